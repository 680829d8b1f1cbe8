"""S11: what surrounds a layer in the calling thread."""

import contextlib
import contextvars
import decimal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .blocks import Apply, function, network, plain
from .case import Case, Draw, kind

FACTOR = contextvars.ContextVar("FACTOR", default=1.0)
LOCAL = threading.local()


@contextlib.contextmanager
def during(begin: Callable[[], Any], end: Callable[[Any], object]) -> Iterator[None]:
    """Something holds for a while; what `begin` gives, `end` takes."""
    begun = begin()
    try:
        yield
    finally:
        end(begun)


@kind("S11")
def s11_contextvars(draw: Draw) -> Case:
    """Layers, hooks and the loss read a context variable of the caller."""
    width, value = draw.width(), draw.choice((0.5, 2.0, 3.0))

    read = function(lambda ctx, x: x * FACTOR.get(), lambda ctx, gradient: gradient * FACTOR.get())
    reader = Apply(draw.choice((lambda x: x * FACTOR.get(), read)))
    case = network(draw, width, [reader, plain(draw, width), Apply(lambda x: x + FACTOR.get())])
    case.context = lambda: during(lambda: FACTOR.set(value), FACTOR.reset)
    if draw.maybe():
        case.loss = lambda o, t: ((o - t) ** 2).mean() * FACTOR.get()
    return case


@kind("S11")
def s11_thread_locals(draw: Draw) -> Case:
    """A layer reads a `threading.local` of the caller: right, refused or told."""
    width, soft, words = draw.width(), draw.maybe(), (r"layer \d", r"thread")
    reader = Apply(lambda x: x * (getattr(LOCAL, "factor", 1.0) if soft else LOCAL.factor))
    case = network(draw, width, [reader, plain(draw, width)], refusal=words, told=words)
    case.context = lambda: during(lambda: setattr(LOCAL, "factor", 3.0), lambda _: delattr(LOCAL, "factor"))
    case.errors = (AttributeError,)  # the layer's own, with a note
    return case


@kind("S11")
def s11_flush_denormal(draw: Draw) -> Case:
    """Tiny numbers, flushed to zero or not, as the caller's thread has it."""
    width, words = draw.width(), (r"denormal", r"thread|layer")
    case = network(draw, width, [Apply(lambda x: x + ((x * 1e-20) * 1e-20) * 1e38), plain(draw, width)])
    case.told = case.refusal = words
    flush = torch.set_flush_denormal
    case.context = lambda: during(lambda: flush(True), lambda _: flush(False))
    return case


@kind("S11")
def s11_tensor_attributes(draw: Draw) -> Case:
    """A layer puts an attribute on the tensor that it gives; one of the mini-batch is no micro-batch's."""
    width, soft = draw.width(), draw.maybe(0.7)

    def put(x: torch.Tensor) -> torch.Tensor:
        out = x.tanh()
        out.factor = 2.5  # type: ignore[attr-defined]
        return out

    get = Apply(lambda x: x * (getattr(x, "factor", 1.0) if soft else x.factor))
    words = (r"layer \d|tensor", r"factor|attribute")
    core = [*([get] if soft else []), Apply(put), get, plain(draw, width)]
    case = network(draw, width, core, refusal=words, told=words)
    for x, _ in case.batches:
        x.factor = 2.5
    return case


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.tanh, torch.Tensor.tanh) else out


class Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


@kind("S11")
def s11_user_modes(draw: Draw) -> Case:
    """Modes of torch that the caller has entered reach the layers, or are refused."""
    width = draw.width()
    mode: Callable[[], Any] = draw.choice((Doubling, Halving, CountOps))
    words = (r"mode|Doubling|Halving|CountOps",)
    return network(draw, width, Apply(lambda x: x.tanh()), context=mode, refusal=words, told=words)


@kind("S11")
def s11_python_contexts(draw: Draw) -> Case:
    """Decimal's context and numpy's error state are the caller's."""
    width, precise = draw.width(), draw.maybe()

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with decimal.localcontext() as context, np.errstate(over="raise"):
            context.prec = 3
            yield

    def number(x: torch.Tensor) -> torch.Tensor:
        if precise:
            return x * float(decimal.Decimal(1) / decimal.Decimal(3))
        return x * (1.0 if np.geterr()["over"] == "raise" else 2.0)

    return network(draw, width, [Apply(number), plain(draw, width)], context=inside)


@kind()
def default_dtype(draw: Draw) -> Case:
    """Layers make tensors of the default dtype, which the caller has changed."""
    width = draw.width()
    make = Apply(lambda x: (x * torch.tensor([1.1]) + torch.full((1,), 0.1)).to(x.dtype))
    case = network(draw, width, [make, plain(draw, width)])
    begin, end = partial(torch.set_default_dtype, torch.float64), partial(torch.set_default_dtype, torch.float32)
    case.context = lambda: during(begin, lambda _: end())
    return case


@kind()
def device_context(draw: Draw) -> Case:
    """A `with torch.device(...)` of the caller reaches the layers, or is refused."""
    width = draw.width()
    make = Apply(lambda x: x * torch.arange(width).to(x) + torch.ones(width))
    return network(draw, width, make, context=lambda: torch.device("cpu"), refusal=("device",))


@kind()
def autocast(draw: Draw) -> Case:
    """Autocast around the step, or within a layer."""
    width = draw.width()
    dtype, enabled = draw.choice((torch.bfloat16, torch.float16)), draw.maybe(0.8)

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return self.linear(x).to(x.dtype)

    core: list[nn.Module] = [draw.choice((Casting, lambda: nn.Linear(width, width)))(), plain(draw, width)]
    return network(
        draw, width, [*core, Apply(lambda x: x.float())], loss=lambda o, t: (o.float() - t).pow(2).mean(),
        context=lambda: torch.autocast("cpu", dtype=dtype, enabled=enabled),
    )  # fmt: skip


@kind()
def saved_tensors_hooks(draw: Draw) -> Case:
    """Hooks on saved tensors that change what is saved; save_on_cpu; hooks within a layer."""
    width, within = draw.width(), draw.maybe()

    def hooks() -> Any:
        if draw.number % 3 == 0:
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t * 1.5 if t.is_floating_point() else t
        )

    class Within(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hooks():
                return x.tanh() * x

    core = [Within() if within else Apply(lambda x: x.tanh() * x), plain(draw, width)]
    refusal = None if within else (r"saved_tensors_hooks|saved tensors|hooks",)
    return network(draw, width, core, context=contextlib.nullcontext if within else hooks, refusal=refusal, before=1)


@kind()
def anomaly_mode(draw: Draw) -> Case:
    """Anomaly detection changes nothing."""
    width = draw.width()
    return network(
        draw, width, plain(draw, width), context=lambda: torch.autograd.set_detect_anomaly(draw.number % 2 == 0)
    )
