"""Weights as they are stored: those that a quantizer made have fewer bytes than numbers times their width.

torchao's hold the tensors that they are made of. bitsandbytes' are bytes, and keep scales in objects of its own, in
attributes of themselves or, of 8 bits and behind the first forward, of their module.
"""

from collections.abc import Iterable, Iterator

from torch import Size, Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import PLAIN
from gpipe._torch.modules import is_wrapper
from gpipe.stages.memory_layout import strided_parts


def stored_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The plain tensors in which parameters and buffers of modules lie, each once; lazy ones have none."""
    found: dict[int, Tensor] = {}
    for module in {part: None for one in modules for part in one.modules()}:
        held = (*module._parameters.values(), *module._buffers.values())
        own = [piece for tensor in held if tensor is not None and not is_lazy(tensor) for piece in pieces_of(tensor)]
        for piece in (*own, *_beside(module)):
            found.setdefault(id(piece) if piece.is_meta else piece.data_ptr() or id(piece), piece)
    return list(found.values())


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in which a tensor lies: itself, or those that one of a class of its own holds."""
    if type(tensor) in PLAIN:
        return [*strided_parts(tensor)]
    if is_wrapper(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]  # which such a tensor has
        return [piece for one in inner if isinstance(one, Tensor) for piece in pieces_of(one)]
    held = (one for one in vars(tensor).values() if type(one) is Tensor)
    return [tensor.detach().as_subclass(Tensor), *held, *_beside(tensor)]


def _states(owner: object) -> Iterator[dict[str, object]]:
    """What objects of bitsandbytes hold that stand in attributes, and in theirs."""
    for held in vars(owner).values():
        if type(held).__module__.startswith("bitsandbytes.") and not isinstance(held, (Tensor, nn.Module)):
            yield vars(held)
            yield from _states(held)


def _beside(owner: object) -> list[Tensor]:
    return [one for state in _states(owner) for one in state.values() if isinstance(one, Tensor)]


PACKS = "support_avx512bf16_for_cpu"
"""Where a module of bitsandbytes looks whether its first forward in evaluation packs its weights anew.

They lose bits by it, and no gradient goes through them any more.
"""


def leave_unpacked(module: nn.Module) -> None:
    """Has the weights in a module stay as they are in evaluation."""
    for part in module.modules():
        if PACKS in vars(part):
            vars(part)[PACKS] = False


def forget_beside(module: nn.Module) -> None:
    """Has a module hold nothing more beside its parameters of what these are made of."""
    for state in [*_states(module)]:
        state.update({name: None for name, one in state.items() if isinstance(one, Tensor)})


def numbers_in(parameter: Tensor) -> int:
    """For how many numbers a parameter stands: a byte of bitsandbytes' of 4 bits has two."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    return Size(shape).numel()


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen weight that a quantizer made."""
    by = type(tensor).__module__.partition(".")[0]
    return by in ("bitsandbytes", "torchao") and not tensor.requires_grad and not tensor.is_meta
