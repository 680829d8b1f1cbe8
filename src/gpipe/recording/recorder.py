"""Records the path that a model's forward takes: it runs once, whole, and every event is written down."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from gpipe.recording.blocks import open_names
from gpipe.recording.chance import Chance
from gpipe.recording.own_loss import LossCall, LossReader, read_loss_call
from gpipe.replay.dry import Dry
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.path import Event, Path, Tag, is_carried
from gpipe.replay.skeleton import Skeleton
from gpipe.replay.structure import Leaves, again_in, take_apart
from gpipe.replay.walk import RANDOM, Walk
from gpipe.torch_private.modes import is_vmapped, saved_tensor_hooks
from gpipe.torch_private.trees import tree_leaves
from gpipe.values.layout import copy_of, storage_address
from gpipe.values.tree import version

UNSEEN = (
    "{name} is given a tensor that was computed between blocks by what torch does not show (a "
    "torch.autograd.Function, torch.utils.checkpoint by use_reentrant=True, a scripted function), that a block left "
    "somewhere, or that was made between blocks and then written into: it cannot be known which layer is to compute "
    "it. Put that code into a module with parameters, have blocks return what others use, or name other blocks"
)
FILLED = (
    "{name} is given a tensor that was made of nothing (torch.zeros, torch.empty) and changed in place by "
    "{changed}: every layer makes it, and one alone would change it. Use what {changed} returns, put parts "
    "together by torch.cat or torch.stack, or make it of what a block gave: x.new_zeros(...), torch.zeros_like(x)"
)
NOT_CALLED = (
    "none of the blocks ({blocks}) is called in the forward of the {model}: methods or parts of them are used "
    "instead. Name modules that are called: blocks=[...]"
)
PARTLY_CHANGED = (
    "{name} changes in place a tensor that shares its memory with another, which an earlier layer made and a "
    "later operation uses: behind a cut the other would not change with it. Work on a copy there"
)
HOOKED = (
    "{name} runs inside of torch.utils.checkpoint, or of other hooks on saved tensors, that the forward puts around "
    "it: what they keep would be of one layer and their recompute of another. Let a block do so inside of it "
    "(gradient_checkpointing_enable() of transformers), or leave it to the pipe, by remat="
)
CHANGES_INPUT = (
    "the forward changes an input of shape {shape}, {dtype}, in place between blocks, and every layer would do "
    "so again; let it work on a clone"
)


class Recorder(Walk):
    """A walk that does every event and writes it down.

    Args:
        skeleton: What is walked through.
        model: The model that it was made of.
        blocks: The names of its blocks.
        around: What is entered around the events of a layer, by its number.
        dry: Does the events of a model without values.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        model: nn.Module,
        blocks: Sequence[str],
        around: Callable[[int], AbstractContextManager[object]] = lambda layer: nullcontext(),
        dry: Dry | None = None,
    ) -> None:
        super().__init__(skeleton, dry)
        self.events: list[Event] = []
        self.starts: list[int] = []
        self.losses: list[LossCall] = []
        self.layouts: dict[Tag, tuple[tuple[int, ...], Any]] = {}
        self._around = around
        self._blocks = frozenset(blocks)
        self._opened = open_names(blocks)
        self._begins_layer = True
        self._blocks_seen = False
        self._raw = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffers: set[str] = set()
        self._taken: set[int] = set()
        self._inputs: dict[int, int] = {}
        self._memory: dict[Tag, int] = {}
        self._wants: dict[Tag, bool] = {}  # whether a tensor wanted a gradient when its event was done
        self._hooks = saved_tensor_hooks()
        self._filled: dict[
            int, tuple[Tensor, str, int]
        ] = {}  # by address: what an event of a layer changed, none made
        self._inner: list[str] = []  # units that the unit that runs has called
        self._chance = Chance(model, skeleton.walked)
        self._makers: dict[
            Tag, tuple[Any, int]
        ] = {}  # the node behind each tensor in autograd's graph, and its version
        self._changed: list[tuple[int, Tag]] = []  # the events that changed a tensor in place, and which

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Path]:
        """Runs the forward; gives its output, and the path that it took.

        Raises:
            CannotSplitError: It does what cannot be done in parts.
        """
        leaves, inputs = take_apart((tuple(args), dict(kwargs)))
        leaves = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # each known for itself
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._inputs[id(leaf)] = at
                if is_carried(leaf):
                    self._note(leaf, Tag(-1, at))
        again, named = inputs.filled(leaves)
        versions = [version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        output = self.run(again, named)
        self._refuse_changed_inputs(leaves, versions)
        if not self._blocks_seen:
            some = ", ".join(sorted(self._blocks)[:3])
            raise CannotSplitError(NOT_CALLED.format(blocks=some, model=type(self.skeleton.root).__name__))
        flat, structure = take_apart(output)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._refuse_filled(tensors, "the output", len(self.starts) - 1)
        self._look(tensors, "the output")
        results = frozenset(
            tag for leaf in flat if isinstance(leaf, Tensor) and (tag := self.tag_of(leaf)) is not None
        )
        path = Path(
            inputs,
            tuple(Tag(-1, at) for at, leaf in enumerate(leaves) if is_carried(leaf)),
            tuple(self.events),
            tuple(self.starts),
            results,
            structure,
            frozenset(self._buffers),
            frozenset(self._taken),
            self.layouts,
        )
        self._refuse_changes_of_views(path)
        return output, path

    def _unit(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_unit:
            self._inner.append(name)
        return super()._unit(name, args, kwargs)

    def free(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Does an operation that every layer does for itself."""
        name = getattr(func, "__name__", str(func))
        self._look(tensors, name)
        filled = next(self._filled_among(tensors), None)
        made = func(*args, **kwargs)
        for leaf in take_apart(made)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise CannotSplitError(UNSEEN.format(name=name))
            if filled is not None and isinstance(leaf, Tensor):
                self._filled[storage_address(leaf)] = leaf, *filled[1:]
            elif filled is not None and isinstance(leaf, (bool, int, float)):
                raise CannotSplitError(FILLED.format(name=name, changed=filled[1]))
        return made

    def _look(self, tensors: Sequence[Tensor], name: str, *, is_unit: bool = False) -> None:
        """Notes which buffers and inputs are used, and refuses what was made where no walk sees it.

        A unit may only hand on what it is given.
        """
        self._buffers.update(self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        if not is_unit:
            self._taken.update(self._inputs[id(tensor)] for tensor in tensors if id(tensor) in self._inputs)
        if any(self._is_unseen(tensor) or self._has_other_maker(tensor) for tensor in tensors):
            raise CannotSplitError(UNSEEN.format(name=name))

    def _filled_among(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, str, int]]:
        """What an event changed in place and no event made: each with that event, and its layer."""
        for tensor in tensors if self._filled and not is_vmapped() else ():
            if self.tag_of(tensor) is None and storage_address(tensor) in self._filled:
                _, name, layer = self._filled[storage_address(tensor)]
                yield tensor, name, layer

    def _refuse_filled(self, tensors: Sequence[Tensor], name: str, layer: int) -> None:
        """Refuses it but in the layer of that event: the others have it as it was made."""
        for tensor, changed, home in self._filled_among(tensors):
            if tensor.requires_grad or home != layer:
                raise CannotSplitError(FILLED.format(name=name, changed=changed))

    def left_behind(self) -> list[str]:
        """The attributes of copies in which the forward left what events made."""
        return [
            f"{type(copy).__name__}.{key}"
            for name, copy in self.skeleton.copies.items()
            for key, value in vars(copy).items()
            if not (key == "_buffers" and name in self._opened)  # which the model itself shows
            and any(isinstance(leaf, Tensor) and self.tag_of(leaf) is not None for leaf in tree_leaves(value))
        ]

    def event(
        self,
        name: str,
        call: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        *,
        is_unit: bool,
    ) -> Any:
        """Does an event and writes it down."""
        if is_vmapped():
            raise CannotSplitError(UNSEEN.format(name=name))
        tags = {tag for tensor in tensors if (tag := self.tag_of(tensor)) is not None}
        raw = tuple(dict.fromkeys(self._raw[id(t)] for t in tensors if id(t) in self._raw))
        if saved_tensor_hooks() != self._hooks:
            raise CannotSplitError(HOOKED.format(name=name))
        is_block = is_unit and name in self._blocks
        if self._begins_layer or (is_block and not self._blocks_seen):
            self.starts.append(self.at)
        self._begins_layer = is_block
        self._blocks_seen = self._blocks_seen or is_block
        self._refuse_filled(tensors, name, len(self.starts) - 1)
        self._look(tensors, name, is_unit=is_unit)
        if not is_unit and (loss := read_loss_call(name, args, kwargs)) is not None:
            self.losses.append(loss)
        before = [version(tensor) for tensor in tensors]
        reader = LossReader(self.losses) if is_unit and not is_block else nullcontext()  # a head may have the loss
        with self._around(len(self.starts) - 1), reader:
            made = self.do(name, call, args, kwargs)
        self._wants |= {tag: t.requires_grad for t in tensors if (tag := self.tag_of(t)) is not None}
        self._changed += [
            (self.at, tag)
            for tensor, was in zip(tensors, before, strict=True)
            if version(tensor) != was and (tag := self.tag_of(tensor)) is not None
        ]
        for tensor, was in zip(tensors, before, strict=True):
            self._note_changed(tensor, name, is_changed=version(tensor) != was)
        leaves, returns = take_apart(made)
        given = set(map(id, tensors))
        again = again_in(leaves)
        leaves = [self._known_apart(leaf, given) for leaf in leaves]
        for at, first in again:
            leaves[at] = leaves[first]
        for at, leaf in reversed([*enumerate(leaves)]):  # what stands there again is known by its first place
            if isinstance(leaf, Tensor):
                self._note(leaf, Tag(self.at, at))
        if not is_unit:
            some = {Tag(self.at, at): leaf for at, leaf in enumerate(leaves)}
            self._chance.see(name, args, tags, some, draws=name in RANDOM)
        inner, self._inner = tuple(dict.fromkeys(self._inner)), []
        self.events.append(Event(name, is_unit, frozenset(tags), raw, returns, again, inner))
        self.at += 1
        return returns.filled(leaves)

    def _is_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor wants a gradient that no event gave it: it came of a function of autograd's own."""
        tag = self.tag_of(tensor)
        return tensor.requires_grad and (id(tensor) not in self._raw if tag is None else not self._wants[tag])

    def _has_other_maker(self, tensor: Tensor) -> bool:
        """Whether something else than an event has put a tensor into another place of autograd's graph since."""
        tag = self.tag_of(tensor)
        if tag is None or tag not in self._makers:
            return False
        maker, before = self._makers[tag]
        return tensor.grad_fn is not maker and version(tensor) == before

    def _note_changed(self, tensor: Tensor, name: str, *, is_changed: bool) -> None:
        """Notes that an event was given a tensor, and perhaps changed it in place."""
        tag = self.tag_of(tensor)
        if tag is not None:
            self._makers[tag] = tensor.grad_fn, version(tensor)
        elif is_changed and id(tensor) not in self._inputs and id(tensor) not in self._held:
            self._filled[storage_address(tensor)] = tensor, name, len(self.starts) - 1

    def _known_apart(self, leaf: Any, given: Collection[int]) -> Any:
        """A tensor that has no name yet: what comes back as it was given need not be that with other inputs."""
        if not isinstance(leaf, Tensor):
            return leaf
        is_known = id(leaf) in given or id(leaf) in self._held or id(leaf) in self._raw
        return leaf.expand_as(leaf) if is_known or self.tag_of(leaf) is not None else leaf

    def _refuse_changed_inputs(self, leaves: Leaves, versions: Sequence[int]) -> None:
        """Refuses changes in place of what every layer is given."""
        for leaf, before in zip(leaves, versions, strict=True):
            if isinstance(leaf, Tensor) and not is_carried(leaf) and version(leaf) != before:
                raise CannotSplitError(CHANGES_INPUT.format(shape=tuple(leaf.shape), dtype=leaf.dtype))

    def _note(self, tensor: Tensor, tag: Tag) -> None:
        self.name_as(tensor, tag)
        self._makers[tag] = tensor.grad_fn, version(tensor)
        self.layouts[tag] = tuple(tensor.shape), tensor.dtype
        self._wants[tag] = tensor.requires_grad
        try:
            self._memory[tag] = storage_address(tensor)
        except NotImplementedError:  # below vmap there is none
            self._memory[tag] = 0

    def _refuse_changes_of_views(self, path: Path) -> None:
        """Refuses changes in place of what another tensor of an earlier layer shares, and a later event uses."""
        last_use = dict.fromkeys(path.results, len(path.events))
        for at, event in enumerate(path.events):
            for tag in event.uses:
                last_use[tag] = max(at, last_use.get(tag, -1))
        for at, changed in self._changed:
            layer = path.layer_of(at)
            memory = self._memory[changed]
            for tag, other in self._memory.items():
                shares = tag != changed and memory and other == memory and tag.event < at < last_use.get(tag, -1)
                if shares and min(path.layer_of(tag.event), path.layer_of(changed.event)) < layer:
                    raise CannotSplitError(PARTLY_CHANGED.format(name=path.events[at].name))
