"""Manages the processes of a pipe: their connections, and the communication between runs."""

import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import finalize

from gpipe.distributed.communicator import CALLED, Communicator, broadcast_header
from gpipe.distributed.context import ProcessContext
from gpipe.distributed.endpoint import Endpoint, count_runs
from gpipe.distributed.linking import connect
from gpipe.distributed.mesh import Position
from gpipe.distributed.nccl import groups_for
from gpipe.distributed.rendezvous import LINKING, Rendezvous
from gpipe.distributed.stragglers import Stragglers
from gpipe.errors import RemoteError
from gpipe.features.batch_norm import find_replica_drift
from gpipe.runtime.context import Context
from gpipe.runtime.pipeline_stages import PipelineStages
from gpipe.stages.messages import Request
from gpipe.stages.skips import find_loss_pops
from gpipe.stages.tree import Tree

LONGEST_REASON = 300  # characters of an exception's text

T = TypeVar("T")
Snapshot: TypeAlias = Callable[[], Callable[[], object]]
"""A function that saves a state and returns a function that restores the state."""


class SingleProcess(Communicator):
    """A pipe with a single process. The base class of pipes with several processes.

    Attributes:
        position: The position in the mesh, or None for a single process.
        context: A function that creates the context of a run.
    """

    position: Position | None = None

    def __init__(self, engine: PipelineStages) -> None:
        self.engine = engine
        self.context: Callable[[], Context] = partial(Context, max(engine.placement) + 1)

    def survive(self, attempt: Callable[[], T], late: Callable[[list[Any]], T], snapshot: Snapshot) -> T:
        """Runs `attempt`, which all processes run together, and repeats it if a replica is lost.

        Args:
            attempt: The function to run.
            late: A function that is called instead of a repetition if the run has ended on other processes. Its
                argument is the list of gathered values.
            snapshot: A function that saves the state that `attempt` changes.
        """
        return attempt()

    @property
    def living(self) -> list[int]:
        """The numbers of the replicas that currently train."""
        return [0]

    def admit_replicas(self) -> None:
        """Admits replicas that wait to join. Call this method between two steps."""

    def join(
        self,
        get_state: Callable[[], Tree],
        set_state: Callable[[Any], object],
        digests: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        """Connects all replicas. A replica that comes back receives the state of another replica.

        Args:
            get_state: A function that returns the state of this replica.
            set_state: A function that sets the state of this replica.
            digests: Texts that describe the initial state. The first text is for the weights.
            classes: Texts that describe the classes of stateful objects. These texts do not change during training.

        Raises:
            ValueError: If the pipe was created without survive=True, or if replicas begin with different states.
        """
        raise ValueError("join() requires a pipe with survive=True. Pass driver=gpipe.Processes(survive=True).")

    def findings(self) -> list[str]:
        """Returns findings about the stages of this process."""
        return []

    def close(self, error: BaseException | None = None) -> None:
        """Ends the connections. The next run connects again.

        Args:
            error: The exception with which the user's code ends. The other processes raise it as a RemoteError.
        """


class Processes(SingleProcess):
    """One of several processes of a pipe.

    Args:
        engine: The stages.
        position: The position of this process in the mesh.
        sync_batch_norm: Whether BatchNorm is synchronized over replicas.
        costs: The cost of each stage, to find slow ranks.
        measured: Whether the costs are measured times.
    """

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
        self._end: finalize[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copy and pickle, without the connections."""
        return {**vars(self), "_endpoint": None, "_end": None}

    def findings(self) -> list[str]:
        if self.engine.lowering.deferred_batch_norm or self.sync_batch_norm or self.position.replicas == 1:
            return []
        return find_replica_drift([layer.module for stage in self.engine.local for layer in stage.layers])

    def link(self, rendezvous: Rendezvous) -> None:
        """Connects this process with the other processes, and closes the rendezvous. All processes must call it."""
        plain = rendezvous.tls is None or len({*rendezvous.hosts}) == 1
        groups = groups_for(self.position, _pairs_of_ranks(self.engine), plain=plain)
        self._use(connect(rendezvous, self.position, groups))

    def _use(self, endpoint: Endpoint) -> None:
        if self._end is not None:
            self._end.detach()
        self._endpoint, self._end = endpoint, endpoint.end_with(self)

    def linked(self) -> Endpoint:
        """Returns the connections. If they were closed, all processes connect again."""
        if self._endpoint is None:
            with Rendezvous() as rendezvous:
                rendezvous.greet(self.position)
                rendezvous.phase = LINKING
                self.link(rendezvous)
        assert self._endpoint is not None
        return self._endpoint

    def gather(self, request: Request, value: Tree) -> list[Any]:
        """Gathers a value from each process outside a step. All processes must make the same request."""
        with self.engine.threads.exclusive(), self.linked().in_run(records=False) as endpoint:
            first = self.position.rank_of(self.engine.placement[0])
            broadcast_header(endpoint, self.position, first, {CALLED: request})
            return self.finish_run(value)

    def finish_run(self, value: Tree) -> list[Any]:
        """Waits until all processes reach the end of a run. Returns the value of each process, by rank."""
        return self.linked().finish_run(value)

    @property
    def living(self) -> list[int]:
        return [*range(self.position.replicas)]

    def all_gather(self, message: bytes, /) -> list[bytes]:
        return self.gather(Request.EXCHANGE, message)

    def gone(self) -> Collection[int]:
        endpoint = self._endpoint  # read once, because another thread may close it
        return () if endpoint is None else endpoint.detector.gone()

    def close(self, error: BaseException | None = None) -> None:
        if self._endpoint is None:
            return
        reason = f"rank {self.rank} closed its pipe, after {count_runs(self._endpoint.detector.run)}."
        if error is not None and not (isinstance(error, RemoteError) and error.received):
            text = "".join(traceback.format_exception_only(error)).strip()  # works if str(error) raises
            reason += f" Its script raised {text[:LONGEST_REASON]}"
            if isinstance(error, Exception):  # SystemExit and Ctrl-C end a process without an error.
                self._endpoint.fail_next_run(error)
        if self._end is not None:
            self._end.detach()
        self._endpoint.close(reason)
        self._endpoint = self._end = None


def _pairs_of_ranks(stages: PipelineStages) -> set[tuple[int, int]]:
    """Returns the pairs of pipeline ranks that send each other messages. The lower rank is the first of each pair."""
    every = find_loss_pops(stages.layers, stages.stashes)  # a loss may pop any stash
    sharing, placement = stages.stages_that_share(), stages.placement
    paths = 1 if stages.traced is None else len(stages.traced.traces)
    pairs = [
        *((stage - 1, stage) for stage in range(1, len(stages.all))),
        *((route.source, route.target) for path in range(paths) for route in stages.skip_routes(every, path)),
        *((one, other) for one in sharing for other in sharing),
    ]
    ranks = [sorted((placement[one], placement[other])) for one, other in pairs]
    return {(low, high) for low, high in ranks if low != high}
