"""Cuts a model at its blocks: which layer has what."""

from gpipe.replay.path import Path
from gpipe.replay.segment import Places, Segment, places_of
from gpipe.replay.skeleton import Parts


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
