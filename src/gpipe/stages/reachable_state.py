"""Copies the mutable state that modules and functions can reach, and restores it in place.

A traversal (`_Walk`) visits each reachable object and records its contents: references to other objects, or a copy of
tensor values. Objects are restored in place and keep their identity, except iterators, which are replaced by copies.

The traversal visits a method only if code that it has visited contains the name of the method. Other methods cannot
be called. Without this rule, one layer of a large library would reach most of the library.
"""

import array
import copy
import dis
import functools
import gc
import io
import itertools
import math
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe._torch.autograd import gradient_hooks_of
from gpipe._torch.modes import as_plain_tensors
from gpipe._torch.modules import is_wrapper
from gpipe.stages.memory_layout import copy_of, strided_parts
from gpipe.stages.object_contents import (
    ARRAY,
    ATOMS,
    ATTRIBUTES,
    BYTES,
    CELL,
    CLASS,
    CODE,
    CONTAINERS,
    DICT,
    EMPTY,
    GENERATOR,
    NAMED,
    ORDERED,
    SET,
    SLOTS,
    STREAM,
    TENSOR,
    VARIABLE,
    Contents,
    Kind,
    attributes_of,
    differs,
    read_array,
    read_tensor,
    same,
    same_or_equal,
    same_values,
    slots_of,
)

MOST = 200_000  # The most objects that a walk visits.
WITHOUT_ATTRIBUTES = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple, frozenset})
"""Types whose objects have no attributes, unlike the objects of their subclasses."""
WALKED_LIBRARY = frozenset({"builtins", "collections", "functools", "types", "random", "queue", "weakref"})
"""Modules of the standard library whose objects the traversal visits."""
SKIPPED = (
    "numpy.", "torch._", "torch.fx", "torch.distributed", "torch.jit", "torch.export", "torch.multiprocessing",
    "gpipe.config", "gpipe.distributed", "gpipe.features", "gpipe.planner", "gpipe.profiling", "gpipe.runtime",
    "gpipe.schedule",
)  # fmt: skip
"""Prefixes of module names. The traversal skips objects of classes that these modules define."""
FLAT_ITERATORS = frozenset((
    itertools.count, itertools.repeat, *map(type, (
        iter([]), reversed([]), iter(()), iter(""), iter(b""), iter(bytearray()), iter(range(0)), iter(range(2**70)),
        iter({}), iter({}.values()), iter({}.items()), iter(set()), iter(deque()),
    )),
))  # fmt: skip
"""Types of iterators that hold a position but no other iterator. `copy.copy` therefore copies all their state."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
UNCOPYABLE = (types.CoroutineType, types.AsyncGeneratorType, queue.SimpleQueue)
UNCOPYABLE_LIBRARY = frozenset({"asyncio", "concurrent", "mmap", "multiprocessing", "socket", "subprocess"})
"""Modules of the standard library whose objects have state outside of this interpreter, or in other threads."""

GLOBAL_GENERATOR = "the global generator"
GLOBAL_GENERATORS: Mapping[str, object] = {
    "Python's random": random.seed.__self__,  # type: ignore[attr-defined]
    "numpy.random": np.random.mtrand._rand,
    "torch": torch.default_generator,
}

Key: TypeAlias = tuple[object, ...]
Visit: TypeAlias = Callable[["_Walk", Any, "Path"], None]


class Path(NamedTuple):
    """The path from a root to an object.

    Labels that begin with "." or "[" continue the name of the parent. Other labels, such as "global n", begin a name.
    """

    parent: "Path | None"
    label: str

    def __str__(self) -> str:
        labels = list[str]()
        path: Path = self
        while path.parent is not None:
            labels.append(path.label)
            if path.label[:1] not in ("", ".", "["):
                break
            path = path.parent
        while path.parent is not None:
            path = path.parent
        name = "".join(reversed(labels))
        if name[:1] in (".", "["):
            name = f"its {'attribute ' if name[0] == '.' else 'item '}{name.lstrip('.')}"
        return f"{path.label}, {name}" if name else path.label


class Record(NamedTuple):
    """An object and its contents at one moment."""

    kind: Kind
    holder: Any
    path: Path
    contents: Contents


@cache
def _is_user_code(module: object) -> bool:
    """Whether the module with this name is outside of the standard library, torch, NumPy and gpipe."""
    top = str(module).partition(".")[0]
    return top not in ("torch", "numpy", "gpipe") and top not in sys.stdlib_module_names


def _package_of(value: object) -> str | None:
    """Returns the top-level package of a module, class or function, and None for other objects."""
    if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return None
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0]


@cache
def _library_of(module: str, file: str | None) -> str | None:
    """Returns the top-level package of a module in site-packages, and None for other modules."""
    is_installed = {"site-packages", "dist-packages"} & set(PurePath(file or "").parts)
    return module.partition(".")[0] if is_installed else None


@cache
def _is_skipped(module: str) -> bool:
    """Whether the traversal skips objects of classes that the module with this name defines."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return top not in WALKED_LIBRARY
    return module == "numpy" or module.startswith(SKIPPED)


