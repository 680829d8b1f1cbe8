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

BRANCHES = (
    "{name} needs values between blocks, and the model is on the meta device and has none: its path depends on them. "
    "Build it for real, or name other blocks: blocks=[...]"
)


def lacks_values(model: nn.Module) -> bool:
    """Whether some parameters of a model are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class Dry:
    """Does the operations of a model without values."""

    again: Callable[[], None] = staticmethod(lambda: None)
    """Called where a unit that has failed without values is to run again, on zeros."""

    def __init__(self) -> None:
        self._fakes = Fakes()

    def faking(self, model: nn.Module) -> AbstractContextManager[None]:
        """Has the modules of a model have tensors without values that say to be on the CPU."""
        return exchanged(model, lambda tensor: self.like(tensor) if tensor.is_meta else tensor)

    def like(self, tensor: Tensor) -> Tensor:
        return self._fakes.like(tensor)

    def do(self, call: OpCall) -> Any:
        unit = call.unit
        try:
            with self._fakes.inside():
                return call.do()
        except Exception as error:  # some operations of units cannot be done without values, or not yet
            if unit is None and isinstance(error, NEEDS_VALUES):
                raise CannotSplitError(BRANCHES.format(name=call.name)) from error
            if unit is None or lacks_memory(error):
                raise
        self.again()
        with exchanged(unit, zeros), torch.no_grad():
            made = call.given(zeros).do()
        return map_tensors(made, lambda tensor: tensor if is_fake(tensor) else self.like(tensor))


@contextmanager
def exchanged(model: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Has a model have others in place of its parameters and buffers, one for each."""
    others = {id(tensor): other(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with ExitStack() as back:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                back.callback(put_parameter, module, name, parameter)
                put_parameter(module, name, others.get(id(parameter)))
            for name, buffer in module._buffers.items():
                back.callback(module._buffers.__setitem__, name, buffer)
                module._buffers[name] = others.get(id(buffer))
        yield


def zeros(tensor: Any) -> Any:
    """Zeros in place of a tensor without values."""
    return as_kind_of(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype)) if is_fake(tensor) else tensor


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, or one without values where it is."""
    return tensor if tensor.is_cpu or tensor.is_meta else as_kind_of(tensor, tensor.detach().cpu())


def as_kind_of(tensor: Tensor, made: Tensor) -> Tensor:
    """What was made for a tensor, a parameter if that is one."""
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


FREE = -1  # the index, in keys, of what belongs to no layer
ODD = 0xA5  # what bytes of whole numbers are filled with before they get values; floats are filled with NaN

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
    held: dict[str, Any]
    key: str
    tensor: Tensor


Places = Mapping[str, TensorPlace]  # by the names that their tensors have in the model


def give_values(
    model: nn.Module,
    layers: Sequence[Collection[str]],  # the names of what each has, of which one tensor may have several
    own: Collection[int],
    seed: int,
    free: Collection[str] = (),  # the names of what belongs to no layer, and gets values too
) -> None:
    """Gives what is on the meta device of a model's own layers memory and initial values."""
    places = {
        f"{path}.{key}".lstrip("."): TensorPlace(module, held, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for held in (module._parameters, module._buffers)
        for key, tensor in held.items()
        if tensor is not None
    }
    asked = {*free, *(name for index in own for name in layers[index])}
    wanted = {id(place.tensor): name for name, place in places.items() if name in asked and place.tensor.is_meta}
    seen: set[int] = set()
    made: dict[int, Tensor] = {}
    for index, group in (*enumerate(layers), (FREE, free)):
        of_group = [places[name] for name in reversed([*places]) if name in set(group)]  # each where it stands first
        mine = {id(place.tensor): place for place in of_group if id(place.tensor) not in seen}
        seen |= mine.keys()
        if not mine.keys().isdisjoint(wanted):
            with seeded(rng_seed(seed, FREE, index, 0)):
                given = _initial_values(model, places, [*mine.values()], index)
            made |= {it: value for it, value in given.items() if it in wanted}
    if mistakes := list(_find_mistakes(model, places, wanted, made)):
        raise ValueError("; ".join(mistakes))
    _put(places, made)


def _find_mistakes(
    model: nn.Module, places: Places, wanted: Mapping[int, str], made: Collection[int]
) -> Iterator[str]:
    known = {id(place.tensor) for place in places.values()}
    unknown = [
        f"{path}.{key}".lstrip(".")
        for path, module in (model.named_modules() if wanted else ())
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta and id(value) not in known
    ]
    without = [name for it, name in wanted.items() if it not in made]
    hooked = [name for name in wanted.values() if has_hooks(places[name].tensor)]
    for names, text in ((without, WITHOUT), (unknown, UNKNOWN), (hooked, HOOKED)):
        if names:
            yield text.format(names=", ".join(names))


def _initial_values(model: nn.Module, places: Places, mine: Sequence[TensorPlace], index: int) -> dict[int, Tensor]:
    """The values that the model's own code gives to tensors, by their identities; it may give some none."""
    given: dict[int, Tensor] = {}
    try:
        for by_model in (True, False):
            left = [place for place in mine if id(place.tensor) not in given and _can_have_values(place.tensor)]
            if left:
                given |= _run(model, places, left, by_model=by_model)
    except Exception as error:
        error.add_note(f"while layer {index} got its initial values")
        raise
    return given


def _can_have_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not is_wrapper(tensor)


def _run(model: nn.Module, places: Places, left: Sequence[TensorPlace], *, by_model: bool) -> dict[int, Tensor]:
    """Initializes a model where the tensors at these places, and the others beside them, are on the CPU."""
    beside = {place.module for place in left}
    with ExitStack() as back, torch.no_grad(), torch.device("cpu"):
        for place in {(id(place.held), place.key): place for place in places.values()}.values():  # each once
            is_beside = place.module in beside
            back.callback(place.held.__setitem__, place.key, place.tensor)
            if _can_have_values(place.tensor) and (is_beside or not place.tensor.is_meta):
                place.held[place.key] = _alike(place.tensor, "cpu" if is_beside else "meta")
        stand_ins = [place.held[place.key] for place in left]
        addresses = [_fill(stood) for stood in stand_ins]
        _initialize(model, beside, (), by_model=by_model)
        found = [place.held[place.key] for place in left]
    given = {}
    for place, made, stood, address in zip(left, found, stand_ins, addresses, strict=True):
        if isinstance(made, Tensor) and not made.is_meta and made.shape == stood.shape:
            if made is not stood:  # somebody put another in its place
                stood.data = made.detach().to(stood.dtype)
            if stood.data_ptr() != address or _is_written(stood):
                given[id(place.tensor)] = stood
    return given


def _alike(tensor: Tensor, device: str) -> Tensor:
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
        made.__class__ = type(tensor)
    made.__dict__.update(tensor.__dict__)
    return made


def _initialize(module: nn.Module, holders: set[nn.Module], around: tuple[nn.Module, ...], *, by_model: bool) -> None:
    """Has the model's own code give values: to parts before what they are part of, if they hold what is wanted.

    `by_model` is whether by `_init_weights` of the innermost module around each, or by its own `reset_parameters`.
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
    """Fills a tensor with what shows whether it gets values; gives its address."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.numel():
        _bytes(tensor).fill_(ODD)
    return tensor.data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _is_written(tensor: Tensor) -> bool:
    """Whether a tensor that was filled has values: a float in each place, whatever else in some."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return not tensor.numel() or not bool((_bytes(tensor) == ODD).all())


def _put(places: Places, made: Mapping[int, Tensor]) -> None:
    by_tensor: dict[int, list[TensorPlace]] = {}
    for place in places.values():
        by_tensor.setdefault(id(place.tensor), []).append(place)
    for it, value in made.items():
        same = by_tensor[it]
        try:
            torch.utils.swap_tensors(same[0].tensor, value)
        except RuntimeError:  # somebody has a weak reference: note "The same objects"
            for place in same:
                place.held[place.key] = value
                refresh_weights_of_rnn(place.module)
