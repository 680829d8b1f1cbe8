"""Finds the tensors in which weights are stored, including weights of quantization libraries.

- torchao's weights are wrapper subclasses that hold plain tensors.
- bitsandbytes stores weights as bytes. Their scales are stored in attributes of the weight. With 8 bits, the scales
  are in attributes of the module after the first forward.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Size, Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import PLAIN
from gpipe._torch.modules import is_wrapper
from gpipe.stages.memory_layout import strided_parts


def stored_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the distinct plain tensors in which parameters and buffers are stored. Skips lazy parameters."""
    stored: dict[int, Tensor] = {}
    for part in {part: None for module in modules for part in module.modules()}:
        state = [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None and not is_lazy(t)]
        pieces = chain.from_iterable(map(pieces_of, state))
        for piece in (*pieces, *_quantization_tensors(part)):
            stored.setdefault(id(piece) if piece.is_meta else piece.data_ptr() or id(piece), piece)
    return list(stored.values())


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors in which a tensor is stored: the tensor itself, or tensors in a wrapper subclass."""
    if type(tensor) in PLAIN:
        return [*strided_parts(tensor)]
    if is_wrapper(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]  # a wrapper
        return [piece for value in inner if isinstance(value, Tensor) for piece in pieces_of(value)]
    attributes = (value for value in vars(tensor).values() if type(value) is Tensor)
    return [tensor.detach().as_subclass(Tensor), *attributes, *_quantization_tensors(tensor)]


def _quantization_states(owner: object) -> Iterator[dict[str, object]]:
    """Yields the attributes of each bitsandbytes object that is reachable through attributes of `owner`."""
    for value in vars(owner).values():
        if type(value).__module__.startswith("bitsandbytes.") and not isinstance(value, (Tensor, nn.Module)):
            yield vars(value)
            yield from _quantization_states(value)


def _quantization_tensors(owner: object) -> list[Tensor]:
    return [value for state in _quantization_states(owner) for value in state.values() if isinstance(value, Tensor)]


PACKS_WEIGHTS = "support_avx512bf16_for_cpu"
"""Attribute of a bitsandbytes module. If True, its first forward in evaluation mode repacks the weights.

Repacking loses precision, and repacked weights do not propagate gradients.
"""


def prevent_packing(module: nn.Module) -> None:
    """Prevents the bitsandbytes modules in a module from repacking their weights in evaluation mode."""
    for part in module.modules():
        if PACKS_WEIGHTS in vars(part):
            vars(part)[PACKS_WEIGHTS] = False


def drop_quantization_state(module: nn.Module) -> None:
    """Removes the scales and other tensors that bitsandbytes keeps outside of a module's parameters and buffers."""
    for state in [*_quantization_states(module)]:
        state.update({name: None for name, value in state.items() if isinstance(value, Tensor)})


def numbers_in(parameter: Tensor) -> int:
    """Returns the number of weights in a parameter. A 4-bit parameter of bitsandbytes has two weights per byte."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)
    return Size(shape).numel()


def is_quantized(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen weight of bitsandbytes or torchao that has values."""
    library = type(tensor).__module__.partition(".")[0]
    return library in ("bitsandbytes", "torchao") and not tensor.requires_grad and not tensor.is_meta
