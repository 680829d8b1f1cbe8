"""A model on the meta device: traced without values, and given them where it is trained.

Rules:
1. A layer's values depend on (seed, index) and on what stands in the layer, on nothing else. While they are made, all
   other tensors of the model are on the meta device, where to write is nothing and draws nothing from a generator; so
   it does not matter which layers have values already, or ever get some here.
2. The model's own code gives them, in the order in which a constructor would: parts before the module that they are
   part of. First comes `_init_weights(part)` of the innermost module around a part that has one, which is what
   transformers calls, and many a model that says `self.apply(self._init_weights)`; what it leaves empty is given by
   `reset_parameters()`, which the modules of torch have.
3. A tensor under several names is the first layer's that has it, and is made where it stands in that layer first.
4. Nothing changes unless all that is asked for has values.

Note "The same objects". Memory of another device cannot be put into a parameter by `.data`. A new parameter in place
of the old would have to be put wherever that stands, and whatever else refers to it, a module's list or an optimizer,
would lose it. So the tensors are swapped inside of their objects (`torch.utils.swap_tensors`), which keeps ties,
attributes and `requires_grad`. That is refused where somebody has a weak reference, as an RNN has to its weights;
there the new parameter is put in all places where modules have the old one.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import has_hooks
from gpipe._torch.dispatcher import NEEDS_VALUES, Fakes, is_fake
from gpipe._torch.modules import is_wrapper, refresh_weights_of_rnn, reset_of
from gpipe._torch.trees import tree_map_only
from gpipe.stages.rng import rng_seed
from gpipe.stages.sequence import seeded
from gpipe.stages.shared_weights import put_parameter
from gpipe.tracing.checks import lacks_memory
from gpipe.tracing.trace import OpCall
from gpipe.tracing.values import CannotSplitError

BRANCHES = (
    "{name} needs values between blocks, and the model is on the meta device and has none: its path depends on them. "
    "Build it for real, or name other blocks: blocks=[...]"
)


def lacks_values(model: nn.Module) -> bool:
    """Whether some parameters of a model are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class Dry:
    """Does the operations of a model without values."""

    def __init__(self) -> None:
        self._fakes = Fakes()

    @contextmanager
    def faking(self, model: nn.Module) -> Iterator[None]:
        """Has the modules of a model have tensors without values that say to be on the CPU."""
        known: dict[int, Tensor] = {}
        with ExitStack() as back:
            for module in model.modules():
                for held in _held_by(module):
                    for name, tensor in held.items():
                        if tensor is not None and tensor.is_meta:
                            made = known.setdefault(id(tensor), self._fakes.like(tensor))
                            back.callback(_place, module, held, name, tensor)
                            _place(module, held, name, made)
            yield

    def do(self, call: OpCall) -> Any:
        """Does an operation."""
        unit = call.unit
        try:
            with self._fakes.inside():
                return call.do()
        except Exception as error:  # some operations of units cannot be done without values, or not yet
            if unit is None and isinstance(error, NEEDS_VALUES):
                raise CannotSplitError(BRANCHES.format(name=call.name)) from error
            if unit is None or lacks_memory(error):
                raise
        return self._on_zeros(unit, call)

    def _on_zeros(self, unit: nn.Module, call: OpCall) -> Any:
        with ExitStack() as back, torch.no_grad():
            for module in unit.modules():
                for held in _held_by(module):
                    for name, tensor in held.items():
                        if is_fake(tensor):
                            back.callback(_place, module, held, name, tensor)
                            _place(module, held, name, _zeros(tensor))
            made = call.given(_zeros).do()
        return tree_map_only(Tensor, lambda tensor: tensor if is_fake(tensor) else self._fakes.like(tensor), made)


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _place(module: nn.Module, held: dict[str, Any], name: str, tensor: Tensor | None) -> None:
    if held is module._parameters:
        put_parameter(module, name, tensor)
    else:
        held[name] = tensor


def _zeros(tensor: Any) -> Any:
    if not is_fake(tensor):
        return tensor
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


