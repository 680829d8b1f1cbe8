"""What surrounds a call, surrounds its layers too, whichever thread they run in; what cannot is refused."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gpipe
from tests.support.plain_loop import (
    Loop,
    assert_same_bits,
    plain_loop,
    same_bits,
    squares,
    train,
    train_plainly,
    weights_of,
)

M = 3
X, Y = torch.randn(7, 9), torch.randn(7, 9)
pytestmark = [
    pytest.mark.parametrize("driver", ["lockstep", "threads"]),
    pytest.mark.parametrize("remat", ["always", "never"]),
]
WAYS = pytest.mark.parametrize("way", ["step", "call"])


class Watch(nn.Linear):
    """Notes what it finds around it, in its forwards and in their backwards."""

    def __init__(self, width: int, look: Callable[[], object]) -> None:
        super().__init__(width, width)
        self.look = look
        self.forwards: list[object] = []
        self.backwards: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(self.look())
        out: Tensor = Back.apply(super().forward(x), self)
        return out


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Watch) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.backwards.append(ctx.layer.look())
        return gradient, None


def build(look: Callable[[], object] = lambda: None) -> list[nn.Module]:
    with weights_of(1):
        return [Watch(9, look), nn.LayerNorm(9), nn.Dropout(0.2), Watch(9, look), nn.GELU(), Watch(9, look)]


def watches(pipe: nn.Module) -> list[Watch]:
    return [layer for layer in pipe.children() if isinstance(layer, Watch)]


def seen_in_forwards(pipe: nn.Module) -> set[object]:
    """All that layers noted since this was asked last."""
    found = {seen for layer in watches(pipe) for seen in layer.forwards}
    for layer in watches(pipe):
        layer.forwards.clear()
    return found


@contextmanager
def piped(driver: str, remat: str, layers: list[nn.Module], **changes: Any) -> Iterator[gpipe.GPipe]:
    options = {"partitions": min(3, len(layers)), "micro_batches": M, "seed": 4, **changes}
    with gpipe.GPipe(layers, driver=driver, remat=remat, **options) as pipe:
        yield pipe


def run(pipe: gpipe.GPipe, way: str, around: Callable[[], AbstractContextManager[object]]) -> Tensor:
    """Trains on one mini-batch, the forward inside of `around`; of a call, the backward outside."""
    with around():
        loss: Tensor = pipe.step(X, Y, squares) if way == "step" else squares(pipe(X), Y)
    if way == "call":
        loss.backward()
    return loss.detach()


def plain_under(layers: list[nn.Module], way: str, around: Callable[[], AbstractContextManager[object]]) -> Tensor:
    """The plain loop, whose forward runs inside of `around`, and its backward outside."""

    class Around(Loop):
        def run(self, *given: Any) -> Any:
            with around():
                return super().run(*given)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        with around():
            return squares(output, target)

    return train(Around(layers, M, 4), X, Y, loss_fn, way)


def bfloat16() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@WAYS
@pytest.mark.parametrize(
    "around",
    [
        bfloat16,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        lambda: torch.autocast("cpu", enabled=False),
    ],
)
def test_autocast_surrounds_layers_and_loss_but_no_backward(
    around: Callable[[], AbstractContextManager[object]], way: str, driver: str, remat: str
) -> None:
    def look() -> object:
        return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")

    reference = build()
    expected = plain_under(reference, way, around)
    with piped(driver, remat, build(look)) as pipe:
        assert same_bits(run(pipe, way, around), expected)
        assert_same_bits(pipe, reference)
        with around():
            inside = look()
        for layer in watches(pipe):
            assert layer.forwards == [inside] * M * (2 if remat == "always" else 1)
            assert layer.backwards == [False] * M


class Twice(nn.Linear):
    """Uses its weight twice: autocast casts it once, and what comes back is added up in the low precision."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        once = linear(x, self.weight, self.bias)
        self.meanwhile()
        return linear(once.tanh(), self.weight, self.bias)


