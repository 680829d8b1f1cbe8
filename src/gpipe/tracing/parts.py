"""Finds the blocks of a model, decides which modules run as units and which are copied, and forms the layers."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from traceback import walk_tb
from types import FrameType

from torch import nn

from gpipe._torch.modes import without_compiler
from gpipe.stages.buffers import Slot
from gpipe.tracing.trace import CannotSplitError, Trace

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # modules without a forward


def declared_blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks in the model's `_no_split_modules`, if these blocks are members of a list."""
    unsplit = _unsplit(model)
    return unsplit if sum(name.rpartition(".")[2].isdigit() for name in unsplit) > 1 else []


def _unsplit(model: nn.Module) -> list[str]:
    declared = set(getattr(model, "_no_split_modules", None) or ())
    return _outermost(
        [name for name, part in model.named_modules() if type(without_compiler(part)).__name__ in declared]
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks, which are the members of the outermost lists of modules."""
    blocks = [name for members in _lists(model, "", least=2) for name in members]
    if len(blocks) < 2:  # Accept lists with one member too: a forward may call it several times.
        blocks = _unsplit(model) or [name for members in _lists(model, "", least=1) for name in members]
    if not blocks:
        raise CannotSplitError(
            f"{type(model).__name__} has no list of blocks (an nn.ModuleList, nn.ModuleDict or nn.Sequential of "
            f"modules with parameters). Name the modules to split between, as in model.named_modules(): "
            f"gpipe.layers_of(model, sample, blocks=[...]). [no-list-of-blocks]"
        )
    return blocks


def closed(model: nn.Module, blocks: Sequence[str], places: Collection[str]) -> list[str]:
    """Adds modules to the blocks. An added module replaces the blocks that it contains.

    Args:
        model: The model.
        blocks: The names of the blocks.
        places: The names of modules that become blocks. If an `nn.ModuleDict` contains such a module, all of its
            members become blocks.
    """
    closed_blocks = [*blocks, *places]
    for path in {place.rpartition(".")[0] for place in places}:
        holder = model.get_submodule(path)
        for name, child in holder.named_children() if isinstance(holder, nn.ModuleDict) else ():
            if _has_parameters(child) and not any(block.startswith(f"{path}.{name}.") for block in blocks):
                closed_blocks.append(f"{path}.{name}")
    return _outermost(closed_blocks)


def check_blocks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Checks the names of blocks that a user passed, and returns the names without duplicates."""
    if isinstance(blocks, str) or not all(isinstance(name, str) for name in blocks):
        raise CannotSplitError(
            f"blocks={blocks!r} is not a list of names. Pass names of modules: ['encoder.layers.0', ...]. "
            f"[blocks-not-names]"
        )
    known = dict(model.named_modules(remove_duplicate=False))
    mistakes = [
        f"blocks: the model has no module {name!r}. Use a name from model.named_modules(). [block-not-found]"
        for name in blocks
        if not name or name not in known
    ]
    outer = set(_outermost(list(blocks)))
    mistakes += [
        f"blocks: {name!r} is inside another block. Remove one of these two blocks. [nested-blocks]"
        for name in blocks
        if name not in outer
    ]
    if not blocks:
        mistakes.append("blocks=[] is empty. Remove it, or name at least one module. [empty-blocks]")
    if mistakes:
        raise CannotSplitError("\n".join(mistakes))
    return list(dict.fromkeys(blocks))


def _outermost(names: Sequence[str]) -> list[str]:
    """Returns the names that are not inside another named module, without the model itself."""
    inside = tuple(f"{name}." for name in names)
    return [name for name in dict.fromkeys(names) if name and not name.startswith(inside)]


def _lists(module: nn.Module, name: str, *, least: int, held: bool = False) -> Iterator[list[str]]:
    """Yields the members of each outermost list with at least `least` members that a module contains.

    A list inside another list needs only one member. The members of the inner list then become members of the outer
    list.
    """
    is_list = _is_list(module, 1 if held else least, held=held)
    members: list[str] = []
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        within = isinstance(module, CONTAINERS) and isinstance(child, CONTAINERS)
        if not is_list:
            yield from _lists(child, path, least=least, held=within)
        elif _has_parameters(child):
            nested = _lists(child, path, least=least, held=True) if within else ()
            members += [name for names in nested for name in names] or [path]
    if members:
        yield members


def _is_list(module: nn.Module, least: int, *, held: bool) -> bool:
    """Whether a module is a list of blocks. An nn.ModuleDict may hold all modules of a model instead."""
    if not isinstance(module, LISTS) or len(module) < least:
        return False
    if not isinstance(module, nn.ModuleDict):
        return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    members = [child for child in module.values() if _has_parameters(child)]
    alike = len({type(child) for child in members}) == 1
    modules = (inner for child in members for inner in ([child] if alike else child.modules()))
    return held or (len(module) > 1 and not any(isinstance(inner, CONTAINERS) for inner in modules))


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


class Parts:
    """A model split at blocks: which modules run as units, and which are copied.

    Args:
        model: The model.
        blocks: The names of the blocks.
        stateful: The names of modules without parameters that change buffers or have hooks.
        iterated: The names of sequences that the forward iterates over without calling. Their members become blocks.

    Attributes:
        blocks: The names of the outermost blocks.
        opened: The names of the modules that contain blocks.
        units: The modules that run as a whole, each in one layer.
        copied: The modules that every layer runs, on shallow copies.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], stateful: Collection[str] = (), iterated: Collection[str] = ()
    ) -> None:
        self.model, self.stateful, self.iterated = model, frozenset(stateful), frozenset(iterated)
        members = {
            path: [
                f"{path}.{key}" for key, part in model.get_submodule(path).named_children() if _has_parameters(part)
            ]
            for path in self.iterated.intersection(blocks)
        }
        names = [member for name in blocks for member in members.get(name, [name])]
        modules = {name: model.get_submodule(name) for name in names}  # a module may have other names too
        nested = {part for block in modules.values() for part in block.modules() if part is not block}
        self._names = {block: name for name, block in modules.items() if block not in nested}
        self.blocks = tuple(self._names.values())
        outer = [name.split(".")[:length] for name in self.blocks for length in range(name.count(".") + 1)]
        self.opened = {".".join(path) for path in outer}
        self.units: dict[str, nn.Module] = {}
        self.copied: dict[str, nn.Module] = {}
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
        """Returns the name of the opened module whose code runs in the first frame that belongs to an opened module.

        The model itself has the name "".
        """
        known = {id(self.copied[name]._parameters): name for name in self.opened & self.copied.keys()}
        for frame in frames:
            first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
            if isinstance(first, nn.Module) and (name := known.get(id(first._parameters))) is not None:
                return name
        return ""

    def caller(self, block: str) -> str:
        """Returns the name of the module whose forward should call a block: its parent that is not a container."""
        path = block.rpartition(".")[0]
        while isinstance(self.model.get_submodule(path), CONTAINERS):
            path = path.rpartition(".")[0]
        return path

    def places_of(self, error: CannotSplitError) -> set[str]:
        """Returns the opened modules that an error names, or in which it was raised. Excludes the model itself."""
        raised: BaseException = error
        while raised.__cause__ is not None:
            raised = raised.__cause__
        frames = [frame for frame, _ in walk_tb(raised.__traceback__)]
        modules = {self.running(reversed(frames))}
        for place in error.places:
            while place not in self.opened:
                place = place.rpartition(".")[0]
            modules.add(place)
        return modules - {""}


class ModelPart(nn.Module):
    """One layer of a traced model: its units, and the other parameters that its operations use.

    The layer keeps units and parameters under their names in the model. The layer has no forward, because a stage
    interprets all of its layers at once.

    Args:
        model: The model.
        stands_for: The class name of the layer's block, for display.
        units: The names of the units that run in the layer.
        raw: The parameters that functions between units use, by name, with the slots in which the model holds them.
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
        modules = set(self.modules())
        self.raw: dict[str, tuple[Slot, Sequence[Slot]]] = {}  # the slot in the layer, and the slots in the model
        for name, slots in raw.items():
            path, _, leaf = name.rpartition(".")
            in_unit = next((slot for slot in slots if slot[0] in modules), None)
            self.raw[name] = in_unit or (self._holder(path), leaf), slots
        self.pull_parameters()

    def _holder(self, path: str) -> nn.Module:
        holder: nn.Module = self
        for part in path.split(".") if path else ():
            holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]  # none of them is None
        return holder

    @property
    def training(self) -> bool:
        """Whether the model is in training mode, because a layer does not have its own mode."""
        return "model" in self.__dict__ and self.__dict__["model"].training

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignores the mode that `nn.Module` sets, because a layer has the mode of the model."""

    def pull_parameters(self) -> None:
        """Copies the model's current parameters into the layer."""
        for (holder, leaf), slots in self.raw.values():
            module, name = slots[0]
            holder._parameters[leaf] = module._parameters[name]

    def push_parameters(self) -> None:
        """Copies the layer's current parameters into the model."""
        for (holder, leaf), slots in self.raw.values():
            for module, name in slots:
                module._parameters[name] = holder._parameters[leaf]

    def slots_of_parameters(self) -> dict[int, Slot]:
        """Returns the slot in which the layer holds each current parameter of the model, by the parameter's id."""
        return {id(module._parameters[leaf]): slot for slot, slots in self.raw.values() for module, leaf in slots}