Names: TypeAlias = tuple[frozenset[str], frozenset[str]]
_names: dict[int, tuple["weakref.ref[types.CodeType]", Names]] = {}  # By id, because the hash of code is slow.


def _names_in(code: types.CodeType) -> Names:
    """Returns the names of globals and attributes that code uses, and the globals that it assigns or deletes."""
    if (known := _names.get(id(code))) and known[0]() is code:
        return known[1]
    used, assigned = set(code.co_names), set[str]()
    if not {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}.isdisjoint(code.co_code[::2]):
        assigned = {str(step.argval) for step in dis.get_instructions(code) if step.opname.endswith("E_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_used, inner_assigned = _names_in(inner)
            used |= inner_used
            assigned |= inner_assigned
    if len(_names) > MOST:
        _names.clear()
    _names[id(code)] = weakref.ref(code), (frozenset(used), frozenset(assigned))
    return _names[id(code)][1]


class _Globals:
    """The globals of one module, and the names of the globals that a traversal has visited.

    Attributes:
        library: The installed package that contains the module. From code of this package, the traversal does not
            visit code of other packages.
        modules: The visited globals that are modules of user code.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        name = variables.get("__name__")
        self.variables, self.are_of_user = variables, _is_user_code(name)
        self.library = _library_of(name, variables.get("__file__")) if self.are_of_user else None
        self.visited, self.modules = set[str](), dict[str, types.ModuleType]()


class _Walk:
    """One traversal of all reachable objects."""

    def __init__(
        self,
        like: "ReachableState | None",
        parameters_too: Collection[Tensor],
        parameters_except: Collection[Tensor] | None,
        most_bytes: float,
    ) -> None:
        self.records: dict[Key, Record] = {}
        self.uncopyable: list[str] = []
        self.thread_locals: list[str] = []
        self.iterators: dict[int, tuple[Any, Any, Path]] = {}
        self.nbytes = 0
        self._like = {} if like is None else like._records
        self._copied, self._most_bytes = set(map(id, parameters_too)), most_bytes
        self._not_copied = None if parameters_except is None else set(map(id, parameters_except))
        self._queue: deque[tuple[Any, Path]] = deque()
        self._seen: dict[int, object] = {}  # It keeps the objects alive, so that no id is used again.
        self._visits: dict[type, Visit] = {}
        self._have_slots: dict[type, bool] = {}
        self._globals: dict[int, _Globals] = {}
        self.names = {"forward"}  # The names that reached code uses.
        self._unused: dict[str, list[tuple[Any, Path]]] = {}  # Methods, by name, whose names no reached code uses.

    def run(self, roots: Mapping[str, object]) -> None:
        for name, generator in GLOBAL_GENERATORS.items():
            self._reach(generator, Path(None, f"{GLOBAL_GENERATOR} of {name}"))
        for name, root in roots.items():
            self._reach(root, Path(None, name))
        queue, visits, seen = self._queue, self._visits, self._seen
        while queue:
            value, path = queue.popleft()
            if len(seen) > MOST or self.nbytes > self._most_bytes:
                most = f"{MOST} objects" if len(seen) > MOST else f"{self._most_bytes:.0f} bytes"
                self.uncopyable.append(f"{path} (more than {most} are reachable)")
                return
            visit = visits.get(kind := type(value)) or visits.setdefault(kind, _visit_of(kind))
            try:  # noqa: SIM105  # A context costs more than many visits.
                visit(self, value, path)
            except Exception:  # The walk skips objects that raise when they are read.
                pass

    def _reach(self, value: Any, path: Path, label: str | None = None) -> None:
        if type(value) not in ATOMS and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((value, path if label is None else Path(path, label)))

    def _record(self, kind: Kind, holder: Any, path: Path, key: Key | None = None) -> None:
        self.records[key or (kind, id(holder))] = Record(kind, holder, path, kind.read(holder))

    def _hold(self, kind: Kind, holder: Any, path: Path, key: Key | None = None) -> None:
        """Records an object, and queues the objects to which it refers."""
        keys, values = contents = kind.read(holder)
        self.records[key or (kind, id(holder))] = Record(kind, holder, path, contents)
        for index, value in enumerate(values):
            if type(value) in ATOMS or id(value) in self._seen:
                continue
            inner = path
            if kind is not CELL and kind is not VARIABLE:
                inner = Path(path, kind.label(keys[index] if keys else index))
            self._seen[id(value)] = value
            if type(value) in FLAT_ITERATORS and kind is not SET:
                self._copy_iterator(value, inner)
            else:
                self._queue.append((value, inner))
        if keys and (kind is DICT or kind is ORDERED):
            for key_of_item in keys:
                self._reach(key_of_item, path)

    def _copy_iterator(self, value: Any, path: Path) -> None:
        try:
            self.iterators[id(value)] = value, _copy_iterator(value), path
        except TypeError:
            self._visit_uncopyable(value, path)

    def _visit_uncopyable(self, value: Any, path: Path) -> None:
        self.uncopyable.append(f"{path} (a {type(value).__name__})")

    def _visit_method(self, value: Any, path: Path) -> None:
        self._reach(value.__func__, path)
        self._reach(value.__self__, path)

    def _visit_builtin_method(self, value: Any, path: Path) -> None:
        self._reach(value.__self__, path)

    def _visit_partial(self, value: Any, path: Path) -> None:
        for part in (value.func, value.args, value.keywords):
            self._reach(part, path)
        self._visit_object(value, path)

    def _visit_lru_cache(self, value: Any, path: Path) -> None:
        for referent in gc.get_referents(value):  # The function and the cached results.
            self._reach(referent, path, "[cached]")

    def _visit_weak_reference(self, value: Any, path: Path) -> None:
        referent = value()
        if getattr(referent, "grad_fn", None) is None:  # A record would keep the graph alive.
            self._reach(referent, path)

    def _visit_immutable(self, value: Any, path: Path) -> None:
        items = tuple.__iter__(value) if isinstance(value, tuple) else frozenset.__iter__(value)
        for index, item in enumerate(items):
            self._reach(item, path, f"[{index}]")
        self._visit_object(value, path)

    def _visit_random(self, value: Any, path: Path) -> None:
        if not isinstance(value, random.SystemRandom):
            self._record(GENERATOR, value, path)
        self._visit_object(value, path)

    def _visit_thread_local(self, value: Any, path: Path) -> None:
        self.thread_locals.append(str(path))

    def _visit_file(self, value: Any, path: Path) -> None:
        if not value.closed and not value.writable():  # Writing a file twice changes no result.
            self._visit_uncopyable(value, path)

    def _visit_if_idle(self, value: Any, path: Path) -> None:
        """Visits a Python generator that has ended, a thread that has ended, or a queue that no thread waits for."""
        if isinstance(value, types.GeneratorType):
            is_idle = value.gi_frame is None
        elif isinstance(value, threading.Thread):
            is_idle = not value.is_alive()
        else:
            is_idle = not value.not_empty._waiters and not value.not_full._waiters
        (self._visit_object if is_idle else self._visit_uncopyable)(value, path)

    def _visit_container(self, value: Any, path: Path, kind: Kind) -> None:
        self._hold(kind, value, path)
        self._visit_object(value, path)

    def _visit_object(self, value: Any, path: Path) -> None:
        """Visits the attributes, slots and class of an object. Its items are visited separately."""
        kind = type(value)
        if kind in WITHOUT_ATTRIBUTES or (_is_skipped(kind.__module__) and not isinstance(value, nn.Module)):
            return
        with suppress(AttributeError):
            attributes = attributes_of(value)
            if isinstance(value, nn.Module):
                self._visit_parts(value, attributes, path)
                if getattr(value, "max_norm", None) is not None:  # Its forward writes its weight.
                    self._copied.update(map(id, value._parameters.values()))
            self._hold(ATTRIBUTES, value, path)
        if kind not in self._have_slots:
            self._have_slots[kind] = bool(slots_of(kind))
        if self._have_slots[kind]:
            self._hold(SLOTS, value, path)
        self._reach(kind, path)

    def _visit_parts(self, module: nn.Module, attributes: dict[str, Any], path: Path) -> None:
        """Visits submodules, parameters and buffers by name. Stores all empty dicts of a module in one record."""
        hooks = (attributes[name] for name in MODULE_ATTRIBUTES & attributes.keys())
        empty = [held for held in hooks if type(held) in (dict, OrderedDict, set) and not held]
        self._seen.update((id(held), held) for held in empty)
        self._record(EMPTY, tuple(empty), Path(path, ".hooks"), (EMPTY, id(module)))
        for name in ("_modules", "_buffers", "_parameters"):
            held = attributes.get(name)
            if isinstance(held, dict) and id(held) not in self._seen:
                self._seen[id(held)] = held
                self._hold(NAMED, held, path)
                self._visit_object(held, path)

    def _visit_class(self, kind: type, path: Path) -> None:
        for base in kind.__mro__[1:]:
            self._reach(base, path)
        if not _is_user_code(kind.__module__):
            return
        self._hold(CLASS, kind, Path(path, f"class attribute {kind.__qualname__}"))
        is_called = issubclass(kind, torch.autograd.Function)
        for name, member in vars(kind).items():
            if not isinstance(member, CODE):
                continue
            if is_called or name in self.names or (name.startswith("__") and name.endswith("__")):
                self._visit_member(member, path)
            else:
                self._unused.setdefault(name, []).append((member, path))

    def _visit_member(self, member: Any, path: Path) -> None:
        if isinstance(member, types.FunctionType):
            self._reach(member, path)
            return
        for name in ("__func__", "fget", "fset", "fdel", "func"):
            self._reach(getattr(member, name, None), path)

    def _visit_function(self, function: Any, path: Path) -> None:
        code = function.__code__
        if function.__closure__:
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
                if id(cell) not in self._seen:
                    self._seen[id(cell)] = cell
                    self._hold(CELL, cell, Path(path, f"closure variable {name}"))
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._reach(defaults, path, f"default argument of {function.__name__}")
        known = self._globals.get(id(function.__globals__))
        if known is None:
            known = self._globals[id(function.__globals__)] = _Globals(function.__globals__)
        if known.are_of_user or function.__dict__:
            self._hold(ATTRIBUTES, function, Path(path, f"function {function.__name__}"))
        if known.are_of_user:
            names, assigned = _names_in(code)
            if new := names - self.names:
                self._use_names(new)
            self._visit_globals(known, names, assigned, path)

    def _use_names(self, names: frozenset[str]) -> None:
        """Visits the methods with these names, on the classes that the traversal has visited so far."""
        self.names |= names
        for name in names & self._unused.keys():
            for member, path in self._unused.pop(name):
                self._visit_member(member, path)

    def _visit_globals(self, known: "_Globals", names: frozenset[str], assigned: frozenset[str], path: Path) -> None:
        """Visits the globals of one module that code uses, unless the traversal has visited them already."""
        variables = known.variables
        for name in ((names & variables.keys()) - known.visited) | assigned:
            known.visited.add(name)
            value = variables.get(name)
            if name.startswith("@"):  # Tools that rewrite code, such as pytest, add such names.
                continue
            if known.library is not None and _package_of(value) not in (None, known.library):
                continue
            if isinstance(value, types.ModuleType) and _is_user_code(value.__name__):
                known.modules[name] = value
            self._visit_variable(variables, name, path, name, assigned=name in assigned)
        for name in names & known.modules.keys():
            module = known.modules[name]
            for attribute in names & vars(module).keys():
                self._visit_variable(vars(module), attribute, path, f"{module.__name__}.{attribute}")

    def _visit_variable(
        self, variables: dict[str, Any], name: str, path: Path, full_name: str, *, assigned: bool = False
    ) -> None:
        value = variables.get(name)
        if not assigned and isinstance(value, (types.FunctionType, type, types.ModuleType, types.BuiltinMethodType)):
            self._reach(value, path, f"global {full_name}")
        elif (key := (VARIABLE, id(variables), name)) not in self.records:
            self._hold(VARIABLE, (variables, name), Path(path, f"global {full_name}"), key)

    def _visit_tensor(self, tensor: Tensor, path: Path) -> None:
        self._visit_object(tensor, path)
        for hooks in gradient_hooks_of(tensor):
            self._reach(hooks, path, ".hooks")
        if isinstance(tensor, nn.Parameter) and not self._copies(tensor):
            return
        if is_lazy(tensor) or tensor.is_meta or is_wrapper(tensor) or tensor.grad_fn is not None:
            return
        with as_plain_tensors(), torch.no_grad():
            keys, (memory, gradient, values) = read_tensor(tensor)
            earlier = self._like.get((TENSOR, id(tensor)))
            shared = earlier is not None and same_values(earlier.contents.values[2], values)
            values = earlier.contents.values[2] if earlier is not None and shared else copy_of(values)
            self.records[TENSOR, id(tensor)] = Record(
                TENSOR, tensor, path, Contents(keys, (memory, gradient, values))
            )
        self.nbytes += 0 if shared else sum(part.nbytes for part in strided_parts(values))
        self._reach(gradient, path, ".grad")

    def _copies(self, parameter: Tensor) -> bool:
        is_other = self._not_copied is not None and id(parameter) not in self._not_copied
        return is_other or id(parameter) in self._copied

    def _visit_array(self, array: Any, path: Path) -> None:
        self._visit_object(array, path)
        if array.base is not None:
            self._reach(array.base, path)
        if not array.flags.writeable:
            return
        keys, _ = read_array(array)
        earlier = self._like.get((ARRAY, id(array)))
        shared = earlier is not None and not differs(ARRAY, earlier.contents, Contents(keys, (array,)))
        values = earlier.contents.values[0] if earlier is not None and shared else array.copy()
        self.records[ARRAY, id(array)] = Record(ARRAY, array, path, Contents(keys, (values,)))
        self.nbytes += 0 if shared else array.nbytes
        if array.dtype.hasobject:
            for item in array.flat:
                self._reach(item, path, "[...]")


def _recording(kind: Kind) -> Visit:
    return lambda walk, value, path: walk._record(kind, value, path)


VISITS: tuple[tuple[tuple[type, ...], Visit], ...] = (
    ((Tensor,), _Walk._visit_tensor),
    ((type,), _Walk._visit_class),
    ((types.FunctionType,), _Walk._visit_function),
    ((types.MethodType,), _Walk._visit_method),
    ((types.BuiltinMethodType, types.MethodWrapperType), _Walk._visit_builtin_method),
    ((partial,), _Walk._visit_partial),
    ((types.ModuleType,), lambda walk, value, path: None),  # Functions reach only the globals that they name.
    ((functools._lru_cache_wrapper,), _Walk._visit_lru_cache),
    ((weakref.ref,), _Walk._visit_weak_reference),
    ((tuple, frozenset), _Walk._visit_immutable),
    ((bytearray, array.array), _recording(BYTES)),
    ((torch.Generator, np.random.RandomState, np.random.BitGenerator), _recording(GENERATOR)),
    ((np.random.Generator,), lambda walk, value, path: walk._reach(value.bit_generator, path)),
    ((random.Random,), _Walk._visit_random),
    ((np.ndarray,), _Walk._visit_array),
    ((threading.local,), _Walk._visit_thread_local),
    ((io.StringIO, io.BytesIO), _recording(STREAM)),
    ((io.IOBase,), _Walk._visit_file),
    ((types.GeneratorType, threading.Thread, queue.Queue), _Walk._visit_if_idle),
    (UNCOPYABLE, _Walk._visit_uncopyable),
)
"""The functions that visit objects, by type. The first entry with the type of an object, or a base type, is used."""


def _visit_of(kind: type) -> Visit:
    """Returns the function that visits objects of a type."""
    for types_visited, visit in VISITS:
        if issubclass(kind, types_visited):
            return visit
    step = getattr(kind, "__next__", None)  # Iterators that are not written in Python hide their state.
    is_iterator = step is not None and not isinstance(step, types.FunctionType)
    if is_iterator or kind.__module__.partition(".")[0] in UNCOPYABLE_LIBRARY:
        return _Walk._visit_uncopyable
    for base, container in CONTAINERS:
        if issubclass(kind, base):
            return partial(_Walk._visit_container, kind=container)
    return _Walk._visit_object


class ReachableState:
    """Holds a copy of all mutable state that modules and functions could reach at one moment.

    Attributes:
        uncopyable: The names of objects whose state cannot be copied, such as Python generators and open files.
            `restore` adds the names of objects that it cannot restore.
        thread_locals: The names of objects that are a `threading.local`. Their contents are not copied.
        nbytes: The total size in bytes of the copied tensors and arrays.
        names: The names of globals and attributes that the code of the reachable functions uses.

    Example:
        >>> from types import SimpleNamespace
        >>> meter = SimpleNamespace(rows={"train": 0})
        >>> state = ReachableState.of({"loss_fn": meter})
        >>> meter.rows["train"] = 8
        >>> ReachableState.of({"loss_fn": meter}).changed_since(state)
        ["loss_fn, its attribute rows['train']"]
        >>> state.restore(); meter.rows
        {'train': 0}
    """

    def __init__(self, walk: _Walk) -> None:
        self._records, self._iterators = walk.records, walk.iterators
        self.thread_locals = walk.thread_locals
        self.uncopyable, self.nbytes, self.names = walk.uncopyable, walk.nbytes, frozenset(walk.names)

    @classmethod
    def of(
        cls,
        roots: Mapping[str, object],
        *,
        like: "ReachableState | None" = None,
        parameters_too: Collection[Tensor] = (),
        parameters_except: Collection[Tensor] | None = None,
        most_bytes: float = math.inf,
    ) -> "ReachableState":
        """Copies the state that modules and functions can reach now.

        Args:
            roots: The modules, functions and other objects to start from, by the names that messages use for them.
            like: An earlier state. If tensors and arrays have not changed, the new state uses the same copies as this
                state.
            parameters_too: The parameters to copy. Other parameters are not copied, except the parameters of modules
                with `max_norm`, whose forward writes them.
            parameters_except: The parameters that are not copied. If this argument is not None, all other parameters
                are copied.
            most_bytes: The maximum number of bytes to copy. A traversal that needs more ends early, and adds an entry
                to `uncopyable`.
        """
        walk = _Walk(like, parameters_too, parameters_except, most_bytes)
        walk.run(roots)
        return cls(walk)

    def leave_alone(self, generator: object) -> None:
        """Removes a random number generator from the state, for example because other threads may draw from it."""
        self._records.pop((GENERATOR, id(generator)), None)

    def changed_keys(self, earlier: "ReachableState") -> set[Key]:
        """Returns the keys of the objects whose contents differ from an earlier state of the same roots."""
        pairs = ((key, earlier._records.get(key), now) for key, now in self._records.items())
        return {key for key, was, now in pairs if was and differs(now.kind, was.contents, now.contents)}

    def has(self, key: Key) -> bool:
        """Whether the roots reach the object with this key."""
        return key in self._records

    def restore(self, *, generators: bool = True) -> None:
        """Restores, in place, the recorded contents of all objects that have changed.

        Args:
            generators: Whether to restore the states of random number generators.
        """
        moved = {
            id(it): _copy_iterator(saved) for it, saved, _ in self._iterators.values() if not _stand_alike(it, saved)
        }
        with as_plain_tensors(), torch.no_grad():
            for kind, holder, path, contents in self._records.values():
                if kind is GENERATOR and not generators:
                    continue
                if moved:
                    values = tuple(moved.get(id(value), value) for value in contents.values)
                    contents = contents._replace(values=values)
                try:
                    if not kind.matches(holder, contents) and differs(kind, contents, kind.read(holder)):
                        kind.write(holder, contents)
                except Exception:  # User classes may raise any exception. The other places are still restored.
                    self.uncopyable.append(str(path))

    def changed_since(
        self, earlier: "ReachableState", *, except_for: Collection[int] = (), by_value: bool = False
    ) -> list[str]:
        """Returns the places whose contents differ from an earlier state of the same roots.

        Args:
            earlier: The earlier state.
            except_for: The ids of tensors that may differ.
            by_value: Whether a tensor counts as unchanged if a different tensor with the same values has replaced it.
        """
        places = dict[str, None]()
        are_same = same_or_equal if by_value else same
        for key, (kind, holder, path, now) in self._records.items():
            was = earlier._records[key].contents if key in earlier._records else None
            if was is None or id(holder) in except_for or not differs(kind, was, now):
                continue
            if kind in (TENSOR, ARRAY, GENERATOR) or not (was.keys or now.keys):
                places[str(path)] = None
                continue
            before, after = (dict(zip(map(_by_value, c.keys), c.values, strict=True)) for c in (was, now))
            changed = [
                name
                for name in {**before, **after}
                if name not in before or name not in after or not are_same(before[name], after[name])
            ]
            inner = [str(Path(path, kind.label(name))) for _, name in changed]
            if inner or not by_value:  # If `inner` is empty, only the order differs.
                places.update(dict.fromkeys(inner or [str(path)]))
        for it, (_, saved, path) in self._iterators.items():
            if it in earlier._iterators and not _stand_alike(saved, earlier._iterators[it][1]):
                places[str(path)] = None
        return list(places)


def _by_value(key: object) -> tuple[object, object]:
    return (type(key), key) if type(key) in ATOMS else (id(key), key)


def _copy_iterator(it: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python deprecates copies of the iterators of itertools.
        return copy.copy(it)


def _stand_alike(a: Any, b: Any) -> bool:
    """Whether two iterators over one container have the same position."""
    if hasattr(a, "__length_hint__"):
        return int(a.__length_hint__()) == int(b.__length_hint__())
    return repr(a) == repr(b)  # For itertools.count and an endless itertools.repeat.
