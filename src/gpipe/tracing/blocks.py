"""Finds the blocks of a model: the modules between which it may be cut.

Cuts a model at its blocks: which layer has what.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from gpipe._torch.modes import without_compiler
from gpipe.tracing.part import Places, Segment, places_of
from gpipe.tracing.placeholder import CannotSplitError
from gpipe.tracing.shallow_copy import Parts
from gpipe.tracing.trace import Path

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


def layers_of_path(path: Path) -> tuple[list[list[str]], list[list[str]]]:
    """The units of each layer, and the parameters that are used as they are."""
    units: list[dict[str, None]] = [{} for _ in path.starts]
    raw: list[dict[str, None]] = [{} for _ in path.starts]
    for at, event in enumerate(path.events):
        layer = path.layer_of(at)
        if event.is_unit:
            units[layer] |= dict.fromkeys((*event.inner, event.name))  # named after the last
        raw[layer] |= dict.fromkeys(event.raw)
    return list(map(list, units)), list(map(list, raw))


def segments_of(parts: Parts, path: Path) -> dict[str, Segment]:
    """The layers by name; what no event uses goes with the last."""
    places = places_of(parts.model)
    units, raw = layers_of_path(path)
    called = [list(some) for some in units]
    _add_unused(parts, places, units, raw)
    named: dict[str, Segment] = {}
    blocks = set(parts.blocks)
    for at, (some, parameters) in enumerate(zip(units, raw, strict=True)):
        runs = called[at]
        main = next((name for name in runs if name in blocks), None) or next(iter(runs[-1:] if at else runs), "")
        label = type(parts.model.get_submodule(main)).__name__ if main else type(parts.model).__name__
        name = main or (parameters[0] if parameters else f"operations_{at}")
        count = sum(other.partition("#")[0] == name for other in named)
        segment = Segment(parts.model, label, some, parameters, places)
        named[f"{name}#{count + 1}" if count else name] = segment
    return named


def _add_unused(parts: Parts, places: Places, units: list[list[str]], raw: list[list[str]]) -> None:
    """Adds what no event uses: to the first layer that uses the same parameters, if tied, else to the last."""
    known = parts.skeleton().units
    unit_of = {module: name for name, unit in known.items() for module in unit.modules()}
    first: dict[str, int] = {}
    for layer in reversed(range(len(units))):
        held = {module for unit in units[layer] for module in known[unit].modules()}
        used = [name for name, slots in places.items() if any(module in held for module, _ in slots)]
        first |= dict.fromkeys([*used, *raw[layer]], layer)
    called = {name for some in units for name in some}
    for name, slots in places.items():
        homes = [unit_of.get(module) for module, _ in slots]
        for unit in dict.fromkeys(home for home in homes if home is not None and home not in called):
            units[first.get(name, -1)].insert(0, unit)
            called.add(unit)
        if homes[0] is None and name not in first:
            raw[-1].append(name)
