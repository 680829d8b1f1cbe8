"""Refuses what cannot be done in parts: what a forward leaves behind, what is not seen, what depends on chance."""

import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe._torch.modes import is_vmapped
from gpipe.stages.boundary import leaves_of
from gpipe.stages.layout import storage_address
from gpipe.stages.tree import hides_tensors, version
from gpipe.tracing.runs import ForwardArguments, call
from gpipe.tracing.shallow_copy import is_replaced
from gpipe.tracing.trace import OpCall, Trace
from gpipe.tracing.values import CannotSplitError, ValueId, take_apart

T = TypeVar("T")
DEEP = 3
"""How far into containers it is looked."""
CONTAINERS = (list, tuple, set, dict, deque)
MISSING = object()

LEAVES_TENSORS = (
    "the forward of the {model} leaves tensors in {places}, where nobody would find them: layers walk through "
    "copies of the modules that blocks stand in. Return them as part of the output"
)
REPLACES_BUFFER = (
    "the forward of the {model} puts another tensor in place of {places} between blocks, and every layer would do"
    " so on a copy of its own; let a module inside of a block have that buffer, or one of its own that is called. "
    "Rotary embeddings of the type 'dynamic' do so where the sample is longer than max_position_embeddings"
)
COUNTS = (
    "the forward of the {model} changes {places} each time that it runs, and every layer would do so, again in "
    "each recompute; keep what changes in a module inside of a block, as a buffer, or count outside of the model"
)

APART = (
    "in layers, {place} of the {model} fails with {error}, and in the model by itself it does not{left}. It looks "
    "for what another block, or the forward around it, has put where layers that run apart do not see it: into a "
    "dict, list or cache that all blocks are given, or on their parent. Return it where it is made and hand it on as "
    "an argument, or name other blocks (blocks=[...]), each with all that shares it. Layers of transformers that "
    "share keys and values do so: num_kv_shared_layers=0"
)
KEEPS = (
    "the {model} is given a {kind} ({name}), in which its forward keeps tensors, and layers run apart: each would "
    "keep its own, again in each recompute. Leave it out; for generation, past_key_values and caches, call the model "
    "itself"
)


def refusing_leftovers(
    copied_modules: Mapping[str, nn.Module],
    opened: set[str],
    model: str,
    run: Callable[[], T],
    again: Callable[[], object],
) -> T:
    """What a run of a forward gives, if it leaves nothing behind.

    Args:
        copied_modules: The modules that every layer interpreters through, by name.
        opened: The names of those that blocks stand in.
        model: The class of the model, for errors.
        run: Runs it.
        again: Runs it once more, and puts back buffers; called if something is left that may be the same each time.

    Raises:
        CannotSplitError: It leaves tensors, or something else that is another each time.
    """
    before = _look(copied_modules)
    made = run()
    after = _look(copied_modules)
    changed = _changed(before, after)
    names = [
        f"{name}.{leaf}".lstrip(".")
        for name, key in changed
        if key == "_buffers"
        for leaf in _replaced(copied_modules[name], before, name, is_open=name in opened)
    ]
    if names:
        raise CannotSplitError(REPLACES_BUFFER.format(model=model, places=", ".join(names)))
    tensors = [at for at in changed if at[0] in opened and hides_tensors(vars(copied_modules[at[0]]).get(at[1]))]
    if tensors:
        raise CannotSplitError(LEAVES_TENSORS.format(model=model, places=_in_words(copied_modules, tensors)))
    if changed:
        again()
        if counts := _changed(after, _look(copied_modules)):
            raise CannotSplitError(COUNTS.format(model=model, places=_in_words(copied_modules, counts)))
    return made


def _look(copied_modules: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    return {
        (name, key): _frozen(value) for name, module in copied_modules.items() for key, value in vars(module).items()
    }


def _frozen(value: Any, depth: int = DEEP) -> Any:
    """A value that stays as it is when a container in it is changed."""
    if not isinstance(value, CONTAINERS) or not depth:
        return value
    if isinstance(value, dict):
        return dict, [(key, _frozen(item, depth - 1)) for key, item in value.items()]
    return type(value), [_frozen(item, depth - 1) for item in value]


def _changed(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
    return [at for at in {**before, **after} if not _same(before.get(at, MISSING), after.get(at, MISSING))]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, (Tensor, nn.Module)):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (bool, int, float, str, bytes)) and one == other


def _replaced(module: nn.Module, before: Mapping[tuple[str, str], Any], name: str, *, is_open: bool) -> list[str]:
    """The buffers that are others now; a module that no block stands in may have a table that grew."""
    was = dict(before[name, "_buffers"][1])
    return [
        leaf
        for leaf, buffer in module._buffers.items()
        if buffer is not was.get(leaf, MISSING) and (is_open or is_replaced(was.get(leaf), buffer))
    ]


def _in_words(copied_modules: Mapping[str, nn.Module], places: list[tuple[str, str]]) -> str:
    return ", ".join(f"{type(copied_modules[name]).__name__}.{key}" for name, key in places)


