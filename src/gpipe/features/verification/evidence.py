"""Copies the state before a verified step, and computes digests of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe._torch.modules import global_hooks
from gpipe.batch.losses import runs_once
from gpipe.runtime.run import Run
from gpipe.stages.digest import Digest, differ, digest
from gpipe.stages.reachable_state import GLOBAL_GENERATORS, ReachableState
from gpipe.stages.stage import LOSS

MOST_BYTES = 2**30  # The most state that is copied for a replay of one stage, besides its parameters.


@dataclass
class Evidence:
    """The state before a verified step.

    Attributes:
        began: A copy of the state that the stages can reach.
        weights: Each parameter and its digest, by name.
        calls_loss: Whether replays call the loss.
        copied: Weights that earlier steps have written. `began` contains copies of these weights.
    """

    began: "StagesState"
    weights: dict[str, tuple[Tensor, Digest]]
    calls_loss: bool
    copied: Sequence[Tensor]

    @classmethod
    def of(cls, run: Run, written: Sequence[Tensor]) -> "Evidence":
        """Copies the state of this process. A parameter is copied only if an earlier step has written it."""
        copied, calls_loss = [*written], not runs_once(run.loss_fn)
        began = StagesState.of(run, copied, calls_loss=calls_loss)
        if calls_loss and any(place.startswith(LOSS) for place in began.uncopyable):
            calls_loss = False
            began = StagesState.of(run, copied, calls_loss=False)
        return cls(began, _digests_of_weights(run), calls_loss, copied)

    def written_weights(self, run: Run) -> dict[str, Tensor]:
        """Returns the weights that the step has written, by name."""
        now = _digests_of_weights(run)
        pairs = ((name, weight, before, now.get(name)) for name, (weight, before) in self.weights.items())
        return {name: weight for name, weight, before, other in pairs if other is None or differ(before, other[1])}


@dataclass
class StagesState:
    """A copy of the state that each stage of this process can reach."""

    states: dict[int, ReachableState]

    @classmethod
    def of(
        cls,
        run: Run,
        parameters_too: Sequence[Tensor] = (),
        like: "StagesState | None" = None,
        *,
        calls_loss: bool = True,
    ) -> "StagesState":
        """Copies the current state. The state of the loss is copied only if replays call the loss."""
        hooks = {f"global module hook {number}": hook for number, hook in enumerate(global_hooks())}
        parameters: list[Tensor] = [
            p for stage in run.stages.local for layer in stage.layers for p in layer.module.parameters()
        ]
        parameters += [leaf for leaves in run.aliases.leaves.values() for leaf in leaves.values()]
        parameters += run.aliases.sources.values()
        states = {}
        for stage in run.stages.local:
            roots: dict[str, object] = {**hooks, "saved-tensor hooks": run.thread_state.hooks}
            for (
                layer
            ) in stage.layers:  # The module of a traced layer holds the whole model; only its own parts count.
                is_part = "stands_for" in vars(layer.module)
                roots[str(layer)] = layer.module._modules if is_part else layer.module
            if calls_loss and run.loss_fn is not None and stage.index == len(run.stages.all) - 1:
                roots[LOSS] = run.loss_fn
            earlier = None if like is None else like.states[stage.index]
            states[stage.index] = ReachableState.of(
                roots,
                parameters_too=parameters_too,
                parameters_except=parameters,
                most_bytes=MOST_BYTES,
                like=earlier,
            )
        return cls(states)

    def restore(self) -> None:
        for state in self.states.values():
            state.restore()

    def leave_unused_generators(self, earlier: "StagesState") -> None:
        """Removes unused global random generators from the copied state, because other threads may use them.

        The generator of torch is always removed, because random numbers of layers do not depend on it.
        """
        keys = set[Any]().union(*(now.changed_keys(earlier.states[stage]) for stage, now in self.states.items()))
        drawn = {holder for _, holder, *_ in keys}
        for generator in GLOBAL_GENERATORS.values():
            if generator is torch.default_generator or id(generator) not in drawn:
                for state in (*self.states.values(), *earlier.states.values()):
                    state.leave_alone(generator)

    def changed_since(self, earlier: "StagesState", **options: Any) -> list[str]:
        """Returns descriptions of the objects whose contents differ from an earlier state."""
        places = (now.changed_since(earlier.states[stage], **options) for stage, now in self.states.items())
        return list(dict.fromkeys(chain.from_iterable(places)))

    def several_reach_changes(self, earlier: "StagesState") -> bool:
        """Returns whether several stages reach an object that has changed, or whether any code uses `.grad`."""
        if any("grad" in state.names for state in self.states.values()):
            return True
        changed = set[Any]().union(*(now.changed_keys(earlier.states[stage]) for stage, now in self.states.items()))
        return any(sum(state.has(key) for state in self.states.values()) > 1 for key in changed)

    @property
    def thread_locals(self) -> list[str]:
        return list(chain.from_iterable(state.thread_locals for state in self.states.values()))

    @property
    def uncopyable(self) -> list[str]:
        return list(chain.from_iterable(state.uncopyable for state in self.states.values()))


def _digests_of_weights(run: Run) -> dict[str, tuple[Tensor, Digest]]:
    return {
        layer.full_name(name): (parameter, digest([parameter.detach()]))
        for stage in run.stages.local
        for layer in stage.layers
        for name, parameter in layer.module.named_parameters()
        if not is_lazy(parameter) and not parameter.is_meta
    }