def modules_run(layer: nn.Module) -> list[nn.Module]:
    """Returns the modules that a layer calls. For a layer of a traced model, these are its units."""
    return [layer.get_submodule(name) for name in layer.units] if isinstance(layer, ModelPart) else [layer]


def units_by_layer(trace: Trace) -> tuple[list[list[str]], list[list[str]]]:
    """Returns for each layer the units, and the parameters that functions between units use."""
    units: list[dict[str, None]] = [{} for _ in trace.starts]
    raw: list[dict[str, None]] = [{} for _ in trace.starts]
    for index, op in enumerate(trace.ops):
        layer = trace.layer_of(index)
        if op.is_unit:
            units[layer] |= dict.fromkeys((*op.inner, op.name))  # the called unit comes last, and names the layer
        raw[layer] |= dict.fromkeys(op.raw)
    return list(map(list, units)), list(map(list, raw))


def layers_by_name(parts: Parts, trace: Trace) -> dict[str, ModelPart]:
    """Returns the layers by name. Modules that no operation uses belong to the last layer."""
    places = _places_of(parts.model)
    called, raw = units_by_layer(trace)
    units = list(map(list, called))
    _add_unused(parts, places, units, raw)
    layers: dict[str, ModelPart] = {}
    for index, names in enumerate(called):
        block = next((name for name in names if name in parts.blocks), None)
        main = block or next(iter(names[-1:] if index else names), "")
        name = main or (raw[index][0] if raw[index] else f"operations_{index}")
        label = type(parts.model.get_submodule(main)).__name__  # the model's class for a layer without modules
        count = sum(known.partition("#")[0] == name for known in layers)
        part = ModelPart(parts.model, label, units[index], {leaf: places[leaf] for leaf in raw[index]})
        layers[f"{name}#{count + 1}" if count else name] = part
    return layers