class First(nn.Linear):
    """The layer of another rank, which ends its autocast while the other is at work."""

    at_second: Callable[[], object] = staticmethod(lambda: None)
    at_third: Callable[[], object] = staticmethod(lambda: None)
    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.at_second()
        if self.forwards == 3:
            self.at_third()
        return super().forward(x)


def test_autocast_keeps_the_casts_of_weights_though_another_rank_ends_its_own(driver: str, remat: str) -> None:
    def layers() -> tuple[First, Twice]:
        with weights_of(1):
            return First(9, 9), Twice(9, 9)

    reference: list[nn.Module] = list(layers())
    expected = plain_under(reference, "step", bfloat16)
    first, twice = layers()
    if driver == "threads":
        used_once, ended = threading.Event(), threading.Event()
        first.at_second = lambda: used_once.wait(60)
        first.at_third = ended.set
        twice.meanwhile = lambda: used_once.set() or ended.wait(60)  # type: ignore[func-returns-value]
    with piped(driver, remat, [first, twice]) as pipe:
        assert same_bits(run(pipe, "step", bfloat16), expected)
        assert_same_bits(pipe, reference)


class Casting(nn.Linear):
    """Has an autocast of its own, in which it uses its weight twice."""

    def forward(self, x: Tensor) -> Tensor:
        with bfloat16():
            once = linear(x, self.weight, self.bias)
            time.sleep(0.003)  # in which another rank leaves its own
            return linear(once.tanh(), self.weight, self.bias).float()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
def test_autocasts_of_layers_keep_their_casts_though_another_rank_ends_its_own(
    schedule: str, driver: str, remat: str
) -> None:
    layers = [Casting(9, 9) for _ in range(8)]
    with gpipe.GPipe(layers, 4, 7, schedule=schedule, driver=driver, remat=remat, seed=0) as pipe:
        assert pipe.verify(X, Y, squares, against="model").equal
    assert torch.clear_autocast_cache.__module__ != "gpipe._torch.modes"