FREE = -1
"""The index, in keys, of what belongs to no layer."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ONES, ODD = 0xFF, 0xA5
"""What memory is filled with before it gets values: not a number, for floats; for others, what hardly is a value."""

WITHOUT = (
    "{names} have no values: they are on the meta device, and neither _init_weights of the model nor "
    "reset_parameters() of the modules that hold them gives them any. Build the model for real, without "
    "torch.device('meta'), or give those modules a reset_parameters() that fills them"
)
UNKNOWN = (
    "{names} are on the meta device and neither parameters nor buffers, so nothing can give them values; let "
    "their modules have them by register_buffer(name, value, persistent=False)"
)
HOOKED = "{names} have hooks, which would not come along; register them when the pipe is built"


class TensorPlace(NamedTuple):
    """Where a tensor stands: a module, its parameters or its buffers, and the name there."""

    module: nn.Module
    held: dict[str, Tensor | None]
    key: str

    @property
    def tensor(self) -> Tensor:
        """What stands there."""
        found = self.held[self.key]
        assert found is not None
        return found


TensorPlaces: TypeAlias = Mapping[str, TensorPlace]
"""Slots by the names that their tensors have in the model."""
Initializer: TypeAlias = Callable[[], object]
Initializers: TypeAlias = Callable[[nn.Module, Collection[nn.Module]], Iterator[Initializer]]
"""What gives values to the parts of a model that are named, in order."""


def give_values(
    model: nn.Module,
    layers: Sequence[Collection[str]],
    own: Collection[int],
    seed: int,
    free: Collection[str] = (),
) -> None:
    """Gives those parameters and buffers of some layers that are on the meta device memory and initial values.

    Args:
        model: The model; what is not on the meta device stays as it is.
        layers: The names of the parameters and buffers of each layer; one tensor may have several.
        own: The layers that get values.
        seed: What the values depend on, with a layer's index.
        free: Names of what belongs to no layer and gets values too.

    Raises:
        ValueError: Something would get no values; nothing was changed.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(10**6, 10**6), nn.LayerNorm(2))
        >>> give_values(model, [["0.weight", "0.bias"], ["1.weight", "1.bias"]], own=[1], seed=0)
        >>> model[0].weight.device.type, model[1].weight
        ('meta', Parameter containing:
        tensor([1., 1.], requires_grad=True))
    """
    slots = _tensor_places(model)
    asked = {*free, *(name for index in own for name in layers[index])}
    wanted = {id(slots[name].tensor): name for name in slots if name in asked and slots[name].tensor.is_meta}
    made: dict[int, Tensor] = {}
    for index, names in _homes(slots, [*enumerate(layers), (FREE, free)]):
        here = {id(slots[name].tensor): name for name in names}
        if wanted.keys() & here.keys():
            with seeded(rng_seed(seed, FREE, index, 0)):
                given = _initial_values(model, slots, names, index)
            made |= {it: given[name] for it, name in here.items() if it in wanted and name in given}
    if mistakes := list(_find_mistakes(model, slots, wanted, made)):
        raise ValueError("; ".join(mistakes))
    _put(slots, made)


def _tensor_places(model: nn.Module) -> dict[str, TensorPlace]:
    return {
        f"{path}.{key}" if path else key: TensorPlace(module, held, key)
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }


def _homes(slots: TensorPlaces, groups: Iterable[tuple[int, Collection[str]]]) -> Iterator[tuple[int, list[str]]]:
    """The groups, each with the names, in the model's order, of tensors that no group before has."""
    seen: set[int] = set()
    for index, group in groups:
        among, names = set(group), []
        for name, slot in slots.items():
            if name in among and id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                names.append(name)
        yield index, names


def _find_mistakes(
    model: nn.Module, slots: TensorPlaces, wanted: Mapping[int, str], made: Collection[int]
) -> Iterator[str]:
    """Why values cannot be given, if so."""
    known = {id(slot.tensor) for slot in slots.values()}
    unknown = [
        f"{path}.{key}" if path else key
        for path, module in (model.named_modules() if wanted else ())
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta and id(value) not in known
    ]
    without = [name for it, name in wanted.items() if it not in made]
    hooked = [name for name in wanted.values() if has_hooks(slots[name].tensor)]
    for names, text in ((without, WITHOUT), (unknown, UNKNOWN), (hooked, HOOKED)):
        if names:
            yield text.format(names=", ".join(names))


def _initial_values(model: nn.Module, slots: TensorPlaces, names: Collection[str], index: int) -> dict[str, Tensor]:
    """The values that the model's own code gives to tensors; those that it gives none are left out."""
    given: dict[str, Tensor] = {}
    try:
        for initializers in (_by_the_model, _by_the_modules):
            left = [name for name in names if name not in given and _can_have_values(slots[name].tensor)]
            if left:
                given |= _run(model, slots, left, initializers)
    except Exception as error:
        error.add_note(f"while layer {index} got its initial values")
        raise
    return given


def _can_have_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not is_wrapper(tensor)


