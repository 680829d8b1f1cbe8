"""Copies the mutable state that modules and functions can reach, and restores it in place.

A walk visits each reachable object and records its contents: references to other objects, or a copy of numbers.
Objects are restored in place and keep their identity, except iterators, which are replaced by copies.

The walk follows a method only if its name occurs in code that the walk has reached, because only such a method can be
called. Without this rule, one layer of a large library would reach most of the library.
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
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache, lru_cache, partial
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

MOST = 200_000  # objects that a walk visits
WITHOUT_ATTRIBUTES = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple, frozenset})
"""Types whose objects have no attributes, unlike those of their subclasses."""
WALKED_LIBRARY = frozenset({"builtins", "collections", "functools", "types", "random", "queue", "weakref"})
"""Modules of the standard library whose objects are walked."""
SKIPPED = (
    "numpy.", "torch._", "torch.fx", "torch.distributed", "torch.jit", "torch.export", "torch.multiprocessing",
    "gpipe.config", "gpipe.distributed", "gpipe.features", "gpipe.planner", "gpipe.profiling", "gpipe.runtime",
    "gpipe.schedule",
)  # fmt: skip
"""How the modules begin whose objects are left alone."""
FLAT_ITERATORS = (
    itertools.count, itertools.repeat, *map(type, (
        iter([]), reversed([]), iter(()), iter(""), iter(b""), iter(bytearray()), iter(range(0)), iter(range(2**70)),
        iter({}), iter({}.values()), iter({}.items()), iter(set()), iter(deque()),
    )),
)  # fmt: skip
"""Iterators that hold a position and no other iterator, so that `copy.copy` copies all their state."""
OF_MODULES = frozenset(vars(nn.Module()))
UNCOPYABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, queue.SimpleQueue)
UNCOPYABLE_LIBRARY = frozenset({"asyncio", "concurrent", "mmap", "multiprocessing", "socket", "subprocess"})
"""Modules of the standard library whose objects have state outside of this interpreter, or in its other threads."""

GLOBAL_GENERATOR = "the global generator"
GLOBAL_GENERATORS: Mapping[str, object] = {
    "Python's random": random.seed.__self__,  # type: ignore[attr-defined]
    "numpy.random": np.random.mtrand._rand,
    "torch": torch.default_generator,
}

Key: TypeAlias = tuple[object, ...]


class Path(NamedTuple):
    """The way from a root to an object. A label such as "global n" starts the words anew, ".n" continues them."""

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
        words = "".join(reversed(labels))
        if words[:1] in (".", "["):
            words = f"its {'attribute ' if words[0] == '.' else 'item '}{words.lstrip('.')}"
        return f"{path.label}, {words}" if words else path.label


class Record(NamedTuple):
    """An object and its contents at one moment."""

    kind: Kind
    holder: Any
    path: Path
    contents: Contents


@cache
def _is_user_code(module: object) -> bool:
    """Whether a module, by name, is neither of the standard library nor of torch, numpy or this package."""
    top = str(module).partition(".")[0]
    return top not in ("torch", "numpy", "gpipe") and top not in sys.stdlib_module_names


def _package_of(value: object) -> str | None:
    """The package that a module, class or function belongs to; None for other objects."""
    if not isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return None
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0]


@cache
def _library_of(module: str, file: str | None) -> str | None:
    """The package of a module that is installed; None for other modules. Its code is not followed beyond it."""
    is_installed = {"site-packages", "dist-packages"} & set(PurePath(file or "").parts)
    return module.partition(".")[0] if is_installed else None


@cache
def _is_skipped(module: str) -> bool:
    """Whether objects of the classes of a module are left alone."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return top not in WALKED_LIBRARY
    return module == "numpy" or module.startswith(SKIPPED)


