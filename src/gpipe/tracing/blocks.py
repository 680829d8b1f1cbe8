"""Finds the blocks of a model: the modules between which it may be cut."""

from collections.abc import Iterator, Sequence
from itertools import product

from torch import nn

from gpipe._torch.modes import without_compiler
from gpipe.tracing.trace import CannotSplitError

NO_BLOCKS = (
    "in {model} there is no list of blocks (an nn.ModuleList, nn.ModuleDict or nn.Sequential of modules with "
    "parameters); name the modules between which it may be cut: blocks=[...], with names as in model.named_modules()"
)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are not called themselves."""


def find_blocks(model: nn.Module) -> list[list[str]]:
    """The choices of blocks, each by their names, the best first.

    What the model itself says is not to be split comes alone. Else these are the members of the outermost lists of
    modules, then with one of these lists as one block, then those of lists within members, level by level; last come
    the modules that hold lists. Where no list has two members, one is taken: a forward may call it several times.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> find_blocks(Net())
    [['inner.0', 'inner.1']]

    Raises:
        CannotSplitError: There are none.
    """
    declared = set(getattr(model, "_no_split_modules", None) or ())
    unsplit = _outermost(
        [name for name, part in model.named_modules() if type(without_compiler(part)).__name__ in declared]
    )
    if sum(name.rpartition(".")[2].isdigit() for name in unsplit) > 1:
        return [unsplit]
    choices: list[list[str]] = []
    for depth, alike in product(range(DEEPEST), (True, False)):
        for some in _variants(list(_lists(model, "", least=2, depth=depth, alike=alike))):
            if len(some) > 1 and some not in choices:
                choices.append(some)
    if choices:
        holders = _outermost([_holder_of(name) for some in choices for name in some])
        return [*choices[:MOST_CHOICES], *([holders] if holders else [])]
    alone = unsplit or [name for some in _lists(model, "", least=1, depth=0) for name in some]
    if not alone:
        raise CannotSplitError(NO_BLOCKS.format(model=f"a {type(model).__name__}"))
    return [alone]


def _variants(lists: Sequence[list[str]]) -> Iterator[list[str]]:
    """The members of all lists; then with one list after another as one block, by the module that holds it."""
    yield [name for some in lists for name in some]
    for whole in lists if len(lists) > 1 else ():
        yield _outermost([name for some in lists for name in ([_holder_of(whole[0])] if some is whole else some)])


def _holder_of(name: str) -> str:
    """The module that has the list of a member, as its code runs the members; empty if that is the model."""
    return name.rpartition(".")[0].rpartition(".")[0]


MOST_CHOICES = 12
DEEPEST = 4
"""Levels of lists within members of lists that are tried."""


def check_blocks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The names of blocks that a user gave.

    Raises:
        CannotSplitError: There are no such modules, or one stands in another; names all that is wrong.
    """
    if isinstance(blocks, str) or not all(isinstance(name, str) for name in blocks):
        raise CannotSplitError(f"blocks={blocks!r}; give names of modules: ['encoder.layers.0', ...]")
    known = dict(model.named_modules(remove_duplicate=False))
    wrong = [f"blocks: there is no module {name!r}" for name in blocks if not name or name not in known]
    outer = set(_outermost(list(blocks)))
    wrong += [f"blocks: {name!r} stands in another block" for name in blocks if name not in outer]
    if not blocks:
        wrong.append("blocks is empty; leave it out, or name at least one module")
    if wrong:
        raise CannotSplitError("\n".join(wrong))
    return list(dict.fromkeys(blocks))


def _outermost(names: Sequence[str]) -> list[str]:
    """Those of which no other is a part; the model itself, without a name, is none."""
    held = set(names)
    return [
        name
        for name in dict.fromkeys(names)
        if name and not any(".".join(name.split(".")[:length]) in held for length in range(1, name.count(".") + 1))
    ]


def _lists(module: nn.Module, name: str, *, least: int, depth: int, alike: bool = True) -> Iterator[list[str]]:
    """The outermost lists of at least so many in a module, each by its members, or so much deeper where there are."""
    is_list = _is_list(module, least, alike=alike)
    members: list[str] = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not is_list:
            yield from _lists(child, path, least=least, depth=depth, alike=alike)
        elif _has_parameters(child):
            holds = isinstance(child, CONTAINERS)
            some = 1 if holds else least
            deeper = depth - (not holds)
            inner = list(_lists(child, path, least=some, depth=deeper, alike=alike)) if deeper >= 0 else []
            members += [member for some in inner for member in some] or [path]
    if members:
        yield members


def _is_list(module: nn.Module, least: int, *, alike: bool) -> bool:
    """Whether the members of a module are called one by one; with names, they may have to be alike."""
    if not isinstance(module, LISTS) or len(module) < least:
        return False
    if isinstance(module, nn.ModuleDict):
        kinds = {type(child) for child in module.values() if _has_parameters(child)}
        holds = any(issubclass(kind, CONTAINERS) for kind in kinds)
        return len(module) > 1 and (len(kinds) == 1 or not alike) and not holds
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
