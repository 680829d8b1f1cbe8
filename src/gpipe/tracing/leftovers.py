"""Finds what a forward leaves behind where layers do not see it: in the modules that all walk through, in inputs.

Layers walk through copies of these, so what a forward puts into an attribute is not in the user's model, and a count
of its own would be one too many for each layer and each recompute.
"""

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gpipe.stages.tree import hides_tensors
from gpipe.tracing.placeholder import CannotSplitError
from gpipe.tracing.runs import Given, call
from gpipe.tracing.shallow_copy import is_replaced
from gpipe.tracing.structure import take_apart

T = TypeVar("T")
DEEP = 3
"""How far into containers it is looked."""
CONTAINERS = (list, tuple, set, dict, deque)
ABSENT = object()

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
    walked: Mapping[str, nn.Module], opened: set[str], model: str, run: Callable[[], T], again: Callable[[], object]
) -> T:
    """What a run of a forward gives, if it leaves nothing behind.

    Args:
        walked: The modules that every layer walks through, by name.
        opened: The names of those that blocks stand in.
        model: The class of the model, for errors.
        run: Runs it.
        again: Runs it once more, and puts back buffers; called if something is left that may be the same each time.

    Raises:
        CannotSplitError: It leaves tensors, or something else that is another each time.
    """
    before = _look(walked)
    made = run()
    after = _look(walked)
    changed = _changed(before, after)
    names = [
        f"{name}.{leaf}".lstrip(".")
        for name, key in changed
        if key == "_buffers"
        for leaf in _replaced(walked[name], before, name, is_open=name in opened)
    ]
    if names:
        raise CannotSplitError(REPLACES_BUFFER.format(model=model, places=", ".join(names)))
    tensors = [at for at in changed if at[0] in opened and hides_tensors(vars(walked[at[0]]).get(at[1]))]
    if tensors:
        raise CannotSplitError(LEAVES_TENSORS.format(model=model, places=_in_words(walked, tensors)))
    if changed:
        again()
        if counts := _changed(after, _look(walked)):
            raise CannotSplitError(COUNTS.format(model=model, places=_in_words(walked, counts)))
    return made


def _look(walked: Mapping[str, nn.Module]) -> dict[tuple[str, str], Any]:
    return {(name, key): _frozen(value) for name, module in walked.items() for key, value in vars(module).items()}


def _frozen(value: Any, depth: int = DEEP) -> Any:
    """A value that stays as it is when a container in it is changed."""
    if not isinstance(value, CONTAINERS) or not depth:
        return value
    if isinstance(value, dict):
        return dict, [(key, _frozen(item, depth - 1)) for key, item in value.items()]
    return type(value), [_frozen(item, depth - 1) for item in value]


def _changed(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
    return [at for at in {**before, **after} if not _same(before.get(at, ABSENT), after.get(at, ABSENT))]


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
        if buffer is not was.get(leaf, ABSENT) and (is_open or is_replaced(was.get(leaf), buffer))
    ]


def _in_words(walked: Mapping[str, nn.Module], places: list[tuple[str, str]]) -> str:
    return ", ".join(f"{type(walked[name]).__name__}.{key}" for name, key in places)


def refuse_kept(model: nn.Module, given: Given) -> None:
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
    model: nn.Module, given: Given, error: Exception, run_apart: Callable[[], object], left: Sequence[str] = ()
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
