"""Law: what is loaded is what was saved, to the last bit, whatever the partitions and processes on either side."""

import copy
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import gpipe
from gpipe.checkpoint.manifest import ADVICE
from tests.support.checkpointed import (
    M,
    Odd,
    adamw,
    build,
    build_tied,
    differences,
    make,
    remembered,
    snapshot,
    train,
    trained,
)
from tests.support.thread_ranks import RankPipe, all_well, optimizer_of, rank_pipes, run_ranks, save_in_ranks

Build = Callable[[], list[nn.Module]]

BUILDS: list[Build] = [build, build_tied, lambda: [*build(), Odd()]]
PLACES = [(1, 0), (3, 0), (2, 1), (4, 2)]
"""Partitions, and the replicas of as many processes; 0 is all in one process."""


def save_at(folder: Path, layers: list[nn.Module], place: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Trains at K=3, saves at another; gives what was saved."""
    pipe, optimizer = trained(layers)
    expected = snapshot(pipe, optimizer)
    partitions, replicas = place
    whole = make(layers, partitions)  # the very same layers
    whole.step_number = pipe.step_number
    if replicas:
        save_in_ranks(folder, whole, optimizer, replicas, **options)
    else:
        gpipe.save(folder, whole, optimizer, **options).wait()
    return expected


def load_at(folder: Path, build: Build, place: tuple[int, int]) -> dict[str, Any]:
    """What a fresh pipe has after it was loaded."""
    partitions, replicas = place
    layers = build()
    for parameter in nn.Sequential(*layers).parameters():
        parameter.data.fill_(7)
    whole = make(layers, partitions, seed=9)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=9.0)
    if not replicas:
        checkpoint = gpipe.load(folder, whole, optimizer)
        assert (whole.step_number, whole.seed) == (checkpoint.step_number, checkpoint.seed) == (2, 4)
        return remembered(whole, optimizer)

    def load(own: RankPipe) -> dict[str, Any]:
        mine = optimizer_of(whole, optimizer, own)
        gpipe.load(folder, own, mine)
        assert (own.step_number, own.seed) == (2, 4)
        return remembered(own, mine)

    every = all_well(run_ranks(load, rank_pipes(whole, replicas)))
    return {name: value for found in every for name, value in found.items()}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("reader", PLACES, ids=str)
@pytest.mark.parametrize("writer", PLACES, ids=str)
def test_what_is_loaded_is_what_was_saved(
    writer: tuple[int, int], reader: tuple[int, int], build: Build, tmp_path: Path
) -> None:
    expected = save_at(tmp_path, build(), writer)
    assert differences(load_at(tmp_path, build, reader), expected) == []


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_write_the_very_files_that_one_process_writes(
    replicas: int, background: bool, build: Build, tmp_path: Path
) -> None:
    extra = {"epoch": 3, "noise": torch.arange(5)}
    save_at(tmp_path / "one", build(), (4, 0), extra=extra)
    save_at(tmp_path / "many", build(), (4, replicas), extra=extra, background=background)
    one, many = (tmp_path / where / "step_2" for where in ("one", "many"))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in many.iterdir())
    for name in set(names) - {"manifest.json"}:
        assert (one / name).read_bytes() == (many / name).read_bytes()
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (one, many)]
    assert {key for key in manifests[0] if manifests[0][key] != manifests[1][key]} == {"world", "sha256"}
    assert [manifest["world"] for manifest in manifests] == [1, 4 * replicas]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("place", [(3, 0), (4, 1)], ids=str)
def test_plain_pytorch_loads_it(place: tuple[int, int], build: Build, tmp_path: Path) -> None:
    expected = save_at(tmp_path, build(), place)
    checkpoint = gpipe.load(tmp_path)
    plain, again = nn.Sequential(*build()), nn.Sequential(*build())
    assert plain.load_state_dict(checkpoint.state_dict()).missing_keys == []
    optimizer = adamw(again.parameters())
    gpipe.load(tmp_path, again, optimizer)
    state = plain.state_dict()
    assert differences(state, {name: expected[name] for name in state}) == []
    assert differences(remembered(again, optimizer), expected) == []


def test_a_shared_parameter_is_stored_once(tmp_path: Path) -> None:
    save_at(tmp_path, build_tied(), (5, 1))
    manifest = gpipe.load(tmp_path).manifest
    assert "0.weight" in manifest.names
    assert manifest.ties == {"2.weight": "0.weight", "4.weight": "0.weight"}
    assert not {"2.weight", "4.weight"} & {*manifest.names, *manifest.optimizer["state"]}  # type: ignore[index]
    files = [load_file(file) for file in (tmp_path / "step_2").glob("*.safetensors")]
    assert [sorted(file) for file in files if any(name.startswith(("2.weight", "4.weight")) for name in file)] == []
    state = gpipe.load(tmp_path).state_dict()
    assert state["0.weight"] is state["2.weight"] is state["4.weight"]


def test_layers_that_shared_a_parameter_may_each_have_a_copy_later(tmp_path: Path) -> None:
    save_at(tmp_path, build_tied(), (2, 0))
    apart = nn.Sequential(*map(copy.deepcopy, build_tied()))
    optimizer = adamw(apart.parameters())
    gpipe.load(tmp_path, apart, optimizer)
    found = remembered(apart, optimizer)
    for name in ("2.weight", "4.weight"):
        assert differences(found[f"{name}/state"], found["0.weight/state"]) == []
        assert torch.equal(found[name], found["0.weight"])


class Plain(torch.optim.Optimizer):
    """Remembers all kinds of things, in more digits than the parameter has: `load_state_dict` would round them."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "note": "text", "odd": (1, [None, float("nan")]), "by": {2: "two"}})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it takes none
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["sum"] = state.get("sum", 0) + parameter.grad.double()
                state["times"] = state.get("times", 0) + 1
                state["nothing"], state["best"], state["seen"] = None, float("inf"), True
                state["history"] = [*state.get("history", []), (parameter.grad.clone(), state["times"])]
                with torch.no_grad():
                    parameter -= group["lr"] * state["sum"].to(parameter.dtype)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, foreach=True),
    "tensor rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "plain": Plain,
}