def _places_of(model: nn.Module) -> dict[str, list[Slot]]:
    """Returns the slots of each parameter, by the first name of the parameter. A tied parameter has several slots."""
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, leaf))
    return {name: slots[parameter] for name, parameter in model.named_parameters()}


def _add_unused(
    parts: Parts, places: Mapping[str, Sequence[Slot]], units: list[list[str]], raw: list[list[str]]
) -> None:
    """Adds modules and parameters that no operation uses to a layer.

    If a layer uses a module with the same (tied) parameters, the first such layer is chosen, otherwise the last
    layer.
    """
    unit_of = {module: name for name, unit in parts.units.items() for module in unit.modules()}
    layer_of = {name: layer for layer, names in reversed([*enumerate(units)]) for name in names}
    called = {*layer_of}
    for name, slots in places.items():
        homes = [unit_of.get(module) for module, _ in slots]
        users = [layer_of[home] for home in homes if home in layer_of]
        users += [layer for layer, names in enumerate(raw) if name in names]
        for home in dict.fromkeys(homes):
            if home is not None and home not in called:
                units[min(users, default=-1)].insert(0, home)
                called.add(home)
        if homes[0] is None and not users:
            raw[-1].append(name)


def names_in(model: nn.Module, part: ModelPart) -> list[str]:
    """Returns the names that the parameters and buffers of a layer have in the model."""
    slots_and_modules = {*part.modules(), *(slot for _, model_slots in part.raw.values() for slot in model_slots)}
    return [
        f"{path}.{leaf}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in (*module._parameters, *module._buffers)
        if module in slots_and_modules or (module, leaf) in slots_and_modules
    ]
