"""The parts of a model: the blocks that it may be cut between, which of its modules are what, and its layers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

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


def find_blocks(model: nn.Module) -> list[list[str]]:
    """The choices of blocks, each by their names, the best first.

    What the model itself says is not to be split comes alone. Else these are the members of the outermost lists of
    modules, then with one of these lists as one block, then those of lists within members, level by level; last come
    the modules that hold lists. Where no list has two members, one is taken: a forward may call it several times.
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
DEEPEST = 4  # levels of lists within members of lists that are tried


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


class Parts:
    """A model, cut at blocks, and which of its modules are what, by their names.

    Attributes:
        opened: Those that blocks stand in.
        stateful: Those without parameters that change buffers, or have hooks.
        units: Those that run as they are, in one layer each.
        copied: Those through which every layer walks, on copies.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], stateful: Collection[str] = ()) -> None:
        self.model, self.blocks, self.stateful = model, tuple(blocks), frozenset(stateful)
        outer = [name.split(".")[:length] for name in blocks for length in range(name.count(".") + 1)]
        self.opened = {".".join(path) for path in outer}
        self.units: dict[str, nn.Module] = {}
        self.copied: dict[str, nn.Module] = {}
        self._sort("", model, set())

    def _sort(self, name: str, module: nn.Module, seen: set[nn.Module]) -> None:
        seen.add(module)
        keeps = name in self.stateful or _has_parameters(module)
        if keeps and name not in self.opened:
            self.units[name] = module
            return
        self.copied[name] = module
        for key, part in module._modules.items():
            if part is not None and part not in seen:
                self._sort(f"{name}.{key}" if name else key, part, seen)


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
        """Whether the model is in training mode."""
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


class Names:
    """The names of a model's parameters and buffers, and which layers have them."""

    def __init__(self, model: nn.Module, layers: dict[str, ModelPart]) -> None:
        self._model, self._layers = model, layers

    def in_layer(self, layer: str) -> list[str]:
        """What a layer has."""
        part = self._layers[layer]
        own = {*part.modules(), *(slot for _, slots in part.raw.values() for slot in slots)}
        return [
            f"{path}.{leaf}".lstrip(".")
            for path, module in self._model.named_modules(remove_duplicate=False)
            for leaf in (*module._parameters, *module._buffers)
            if module in own or (module, leaf) in own
        ]

    def of_others(self, own: Collection[str]) -> frozenset[str]:
        """What others have and none of these layers; of buffers outside of units, which all read, none is."""
        return frozenset().union(*map(self.in_layer, self._layers)).difference(*map(self.in_layer, own))

    def first_layers(self) -> dict[str, str]:
        """The first layer that has each; what every layer reads counts to the first."""
        buffers = [name for name, _ in self._model.named_buffers(remove_duplicate=False)]
        first = dict.fromkeys(buffers, next(iter(self._layers)))
        for layer in reversed(self._layers):
            first |= dict.fromkeys(self.in_layer(layer), layer)
        return first