@pytest.mark.parametrize("reader", [2, 5])
@pytest.mark.parametrize("optimize", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_goes_on(
    optimize: Callable[[Any], torch.optim.Optimizer], reader: int, tmp_path: Path
) -> None:
    pipe, optimizer = trained(optimize=optimize)
    gpipe.save(tmp_path, pipe, optimizer)
    again = make(build(2), reader, seed=None)
    other = optimize(again.parameters())
    gpipe.load(tmp_path, again, other)
    same = [name for name in differences(remembered(again, other), remembered(pipe, optimizer)) if "opti" not in name]
    assert same == []  # of the options NaN is not equal to itself
    train(pipe, optimizer, 2)
    train(again, other, 2)
    assert differences(again.state_dict(), pipe.state_dict()) == []
    assert [repr(g) for g in other.state_dict()["param_groups"]] == [
        repr(g) for g in optimizer.state_dict()["param_groups"]
    ]


def test_options_belong_to_parameters_not_to_the_places_of_groups(tmp_path: Path) -> None:
    def optimize(pipe: nn.Module, order: int) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in pipe.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in pipe.parameters() if p.dim() == 1], "lr": 0.5},
        ]
        return torch.optim.SGD(groups[::order], lr=0.1, momentum=0.9)

    pipe = make()
    optimizer = optimize(pipe, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(pipe, optimizer, 2)
    scheduler.step()
    gpipe.save(tmp_path, pipe, optimizer)
    again = make(partitions=2)
    other = optimize(again, -1)
    gpipe.load(tmp_path, again, other)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.05, 0.01])
    assert differences(remembered(again, other), remembered(pipe, optimizer)) == []
    mixed = torch.optim.SGD(again.parameters(), lr=1.0)
    with pytest.raises(gpipe.CheckpointError, match=r"has 0.weight and 0.bias, whose saved initial_lr, lr, "):
        gpipe.load(tmp_path, again, mixed)
    assert mixed.param_groups[0]["lr"] == 1.0


def test_a_parameter_that_was_never_trained_has_no_state(tmp_path: Path) -> None:
    layers = build()
    layers[0].requires_grad_(False)
    pipe, optimizer = trained(layers)
    gpipe.save(tmp_path, pipe, optimizer)
    again = make()
    other = adamw(again.parameters())
    train(again, other, 1)
    gpipe.load(tmp_path, again, other)
    assert differences(remembered(again, other), remembered(pipe, optimizer)) == []
    assert again.get_parameter("0.weight") not in other.state


def test_state_takes_the_memory_format_of_its_parameter(tmp_path: Path) -> None:
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten()]  # type: ignore[call-overload]
    pipe = make(layers, 2)
    optimizer = adamw(pipe.parameters())
    pipe.step(torch.ones(4, 3, 5, 5), torch.ones(4, 36), nn.functional.mse_loss)
    optimizer.step()
    gpipe.save(tmp_path, pipe, optimizer)
    gpipe.load(tmp_path, pipe, optimizer)
    weight = pipe.get_parameter("0.weight")
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() != torch.empty(4, 3, 3, 3).stride()