def refuse_kept(model: nn.Module, given: ForwardArguments) -> None:
    """Refuses objects among inputs that hold tensors once the forward has run."""
    for name, value in (*enumerate(given.args), *given.kwargs.items()):
        for leaf in take_apart(value)[0]:
            if not isinstance(leaf, Tensor) and hides_tensors(leaf):
                kind = type(leaf).__name__
                raise CannotSplitError(KEEPS.format(model=type(model).__name__, kind=kind, name=name))


LOOKS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""What is raised where something is looked for and not found, but for classes of others derived from these."""
NO_MEMORY = "can't allocate memory"
"""What torch's allocator of the CPU says, in a RuntimeError."""


def _passes(run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception:
        return False
    return True


def lacks_memory(error: BaseException) -> bool:
    """Whether memory was exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or NO_MEMORY in str(error)


def is_of_code(error: Exception) -> bool:
    """Whether an error is of a class, of Python's or torch's, that code raises where it lacks what it needs."""
    is_users = type(error).__module__.partition(".")[0] not in ("builtins", "torch")
    return isinstance(error, LOOKS) and not is_users and not lacks_memory(error)


def refuse_failing_apart(
    model: nn.Module,
    given: ForwardArguments,
    error: Exception,
    run_apart: Callable[[], object],
    left: Sequence[str] = (),
) -> None:
    """Refuses a model for an error that it raises in layers, each time, and by itself never.

    Args:
        model: The model.
        given: What its forward was given.
        error: What it raised in layers.
        run_apart: Runs it in layers again.
        left: Where its forward puts tensors.
    """
    if not is_of_code(error) or not _passes(partial(call, model, given)) or _passes(run_apart):
        return
    names = {id(module): name for name, module in model.named_modules() if name}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [names[it] for frame in frames if (it := id(frame.f_locals.get("self"))) in names]
    raise CannotSplitError(
        APART.format(
            place=inside[-1] if inside else "the forward",
            model=type(model).__name__,
            error=f"{type(error).__name__}: {error}",
            left=f" (there its forward puts tensors into {', '.join(left)})" if left else "",
        )
    ) from error


FILLED = (
    "{name} is given a tensor that was made of nothing (torch.zeros, torch.empty) and changed in place by "
    "{changed}: every layer makes it, and one alone would change it. Use what {changed} returns, put parts "
    "together by torch.cat or torch.stack, or make it of what a block gave: x.new_zeros(...), torch.zeros_like(x)"
)
PARTLY_CHANGED = (
    "{name} changes in place a tensor that shares its memory with another, which an earlier layer made and a "
    "later operation uses: behind a cut the other would not change with it. Work on a copy there"
)


class _Known(NamedTuple):
    maker: Any  # the node behind the tensor in autograd's graph
    version: int
    wants: bool  # a gradient


class Makers:
    """Notices that something else than an operation has put a tensor into another place of autograd's graph."""

    def __init__(self) -> None:
        self._known: dict[ValueId, _Known] = {}

    def note(self, value_id: ValueId, tensor: Tensor) -> None:
        """Notes how an operation left a tensor."""
        self._known[value_id] = _Known(tensor.grad_fn, version(tensor), tensor.requires_grad)

    def differ(self, value_id: ValueId, tensor: Tensor) -> bool:
        """Whether it is otherwise now."""
        known = self._known[value_id]
        if tensor.requires_grad and not known.wants:
            return True
        return tensor.grad_fn is not known.maker and version(tensor) == known.version


class _Filling(NamedTuple):
    tensor: Tensor  # kept, so that its address stays its own
    changed_by: str
    layer: int


class Fillings:
    """Follows tensors that every layer makes for itself and the operation of one changed in place.

    Args:
        value_id_of: What a tensor is called that an operation made.
    """

    def __init__(self, value_id_of: Callable[[Tensor], ValueId | None]) -> None:
        self._value_id_of = value_id_of
        self._by_address: dict[int, _Filling] = {}

    def note(self, tensor: Tensor, changed_by: str, layer: int) -> None:
        """Notes that an operation changed a tensor that none made."""
        self._by_address[storage_address(tensor)] = _Filling(tensor, changed_by, layer)

    def spread(self, tensors: Sequence[Tensor], name: str, made: Sequence[Any]) -> None:
        """Notes that an operation of every layer was given such ones; refuses it if it made plain values of them."""
        filling = next((filling for _, filling in self._among(tensors)), None)
        for leaf in made if filling is not None else ():
            assert filling is not None
            if isinstance(leaf, Tensor):
                self._by_address[storage_address(leaf)] = filling._replace(tensor=leaf)
            elif isinstance(leaf, (bool, int, float)):
                raise CannotSplitError(FILLED.format(name=name, changed=filling.changed_by))

    def refuse_elsewhere(self, tensors: Sequence[Tensor], name: str, layer: int) -> None:
        """Refuses them but in the layer of that operation: the others have them as they were made."""
        for tensor, filling in self._among(tensors):
            if tensor.requires_grad or filling.layer != layer:
                raise CannotSplitError(FILLED.format(name=name, changed=filling.changed_by))

    def _among(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, _Filling]]:
        for tensor in tensors if self._by_address and not is_vmapped() else ():
            if self._value_id_of(tensor) is None and storage_address(tensor) in self._by_address:
                yield tensor, self._by_address[storage_address(tensor)]


