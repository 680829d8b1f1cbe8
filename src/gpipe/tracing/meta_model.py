"""Traces models on the meta device, and initializes their weights in the process that trains them.

Rules:

1. The initial values of a layer depend only on (seed, index) and on the layer. While they are computed, all other
   tensors of the model are on the meta device, where writes do nothing and use no random numbers. The values
   therefore do not depend on which other layers this process initializes.
2. The model's own code initializes the layers, in the order of a constructor: children before the module that
   contains them. For each child, gpipe first calls `_init_weights(child)` of the innermost module around it that has
   this method. transformers does the same, and so do many models with `self.apply(self._init_weights)`. For tensors
   that remain uninitialized, gpipe calls `reset_parameters()`, which torch's modules have.
3. A tensor with several names belongs to the first layer that contains the tensor, under the first name in this
   layer.
4. Nothing changes unless all requested tensors get values.

Note "The same objects". Assigning `.data` cannot move a parameter to a different device. If a new parameter replaced
it, other references to the old parameter, for example in an optimizer, would become stale. Therefore, gpipe calls
`torch.utils.swap_tensors`, which keeps ties, attributes and `requires_grad`. PyTorch rejects this call for tensors
with weak references, such as the weights of an RNN. A new parameter replaces such a tensor in all modules.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import has_hooks
from gpipe._torch.dispatcher import NEEDS_VALUES, Fakes, is_fake
from gpipe._torch.modules import is_wrapper, refresh_weights_of_rnn, reset_of
from gpipe._torch.trees import map_tensors
from gpipe.stages.rng import rng_seed
from gpipe.stages.sequence import seeded
from gpipe.stages.shared_weights import put_parameter
from gpipe.tracing.runs import can_be_called, lacks_memory
from gpipe.tracing.trace import CannotSplitError, OpCall


def lacks_values(model: nn.Module) -> bool:
    """Whether some parameters of a model are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class DryRun:
    """Executes the operations of a model without values, on fake tensors."""

    before_retry: Callable[[], None] = staticmethod(lambda: None)
    """Called if a unit has failed on tensors without values, before the unit runs again on zeros."""

    def __init__(self) -> None:
        self._fakes = Fakes()

    def fake_tensors(self, model: nn.Module) -> AbstractContextManager[None]:
        """Replaces the meta tensors of a model by fake tensors that report the CPU as their device."""
        return replaced_tensors(model, lambda tensor: self.like(tensor) if tensor.is_meta else tensor)

    def like(self, tensor: Tensor) -> Tensor:
        return self._fakes.like(tensor)

    def execute(self, call: OpCall) -> Any:
        unit = call.unit
        try:
            with self._fakes.inside():
                return call.execute()
        except Exception as error:  # torch cannot run some operations on fake tensors
            if unit is None and isinstance(error, NEEDS_VALUES):
                raise CannotSplitError(
                    f"{call.name}: code between blocks needs values, but the model is on the meta device. "
                    f"Create the model with values, or choose blocks that contain this code: gpipe.layers_of(model, "
                    f"sample, blocks=[...]). [meta-values-needed]"
                ) from error
            if unit is None or lacks_memory(error):
                raise
        self.before_retry()
        with replaced_tensors(unit, zeros), torch.no_grad():
            result = call.map_tensors(zeros).execute()
        return map_tensors(result, lambda tensor: tensor if is_fake(tensor) else self.like(tensor))


