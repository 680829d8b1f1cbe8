"""Skip connections: layers that stash a tensor, and layers further on that pop it.

A layer with `stash = ("e0",)` returns `(out, {"e0": tensor})`; one with `pop = ("e0",)` takes it as a keyword.
None may stand for the tensor.

Note "Sums". Autograd adds up the gradients of a tensor's uses from the last use to the first. A cut must not change
which are added first, so a stash and each pop get a node of their own (`alias`): the uses of a popped tensor are
summed at its pop, the pops from the last layer to the first at the stash, and that sum joins the main line last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gpipe.stages.memory_layout import version


@dataclass(frozen=True, slots=True)
class Pop:
    """One use of a stash: the layer that pops it, and the layer that stashed it."""

    name: str
    source: int
    target: int

    @property
    def route_name(self) -> str:
        return f"{self.name}/{self.target}"


def skip_names(layer: object, attribute: str) -> tuple[str, ...]:
    """The names that a layer stashes or pops."""
    found = getattr(layer, attribute, ())
    if isinstance(found, str):
        return (found,)
    return tuple(found) if isinstance(found, (tuple, list)) else ()  # nn.Sequential has a method `pop`


def find_pops(layers: Sequence[nn.Module]) -> list[Pop]:
    """All uses of all stashes, in layer order; unknown and duplicate names are refused, all at once."""
    stashed: dict[str, int] = {}
    pops: list[Pop] = []
    mistakes: list[str] = []
    for at, layer in enumerate(layers):
        for name in skip_names(layer, "pop"):
            if name in stashed:
                pops.append(Pop(name, stashed[name], at))
            else:
                mistakes.append(f"layer {at} pops {name!r}, which no earlier layer stashes")
        for name in skip_names(layer, "stash"):
            if name in stashed:
                mistakes.append(f"layers {stashed[name]} and {at} both stash {name!r}; give each stash its own name")
            if not name or set(name) & set("@:/, "):
                mistakes.append(f"layer {at} stashes {name!r}; a name has no spaces and none of @ : / ,")
            stashed.setdefault(name, at)
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return pops


def find_loss_pops(layers: Sequence[nn.Module], popped: Sequence[str]) -> list[Pop]:
    """The uses of stashes by a loss, which stands behind the last layer; `popped` are the names."""
    stashed = {name: at for at, layer in enumerate(layers) for name in skip_names(layer, "stash")}
    used = {*popped, *(name for layer in layers for name in skip_names(layer, "pop"))}
    mistakes = [f"loss_fn pops {name!r}, which no layer stashes" for name in popped if name not in stashed] + [
        f"layer {at} ({type(layers[at]).__name__}) stashes {name!r}, which neither a later layer nor loss_fn pops: "
        f"its gradient would be lost; give the loss pop = ({name!r},) and an argument of that name, or stash nothing"
        for name, at in stashed.items()
        if name not in used
    ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return [Pop(name, stashed[name], len(layers)) for name in popped]


def unpack_stashes(result: object, stash: tuple[str, ...]) -> tuple[object, Mapping[str, Tensor | None]]:
    """Takes apart what a layer that stashes returned: `(out, {name: tensor})`, with the names announced."""
    found = f"a {type(result).__name__}"
    match result:
        case (out, dict() as tensors):
            if set(tensors) == set(stash) and all(isinstance(one, (Tensor, type(None))) for one in tensors.values()):
                return out, tensors
            held = ", ".join(f"{name!r}: {type(tensor).__name__}" for name, tensor in tensors.items())
            found = f"({type(out).__name__}, {{{held}}})"
    raise TypeError(
        f"a layer with stash = {stash!r} must return (out, {{name: tensor}}) with exactly these names, each "
        f"a tensor or None; it returned {found}"
    )


class Stashed:
    """A stash that waits for its pops."""

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = alias(tensor)
        self._version = version(self.tensor)

    def pop(self, name: str) -> Tensor | None:
        """The tensor for one use, as it was stashed."""
        return alias(self.unchanged(name))

    def unchanged(self, name: str) -> Tensor | None:
        """The tensor, which must be as it was stashed: a pop on the other side of a cut would not see a change."""
        if version(self.tensor) != self._version:
            raise RuntimeError(
                f"stash {name!r} was changed in place after it was stashed, and whether a pop sees that would depend "
                f"on where the layers are cut; let the layer that changes it work on a copy, or stash a clone"
            )
        return self.tensor


def alias(tensor: Tensor | None) -> Tensor | None:
    """The same tensor behind an autograd node of its own (note "Sums")."""
    return None if tensor is None else tensor.expand_as(tensor)  # `view_as` has other strides where a size is 1


class Sequential(nn.Sequential):
    """An `nn.Sequential` whose layers may stash and pop: the unpartitioned reference.

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
        held: dict[str, Stashed] = {}
        for layer in self:
            input = run_layer(layer, input, held)
        return input


def run_layer(layer: nn.Module, value: object, held: dict[str, Stashed]) -> object:
    """Runs one layer, popping from and stashing into `held`; for loops over plain layers."""
    result = layer(value, **{name: held[name].pop(name) for name in skip_names(layer, "pop")})
    return keep_stashes(result, skip_names(layer, "stash"), held)


def keep_stashes(result: object, stash: tuple[str, ...], held: dict[str, Stashed]) -> object:
    """Puts what a layer stashed into `held`; gives the rest of what it returned."""
    if not stash:
        return result
    result, tensors = unpack_stashes(result, stash)
    held |= {name: Stashed(tensor) for name, tensor in tensors.items()}
    return result