def test_autocast_sees_what_the_optimizer_did_to_weights(driver: str, remat: str) -> None:
    """Bug story: casts outlive the step that made them if nobody forgets them."""
    reference = build()
    optimizer = torch.optim.SGD(nn.Sequential(*reference).parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        expected = plain_under(reference, "step", bfloat16)
        optimizer.step()
    with piped(driver, remat, build()) as pipe, bfloat16():  # around all of the training
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for _ in range(2):
            pipe.step_number = 0
            optimizer.zero_grad()
            loss = pipe.step(X, Y, squares)
            optimizer.step()
        assert same_bits(loss, expected)
        assert_same_bits(pipe, reference)


@WAYS
def test_no_grad_and_inference_mode_surround_layers(way: str, driver: str, remat: str) -> None:
    def look() -> object:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with piped(driver, remat, build(look)) as pipe:
        modes: dict[Any, tuple[bool, bool]] = {
            torch.no_grad: (False, False),
            torch.inference_mode: (False, True),
            torch.enable_grad: (True, False),
        }
        for mode, found in modes.items():
            with mode():
                _ = pipe.step(X, Y, squares) if way == "step" else pipe(X)
            assert seen_in_forwards(pipe) == {found}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_one_call_do_not_stay_for_the_next(mode: Any, driver: str, remat: str) -> None:
    reference = build()
    with piped(driver, remat, build()) as pipe:
        with mode(), bfloat16(), torch.device("meta"):
            pipe(X)
        pipe.step_number = 0
        pipe.step(X, Y, squares)
        plain_loop(reference, X, Y, squares, micro_batches=M, seed=4)
        assert_same_bits(pipe, reference)


@WAYS
def test_the_default_device_surrounds_layers(way: str, driver: str, remat: str) -> None:
    with piped(driver, remat, build(lambda: torch.empty(1).device.type)) as pipe:
        for device in ("meta", "cpu"):
            run(pipe, way, lambda device=device: torch.device(device))  # type: ignore[misc]  # device is a str
            assert seen_in_forwards(pipe) == {device}


def test_a_pipe_can_be_made_under_a_default_device(driver: str, remat: str) -> None:
    layers = build()
    with torch.device("meta"), piped(driver, remat, layers, seed=None) as pipe:
        pipe.step(X, Y, squares)
    assert {p.device.type for p in pipe.parameters()} == {"cpu"}


@WAYS
def test_saved_tensor_hooks_see_what_layers_save_in_any_thread(way: str, driver: str, remat: str) -> None:
    def counting(counts: dict[str, int]) -> Callable[[], AbstractContextManager[object]]:
        lock = threading.Lock()

        def count(what: str, tensor: Tensor) -> Tensor:
            with lock:
                counts[what] = counts.get(what, 0) + 1
            return tensor.clone() if what == "pack" else tensor

        return lambda: saved_tensors_hooks(lambda t: count("pack", t), lambda t: count("unpack", t))

    expected: dict[str, int] = {}
    found: dict[str, int] = {}
    reference = build()
    plain_under(reference, "step", counting(expected))
    with piped(driver, remat, build()) as pipe:
        pipe.step(X, Y, squares)  # a first step has layers watched for what they draw
        pipe.step_number = 0
        pipe.zero_grad()
        run(pipe, way, counting(found))
        if way == "step":
            assert_same_bits(pipe, reference)
    assert expected["pack"] == expected["unpack"]
    inside = expected["pack"] - 2 * M  # the loss saves two, its input and the target
    losses = 2 * (M if way == "step" else 1)
    assert found == {"pack": inside * (2 if remat == "always" else 1) + losses, "unpack": inside + losses}


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@WAYS
@pytest.mark.parametrize("mode", [Dispatched, Functions, lambda: FlopCounterMode(display=False)])
def test_other_modes_are_refused_by_threads_and_seen_in_lockstep(
    mode: Callable[[], AbstractContextManager[object]], way: str, driver: str, remat: str
) -> None:
    reference = build()
    train_plainly(reference, X, Y, squares, way, micro_batches=M, seed=4)
    with piped(driver, remat, build()) as pipe:
        name = type(mode()).__name__
        if way == "call" and remat == "always":  # a backward may run outside of the mode, and recomputes there
            where = "threads" if driver == "threads" else "recomputation"
            with pytest.raises(ValueError, match=rf"{name} is active.* \[mode-not-in-{where}\]"), mode():
                pipe(X)
            run(pipe, way, nullcontext)
        elif driver == "threads":
            with pytest.raises(ValueError, match=rf"{name} is active.* \[mode-not-in-threads\]"), mode():
                pipe.step(X, Y, squares) if way == "step" else pipe(X)
            assert pipe.step_number == 0
            if way == "call" and mode is not Functions:  # these see backward() itself, but nothing inside it
                loss = squares(pipe(X), Y)
                with pytest.raises(ValueError, match=rf"{name} is active.* \[mode-not-in-threads\]"), mode():
                    loss.backward()
            assert all(p.grad is None for p in pipe.parameters())
            pipe.step_number = 0
            run(pipe, way, nullcontext)
        else:
            run(pipe, way, mode)
        assert_same_bits(pipe, reference)


def test_what_a_layer_changes_for_its_thread_does_not_stay(driver: str, remat: str) -> None:
    class Leaves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            torch.set_grad_enabled(False)
            return out

    with piped(driver, remat, [Leaves(9, 9)], partitions=1) as pipe, torch.no_grad():
        pipe(X)
    assert torch.is_grad_enabled()


def test_anomaly_detection_points_at_the_forward_of_a_layer(driver: str, remat: str) -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x).sqrt() * 0

    with (
        piped(driver, remat, [nn.Linear(9, 9), Bad()]) as pipe,
        pytest.warns(UserWarning, match="Anomaly Detection|Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values"),
        torch.autograd.detect_anomaly(),
    ):
        pipe.step(X, Y, squares)