@contextmanager
def replaced_tensors(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces each parameter and buffer of a model by `replace(tensor)` inside the context."""
    replacements = {id(tensor): replace(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as undo:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                undo.callback(put_parameter, module, name, parameter)
                put_parameter(module, name, replacements.get(id(parameter)))
            for name, buffer in module._buffers.items():
                undo.callback(module._buffers.__setitem__, name, buffer)
                module._buffers[name] = replacements.get(id(buffer))
        yield


def zeros(tensor: Any) -> Any:
    """Returns zeros for a fake tensor. Returns anything else unchanged."""
    return as_kind_of(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype)) if is_fake(tensor) else tensor


def on_cpu(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor on the CPU. Returns CPU and meta tensors unchanged."""
    return tensor if tensor.is_cpu or tensor.is_meta else as_kind_of(tensor, tensor.detach().cpu())


def as_kind_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Returns `value`, as a parameter if `tensor` is one."""
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


FREE = -1  # the layer index of tensors that belong to no layer, in random keys
SENTINEL = 0xA5  # marks the bytes of uninitialized integer tensors; floats are marked with NaN

NOT_INITIALIZED = (
    "{names}: these tensors are on the meta device, and neither _init_weights of the model nor reset_parameters() of "
    "their modules initializes them. Create the model without torch.device('meta'), or add a reset_parameters() that "
    "fills them. [meta-not-initialized]"
)
NOT_REGISTERED = (
    "{names}: these tensors are on the meta device, but they are neither parameters nor buffers, so gpipe cannot "
    "initialize them. Register them with register_buffer(name, value, persistent=False). [meta-plain-tensor]"
)
HOOKED = (
    "{names}: these tensors have hooks, which would be lost when gpipe initializes the tensors. Register these hooks "
    "after you have created the pipe. [meta-tensor-hooks]"
)


class TensorPlace(NamedTuple):
    """The location of a tensor in a model: the module, its dict of parameters or buffers, and the key in the dict."""

    module: nn.Module
    held: dict[str, Any]
    key: str
    tensor: Tensor


Places = Mapping[str, TensorPlace]  # by the names of their tensors in the model


def give_values(
    model: nn.Module, layers: Sequence[Collection[str]], own: Collection[int], seed: int, free: Collection[str] = ()
) -> None:
    """Allocates and initializes the meta tensors of some layers.

    Args:
        model: The model.
        layers: The names of the tensors of each layer. A tensor may have several names.
        own: The indices of the layers to initialize.
        seed: The seed of the initial values.
        free: The names of tensors that do not belong to a layer. These tensors are initialized too.

    Raises:
        ValueError: If some of these tensors cannot be initialized. In this case, the model is unchanged.
    """
    places = {
        f"{path}.{key}".lstrip("."): TensorPlace(module, held, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }
    requested = {*free, *(name for index in own for name in layers[index])}
    wanted = {id(place.tensor): name for name, place in places.items() if name in requested and place.tensor.is_meta}
    assigned: set[int] = set()
    values: dict[int, Tensor] = {}
    for index, names in (*enumerate(layers), (FREE, free)):
        of_group = [
            places[name] for name in reversed([*places]) if name in set(names)
        ]  # the first name of each tensor wins
        new = {id(place.tensor): place for place in of_group if id(place.tensor) not in assigned}
        assigned |= new.keys()
        if not new.keys().isdisjoint(wanted):
            with seeded(rng_seed(seed, FREE, index, 0)):
                initialized = _initial_values(model, places, [*new.values()], index)
            values |= {key: value for key, value in initialized.items() if key in wanted}
    if mistakes := list(_find_mistakes(model, places, wanted, values)):
        raise ValueError("\n".join(mistakes))
    _put(places, values)


def _find_mistakes(
    model: nn.Module, places: Places, wanted: Mapping[int, str], values: Collection[int]
) -> Iterator[str]:
    registered = {id(place.tensor) for place in places.values()}
    unregistered = [
        f"{path}.{key}".lstrip(".")
        for path, module in (model.named_modules() if wanted else ())
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta and id(value) not in registered
    ]
    uninitialized = [name for key, name in wanted.items() if key not in values]
    with_hooks = [name for name in wanted.values() if has_hooks(places[name].tensor)]
    for names, text in ((uninitialized, NOT_INITIALIZED), (unregistered, NOT_REGISTERED), (with_hooks, HOOKED)):
        if names:
            yield text.format(names=", ".join(names))


def _initial_values(model: nn.Module, places: Places, own: Sequence[TensorPlace], index: int) -> dict[int, Tensor]:
    """Returns the values with which the model's own code initializes tensors, by id. Some tensors may be missing."""
    values: dict[int, Tensor] = {}
    try:
        for by_model in (True, False):
            missing = [place for place in own if id(place.tensor) not in values and _can_have_values(place.tensor)]
            if missing:
                values |= _run_initialization(model, places, missing, by_model=by_model)
    except Exception as error:
        error.add_note(f"This happened while gpipe initialized the weights of layer {index}.")
        raise
    return values


def _can_have_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not is_wrapper(tensor)


def _run_initialization(
    model: nn.Module, places: Places, missing: Sequence[TensorPlace], *, by_model: bool
) -> dict[int, Tensor]:
    """Runs the model's initialization with the missing tensors, and other tensors of their modules, on the CPU.

    Returns the tensors that the initialization has written, by the id of the original tensor.
    """
    holders = {place.module for place in missing}
    with ExitStack() as undo, torch.no_grad(), torch.device("cpu"):
        for place in {(id(place.held), place.key): place for place in places.values()}.values():  # each once
            in_holder = place.module in holders
            undo.callback(place.held.__setitem__, place.key, place.tensor)
            if _can_have_values(place.tensor) and (in_holder or not place.tensor.is_meta):
                place.held[place.key] = _empty_like(place.tensor, "cpu" if in_holder else "meta")
        originals = [place.held[place.key] for place in missing]
        addresses = [_fill(tensor) for tensor in originals]
        _initialize(model, holders, (), by_model=by_model)
        results = [place.held[place.key] for place in missing]
    values = {}
    for place, result, original, address in zip(missing, results, originals, addresses, strict=True):
        if isinstance(result, Tensor) and not result.is_meta and result.shape == original.shape:
            if result is not original:  # the initialization assigned a new tensor
                original.data = result.detach().to(original.dtype)
            if original.data_ptr() != address or _is_written(original):
                values[id(place.tensor)] = original
    return values


def _empty_like(tensor: Tensor, device: str) -> Tensor:
    empty = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
        empty.__class__ = type(tensor)
    empty.__dict__.update(tensor.__dict__)
    return empty


def _initialize(module: nn.Module, holders: set[nn.Module], around: tuple[nn.Module, ...], *, by_model: bool) -> None:
    """Runs the model's own initialization: children first, and only modules that contain one of the `holders`.

    If `by_model` is True, calls `_init_weights` of the innermost module around each module. Otherwise calls
    `reset_parameters`.
    """
    if holders.isdisjoint(module.modules()):
        return
    around = (module, *around)
    for child in module.children():
        _initialize(child, holders, around, by_model=by_model)
    reset = reset_of(module)
    if not by_model and reset is not None and can_be_called(reset):
        reset()
    for owner in around if by_model else ():
        initialize = getattr(owner, "_init_weights", None)
        if callable(initialize) and can_be_called(initialize, module):
            initialize(module)
            break


def _fill(tensor: Tensor) -> int:
    """Marks a tensor as uninitialized, and returns its address."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.numel():
        _bytes(tensor).fill_(SENTINEL)
    return tensor.data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _is_written(tensor: Tensor) -> bool:
    """Whether a tensor has been written since `_fill`: a float tensor has no NaN, or other bytes have changed."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return not tensor.numel() or not bool((_bytes(tensor) == SENTINEL).all())


def _put(places: Places, values: Mapping[int, Tensor]) -> None:
    by_tensor: dict[int, list[TensorPlace]] = {}
    for place in places.values():
        by_tensor.setdefault(id(place.tensor), []).append(place)
    for key, value in values.items():
        tied = by_tensor[key]
        try:
            torch.utils.swap_tensors(tied[0].tensor, value)
        except RuntimeError:  # a weak reference exists: note "The same objects"
            for place in tied:
                place.held[place.key] = value
                refresh_weights_of_rnn(place.module)
