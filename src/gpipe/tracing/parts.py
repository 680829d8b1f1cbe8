"""The parts of a model: the blocks that it may be cut between, which of its modules are what, and its layers."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb
from types import FrameType

from torch import nn

from gpipe._torch.modes import without_compiler
from gpipe.stages.buffers import Slot
from gpipe.tracing.trace import CannotSplitError, Trace

NO_BLOCKS = (
    "in {model} there is no list of blocks (an nn.ModuleList, nn.ModuleDict or nn.Sequential of modules with "
    "parameters); name the modules between which it may be cut: blocks=[...], with names as in model.named_modules()"
)
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # modules that are not called themselves


def declared_blocks(model: nn.Module) -> list[str]:
    """What the model itself says is not to be split, if that is a list."""
    unsplit = _unsplit(model)
    return unsplit if sum(name.rpartition(".")[2].isdigit() for name in unsplit) > 1 else []


def _unsplit(model: nn.Module) -> list[str]:
    declared = set(getattr(model, "_no_split_modules", None) or ())
    return _outermost(
        [name for name, part in model.named_modules() if type(without_compiler(part)).__name__ in declared]
    )


def find_blocks(model: nn.Module) -> list[str]:
    """The names of blocks: the members of the outermost lists of modules."""
    found = [name for some in _lists(model, "", least=2) for name in some]
    if len(found) < 2:  # one member is a list then: a forward may call it several times
        found = _unsplit(model) or [name for some in _lists(model, "", least=1) for name in some]
    if not found:
        raise CannotSplitError(NO_BLOCKS.format(model=f"a {type(model).__name__}"))
    return found


def closed(model: nn.Module, blocks: Sequence[str], places: Collection[str]) -> list[str]:
    """The blocks, but these modules, in which some stand, as blocks themselves, and what is in one dict with them."""
    found = [*blocks, *places]
    for path in {place.rpartition(".")[0] for place in places}:
        holder = model.get_submodule(path)
        for name, child in holder.named_children() if isinstance(holder, nn.ModuleDict) else ():
            if _has_parameters(child) and not any(block.startswith(f"{path}.{name}.") for block in blocks):
                found.append(f"{path}.{name}")
    return _outermost(found)


def check_blocks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The names of blocks that a user gave."""
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
    inside = tuple(f"{name}." for name in names)
    return [name for name in dict.fromkeys(names) if name and not name.startswith(inside)]


def _lists(module: nn.Module, name: str, *, least: int, held: bool = False) -> Iterator[list[str]]:
    """The outermost lists of at least so many in a module, each by its members.

    A list that is held by another has one member at least, and is none of its members.
    """
    is_list = _is_list(module, 1 if held else least, held=held)
    members: list[str] = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        within = isinstance(module, CONTAINERS) and isinstance(child, CONTAINERS)
        if not is_list:
            yield from _lists(child, path, least=least, held=within)
        elif _has_parameters(child):
            found = _lists(child, path, least=least, held=True) if within else ()
            members += [member for some in found for member in some] or [path]
    if members:
        yield members


def _is_list(module: nn.Module, least: int, *, held: bool) -> bool:
    """Whether the members of a module are called one by one; with names, they may be all that the model has."""
    if not isinstance(module, LISTS) or len(module) < least:
        return False
    if not isinstance(module, nn.ModuleDict):
        return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    some = [child for child in module.values() if _has_parameters(child)]
    alike = len({type(child) for child in some}) == 1
    inside = (inner for child in some for inner in ([child] if alike else child.modules()))
    return held or (len(module) > 1 and not any(isinstance(inner, CONTAINERS) for inner in inside))


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