def _run(
    model: nn.Module, slots: TensorPlaces, names: Sequence[str], initializers: Initializers
) -> dict[str, Tensor]:
    """Runs initializers on a model where the tensors of these names, and the others beside them, are on the CPU."""
    beside = {slots[name].module for name in names}
    stand_ins: dict[tuple[int, str], Tensor] = {}
    for slot in slots.values():
        if _can_have_values(slot.tensor):
            here = slot.module in beside
            if here or not slot.tensor.is_meta:
                stand_ins[id(slot.held), slot.key] = _alike(slot.tensor, "cpu" if here else "meta")
    with _exchanged(slots, stand_ins), torch.no_grad(), torch.device("cpu"):
        filled = {name: _filled(slots[name].tensor) for name in names}
        for initialize in initializers(model, _around(model, names)):
            initialize()
        found = {name: slots[name].held[slots[name].key] for name in names}
    given = {}
    for name, made in found.items():
        stood = stand_ins[id(slots[name].held), slots[name].key]
        if isinstance(made, Tensor) and not made.is_meta and made.shape == stood.shape:
            if made is not stood:  # somebody put another in its place
                stood.data = made.detach().to(stood.dtype)
            if stood.data_ptr() != filled[name] or _is_written(stood):
                given[name] = stood
    return given


def _alike(tensor: Tensor, device: str) -> Tensor:
    """A tensor of the same kind and shape that has no values yet."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
        made.__class__ = type(tensor)
    made.__dict__.update(tensor.__dict__)
    return made


@contextmanager
def _exchanged(slots: TensorPlaces, others: Mapping[tuple[int, str], Tensor]) -> Iterator[None]:
    """Has others stand in the place of tensors."""
    before = {name: slot.tensor for name, slot in slots.items()}
    try:
        for held, key in ((slot.held, slot.key) for slot in slots.values()):
            held[key] = others.get((id(held), key), held[key])
        yield
    finally:
        for name, slot in slots.items():
            slot.held[slot.key] = before[name]


def _around(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    """The modules that hold what is named, themselves or by others."""
    paths = {path for name in names for path in _paths(name)}
    return {module for path, module in model.named_modules(remove_duplicate=False) if path in paths}


def _paths(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _by_the_model(model: nn.Module, parts: Collection[nn.Module]) -> Iterator[Initializer]:
    """`_init_weights` of the innermost module around each part that has one."""
    for part, around in _from_within(model, parts):
        for owner in around:
            initialize = getattr(owner, "_init_weights", None)
            if callable(initialize) and _takes(initialize, part):
                yield partial(initialize, part)
                break


def _by_the_modules(model: nn.Module, parts: Collection[nn.Module]) -> Iterator[Initializer]:
    """`reset_parameters` of each part that has one."""
    for part, _ in _from_within(model, parts):
        reset = reset_of(part)
        if reset is not None and _takes(reset):
            yield reset


def _from_within(
    module: nn.Module, parts: Collection[nn.Module], around: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Parts before what they are part of, each with itself and the modules around it, innermost first."""
    if module in parts:
        around = (module, *around)
        for child in module.children():
            yield from _from_within(child, parts, around)
        yield module, around


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a function can be called so."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _filled(tensor: Tensor) -> int:
    """The address of a tensor, which is filled with what shows whether it gets values."""
    if tensor.numel():
        _bytes(tensor).fill_(_filling(tensor))
    return tensor.data_ptr()


def _filling(tensor: Tensor) -> int:
    return ONES if tensor.dtype.is_floating_point or tensor.dtype.is_complex else ODD


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _is_written(tensor: Tensor) -> bool:
    """Whether a tensor that was filled has values: a float in each place, whatever else in some."""
    if not tensor.numel():
        return True
    whole = INTEGERS[min(tensor.itemsize, 8)]
    filling = torch.full((8,), _filling(tensor), dtype=torch.uint8, device="cpu").view(whole)[0]
    same = _bytes(tensor).view(whole) == filling
    some = bool(same.any())
    return not (some and (_filling(tensor) == ONES or bool(same.all())))


def _put(slots: TensorPlaces, made: Mapping[int, Tensor]) -> None:
    """Gives tensors, by identity, what was made for them."""
    places: dict[int, list[TensorPlace]] = {}
    for slot in slots.values():
        places.setdefault(id(slot.tensor), []).append(slot)
    for it, value in made.items():
        tensor = places[it][0].tensor
        try:
            torch.utils.swap_tensors(tensor, value)
        except RuntimeError:  # somebody has a weak reference: note "The same objects"
            for slot in places[it]:
                slot.held[slot.key] = value
                refresh_weights_of_rnn(slot.module)