def test_what_the_user_adds_comes_back_as_it_was(tmp_path: Path) -> None:
    pipe, optimizer = trained()
    schedulers = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3]),
    ]
    extra = {
        "data": {"epoch": 2, "row": 640, "order": [3, 1, 2]},
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "generator": torch.Generator().manual_seed(3).get_state(),
        "python": (3, (1, 2**80), None),
        "$text": "a\u00e9\n\ud7ff",
        "by number": {1: 2.5, (1, 2): True},
        "average": OrderedDict(pipe.state_dict()),
        "nothing": [],
    }
    for index in range(2):
        gpipe.save(tmp_path, pipe, optimizer, extra=extra, background=bool(index)).wait()
        found = gpipe.load(tmp_path).extra
        assert differences(found, {**extra, "average": dict(pipe.state_dict())}) == []
        assert isinstance(found["schedulers"][1]["milestones"], Counter)
        for scheduler, state in zip(schedulers, found["schedulers"], strict=True):
            scheduler.load_state_dict(state)


def test_what_cannot_be_saved_is_told_all_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 2)]
    layers[0].register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    layers[1].register_buffer("thin", torch.zeros(2, 2).to_sparse())
    pipe = make(layers, 2)
    optimizer = torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.ones(3, 2))], lr=0.1)
    optimizer.param_groups[0]["key"] = lambda: 1
    with pytest.raises(ValueError, match="Nothing was saved") as raised:
        gpipe.save(tmp_path / "new", pipe, optimizer, extra={"file": tmp_path, "list": [object()]}, keep=0)
    assert str(raised.value).splitlines()[1:] == [
        "- 0.wide is of torch.complex128, which safetensors does not support. Convert it.",
        "- 1.thin is sparse_coo or quantized. Convert it to a plain dense tensor.",
        "- group 0 of the optimizer has parameters of shapes [(3, 2)] that are not in the pipe. Use a separate "
        "optimizer for these parameters, and pass its state as extra=.",
        f"- group 0/key has type function. {ADVICE}",
        f"- extra['file'] has type PosixPath. {ADVICE}",
        f"- extra['list'][0] has type object. {ADVICE}",
        "- keep=0 is invalid. Pass the number of checkpoints to keep, or None for all.",
    ]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match=r"pipe is a Sequential\. Pass the gpipe\.GPipe itself"):
        gpipe.save(tmp_path, nn.Sequential(*layers))  # type: ignore[arg-type]


def test_an_optimizer_with_state_of_its_own_is_refused(tmp_path: Path) -> None:
    class More(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "slow": 1}

    pipe = make()
    optimizer = More(pipe.parameters(), lr=0.1)
    optimizer.state["global"] = 3  # type: ignore[index]
    with pytest.raises(ValueError, match="Nothing was saved") as raised:
        gpipe.save(tmp_path, pipe, optimizer)
    assert "More has slow in addition to its state per parameter" in str(raised.value)
    assert "More has state without a parameter: ['global']" in str(raised.value)


def test_layers_may_be_named_like_what_a_pipe_has(tmp_path: Path) -> None:
    names = ["step_number", "_settings", "exchange", "seed", "partitions", "x"]
    named = nn.Sequential(OrderedDict(zip(names, build(), strict=True)))
    pipe = gpipe.GPipe(named, 2, M, seed=3)
    with torch.no_grad():
        pipe.step_number = 5
        gpipe.save(tmp_path, pipe)
    again = gpipe.GPipe(nn.Sequential(OrderedDict(zip(names, build(2), strict=True))), 3, M)
    gpipe.load(tmp_path, again)
    assert (again.step_number, again.seed) == (5, 3)
    assert differences(again.state_dict(), pipe.state_dict()) == []


def test_meta_and_lazy_layers_are_refused(tmp_path: Path) -> None:
    gpipe.save(tmp_path, make([nn.Linear(4, 4)], 1))
    with pytest.raises(gpipe.CheckpointError, match=r"0.weight is on the meta device and has no values"):
        gpipe.load(tmp_path, nn.Sequential(nn.Linear(4, 4, device="meta")))
    with pytest.raises(gpipe.CheckpointError, match=r"0.weight has no shape yet\. Run a step first"):
        gpipe.load(tmp_path, nn.Sequential(nn.LazyLinear(4)))


def test_values_are_read_whatever_the_default_device_and_type_and_nothing_is_drawn(tmp_path: Path) -> None:
    pipe, optimizer = trained()
    again = make(build(2))
    other, before = adamw(again.parameters()), torch.get_rng_state()
    gpipe.save(tmp_path, pipe, optimizer, background=True).wait()
    with torch.device("meta"), torch.inference_mode():
        gpipe.load(tmp_path, again, other)
    assert torch.equal(before, torch.get_rng_state())
    assert differences(remembered(again, other), remembered(pipe, optimizer)) == []
    train(again, other, 1)