class Parts:
    """A model, cut at blocks, and which of its modules are what, by their names."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        stateful: Collection[str] = (),  # modules without parameters that change buffers, or have hooks
        iterated: Collection[str] = (),  # sequences that are not called: their members are blocks in their place
    ) -> None:
        self.model, self.stateful, self.iterated = model, frozenset(stateful), frozenset(iterated)
        parts = {path: model.get_submodule(path).named_children() for path in self.iterated.intersection(blocks)}
        inner = {
            path: [f"{path}.{key}" for key, part in some if _has_parameters(part)] for path, some in parts.items()
        }
        named = [member for name in blocks for member in inner.get(name, [name])]
        known = {name: model.get_submodule(name) for name in named}  # a module may have other names too
        inside = {part for block in known.values() for part in block.modules() if part is not block}
        self._names = {block: name for name, block in known.items() if block not in inside}
        self.blocks = tuple(self._names.values())
        outer = [name.split(".")[:length] for name in self.blocks for length in range(name.count(".") + 1)]
        self.opened = {".".join(path) for path in outer}  # those that blocks stand in
        self.units: dict[str, nn.Module] = {}  # those that run as they are, in one layer each
        self.copied: dict[str, nn.Module] = {}  # those through which every layer walks, on copies
        self._sort("", model, set())

    def _sort(self, name: str, module: nn.Module, seen: set[nn.Module]) -> None:
        seen.add(module)
        name = self._names.get(module, name)
        is_called = type(module).forward is not nn.Module.forward or _has_parameters(module, recurse=False)
        keeps = name in self.stateful or (_has_parameters(module) and is_called)
        if keeps and name not in self.opened and name not in self.iterated:
            self.units[name] = module
            return
        self.copied[name] = module
        for key, part in module._modules.items():
            if part is not None and part not in seen:
                self._sort(f"{name}.{key}" if name else key, part, seen)

    def running(self, frames: Iterable[FrameType]) -> str:
        """The opened module whose code runs in the first of these frames that is of one; "" is the model."""
        known = {id(self.copied[name]._parameters): name for name in self.opened & self.copied.keys()}
        for frame in frames:
            first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
            if isinstance(first, nn.Module) and (name := known.get(id(first._parameters))) is not None:
                return name
        return ""

    def caller(self, block: str) -> str:
        """The module whose code is to call a block: that which holds it, perhaps in a list."""
        path = block.rpartition(".")[0]
        while isinstance(self.model.get_submodule(path), CONTAINERS):
            path = path.rpartition(".")[0]
        return path

    def places_of(self, error: CannotSplitError) -> set[str]:
        """The modules that blocks stand in, but for the model, of which an error tells, or where it was raised."""
        raised: BaseException = error
        while raised.__cause__ is not None:
            raised = raised.__cause__
        frames = [frame for frame, _ in walk_tb(raised.__traceback__)]
        found = {self.running(reversed(frames))}
        for place in error.places:
            while place not in self.opened:
                place = place.rpartition(".")[0]
            found.add(place)
        return found - {""}


class ModelPart(nn.Module):
    """A layer of a model that is interpreted: it stands for a module, in words, and runs units.

    It holds these, and the raw parameters, those that its operations are given as they are, under their own names in
    the model. It is not called by itself: a stage interprets all of its layers at once.
    """

    def __init__(
        self, model: nn.Module, stands_for: str, units: Sequence[str], raw: Mapping[str, Sequence[Slot]]
    ) -> None:
        super().__init__()
        self.stands_for, self.units = stands_for, tuple(units)
        self.__dict__["model"] = model
        for name in units:
            path, _, leaf = name.rpartition(".")
            self._holder(path)._modules[leaf] = model.get_submodule(name)
        own = set(self.modules())
        self.raw: dict[str, tuple[Slot, Sequence[Slot]]] = {}  # its place in the layer, and those in the model
        for name, places in raw.items():
            path, _, leaf = name.rpartition(".")
            within = next((place for place in places if place[0] in own), None)
            self.raw[name] = within or (self._holder(path), leaf), places
        self.follow()

    def _holder(self, path: str) -> nn.Module:
        found: nn.Module = self
        for part in path.split(".") if path else ():
            found = found._modules.setdefault(part, nn.Module())  # type: ignore[assignment]  # none of them is None
        return found

    @property
    def training(self) -> bool:
        return "model" in self.__dict__ and self.__dict__["model"].training

    @training.setter
    def training(self, mode: bool) -> None:
        """Leaves it to the model."""

    def follow(self) -> None:
        """Takes over the parameters that the model has now."""
        for (holder, leaf), places in self.raw.values():
            module, name = places[0]
            holder._parameters[leaf] = module._parameters[name]

    def lead(self) -> None:
        """Has the model have the parameters that the layer has now."""
        for (holder, leaf), places in self.raw.values():
            for module, name in places:
                module._parameters[name] = holder._parameters[leaf]

    def own_parameters(self) -> dict[int, Slot]:
        """Where the layer has its own of the parameters that the model has now, by their identities."""
        return {id(module._parameters[leaf]): own for own, places in self.raw.values() for module, leaf in places}


def modules_run(layer: nn.Module) -> list[nn.Module]:
    """The modules that are called where a layer runs: itself, or the units of a model's layer."""
    return [layer.get_submodule(name) for name in layer.units] if isinstance(layer, ModelPart) else [layer]


