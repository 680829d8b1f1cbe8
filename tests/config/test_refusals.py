"""What cannot be is refused, all mistakes in one error, each with what to do (law 6)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.distributed import mesh

A_LAYER = "Pass an nn.Module, or a callable without arguments that builds one"


def layers() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]


def make(**changes: Any) -> gpipe.GPipe:
    return gpipe.GPipe(**{"model": layers(), "partitions": 2, "micro_batches": 2, "driver": "lockstep", **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"partitions": 0}, "partitions=0 is invalid"),
        ({"partitions": -1}, "partitions=-1 is invalid"),
        ({"partitions": 2.0}, "partitions=2.0 is invalid"),
        ({"partitions": True}, "partitions=True is invalid"),
        ({"partitions": "2"}, "partitions='2' is invalid"),
        ({"partitions": None}, "partitions=None is invalid"),
        ({"partitions": []}, "partitions=[] is invalid"),
        ({"partitions": 4}, "partitions=4 has 4 stages, but there are only 3 layers"),
        ({"partitions": 10**6}, "partitions=1000000 has 1000000 stages"),
        ({"partitions": [2, 2]}, "partitions=[2, 2] has 4 layers, but the model has 3"),
        ({"partitions": [3, 0]}, "partitions=[3, 0] has an invalid number of layers"),
        ({"partitions": [2, 1.0]}, "partitions=[2, 1.0] has an invalid number of layers"),
        ({"micro_batches": 0}, "micro_batches=0 is invalid. Pass M"),
        ({"micro_batches": 2.5}, "micro_batches=2.5 is invalid"),
        ({"micro_batches": None}, "micro_batches=None is invalid"),
        ({"micro_batches": 10**9}, "micro_batches=1000000000 exceeds the limit of 100,000"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is unknown. Pass one of 'gpipe'"),
        ({"schedule": ["gpipe"]}, "schedule=['gpipe'] is unknown. Pass one of 'gpipe'"),
        ({"remat": "sometimes"}, "remat='sometimes' is unknown. Pass one of 'always', 'except_last', 'never'"),
        ({"remat": None}, "remat=None is unknown"),
        ({"remat": True}, "remat=True is unknown"),
        (
            {"remat": -1},
            "remat=-1 is unknown. Pass one of 'always', 'except_last', 'never', 'offload', 'offload_inputs'",
        ),
        ({"remat": ["always"]}, "remat= has length 1, but there are 2 stages"),
        ({"remat": ["always", "now"]}, "remat=['always', 'now'] is unknown"),
        ({"devices": "pudding"}, "device 'pudding' cannot be used"),
        ({"devices": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"devices": ["cpu"]}, "devices= has length 1, but there are 2 partitions"),
        ({"devices": 1.5}, "device 1.5 cannot be used"),
        ({"devices": ["cpu", None]}, "device None cannot be used"),
        ({"devices": "meta"}, "device 'meta' cannot be used: tensors on it have no values"),
        ({"devices": "hpu"}, "device 'hpu' cannot be used: No module named"),
        ({"driver": "thread"}, "driver='thread' is unknown. Pass 'threads', 'lockstep'"),
        ({"driver": ["threads"]}, "driver=['threads'] is unknown. Pass 'threads', 'lockstep'"),
        ({"seed": 1.5}, "seed=1.5 is not a 64-bit integer"),
        ({"seed": 2**63}, f"seed={2**63} is not a 64-bit integer"),
        ({"seed": "7"}, "seed='7' is not a 64-bit integer"),
        ({"driver": gpipe.Lockstep(0)}, "intra_op_threads=0 is invalid"),
        ({"driver": gpipe.Threads(-3)}, "intra_op_threads=-3 is invalid"),
        ({"batch_norm": "even"}, "batch_norm='even' is unknown. Pass one of 'micro', 'deferred', 'synchronized'"),
        ({"model": []}, "model= has no layers"),
        ({"model": nn.Sequential()}, "model= has no layers"),
        ({"model": nn.Linear(1, 1)}, "Linear is not a sequence of layers"),
        ({"model": 3}, "layers is a int, not a sequence of layers. Pass an nn.Sequential, or a list"),
        ({"model": [nn.Tanh(), "relu", 3]}, f"layer 1 is a str. {A_LAYER}"),
        ({"model": [nn.Tanh(), "relu", 3]}, f"layer 2 is a int. {A_LAYER}"),
        ({"model": [nn.Tanh(), lambda: 3]}, f"layer 1 is a int. {A_LAYER}"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_do(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="GPipe cannot be built:") as refusal:
        make(**changes)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"costs": [1, 2]}, "costs= has 2 numbers for 3 layers"),
        ({"costs": [1, -2, 1]}, "costs[1]=-2 is invalid"),
        ({"costs": [1, float("nan"), 1]}, "costs[1]=nan is invalid"),
        ({"costs": [1, float("inf"), 1]}, "costs[1]=inf is invalid"),
        ({"costs": [1, 10**400, 1]}, "costs[1] is too large for a float"),
        ({"costs": [1, "2", 1]}, "costs[1]='2' is invalid"),
        ({"costs": "cheap"}, "costs='cheap' is invalid"),
        ({"costs": 3}, "costs=3 is invalid"),
        ({"balance": "even"}, "balance='even' is unknown. Pass one of 'variance', 'minmax'"),
    ],
)
def test_costs_that_cannot_be_are_refused_by_find_plan(how: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="GPipe cannot be built:") as refusal:
        gpipe.find_plan(layers(), None, 2, micro_batches=2, **{"balance": "variance", **how})
    assert text in str(refusal.value)


def test_all_mistakes_come_in_one_error_and_nothing_was_drawn() -> None:
    wrong = dict.fromkeys(["batch_norm", "devices", "schedule", "remat", "driver", "seed"], "no")
    with pytest.raises(ValueError, match="GPipe cannot be built:") as refusal:
        make(partitions=9, micro_batches=0, **wrong)
    lines = str(refusal.value).splitlines()[1:]
    for word in (*wrong, "partitions", "micro_batches"):
        assert sum(line.startswith(f"- {word.removesuffix('s')}") for line in lines) == 1, word
    assert len(lines) == 8
    mine = layers()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="cannot be built"):
        gpipe.GPipe(mine, 2, 0, seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"model": [*layers(), 3]}, ["layer 3 is a int", "only 4 layers"]),
        ({"devices": [2**70, "hpu"]}, [f"device {2**70} cannot be used", "device 'hpu' cannot be used"]),
        (
            {"mesh": "none", "driver": None},
            ["driver='process' requires torch.distributed", "there are only 3 layers"],
        ),
        ({"mesh": "none"}, ["driver='lockstep' uses one process, but mesh= is for several"]),
        ({"driver": gpipe.Processes(survive=True)}, ["requires torch.distributed", "there are only 3 layers"]),
        ({"driver": gpipe.Processes(survive=1)}, ["requires torch.distributed", "survive=1 is invalid"]),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_no_mistake_hides_others(changes: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError, match="GPipe cannot be built:") as refusal:
        make(**{"partitions": 9, "micro_batches": 0, **changes})
    for text in (*texts, "micro_batches=0", "partitions=9"):
        assert text in str(refusal.value), text


def test_what_is_no_mesh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "is_joined", lambda: True)
    _, (text,) = mesh.find_position("none", 2, 2)  # type: ignore[arg-type]
    assert "Name the dimension of the partitions 'pp'" in text


X, Y = torch.ones(6, 3), torch.zeros(6, 2)


def both(pipe: gpipe.GPipe, inputs: object, targets: object = Y) -> Iterator[Callable[[], object]]:
    yield lambda: pipe.step(inputs, targets, mse_loss)
    yield lambda: pipe(inputs)


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
def test_rows_that_do_not_match_are_refused_all_at_once(driver: str) -> None:
    pipe = make(driver=driver)
    with pytest.raises(ValueError, match=r"wrap this tensor in gpipe\.Whole") as refusal:
        pipe.step((X, X[:4], {"mask": X[:5]}), (Y[:2], Y), mse_loss)
    text = str(refusal.value)
    assert "inputs[1] has shape (4, 3), but the mini-batch has 6 rows" in text
    assert "inputs[2]['mask'] has shape (5, 3)" in text
    assert "targets[0] has shape (2, 2)" in text
    with pytest.raises(ValueError, match=r"inputs\[1\] has shape \(4, 3\)"):
        pipe((X, X[:4]))
    with pytest.raises(ValueError, match=r"targets has shape \(5, 2\), but the mini-batch has 6 rows"):
        pipe.step(X, Y[:5], mse_loss)


@pytest.mark.parametrize("inputs", [X[:0], (X[:0], X), {"x": torch.empty(0, 3)}])
def test_an_empty_batch_is_refused(inputs: object) -> None:
    for call in both(make(), inputs, Y[:0]):
        with pytest.raises(ValueError, match=r"\[no-rows\]"):
            call()


def test_inputs_that_require_a_gradient_are_refused_by_step_unless_there_is_no_grad() -> None:
    pipe, x = make(), X.clone().requires_grad_()
    for inputs in (x, (gpipe.Whole(x), X), {"a": X, "b": [x]}):
        with pytest.raises(ValueError, match=r"\[input-requires-grad\]"):
            pipe.step(inputs, Y, mse_loss)
    assert pipe.step_number == 0
    with torch.no_grad():
        pipe.step(x, Y, mse_loss)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_loss_that_needs_no_gradient_is_refused(remat: str) -> None:
    pipe = make(remat=remat)
    with pytest.raises(ValueError, match=r"\[loss-without-gradient\]"):
        pipe.step(X, Y, lambda out, target: mse_loss(out.detach(), target))
    pipe.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\[loss-without-gradient\]"):
        pipe.step(X, Y, mse_loss)
    with torch.no_grad():
        pipe.step(X, Y, mse_loss)


def test_weights_that_cannot_be_are_refused_before_anything_runs() -> None:
    pipe = make()
    weights: list[tuple[Callable[[object], object], str]] = [
        (lambda target: 0.0, r"\[all-weights-zero\]"),
        (lambda target: -1.0, r"weights \[-1.0, -1.0\] .*\[invalid-loss-weights\]"),
        (lambda target: float("nan"), r"weights \[nan, nan\]"),
        (lambda target: float("inf"), r"weights \[inf, inf\]"),
        (lambda target: torch.tensor(0), r"\[all-weights-zero\]"),
    ]
    for weight, text in weights:
        with pytest.raises(ValueError, match=text):
            pipe.step(X, Y, mse_loss, reduction=weight)
    for unknown in ("average", 3):
        with pytest.raises(TypeError, match=f"reduction={unknown!r}"):
            pipe.step(X, Y, mse_loss, reduction=unknown)  # type: ignore[call-overload]  # on purpose
    assert all(p.grad is None for p in pipe.parameters())
    assert pipe.step_number == 0


@dataclass
class Hidden:
    """A class that torch cannot look into."""

    tensor: Tensor


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


class Finds(nn.Linear):
    def forward(self, hidden: Any) -> Tensor:
        return super().forward(hidden.tensor)


@pytest.mark.parametrize("driver", ["lockstep", "threads"])
@pytest.mark.parametrize("remat", ["always", "never"])
def test_tensors_hidden_in_an_object_cannot_cross_a_boundary_but_may_live_inside(driver: str, remat: str) -> None:
    hiding = [Hides(3, 4), Finds(4, 2)]
    pipe = make(model=hiding, driver=driver, remat=remat)
    for call in both(pipe, X):
        with pytest.raises(TypeError, match=r"Hidden.*\[tensors-in-unregistered-class\]"):
            call()
    make(model=hiding, partitions=1, driver=driver, remat=remat).step(X, Y, mse_loss)


def test_an_output_without_rows_cannot_be_merged() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    pipe = make(model=[nn.Linear(3, 2), Mean()])
    with pytest.raises(TypeError, match=r"output has the shape \(\) for 3 rows.*outputs-cannot-be-joined"):
        pipe(X)
    pipe.step(X, Y, lambda out, target: out)


MOVES: list[Callable[[nn.Module], object]] = [
    lambda module: module.to("meta"),
    lambda module: module.to("meta", torch.float64),
    lambda module: module.to_empty(device="meta"),
]
DTYPES: list[Callable[[nn.Module], object]] = [
    lambda module: module.to(torch.float64),
    lambda module: module.double(),
    lambda module: module.to("cpu", torch.float64),
]


@pytest.mark.parametrize("inside", [False, True])
def test_a_move_to_another_device_is_refused_with_the_reason_and_another_dtype_is_fine(inside: bool) -> None:
    for move, change in zip(MOVES, DTYPES, strict=True):
        pipe = make()
        module = nn.Sequential(pipe) if inside else pipe
        with pytest.raises(ValueError, match="partitions are on cpu and cannot be moved"):
            move(module)
        assert all(p.device.type == "cpu" for p in pipe.parameters())
        pipe.step(X, Y, mse_loss)
        change(module)
        assert {p.dtype for p in pipe.parameters()} == {torch.float64}
        pipe.zero_grad()
        assert pipe.step(X.double(), Y.double(), mse_loss).dtype == torch.float64
        assert pipe.to("cpu") is pipe


def test_what_data_parallel_would_do_is_refused_with_the_reason(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"DistributedDataParallel.* every micro-batch"):
            nn.parallel.DistributedDataParallel(make())
        nn.parallel.DistributedDataParallel(nn.Sequential(*layers()))
    finally:
        dist.destroy_process_group()


def test_ties_that_cannot_be_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        ([("0.weight", "1.weight"), ("1.weight", "0.weight")], r"\[overlapping-ties\]"),
        ([("0.weight", "1.weight"), ("0.weight", "1.weight")], r"\[overlapping-ties\]"),
        ([("0.weight", "1.weight", "0.weight")], "each once"),
        ([("0.weight", "0.weight")], "each once"),
        ([("0.weight", "9.weight")], "no parameter '9.weight'"),
        ({"0.weight": "1.weight"}, "is not a list of groups of names"),
        ([("0.weight", 1)], "is not a list of groups of names"),
        (3, "ties=3 is not a list of groups of names"),
    ]
    for ties, words in wrong:
        with pytest.raises(ValueError, match=words):
            gpipe.GPipe([nn.Linear(4, 4) for _ in range(3)], 2, 2, ties=ties)


def test_keys_of_more_than_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 64-bit integers"), gpipe.rng_scope(2**70, 0, 0, 0):
        torch.rand(1)
