"""Skip connections: layers that stash a tensor, and later layers that pop it.

A layer with `stash = ("e0",)` returns `(out, {"e0": tensor})`. A layer with `pop = ("e0",)` receives the tensor as
keyword argument `e0`. The tensor may be None.

Note "Sums": Autograd sums the gradients of a tensor's uses from the last use to the first, and a stage boundary must
not change this order. Each stash and each pop therefore has its own autograd node (`alias`). The order is then the
same for all split points:

1. At each pop, the gradients of the uses of the popped tensor are summed.
2. At the stash, the gradients of the pops are summed, from the last layer to the first.
3. This sum is added last to the gradient from the main route (the output of the layer).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gpipe.stages.memory_layout import version


@dataclass(frozen=True, slots=True)
class Pop:
    """One use of a stash.

    Attributes:
        name: The name of the stash.
        source: The index of the layer that stashes it.
        target: The index of the layer that pops it.
    """

    name: str
    source: int
    target: int

    @property
    def route_name(self) -> str:
        return f"{self.name}/{self.target}"


def skip_names(layer: object, attribute: str) -> tuple[str, ...]:
    """Returns the names in the attribute `stash` or `pop` of a layer."""
    names = getattr(layer, attribute, ())
    if isinstance(names, str):
        return (names,)
    return tuple(names) if isinstance(names, (tuple, list)) else ()  # nn.Sequential has a method `pop`.


def find_pops(layers: Sequence[nn.Module]) -> list[Pop]:
    """Returns all uses of all stashes, in layer order.

    Raises:
        ValueError: If a popped name was not stashed, or if a stash has an invalid or duplicate name.
    """
    stashed: dict[str, int] = {}
    pops: list[Pop] = []
    errors: list[str] = []
    for index, layer in enumerate(layers):
        for name in skip_names(layer, "pop"):
            if name in stashed:
                pops.append(Pop(name, stashed[name], index))
            else:
                errors.append(
                    f"layer {index} pops {name!r}, which no earlier layer stashes. Add stash = ({name!r},) to an "
                    f"earlier layer, or correct the name. [pop-without-stash]"
                )
        for name in skip_names(layer, "stash"):
            if name in stashed:
                errors.append(
                    f"layers {stashed[name]} and {index} both stash {name!r}. Use a different name for each stash. "
                    f"[duplicate-stash]"
                )
            if not name or set(name) & set("@:/, "):
                errors.append(
                    f"layer {index} stashes {name!r}, which is not a valid name. Remove spaces and the characters @ "
                    f": / , from it. [invalid-stash-name]"
                )
            stashed.setdefault(name, index)
    if errors:
        raise ValueError("\n".join(errors))
    return pops


def find_loss_pops(layers: Sequence[nn.Module], popped: Sequence[str]) -> list[Pop]:
    """Returns the uses of stashes by a loss function, which counts as a layer after the last one.

    Args:
        layers: All layers.
        popped: The names that the loss function pops.

    Raises:
        ValueError: If a name was not stashed, or if neither a layer nor the loss function pops a stash.
    """
    stashed = {name: index for index, layer in enumerate(layers) for name in skip_names(layer, "stash")}
    used = {*popped, *(name for layer in layers for name in skip_names(layer, "pop"))}
    errors = [
        f"loss_fn pops {name!r}, which no layer stashes. Add stash = ({name!r},) to a layer, or correct the name. "
        f"[pop-without-stash]"
        for name in popped
        if name not in stashed
    ]
    errors += [
        f"layer {index} ({type(layers[index]).__name__}) stashes {name!r}, but neither a later layer nor loss_fn "
        f"pops it. Set loss_fn.pop = ({name!r},) and add an argument of that name, or do not stash it. "
        f"[stash-without-pop]"
        for name, index in stashed.items()
        if name not in used
    ]
    if errors:
        raise ValueError("\n".join(errors))
    return [Pop(name, stashed[name], len(layers)) for name in popped]


def unpack_stashes(result: object, stash: tuple[str, ...]) -> tuple[object, Mapping[str, Tensor | None]]:
    """Splits the result of a layer that stashes into its output and its stashes.

    Raises:
        TypeError: If the result is not `(out, {name: tensor})` with the names in `stash`.
    """
    kind = f"a {type(result).__name__}"
    match result:
        case (out, dict() as tensors):
            if set(tensors) == set(stash) and all(isinstance(t, (Tensor, type(None))) for t in tensors.values()):
                return out, tensors
            items = ", ".join(f"{name!r}: {type(tensor).__name__}" for name, tensor in tensors.items())
            kind = f"({type(out).__name__}, {{{items}}})"
    raise TypeError(
        f"A layer with stash = {stash!r} returned {kind}. Return (out, {{name: tensor}}) with exactly these names. "
        f"Each tensor may be None. [invalid-stash-result]"
    )


class Stashed:
    """A stash that later layers pop."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = alias(tensor)
        self._version = version(self.tensor)

    def pop(self, name: str) -> Tensor | None:
        """Returns an alias of the tensor for one use.

        Raises:
            RuntimeError: If the tensor was changed in place.
        """
        return alias(self.unchanged(name))

    def unchanged(self, name: str) -> Tensor | None:
        """Returns the tensor.

        Raises:
            RuntimeError: If the tensor was changed in place. Pops in other stages would not see the change.
        """
        if version(self.tensor) != self._version:
            raise RuntimeError(
                f"stash {name!r} was changed in place after a layer stashed it, so the result would depend on the "
                f"split points. Change a copy instead, or stash a clone. [stash-changed-in-place]"
            )
        return self.tensor


def alias(tensor: Tensor | None) -> Tensor | None:
    """Returns a view of the whole tensor with its own autograd node (note "Sums")."""
    return (
        None if tensor is None else tensor.expand_as(tensor)
    )  # `view_as` changes the strides of dimensions of size 1.


class Sequential(nn.Sequential):
    """An `nn.Sequential` whose layers may stash and pop. Without a pipe, it runs the layers on one device.

    >>> import torch, gpipe
    >>> class Stash(torch.nn.Module):
    ...     stash = ("early",)
    ...     def forward(self, x): return x + 1, {"early": x}
    >>> class Pop(torch.nn.Module):
    ...     pop = ("early",)
    ...     def forward(self, x, early): return x * 10 + early
    >>> gpipe.Sequential(Stash(), Pop())(torch.ones(1))
    tensor([21.])
    """

    def forward(self, input: object) -> object:
        """Runs the layers one after another."""
        find_pops(list(self))
        stashes: dict[str, Stashed] = {}
        for layer in self:
            input = run_layer(layer, input, stashes)
        return input


def run_layer(layer: nn.Module, value: object, stashes: dict[str, Stashed]) -> object:
    """Runs one layer outside of a pipe.

    Passes the stashes that the layer pops, and adds the stashes that it returns to `stashes`.
    """
    result = layer(value, **{name: stashes[name].pop(name) for name in skip_names(layer, "pop")})
    return keep_stashes(result, skip_names(layer, "stash"), stashes)


def keep_stashes(result: object, stash: tuple[str, ...], stashes: dict[str, Stashed]) -> object:
    """Adds the stashes in the result of a layer to `stashes`, and returns the output of the layer."""
    if not stash:
        return result
    result, tensors = unpack_stashes(result, stash)
    stashes |= {name: Stashed(tensor) for name, tensor in tensors.items()}
    return result