def units_by_layer(trace: Trace) -> tuple[list[list[str]], list[list[str]]]:
    """The units of each layer, and the parameters that are used as they are."""
    units: list[dict[str, None]] = [{} for _ in trace.starts]
    raw: list[dict[str, None]] = [{} for _ in trace.starts]
    for at, op in enumerate(trace.ops):
        layer = trace.layer_of(at)
        if op.is_unit:
            units[layer] |= dict.fromkeys((*op.inner, op.name))  # named after the last
        raw[layer] |= dict.fromkeys(op.raw)
    return list(map(list, units)), list(map(list, raw))


def layers_by_name(parts: Parts, trace: Trace) -> dict[str, ModelPart]:
    """The layers by name; what no operation uses goes with the last."""
    places = _places_of(parts.model)
    called, raw = units_by_layer(trace)
    units = [list(some) for some in called]
    _add_unused(parts, places, units, raw)
    named: dict[str, ModelPart] = {}
    for at, runs in enumerate(called):
        main = next((name for name in runs if name in parts.blocks), None) or next(
            iter(runs[-1:] if at else runs), ""
        )
        name = main or (raw[at][0] if raw[at] else f"operations_{at}")
        label = type(parts.model.get_submodule(main)).__name__  # of the model itself, where it has no name
        count = sum(other.partition("#")[0] == name for other in named)
        part = ModelPart(parts.model, label, units[at], {one: places[one] for one in raw[at]})
        named[f"{name}#{count + 1}" if count else name] = part
    return named


def _places_of(model: nn.Module) -> dict[str, list[Slot]]:
    """Where each parameter of a model stands, by its first name: in several modules if it is tied."""
    found: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((module, leaf))
    return {name: found[parameter] for name, parameter in model.named_parameters()}


def _add_unused(
    parts: Parts, places: Mapping[str, Sequence[Slot]], units: list[list[str]], raw: list[list[str]]
) -> None:
    """Adds what no operation uses: to the first layer that uses the same parameters, if tied, else to the last."""
    unit_of = {module: name for name, unit in parts.units.items() for module in unit.modules()}
    layer_of = {name: layer for layer, some in reversed([*enumerate(units)]) for name in some}
    called = {*layer_of}
    for name, slots in places.items():
        homes = [unit_of.get(module) for module, _ in slots]
        users = [layer_of[home] for home in homes if home in layer_of]
        users += [layer for layer, some in enumerate(raw) if name in some]
        for home in dict.fromkeys(homes):
            if home is not None and home not in called:
                units[min(users, default=-1)].insert(0, home)
                called.add(home)
        if homes[0] is None and not users:
            raw[-1].append(name)


def names_in(model: nn.Module, part: ModelPart) -> list[str]:
    """The names that the parameters and buffers of a layer have in the model."""
    own = {*part.modules(), *(slot for _, slots in part.raw.values() for slot in slots)}
    return [
        f"{path}.{leaf}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in (*module._parameters, *module._buffers)
        if module in own or (module, leaf) in own
    ]
