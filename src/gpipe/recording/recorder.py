"""Records the path that a model's forward takes: it runs once, whole, and every event is written down."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from gpipe.recording.own_loss import LossCall, LossReader, read_loss_call
from gpipe.replay.dry import Dry
from gpipe.replay.errors import CannotSplitError
from gpipe.replay.path import Event, Path, Tag, is_carried
from gpipe.replay.skeleton import Skeleton
from gpipe.replay.structure import Leaves, again_in, take_apart
from gpipe.replay.walk import RANDOM, Walk
from gpipe.torch_private.modes import saved_tensor_hooks
from gpipe.values.layout import copy_of, storage_address
from gpipe.values.tree import version

UNSEEN = (
    "{name} is given a tensor that was computed between blocks by what torch does not show (a "
    "torch.autograd.Function, torch.utils.checkpoint by use_reentrant=True, a scripted function), that a block left "
    "somewhere, or that was made between blocks and then written into: it cannot be known which layer is to compute "
    "it. Put that code into a module with parameters, have blocks return what others use, or name other blocks"
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
RANDOM_PATH = (
    "{name} reads a random number between blocks, and with another one the forward may take another path, as where "
    "layers are dropped at random; set what drops them (layerdrop, layer_drop) to 0, or let a block draw"
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
        self._begins_layer = True
        self._blocks_seen = False
        self._raw = {id(parameter): name for name, parameter in model.named_parameters()}
        self._held = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffers: set[str] = set()
        self._taken: set[int] = set()
        self._random: set[Tag] = set()  # what depends on chance alone
        self._inputs: dict[int, int] = {}
        self._memory: dict[Tag, int] = {}
        self._wants: dict[Tag, bool] = {}  # whether a tensor wanted a gradient when its event was done
        self._hooks = saved_tensor_hooks()
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
        flat, structure = take_apart(output)
        if any(isinstance(leaf, Tensor) and self._is_unseen(leaf) for leaf in flat):
            raise CannotSplitError(UNSEEN.format(name="the output"))
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

    def free(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Does an operation that every layer does for itself."""
        self._look(tensors)
        made = func(*args, **kwargs)
        for leaf in take_apart(made)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise CannotSplitError(UNSEEN.format(name=getattr(func, "__name__", str(func))))
        return made

    def _look(self, tensors: Sequence[Tensor], *, is_unit: bool = False) -> None:
        """Notes which buffers and inputs are used; a unit may only hand on what it is given."""
        self._buffers.update(self._held[id(tensor)] for tensor in tensors if id(tensor) in self._held)
        if is_unit:
            return
        self._taken.update(self._inputs[id(tensor)] for tensor in tensors if id(tensor) in self._inputs)

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
        self._look(tensors, is_unit=is_unit)
        tags = {tag for tensor in tensors if (tag := self.tag_of(tensor)) is not None}
        raw = tuple(dict.fromkeys(self._raw[id(t)] for t in tensors if id(t) in self._raw))
        if any(map(self._is_unseen, tensors)):
            raise CannotSplitError(UNSEEN.format(name=name))
        if saved_tensor_hooks() != self._hooks:
            raise CannotSplitError(HOOKED.format(name=name))
        is_block = is_unit and name in self._blocks
        if self._begins_layer or (is_block and not self._blocks_seen):
            self.starts.append(self.at)
        self._begins_layer = is_block
        self._blocks_seen = self._blocks_seen or is_block
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
        leaves, returns = take_apart(made)
        if not raw and tags <= self._random and (tags or name in RANDOM):
            if any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
                raise CannotSplitError(RANDOM_PATH.format(name=name))
            self._random |= {Tag(self.at, at) for at in range(len(leaves))}
        given = set(map(id, tensors))
        again = again_in(leaves)
        leaves = [self._known_apart(leaf, given) for leaf in leaves]
        for at, first in again:
            leaves[at] = leaves[first]
        for at, leaf in reversed([*enumerate(leaves)]):  # what stands there again is known by its first place
            if isinstance(leaf, Tensor):
                self._note(leaf, Tag(self.at, at))
        self.events.append(Event(name, is_unit, frozenset(tags), raw, returns, again))
        self.at += 1
        return returns.filled(leaves)

    def _is_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor wants a gradient that no event gave it: it came of a function of autograd's own."""
        tag = self.tag_of(tensor)
        return tensor.requires_grad and (id(tensor) not in self._raw if tag is None else not self._wants[tag])

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
