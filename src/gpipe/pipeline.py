"""`GPipe`, the facade that a user sees."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor, nn

from gpipe.build.assemble import assemble
from gpipe.build.settings import Arguments, Costs
from gpipe.build.unknown_arguments import (
    TOO_MANY_FOR_CALLS,
    TOO_MANY_FOR_PIPES,
    TOO_MANY_FOR_STEPS,
    WORDS_OF_CALLS,
    WORDS_OF_PIPES,
    WORDS_OF_STEPS,
    refuse_unknown,
)
from gpipe.distributed.agree import Alone, Team
from gpipe.distributed.handshake import Asked, Header
from gpipe.distributed.session import Session, refuse_norms_of_a_part
from gpipe.errors import entrance
from gpipe.findings.before_training import examine_settings
from gpipe.findings.examination import Examination
from gpipe.findings.summary import summary
from gpipe.layers.build import Layers, release
from gpipe.layers.losses import NO_METRICS
from gpipe.layers.skips import Sequential, find_loss_pops, names, refuse_unused
from gpipe.plan.partition import Balance
from gpipe.plan.program import Program
from gpipe.plan.simulate import Plan, predict
from gpipe.runtime.autograd import Call, pipelined
from gpipe.runtime.batch import MiniBatch
from gpipe.runtime.engine import Wanted
from gpipe.runtime.inputs import (
    NO_GRAPH,
    StepInputs,
    check_loss_fn,
    check_numbers,
    refuse_gradients_of_inputs,
    refuse_tangents,
    refuse_tracing,
    split_alike,
)
from gpipe.runtime.modes import Ambient, untraced
from gpipe.runtime.recorder import Recorder
from gpipe.values.boundary import BoundaryValue, cut
from gpipe.values.dtensor import local, whole
from gpipe.values.microbatch import Reduction, merge
from gpipe.values.tree import Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GPipe(nn.Module):
    """Trains a sequence of layers, cut into partitions, with micro-batches flowing through them (paper, section 2).

    The result is the same, bit for bit, for every number of partitions: that of the plain layers run micro-batch
    by micro-batch. The layers are used as they are, moved to `devices`, and keep their names: `state_dict` is that of
    `nn.Sequential(*layers)`.

    Args:
        layers: The network: an `nn.Sequential`, or a sequence of modules or of callables that build one.
        partitions: K, or the number of layers of each partition.
        micro_batches: M. A mini-batch of fewer rows makes as many micro-batches as it has rows.
        costs: What each layer costs: one number a layer; a function of a layer and its sample input; `"time"`,
            seconds of forward, recompute and backward; `"flops"`; or `"params"`. By default time if there is a
            sample, else parameters, at least 1. `pipe.costs` can be saved and given again, so that the cuts stay.
        sample: An example mini-batch of inputs, for costs that must be measured; nothing of it remains.
        balance: `"variance"`, the paper's: least sum of squared differences from the mean; or `"minmax"`, the fastest
            slowest partition. Both exact.
        devices: One for each partition, or one for all; by default this host's accelerators in turn, else the CPU.
        schedule: `"gpipe"`: all forwards, then all backwards.
        remat: Which micro-batches are run again in the backward pass so that nothing inside a partition is kept:
            `"always"`, `"except_last"` (torchgpipe's word: micro-batch 0, whose backward comes first, keeps its
            inside, at the price of one inside more), or `"never"`; or one of these for each partition. Where a
            backward follows its forward at once, nothing is recomputed.
        deferred_batch_norm: Running statistics of BatchNorm are those of the whole mini-batch, as in one plain
            forward of it (paper, section 2.2), also over replicas; by default those of one micro-batch after
            another, of each replica its own. Either way a micro-batch is normalized by its own.
        sync_batch_norm: With replicas, BatchNorm in training normalizes a micro-batch together with the same one of
            all other replicas, as `torch.nn.SyncBatchNorm` does, and running statistics are those of both; all must
            have as many micro-batches. Not with `deferred_batch_norm`.
        ties: Names of parameters that are one though the modules do not show it: `[("0.weight", "5.weight")]`.
        seed: Keys all randomness of the layers; None draws one number from torch's generator.
        intra_op_threads: CPU threads that one operation may use, the same in every rank; bits depend on it.
        driver: `"threads"`, one for each partition, or `"lockstep"`, all in the calling thread, for debugging. By
            default threads; only if eight mini-batches show layers of a millisecond or less is the calling thread
            tried, and the faster kept. `"process"`: this process runs one partition, others the others. All call the
            same then; only the first reads inputs, only the last reads targets. The bits are the same.
        mesh: For processes: where they are, a `DeviceMesh` with a dimension `"pp"` of K and perhaps one `"dp"` of
            replicas, whose gradients are added up. By default the world, K processes in a row to a replica. Over
            `mesh["dp"]` layers may be sharded by `fully_shard` once the pipe is built, and optimizers by
            `ZeroRedundancyOptimizer`; over a further dimension by `parallelize_module` before. What these do is
            collective: that a rank failed in it is only noticed when the time of its process group is up.

    Raises:
        ValueError: Something above cannot be; the error lists every mistake.
        RemoteError: Another process failed meanwhile; also from `step`, calls and backwards.

    Example:
        >>> import torch, gpipe
        >>> layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
        >>> pipe = gpipe.GPipe(layers, partitions=2, micro_batches=4)
        >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        >>> loss = pipe.step(torch.ones(8, 4), torch.ones(8, 1), torch.nn.functional.mse_loss)
        >>> optimizer.step(); optimizer.zero_grad()
    """

    @entrance
    @refuse_unknown(WORDS_OF_PIPES, TOO_MANY_FOR_PIPES)
    def __init__(
        self,
        layers: Layers,
        partitions: int | Sequence[int],
        micro_batches: int,
        *,
        costs: Costs = None,
        sample: Tree = None,
        balance: Balance = "variance",
        devices: object = None,
        schedule: str = "gpipe",
        remat: str | Sequence[str] = "always",
        deferred_batch_norm: bool = False,
        sync_batch_norm: bool = False,
        ties: Sequence[Sequence[str]] = (),
        seed: int | None = None,
        intra_op_threads: int = 1,
        driver: str | None = None,
        mesh: "DeviceMesh | None" = None,
    ) -> None:
        super().__init__()
        self._settings, self._engine = assemble(
            Arguments(
                layers,
                partitions,
                micro_batches,
                costs=costs,
                sample=sample,
                balance=balance,
                devices=devices,
                schedule=schedule,
                remat=remat,
                deferred_batch_norm=deferred_batch_norm,
                sync_batch_norm=sync_batch_norm,
                ties=ties,
                seed=seed,
                intra_op_threads=intra_op_threads,
                driver=driver,
                mesh=mesh,
            )
        )
        self._together = None if self._engine.position is None else Session(self._engine, self._settings)
        if self._together is not None:
            release(self._engine.stages, self._engine.own)
        self.step_number = 0
        self._examination = Examination(
            [*examine_settings(self._settings), *self._engine.findings()],
            [layer for stage in self._engine.own for layer in stage.layers],
            deferred=self._engine.deferred_batch_norm,
            recomputes=any(remat != "never" for remat in self._settings.remat),
            threaded=self._engine.threaded,
        )
        self.recorder: Recorder | None = None
        # At last, and not by add_module: a layer may be named like any of these.
        self._modules.update(self._own_layers())

    def __len__(self) -> int:
        """The number of layers, of all partitions."""
        return len(self._settings.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order; over processes this one's."""
        return iter(self._own_layers().values())

    @overload
    def __getitem__(self, at: int) -> nn.Module: ...

    @overload
    def __getitem__(self, at: slice) -> Sequential: ...

    def __getitem__(self, at: int | slice) -> nn.Module:
        """A layer by its place among all, or a `gpipe.Sequential` of several, as on `nn.Sequential`.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)], 2, 4)
        >>> pipe[-1].out_features, len(pipe), len(pipe[:2])
        (1, 3, 2)

        Raises:
            IndexError: There is no such layer, or another process has it.
        """
        names = list(self._settings.layers)
        if isinstance(at, slice):
            return Sequential(OrderedDict((name, self._own_layer(name)) for name in names[at]))
        try:
            name = names[at]
        except (TypeError, IndexError):
            last = len(names) - 1
            raise IndexError(
                f"there is no layer {at!r}; give one of 0 to {last}, -1 for the last, or a slice"
            ) from None
        return self._own_layer(name)

    def _own_layer(self, name: str) -> nn.Module:
        own = self._own_layers()
        if name not in own:
            raise IndexError(f"layer {name} is another process's; this one has {', '.join(own)}")
        return own[name]

    @property
    def findings(self) -> list[str]:
        """What was found so far that costs time or numbers, each with what to do."""
        return self._examination.findings

    @property
    def partitions(self) -> int:
        """K."""
        return len(self._settings.layers_per_partition)

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each partition."""
        return self._settings.layers_per_partition

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer was taken to cost."""
        return self._settings.costs

    @property
    def micro_batches(self) -> int:
        """M."""
        return self._settings.micro_batches

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each partition."""
        return self._settings.devices

    @property
    def seed(self) -> int:
        """What all randomness of the layers is keyed by, together with step, layer and micro-batch; settable."""
        return self._settings.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._settings = replace(self._settings, seed=seed)

    @property
    def program(self) -> Program:
        """The table that a training step of M micro-batches runs."""
        return self._engine.compiled(Wanted(self.micro_batches, trains=True)).program

    @property
    def plan(self) -> Plan:
        """The partition, the program, and the timeline that they foretell for a training step of M micro-batches.

        The timeline is in seconds if `costs` were measured at construction, else in their own unit.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Identity()] * 4, partitions=2, micro_batches=4, costs=[1, 1, 1, 1])
        >>> print(pipe.plan.partition.explain())
        stage 0: layer 0 to layer 1 (2): cost 2, 100% of the mean
        stage 1: layer 2 to layer 3 (2): cost 2, 100% of the mean
        slowest stage: 0.0% over the mean 2, 0.0% over the lower bound 2
        >>> round(pipe.plan.bubble, 3)
        0.158
        """
        return predict(self._settings.partition, self.program, in_seconds=self._settings.in_seconds)

    @entrance
    @refuse_unknown(WORDS_OF_STEPS, TOO_MANY_FOR_STEPS)
    @untraced
    def step(
        self,
        inputs: Tree,
        targets: Tree,
        loss_fn: Callable[..., object],
        *,
        reduction: Reduction | None = None,
        scale: float = 1.0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Runs forward and backward of one mini-batch; the gradients are added to `.grad`.

        Under `torch.no_grad` it runs the forward alone: validation through the pipeline.

        Args:
            inputs: What the first layer takes: a tensor, or any pytree of tensors, of N rows each.
            targets: What `loss_fn` takes beside the output, N rows each.
            loss_fn: `(output, target)` of a micro-batch to its loss l_i, or to `(l_i, metrics)`.
            reduction: How the losses make one: `"mean"` over rows, `"sum"`, or a function of a micro-batch's target
                that gives its weight (say, its number of tokens). A micro-batch of weight 0 has no say at all. By
                default as the loss itself does it, if it is one of `torch.nn` or `torch.nn.functional`, perhaps in
                a `functools.partial`: the step's loss is what it gives for the whole mini-batch, with its own
                `reduction`, `ignore_index` and `weight`. Any other loss is taken for a mean over rows.
            scale: The factor of the gradients; the loss returned is unscaled.
            scaler: A `torch.amp.GradScaler` or, over processes, a `gpipe.GradScaler`, whose scale it is then. Its
                `get_scale()`, given as `scale`, would not tell it that it is in use.

        Returns:
            The loss, detached, of no dimensions; with metrics, `(loss, [metrics of each micro-batch])`.

        Raises:
            ValueError: The rows of inputs and targets differ, or there are none. Or replicas were given another
                `reduction` or `scale` than others.
            TypeError: Inputs or targets hold what cannot be split, or the loss is no function or no loss.
        """
        given = StepInputs(inputs, targets, loss_fn, reduction, scale, Ambient.here(), scaler)
        batch = self._batch(given.ambient)
        before = self._examination.look(batch.step) if batch.trains and self.training else None
        together = self._together
        step = partial(self._step_together, together) if together else self._step_here
        rows, loss, metrics = step(given, batch)
        self._count_step()
        if before is not None:
            self._examination.compare(before, rows, batch.findings, self, loss_fn)
        return loss if all(metric is NO_METRICS for metric in metrics) else (loss, metrics)

    def _step_here(self, given: StepInputs, batch: MiniBatch) -> tuple[int, Tensor | int, list[object]]:
        """Runs a step in this process; gives the rows of the last micro-batch, the loss and the metrics."""
        given = given.scaled(self.devices[-1])
        check_loss_fn(given.loss_fn)
        self._examination.tell(given.findings())
        rows, (values, targets) = split_alike(self.micro_batches, inputs=given.inputs, targets=given.targets)
        self._prepare(batch, values, given)
        shares = given.shares(rows, targets)
        batch.targets = targets
        batch.seeds = [share * given.scale if share else None for share in shares]
        self._engine.start(len(values), batch).go(given.ambient, self.recorder)
        loss = sum(batch.losses[m] * share for m, share in enumerate(shares) if share)
        return rows[-1], loss, [batch.metrics[m] for m in range(len(values))]

    def _step_together(
        self, together: Session, given: StepInputs, batch: MiniBatch
    ) -> tuple[int, Tensor | int, list[object]]:
        """Likewise in all processes."""
        with together.run() as talk:
            given = given.scaled(self.devices[-1], processes=together.size)
            if together.is_last:
                self._examination.tell(given.findings())
            rows, values = self._read_inputs(together, given.inputs)
            self._prepare(batch, values, given)
            header = self._header(Asked.STEP, given.ambient, rows, len(values))
            return talk.step(header, batch, given, self.recorder)

    @entrance
    @refuse_unknown(WORDS_OF_CALLS, TOO_MANY_FOR_CALLS)
    @untraced
    def forward(self, inputs: Tree, *, gather: bool = False) -> Any:
        """Runs the pipelined forward; under grad, `backward()` of what comes of it runs the pipelined backward.

        Args:
            inputs: What the first layer takes: a tensor, or any pytree of tensors, of N rows each.
            gather: Over processes: gives the output in every one. Under grad it must, and every process calls
                `backward()` of a loss of it; what the last stage's loss gives counts.

        Returns:
            What the last layer returns, the rows of all micro-batches together; over processes without `gather`
            None but at the last stage.

        Raises:
            ValueError: The rows of the inputs differ, or there are none.
        """
        refuse_tangents(inputs)
        refuse_tracing()
        ambient = Ambient.here()
        batch = self._batch(ambient)
        before = self._examination.look(batch.step) if batch.trains and self.training else None
        if self._together is None:
            rows, output = self._call_here(inputs, batch, ambient)
        else:
            rows, output = self._call_together(self._together, inputs, batch, ambient, gather=gather)
        self._count_step()
        if before is not None:
            self._examination.compare(before, rows, batch.findings)
        return output

    def _call_here(self, inputs: Tree, batch: MiniBatch, ambient: Ambient) -> tuple[int, Any]:
        """Runs the forward in this process; gives the rows of the last micro-batch, and the output."""
        rows, (values,) = split_alike(self.micro_batches, inputs=inputs)
        cuts = [cut(value) for value in values]
        batch.inputs = [crossing for crossing, _ in cuts]
        run = self._engine.start(len(values), batch)
        if ambient.grad:
            outputs = pipelined(Call(run, ambient, self.recorder), [leaves for _, leaves in cuts])
        else:
            run.go(ambient, self.recorder)
            outputs = [output.value for output in run.take_outputs()]
        return rows[-1], merge(outputs)

    def _call_together(
        self, together: Session, inputs: Tree, batch: MiniBatch, ambient: Ambient, *, gather: bool
    ) -> tuple[int, Any]:
        """Likewise in all processes."""
        with together.run() as talk:
            if ambient.grad and not gather:
                raise ValueError(
                    "under grad every process needs the output, to call backward(): use pipe(inputs, gather=True), "
                    "or torch.no_grad()"
                )
            rows, values = self._read_inputs(together, inputs)
            cuts = [cut(value) for value in values]
            batch.inputs = [crossing for crossing, _ in cuts]
            header = self._header(Asked.CALL, ambient, rows, len(values), gathers=gather)
            return talk.call(header, batch, [leaves for _, leaves in cuts], ambient, self.recorder)

    def _read_inputs(self, together: Session, inputs: Tree) -> tuple[int, list[Tree]]:
        """The number of rows and the micro-batches, which only the first stage knows."""
        if not together.is_first:
            return 0, []
        rows, (values,) = split_alike(self.micro_batches, inputs=inputs)
        return sum(rows), values

    def _header(self, asked: Asked, ambient: Ambient, rows: int, parts: int, *, gathers: bool = False) -> Header:
        return Header(asked, self.step_number, ambient.grad, self.training, gathers, 0, 0, rows, parts)

    def _prepare(self, batch: MiniBatch, values: Sequence[Tree], given: StepInputs) -> None:
        """Has a mini-batch be one of a step."""
        if given.ambient.grad:
            refuse_gradients_of_inputs(values)
        batch.inputs = [BoundaryValue(value, []) for value in values]
        batch.loss_fn = given.loss_fn
        layers, popped = self._engine.layers, names(given.loss_fn, "pop")
        refuse_unused(layers, popped)
        batch.loss_pops = find_loss_pops(layers, popped)

    def _batch(self, ambient: Ambient) -> MiniBatch:
        return MiniBatch(
            (),
            self.seed,
            self.step_number,
            trains=ambient.grad,
            deferred_batch_norm=self._engine.deferred_batch_norm,
            around_layers=ambient.around_layers(),
            loss_index=len(self._settings.layers),
            examines=self._examination.fresh and self.training and ambient.grad,
            tell=self._examination.tell,
        )

    @property
    def team(self) -> Team:
        """The processes of this pipe: for what they have to tell each other between steps."""
        return Alone() if self._together is None else self._together

    @property
    def ties_of_names(self) -> dict[str, str]:
        """The name of each parameter that has an earlier name, and that name; over processes."""
        return {} if self._together is None else dict(self._together.ties_of_names)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process by name, one that is shared with another under its first name there."""
        if self._together is not None and self.partitions > 1:
            refuse_norms_of_a_part()
        first = self.ties_of_names if remove_duplicate else {}
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield f"{prefix}{'.' if prefix else ''}{first.get(name, name)}", parameter

    def _count_step(self) -> None:
        if self.training:
            self.step_number += 1

    def _own_layers(self) -> dict[str, nn.Module]:
        return {layer.name: layer.module for stage in self._engine.own for layer in stage.layers}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm together is at most `max_norm`; gives the norm they had.

        The norms of the parameters are put together in the order of `parameters()`, on one device, so the result
        does not depend on the partitions, and is the same on all ranks, which all call it: a step that is left out
        because it is not finite is left out everywhere. Shared parameters count once, replicas too. Over processes
        `torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...)` would clip each partition by a norm of its own, and
        is refused; given a list made before, it cannot be.

        Raises:
            TypeError: The norm is no number.
        """
        check_numbers(max_norm=max_norm, norm_type=norm_type)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms = [whole(torch.linalg.vector_norm(gradient, norm_type)).to(self.devices[0]) for gradient in gradients]
        if self._together is not None:
            norms = self._together.gather_norms(self, norms)
        if not norms:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
        for gradient in gradients:
            local(gradient).mul_(factor.to(gradient.device))
        return total

    def summary(self) -> str:
        """The partitions, what they cost, the bubble, and `findings`: what to do for speed or numbers."""
        return summary(self._settings, self.plan, self.findings)

    def close(self) -> None:
        """Ends the rank threads, and the links to other processes; the next step makes new ones."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what is the pipe's own also where a layer has the same name; layers stay what they are."""
        if isinstance(vars(GPipe).get(name), property):
            object.__setattr__(self, name, value)
        elif name not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        elif name in self.__dict__:
            self.__dict__[name] = value
        else:
            raise TypeError(
                f"layer {name!r} stands in a partition and cannot be replaced: the old one would go on running; "
                f"replace it before, or make a new pipe"
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves the recorder behind, as it does threads."""
        return {**vars(self), "recorder": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves nothing to other devices: partitions stay where `devices` put them. Other changes are fine."""
        devices = dict.fromkeys(self.devices)
        for device in devices:
            if fn(torch.empty(0, device=device)).device != device:
                raise ValueError(
                    f"the partitions are on {', '.join(map(str, devices))}; a pipe cannot be moved as a whole, "
                    f"make a new one with devices=..."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        """What `DistributedDataParallel` asks of a module that it wraps; others that list attributes find none."""
        if sys._getframe(1).f_globals.get("__name__") != nn.parallel.distributed.__name__:
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise TypeError(
            "DistributedDataParallel cannot wrap a pipe: it would reduce the gradients of every micro-batch by "
            "itself, M times a step; average .grad over the replicas after step(), before the optimizer's"
        )

    def __prepare_scriptable__(self) -> Self:
        """What `torch.jit.script` asks for."""
        raise TypeError(NO_GRAPH)
