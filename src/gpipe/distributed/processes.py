"""The processes of one pipe: their connections, and what they say to each other between runs."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from gpipe.distributed.agree import CALLED, Communicator, follow_first
from gpipe.distributed.context import ProcessContext
from gpipe.distributed.endpoint import Endpoint
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import groups_for
from gpipe.distributed.rendezvous import LINKING, Rendezvous, connect
from gpipe.distributed.stragglers import Stragglers
from gpipe.features.batch_norm import find_replica_drift
from gpipe.runtime.context import Context
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.messages import Request
from gpipe.stages.skips import find_loss_pops
from gpipe.stages.tree import Tree

T = TypeVar("T")
Note: TypeAlias = Callable[[], Callable[[], object]]
"""Notes how something is, and gives what puts it back."""


class OneProcess(Communicator):
    """The only process of a pipe."""

    position: Position | None = None
    survives = False  # whether it goes on when a replica is lost

    def __init__(self, engine: PipelineStages) -> None:
        self.engine = engine
        self.context: Callable[[], Context] = partial(Context, max(engine.placement) + 1)
        """Makes what a mini-batch shares with other processes: here nothing."""

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], note: Note) -> T:
        """Does what all processes do together."""
        return attempt()

    @property
    def living(self) -> list[int]:
        """The replicas that take part, by the numbers that their launchers know."""
        return [0]

    def let_in(self) -> None:
        """Between two steps: comes together with replicas that wait for it."""

    def join(self, keep: Callable[[], Tree], take: Callable[[Any], object], begins: Sequence[str]) -> None:
        """Comes together with all replicas: `keep` gives the state of one, `take` has it in one that comes back.

        `begins` says with what this one begins, its weights first.
        """
        raise ValueError("join() is for a pipe made with survive=True")

    def findings(self) -> list[str]:
        """What is to be said of the stages before a run: nothing."""
        return []

    def close(self) -> None:
        """Nothing to close."""


class Processes(OneProcess):
    """One of several processes of a pipe; which is slow is told by the costs of stages, in seconds if `measured`."""

    def __init__(
        self,
        engine: PipelineStages,
        position: Position,
        *,
        sync_batch_norm: bool = False,
        costs: Sequence[float] = (),
        measured: bool = False,
    ) -> None:
        super().__init__(engine)
        self.context = partial(ProcessContext, self)
        self.position: Position = position
        self.sync_batch_norm = sync_batch_norm
        self.rank, self.size = position.rank, len(position.members)
        self.stragglers = Stragglers(engine.placement, costs, position.replicas, measured=measured)
        self._endpoint: Endpoint | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves the connections behind."""
        return {**vars(self), "_endpoint": None}

    def findings(self) -> list[str]:
        if self.engine.lowering.deferred_batch_norm or self.sync_batch_norm or self.position.replicas == 1:
            return []
        return find_replica_drift([layer.module for stage in self.engine.local for layer in stage.layers])

    def link(self, rendezvous: Rendezvous) -> None:
        """Connects with the other processes, who do so at the same time; the last that the rendezvous is for."""
        plain = rendezvous.tls is None or len({*rendezvous.hosts}) == 1
        groups = groups_for(self.position, _pairs_of_ranks(self.engine), plain=plain)
        self._endpoint = connect(rendezvous, self.position, groups)

    def linked(self) -> Endpoint:
        """The connections, made anew by all processes at once if they were closed."""
        if self._endpoint is None:
            with Rendezvous() as rendezvous:
                rendezvous.greet(self.position)
                rendezvous.phase = LINKING
                self.link(rendezvous)
        assert self._endpoint is not None
        return self._endpoint

    def gather(self, request: Request, value: Tree) -> list[Any]:
        with self.engine.threads.exclusive(), self.linked().in_run(notes=False) as endpoint:
            follow_first(endpoint, self.position, self.position.rank_of(self.engine.placement[0]), {CALLED: request})
            return self.end(value)

    def end(self, value: Tree) -> list[Any]:
        """Ends a run once all processes have come to its end; gathers a value from each, by rank."""
        return self.linked().exchange(value)

    @property
    def living(self) -> list[int]:
        return [*range(self.position.replicas)]

    def exchange(self, message: bytes, /) -> list[bytes]:
        return self.gather(Request.EXCHANGE, message)

    def gone(self) -> Collection[int]:
        endpoint = self._endpoint  # once: another thread may close
        return () if endpoint is None else endpoint.detector.gone()

    def close(self) -> None:
        """Ends the connections; the next run makes new ones."""
        if self._endpoint is not None:
            runs = self._endpoint.detector.run
            self._endpoint.close(f"rank {self.rank} closed its pipe, after {runs} run{'s' * (runs != 1)}")
            self._endpoint = None


def _pairs_of_ranks(stages: PipelineStages) -> set[tuple[int, int]]:
    """The pairs of ranks that send each other values, or gradients of what they share, the lower one first."""
    every = find_loss_pops(stages.layers, stages.stashes)  # a loss may pop any of them
    sharing, placement = stages.stages_that_share(), stages.placement
    paths = 1 if stages.traced is None else len(stages.traced.traces)
    pairs = [
        *((stage - 1, stage) for stage in range(1, len(stages.all))),
        *((route.source, route.target) for path in range(paths) for route in stages.skip_routes(every, path)),
        *((one, other) for one in sharing for other in sharing),
    ]
    ranks = [sorted((placement[one], placement[other])) for one, other in pairs]
    return {(low, high) for low, high in ranks if low != high}