@lru_cache(maxsize=2**13)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code uses, of globals and attributes, and the globals that it assigns or deletes."""
    used, assigned = set(code.co_names), set[str]()
    if not {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}.isdisjoint(code.co_code[::2]):
        assigned = {str(step.argval) for step in dis.get_instructions(code) if step.opname.endswith("E_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            inner_used, inner_assigned = _names_in(inner)
            used |= inner_used
            assigned |= inner_assigned
    return frozenset(used), frozenset(assigned)


class _Walk:
    """One walk over the objects that can be reached."""

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
        self._seen: dict[int, object] = {}  # which keeps them alive, so that no id is used again
        self.names = {"forward"}  # which code that was reached uses
        self._waiting: dict[str, list[tuple[Any, Path]]] = {}  # methods, by name, that no code has used so far

    def run(self, roots: Mapping[str, object]) -> None:
        for name, generator in GLOBAL_GENERATORS.items():
            self._reach(generator, Path(None, f"{GLOBAL_GENERATOR} of {name}"))
        for words, root in roots.items():
            self._reach(root, Path(None, words))
        while self._queue:
            value, path = self._queue.popleft()
            if len(self._seen) > MOST or self.nbytes > self._most_bytes:
                most = f"{MOST} objects" if len(self._seen) > MOST else f"{self._most_bytes:.0f} bytes"
                self.uncopyable.append(f"{path} (more than {most} are reachable)")
                return
            with suppress(Exception):  # what cannot be looked into is left alone
                self._visit(value, path)

    def _reach(self, value: Any, path: Path) -> None:
        if type(value) not in ATOMS and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((value, path))

    def _record(self, kind: Kind, holder: Any, path: Path, key: Key | None = None) -> Contents:
        contents = kind.read(holder)
        self.records[key or (kind, id(holder))] = Record(kind, holder, path, contents)
        return contents

    def _hold(self, kind: Kind, holder: Any, path: Path, key: Key | None = None) -> None:
        """Records an object that refers to others, and reaches these."""
        contents = self._record(kind, holder, path, key)
        for at, value in enumerate(contents.values):
            if type(value) in ATOMS:
                continue
            label = kind.label(contents.keys[at] if contents.keys else at) if kind not in (CELL, VARIABLE) else ""
            inner = Path(path, label)
            if isinstance(value, FLAT_ITERATORS) and kind is not SET:
                self._copy_iterator(value, inner)
            else:
                self._reach(value, inner)
        for key_of_item in contents.keys:
            if kind in (DICT, ORDERED):
                self._reach(key_of_item, path)

    def _copy_iterator(self, value: Any, path: Path) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        try:
            self.iterators[id(value)] = value, _copy_iterator(value), path
        except TypeError:
            self.uncopyable.append(f"{path} (a {type(value).__name__})")

    def _visit(self, value: Any, path: Path) -> None:  # noqa: C901  # one case for each kind of object
        match value:
            case Tensor():
                self._visit_tensor(value, path)
            case type():
                self._visit_class(value, path)
            case types.FunctionType():
                self._visit_function(value, path)
            case types.MethodType():
                self._reach(value.__func__, path)
                self._reach(value.__self__, path)
            case types.BuiltinMethodType() | types.MethodWrapperType():
                self._reach(value.__self__, path)
            case partial():
                for part in (value.func, value.args, value.keywords):
                    self._reach(part, path)
                self._visit_object(value, path)
            case types.ModuleType():
                pass
            case functools._lru_cache_wrapper():
                for held in gc.get_referents(value):  # also what it has cached
                    self._reach(held, Path(path, "[cached]"))
            case weakref.ref():
                referent = value()
                if getattr(referent, "grad_fn", None) is None:  # A record would keep the graph alive.
                    self._reach(referent, path)
            case tuple() | frozenset():
                items = tuple.__iter__(value) if isinstance(value, tuple) else frozenset.__iter__(value)
                for at, item in enumerate(items):
                    self._reach(item, Path(path, f"[{at}]"))
                self._visit_object(value, path)
            case bytearray() | array.array():
                self._record(BYTES, value, path)
            case torch.Generator() | np.random.RandomState() | np.random.Generator() | np.random.BitGenerator():
                self._record(GENERATOR, value, path)
            case random.Random():
                if not isinstance(value, random.SystemRandom):
                    self._record(GENERATOR, value, path)
                self._visit_object(value, path)
            case np.ndarray():
                self._visit_array(value, path)
            case threading.local():
                self.thread_locals.append(str(path))
            case io.StringIO() | io.BytesIO():
                self._record(STREAM, value, path)
            case io.IOBase():
                if not value.closed and not value.writable():  # What is written twice changes no result.
                    self.uncopyable.append(f"{path} (a {type(value).__name__})")
            case _ if _is_uncopyable(value):
                self.uncopyable.append(f"{path} (a {type(value).__name__})")
            case _:
                for base, kind in CONTAINERS:
                    if isinstance(value, base):
                        self._hold(kind, value, path)
                        break
                self._visit_object(value, path)

    def _visit_object(self, value: Any, path: Path) -> None:
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
        if slots_of(kind):
            self._hold(SLOTS, value, path)
        self._reach(kind, path)

    def _visit_parts(self, module: nn.Module, attributes: dict[str, Any], path: Path) -> None:
        """Records parts, parameters and buffers by name, and torch's own dicts in one record if they are empty."""
        hooks = (held for name, held in attributes.items() if name in OF_MODULES)
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
        for base in kind.__mro__:
            if base is not kind:
                self._reach(base, path)
        if not _is_user_code(kind.__module__):
            return
        self._hold(CLASS, kind, Path(path, f"class attribute {kind.__qualname__}"))
        for name, member in vars(kind).items():
            if not isinstance(member, CODE):
                continue
            is_called = name in self.names or issubclass(kind, torch.autograd.Function)
            if is_called or (name.startswith("__") and name.endswith("__")):
                self._visit_member(member, path)
            else:
                self._waiting.setdefault(name, []).append((member, path))

    def _visit_member(self, member: Any, path: Path) -> None:
        if isinstance(member, types.FunctionType):
            self._reach(member, path)
        for name in ("__func__", "fget", "fset", "fdel", "func"):
            self._reach(getattr(member, name, None), path)

    def _visit_function(self, function: Any, path: Path) -> None:
        named = function.__qualname__.rpartition(".")[2]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._hold(CELL, cell, Path(path, f"closure variable {name}"))
        for defaults in (function.__defaults__, function.__kwdefaults__):
            self._reach(defaults, Path(path, f"default argument of {named}"))
        variables = function.__globals__
        is_user_code = _is_user_code(variables.get("__name__"))
        if is_user_code or function.__dict__:
            self._hold(ATTRIBUTES, function, Path(path, f"function {named}"))
        if not is_user_code:
            return
        names, assigned = _names_in(function.__code__)
        self._use_names(names)
        library = _library_of(variables.get("__name__"), variables.get("__file__"))
        for name in names:
            value = variables.get(name)
            if name.startswith("@"):  # Such names are of the tool that has rewritten the code, as pytest does.
                continue
            if library is not None and _package_of(value) not in (None, library):
                continue
            if isinstance(value, types.ModuleType) and _is_user_code(value.__name__):
                for attribute in names & vars(value).keys():
                    self._visit_variable(vars(value), attribute, path, f"{value.__name__}.{attribute}")
            if name in assigned or name in variables:
                self._visit_variable(variables, name, path, name, assigned=name in assigned)

    def _use_names(self, names: Collection[str]) -> None:
        for name in names - self.names:  # type: ignore[operator]  # frozensets
            self.names.add(name)
            for member, path in self._waiting.pop(name, ()):
                self._visit_member(member, path)

    def _visit_variable(
        self, variables: dict[str, Any], name: str, path: Path, words: str, *, assigned: bool = False
    ) -> None:
        value, key = variables.get(name), (VARIABLE, id(variables), name)
        path = Path(path, f"global {words}")
        if not assigned and isinstance(value, (types.FunctionType, type, types.ModuleType, types.BuiltinMethodType)):
            self._reach(value, path)
        elif key not in self.records:
            self._hold(VARIABLE, (variables, name), path, key)

    def _visit_tensor(self, tensor: Tensor, path: Path) -> None:
        self._visit_object(tensor, path)
        for hooks in gradient_hooks_of(tensor):
            self._reach(hooks, Path(path, ".hooks"))
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
        self._reach(gradient, Path(path, ".grad"))

    def _copies(self, parameter: Tensor) -> bool:
        others = self._not_copied is not None and id(parameter) not in self._not_copied
        return others or id(parameter) in self._copied

    def _visit_array(self, held: Any, path: Path) -> None:
        self._visit_object(held, path)
        if held.base is not None:
            self._reach(held.base, path)
        if not held.flags.writeable:
            return
        keys, _ = read_array(held)
        earlier = self._like.get((ARRAY, id(held)))
        shared = earlier is not None and not differs(ARRAY, earlier.contents, Contents(keys, (held,)))
        values = earlier.contents.values[0] if earlier is not None and shared else held.copy()
        self.records[ARRAY, id(held)] = Record(ARRAY, held, path, Contents(keys, (values,)))
        self.nbytes += 0 if shared else held.nbytes
        if held.dtype.hasobject:
            for item in held.flat:
                self._reach(item, Path(path, "[...]"))