class SharedMemory:
    """Finds changes in place of what another tensor of an earlier layer shares, and a later operation uses."""

    def __init__(self) -> None:
        self._address: dict[ValueId, int] = {}
        self._changed: list[tuple[int, ValueId]] = []

    def note(self, value_id: ValueId, tensor: Tensor) -> None:
        """Notes where a tensor lies."""
        try:
            self._address[value_id] = storage_address(tensor)
        except NotImplementedError:  # below vmap there is none
            self._address[value_id] = 0

    def note_change(self, op: int, value_id: ValueId) -> None:
        """Notes that an operation changed a tensor in place."""
        self._changed.append((op, value_id))

    def refuse_parted(self, trace: Trace) -> None:
        """Refuses such changes, once the whole trace is known."""
        last_use = dict.fromkeys(trace.results, len(trace.ops))
        for at, op in enumerate(trace.ops):
            for value_id in op.uses:
                last_use[value_id] = max(at, last_use.get(value_id, -1))
        for at, changed in self._changed:
            layer, memory = trace.layer_of(at), self._address[changed]
            for value_id, other in self._address.items():
                shares = (
                    value_id != changed
                    and memory
                    and other == memory
                    and value_id.op < at < last_use.get(value_id, -1)
                )
                if shares and min(trace.layer_of(value_id.op), trace.layer_of(changed.op)) < layer:
                    raise CannotSplitError(PARTLY_CHANGED.format(name=trace.ops[at].name))


REACHES = (
    "{unit} uses {parameter} by a reference, a parameter of a module that blocks stand in: no layer has it, and "
    "several would add to its gradient at once. Hand it to {unit} as an argument, or let a module have it in which "
    "no block stands"
)


class Owners:
    """Which units have which parameters.

    Args:
        model: Has the parameters.
        units: The units by name.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._units = {name: frozenset(map(id, unit.parameters())) for name, unit in units.items()}

    def reached(self, call: OpCall, made: Any, until: Collection[Node]) -> list[str]:
        """The other units whose parameters the call of a unit has used.

        Args:
            call: The call.
            made: What it has returned.
            until: The nodes behind the tensors that it was given, from before it ran.

        Raises:
            CannotSplitError: It has used one of no unit.
        """
        roots = [leaf for leaf in take_apart(made)[0] if isinstance(leaf, Tensor)]
        known = {*self._units[call.name], *map(id, call.tensors)}
        found: dict[str, None] = {}
        for leaf in leaves_of(roots, until):
            if id(leaf) in self._names and id(leaf) not in known:
                home = next((name for name, held in self._units.items() if id(leaf) in held), None)
                if home is None:
                    raise CannotSplitError(REACHES.format(unit=call.name, parameter=self._names[id(leaf)]))
                found[home] = None
        return list(found)


COMPARISONS = frozenset({"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "greater"})

BY_CHANCE = (
    "the forward of the {model} goes one way or another by a random number between blocks{what}, as where layers "
    "are dropped at random: the next micro-batch would take another path than the sample. Set what drops layers "
    "(layerdrop, layer_drop) to 0, or let a block draw"
)


class Chance:
    """What of a forward is drawn, and depends on nothing else.

    Args:
        model: The model, for errors.
        copied_modules: The modules that every layer interpreters through, by name.
    """

    def __init__(self, model: nn.Module, copied_modules: Mapping[str, nn.Module]) -> None:
        self._model, self._copied_modules = model, copied_modules
        self._drawn: set[ValueId] = set()
        self._thresholds: list[float] = []

    def see(
        self,
        name: str,
        args: Sequence[Any],
        uses: Collection[ValueId],
        made: Mapping[ValueId, Any],
        *,
        draws: bool,
    ) -> None:
        """Is told of an operation between units.

        Args:
            name: The function's.
            args: What it was given.
            uses: The tensors of operations among that.
            made: The leaves of what it returned; those of plain numbers too.
            draws: Whether it is a function that draws.

        Raises:
            CannotSplitError: It makes a plain value of a random number.
        """
        if not (draws and not uses) and not (uses and self._drawn.issuperset(uses)):
            return
        threshold = next((item for item in args if isinstance(item, (int, float))), None)
        if name in COMPARISONS and threshold is not None:
            if not 0 < threshold < 1:
                return  # whatever is drawn, it is the same
            self._thresholds.append(float(threshold))
        if uses and any(isinstance(leaf, (bool, int, float)) for leaf in made.values()):
            raise CannotSplitError(BY_CHANCE.format(model=type(self._model).__name__, what=self._in_words()))
        self._drawn |= made.keys()

    def _in_words(self) -> str:
        named = [
            f"{type(module).__name__}.{key}={value!r}"
            for module in self._copied_modules.values()
            for key, value in vars(module).items()
            if "drop" in key and isinstance(value, float) and value in self._thresholds
        ]
        return f" ({', '.join(dict.fromkeys(named))})" if named else ""
