"""Finds the blocks of a model: the modules between which it may be cut."""

from collections.abc import Iterator, Sequence

from torch import nn

from gpipe.replay.errors import CannotSplitError
from gpipe.torch_private.modes import without_compiler

NO_BLOCKS = (
    "in {model} there is no list of blocks (an nn.ModuleList or nn.Sequential of modules with parameters); name the "
    "modules between which it may be cut: blocks=[...], with names as in model.named_modules()"
)


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks: what the model itself says is not to be split, else the members of lists of modules.

    Where there is but one, it is taken: a forward may call it several times.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> find_blocks(Net())
    ['inner.0', 'inner.1']

    Raises:
        CannotSplitError: There are none.
    """
    declared = set(getattr(model, "_no_split_modules", None) or ())
    found = _outermost(
        [name for name, part in model.named_modules() if type(without_compiler(part)).__name__ in declared]
    )
    if sum(name.rpartition(".")[2].isdigit() for name in found) < 2:
        members = list(_members(model, "", least=2))
        found = members if len(members) > 1 else found or list(_members(model, "", least=1))
    if not found:
        raise CannotSplitError(NO_BLOCKS.format(model=f"a {type(model).__name__}"))
    return found


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


def open_names(blocks: Sequence[str]) -> frozenset[str]:
    """The names of the modules that are open: those that blocks stand in."""
    return frozenset(
        ".".join(parts[:length]) for parts in (name.split(".") for name in blocks) for length in range(len(parts))
    ) | {""}


def _outermost(names: Sequence[str]) -> list[str]:
    held = set(names)
    return [
        name
        for name in dict.fromkeys(names)
        if not any(".".join(name.split(".")[:length]) in held for length in range(1, name.count(".") + 1))
    ]


def _members(module: nn.Module, name: str, *, least: int) -> Iterator[str]:
    """The members of the lists of at least so many in a module, itself included, and in modules that are none."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= least and _is_called_apart(module)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not is_list:
            yield from _members(child, path, least=least)
        elif _has_parameters(child):
            yield from (list(_members(child, path, least=least)) if _is_container(child) else []) or [path]


def _is_called_apart(module: nn.Module) -> bool:
    """Whether the members of a list are called one by one, as those of a plain nn.Sequential are too."""
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _is_container(module: nn.Module) -> bool:
    """Whether a member is a list itself, or has a list of several that hold most of its parameters."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    most = sum(parameter.numel() for parameter in module.parameters())
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return any(2 * sum(p.numel() for p in part.parameters()) > most for part in lists)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