def _is_uncopyable(value: Any) -> bool:
    """Whether a value has state that cannot be copied, or that another thread may change meanwhile."""
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is not None  # Otherwise it has ended.
    if isinstance(value, threading.Thread):
        return value.is_alive()
    if isinstance(value, queue.Queue) and (value.not_empty._waiters or value.not_full._waiters):  # type: ignore[attr-defined]
        return True
    kind = type(value)
    step = getattr(kind, "__next__", None)  # An iterator that is not written in Python does not show its state.
    is_iterator = step is not None and not isinstance(step, types.FunctionType)
    return is_iterator or isinstance(value, UNCOPYABLE) or kind.__module__.partition(".")[0] in UNCOPYABLE_LIBRARY


class ReachableState:
    """All mutable state that modules and functions can reach, as it was at one moment.

    Attributes:
        uncopyable: The places that hold state which cannot be copied, such as Python generators and open files, and
            after `restore` the places that it could not write.
        thread_locals: The places that hold a `threading.local`, which is not walked.
        nbytes: The bytes of the copies of tensors and arrays.
        names: The names that the code of the reachable functions uses, of globals and of attributes.

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
            roots: Modules, functions and other objects, by the words that name them in messages.
            like: An earlier state. Copies of tensors and arrays that have not changed since are shared with it.
            parameters_too: Parameters to copy. Other parameters are not copied, except those of modules with
                `max_norm`, whose forward writes them.
            parameters_except: If given, all parameters are copied except these.
            most_bytes: The bytes of copies after which the walk ends, with an entry in `uncopyable`.
        """
        walk = _Walk(like, parameters_too, parameters_except, most_bytes)
        walk.run(roots)
        return cls(walk)

    def leave_alone(self, generator: object) -> None:
        """Forgets a generator, which `restore` then leaves as it is: another thread may draw from it."""
        self._records.pop((GENERATOR, id(generator)), None)

    def changed_keys(self, earlier: "ReachableState") -> set[Key]:
        """Returns keys of the objects whose contents differ from those in an earlier state of the same roots."""
        pairs = ((key, earlier._records.get(key), now) for key, now in self._records.items())
        return {key for key, was, now in pairs if was and differs(now.kind, was.contents, now.contents)}

    def has(self, key: Key) -> bool:
        """Whether the roots reach an object, by its key."""
        return key in self._records

    def restore(self, *, generators: bool = True) -> None:
        """Writes the recorded contents back, in place, wherever they differ.

        Args:
            generators: Whether to restore the states of generators of random numbers too.
        """
        moved = {
            id(it): _copy_iterator(saved) for it, saved, _ in self._iterators.values() if not _stand_alike(it, saved)
        }
        for kind, holder, path, contents in self._records.values():
            if kind is GENERATOR and not generators:
                continue
            if moved:
                contents = contents._replace(values=tuple(moved.get(id(value), value) for value in contents.values))
            try:
                with as_plain_tensors(), torch.no_grad():
                    if differs(kind, contents, kind.read(holder)):
                        kind.write(holder, contents)
            except Exception:  # whatever code of a class raises, the other places are to be written
                self.uncopyable.append(str(path))

    def changed_since(
        self, earlier: "ReachableState", *, except_for: Collection[int] = (), by_value: bool = False
    ) -> list[str]:
        """Returns the places whose contents differ from those in an earlier state of the same roots.

        Args:
            earlier: The other state.
            except_for: The ids of tensors that may differ.
            by_value: Whether a tensor may be replaced by another one with the same values.
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
            apart = [
                name
                for name in {**before, **after}
                if name not in before or name not in after or not are_same(before[name], after[name])
            ]
            inner = [str(Path(path, kind.label(key))) for _, key in apart]
            if inner or not by_value:  # Without `inner`, only the order differs.
                places.update(dict.fromkeys(inner or [str(path)]))
        for at, (_, saved, path) in self._iterators.items():
            if at in earlier._iterators and not _stand_alike(saved, earlier._iterators[at][1]):
                places[str(path)] = None
        return list(places)


def _by_value(key: object) -> tuple[object, object]:
    return (type(key), key) if type(key) in ATOMS else (id(key), key)


def _copy_iterator(it: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python deprecates copies of the iterators of itertools.
        return copy.copy(it)


def _stand_alike(these: Any, those: Any) -> bool:
    """Whether two iterators over one container have the same position."""
    if hasattr(these, "__length_hint__"):
        return int(these.__length_hint__()) == int(those.__length_hint__())
    return repr(these) == repr(those)  # of itertools.count, and of itertools.repeat without an end
