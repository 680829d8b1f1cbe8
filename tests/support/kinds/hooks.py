"""S1: hooks that layers put on their own inputs, on what they make of them, on modules and on parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from .blocks import Apply, Residual, network
from .case import Case, Draw, kind

Change = Callable[[Tensor], Tensor | None]


def changes(draw: Draw, log: list[float]) -> Change:
    def record(g: Tensor) -> None:
        log.append(g.double().abs().sum().item())

    options: tuple[Change, ...] = (
        lambda g: g * 0.5,
        lambda g: -g,
        lambda g: g.clamp(-0.01, 0.01),
        lambda g: torch.zeros_like(g),
        lambda g: g / (g.norm() + 1e-3),
        lambda g: g * (g > 0),
        lambda g: g.sign() * 0.01,
        record,
        lambda g: record(g) or g * 0.5,  # type: ignore[func-returns-value]
    )
    return draw.choice(options)


def hearing(draw: Draw, log: list[float], *core: nn.Module, width: int, **further: Any) -> Case:
    """A network of these layers, each with a linear one behind; what their hooks hear is compared."""
    layers = [layer for each in core for layer in (each, nn.Linear(width, width))]
    return network(draw, width, layers, before=1, extra=lambda: {"hooks": sorted(log)}, **further)


def hooked(draw: Draw, *views: Callable[[Tensor], Tensor]) -> Case:
    """Layers that hook their inputs, or views of them."""
    log: list[float] = []

    def layer() -> nn.Module:
        view, hooks = draw.choice(views), [changes(draw, log) for _ in range(draw.randint(1, 2))]
        guarded, removed, retained = draw.maybe(0.7), draw.maybe(0.15), draw.maybe(0.15)

        def work(x: Tensor) -> Tensor:
            viewed = view(x)
            if viewed.requires_grad or not guarded:
                handles = [viewed.register_hook(hook) for hook in hooks]
                if removed:
                    handles[0].remove()
            if retained and viewed.requires_grad:
                viewed.retain_grad()
            return viewed

        return Apply(work)

    return hearing(draw, log, *(layer() for _ in range(draw.randint(1, 2))), width=draw.width())


@kind("S1")
def s1_tensor_hook(draw: Draw) -> Case:
    return hooked(draw, lambda x: x)


@kind("S1")
def s1_hook_on_view(draw: Draw) -> Case:
    views = (lambda x: x.view_as(x), lambda x: x[:], lambda x: x.view(-1).view(x.shape), lambda x: x.t().t())
    return hooked(draw, *views)


@kind("S1")
def s1_module_hook(draw: Draw) -> Case:
    """Forward pre-hooks that hook the input, full backward hooks and pre-hooks, forward hooks on the output."""
    width, log = draw.width(), list[float]()
    makers = (lambda: nn.Linear(width, width), lambda: Residual(nn.Linear(width, width)), nn.Tanh)
    layer: nn.Module = draw.choice(makers)()

    def register(module: nn.Module) -> None:
        change = changes(draw, log)

        def on_tensor(tensor: Tensor) -> None:
            if tensor.requires_grad:
                tensor.register_hook(change)

        def on_gradients(gradients: Any) -> Any:
            return tuple(g if g is None or (made := change(g)) is None else made for g in gradients)

        match draw.randint(0, 4):
            case 0:
                module.register_forward_pre_hook(lambda m, args: on_tensor(args[0]))
            case 1:
                module.register_full_backward_hook(lambda m, gi, go: on_gradients(gi))
            case 2:
                module.register_full_backward_pre_hook(lambda m, go: on_gradients(go))
            case 3:
                module.register_forward_hook(lambda m, args, out: on_tensor(out))
            case _:
                module.register_forward_hook(lambda m, args, out: on_tensor(args[0]))

    for _ in range(draw.randint(1, 2)):
        register(layer)
    return hearing(draw, log, layer, width=width)


@kind("S1")
def s1_multi_grad_hook(draw: Draw) -> Case:
    """Over an input, and what is made of it perhaps."""
    width, log = draw.width(), list[float]()

    def layer() -> nn.Module:
        linear, every, inner = nn.Linear(width, width), draw.maybe(), draw.maybe()

        def hear(gradients: Any) -> None:
            log.extend(0.0 if g is None else g.double().sum().item() for g in (gradients if every else [gradients]))

        def work(x: Tensor) -> Tensor:
            h = linear(x)
            if x.requires_grad:
                register_multi_grad_hook((x, h) if inner else (x,), hear, mode="all" if every else "any")
            return h.tanh() + x

        return Apply(work, linear)

    return hearing(draw, log, *(layer() for _ in range(draw.randint(1, 2))), width=width)


FORKS: tuple[Callable[[Tensor], tuple[Tensor, Tensor]], ...] = (
    lambda x: (x.tanh(), x.sigmoid()),
    lambda x: (x, x),
    lambda x: (x.view_as(x), x),
    lambda x: (x, x.detach()),
)


@kind("S1")
def s1_hook_on_one_of_two(draw: Draw) -> Case:
    """One of two inputs is hooked, the same tensor perhaps."""
    width, log = draw.width(), list[float]()
    linear, which, change = nn.Linear(width, width), draw.randint(0, 1), changes(draw, log)

    def work(pair: tuple[Tensor, Tensor]) -> Tensor:
        if pair[which].requires_grad:
            pair[which].register_hook(change)
        return linear(pair[0]) * pair[1]

    words = (r"layer \d", r"hook")  # where one of the two was made from the other, a hook would see a part
    core = [Apply(draw.choice(FORKS)), Apply(work, linear)]
    return network(draw, width, core, before=1, extra=lambda: {"hooks": sorted(log)}, refusal=words)


@kind()
def parameter_hooks(draw: Draw) -> Case:
    """Hooks on parameters: they fire for each micro-batch."""
    width, log = draw.width(), list[float]()
    layer = nn.Linear(width, width)
    layer.weight.register_hook(changes(draw, log))
    if draw.maybe():
        layer.bias.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.double().sum().item()))
    return network(draw, width, layer, extra=lambda: {"hooks": sorted(log)})


@kind("S1")
def s1_node_hook(draw: Draw) -> Case:
    """Hooks on the node behind the input, and branches upon it."""
    width, asked = draw.width(), draw.randint(0, 3)

    def work(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        match asked:
            case 0 if x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda gradients: tuple(g * 0.5 for g in gradients))
            case 1 if x.grad_fn is not None:
                x.grad_fn.register_hook(lambda inner, outer: tuple(g if g is None else g * 0.5 for g in inner))
            case 2 if x.is_leaf:
                return x * 2
            case 3:
                return x * (1.0 + float(x.output_nr))
        return x

    words = (r"layer \d", r"grad_fn", r"register_hook")
    return network(draw, width, [Apply(work), nn.Linear(width, width)], before=1, refusal=words[:1], told=words)
