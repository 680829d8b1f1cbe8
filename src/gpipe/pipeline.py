"""The class `GPipe`: splits mini-batches, runs them through the stages, and combines the results."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from gpipe._torch.modes import untraced
from gpipe.batch.inputs import (
    check_loss_fn,
    check_numbers,
    read_scale,
    reject_gradients_of_inputs,
    reject_transforms,
    split_alike,
    split_targets,
)
from gpipe.batch.losses import LossModule, find_contradiction, own_loss, read_average
from gpipe.batch.microbatch import MicroBatches, Reduction, merge, plain
from gpipe.config.arguments import Arguments
from gpipe.config.assemble import assemble
from gpipe.config.findings import Findings
from gpipe.config.options import BatchNorm, Driver, Remat
from gpipe.config.reference import VerificationReport, verify
from gpipe.config.summary import summary
from gpipe.config.unknown_arguments import check_names, checked_entrance
from gpipe.distributed.norms import clip_grad_norm_
from gpipe.distributed.replica_state import (
    describe_classes,
    describe_initial_state,
    load_replica_state,
    replica_state,
    save_gradients_and_buffers,
)
from gpipe.features.chosen import choose_features
from gpipe.features.loss_check import LossWatch
from gpipe.features.recorder import Recorder
from gpipe.features.verification.feature import Verification, Verifier
from gpipe.generation.generate import cache_bytes, generate
from gpipe.generation.paths import Path
from gpipe.module import Partitioned
from gpipe.planner.search.plan import Plan
from gpipe.runtime.autograd import pipelined
from gpipe.runtime.executor import run_step
from gpipe.runtime.run import Run
from gpipe.schedule.lowering import ProgramKey
from gpipe.schedule.program import Program, notebook_html
from gpipe.schedule.schedules.by_name import Maker, Named
from gpipe.schedule.simulate import Prediction, predict
from gpipe.stages.boundary import BoundaryValue, detach_boundary
from gpipe.stages.dtensor import any_sharded
from gpipe.stages.messages import Request
from gpipe.stages.sequence import Layers
from gpipe.stages.skips import find_loss_pops, skip_names
from gpipe.stages.thread_state import ThreadState
from gpipe.stages.tree import Tree, tensors_in
from gpipe.tracing.layers_of import ModelLayers
from gpipe.tracing.own_loss import join
from gpipe.tracing.slices import OWN_LOSS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
PREPARED = (
    "step(): accelerator.prepare(pipe) has wrapped the forward of the pipe in mixed precision, but step() does not "
    "call forward. Do not pass the pipe to prepare(), and call step() under accelerator.autocast(). "
    "[prepared-by-accelerate]"
)
REPLACED = (
    "model: the layers of the nn.Sequential have changed since the pipe was built, but the pipe still runs the "
    "original layers. Change the layers first and build a new pipe. [sequential-changed]"
)
SHARDED = (
    "fully_shard was applied to layers of a pipe that runs in one process, without driver='process'. Start the "
    "script with a launcher (torchrun --nproc-per-node 1 is enough) and pass driver='process', or remove "
    "fully_shard. [fully-shard-in-one-process]"
)
CALL_CANNOT_BE_REPEATED = (
    "pipe(...): with survive=True, a call that records gradients cannot be repeated after a replica is lost. Use "
    "pipe.step(...), or call the pipe under torch.no_grad(). [survive-needs-step]"
)
NOT_GATHERED = (
    "pipe(...): every process needs the output to call backward(), but gather=False. Pass gather=True, or call the "
    "pipe under torch.no_grad(). [output-on-last-rank]"
)


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `GPipe.step`."""

    reduction: Reduction | None
    scale: float
    scaler: torch.amp.GradScaler | None
    losses: list[Tensor] | None


class GPipe(Partitioned):
    """Trains a model as a pipeline of K partitions, with mini-batches split into M micro-batches (paper, section 2).

    Call `step` to run the forward and backward pass of one mini-batch through the pipeline. Results are bitwise
    identical for every number of partitions, schedule, recomputation mode and driver. The results are also bitwise
    identical to the reference loop, which runs the unsplit layers on one micro-batch after another.

    Your modules are used in place, not copied. The modules are moved to `devices` and keep their names:
    `state_dict()` has the keys of `nn.Sequential(*layers)`.

    Most pipes need only `model`, `partitions` and `micro_batches`, and `sample` if the model is not a sequence of
    layers.

    Args:
        model: An `nn.Sequential`, or a sequence whose elements are modules or callables that build a
            module. You can also pass any other `nn.Module` together with `sample`, or the layers that
            `gpipe.layers_of` returns (without `sample`).
        partitions: K, the number of ranks. Each rank usually has its own device. Or a list with the number of layers
            of each stage.
        micro_batches: M, the number of micro-batches per mini-batch. A mini-batch with fewer rows is split into one
            micro-batch per row. A `gpipe.MicroBatches` can also have at most M elements.
        sample: An example mini-batch of inputs. gpipe runs the sample to measure the cost of each layer, so that
            stages take the same time, and to trace the forward of a model. Without a sample, gpipe balances the
            number of parameters of the stages. Later mini-batches can have different sizes. gpipe restores the state
            that the run changes, except parameters, files and objects that cannot be copied.
        plan: A plan from `gpipe.find_plan`, or the `plan` of a different pipe. The plan replaces `partitions`,
            `schedule` and `remat`. If you also pass one of these three arguments, and not its default value, gpipe
            raises an error. The plan also sets `micro_batches`, unless you pass `micro_batches`.
        schedule: The order in which ranks execute micro-batches, and the stages that each rank holds. The schedule
            does not change results. One of:

            - `"gpipe"` (default): all forward passes, then all backward passes.
            - `"1f1b"` or `"interleaved"`.
            - `"zb_h1"`, `"zb_h2"`, `"interleaved_zb"`, `"zb_v"`, `"v_half"` or `"v_min"`: split backward passes.
            - `"dualpipe_v"`: requires M >= 2K.
            - `"breadth_first"`: each stage runs all micro-batches before its rank continues with another stage.
            - `"auto"`: gpipe searches for the best split points, stages per rank, schedule and recomputation (see
              Note).
            - `gpipe.Interleaved(4)`: a schedule with this number of stages on each rank.
            - `gpipe.BreadthFirst(4)`: `"breadth_first"` with this number of stages on each rank.
            - `gpipe.Sliced("1f1b", 4)`: a schedule that also splits micro-batches along the sequence dimension (see
              Note).
            - a `Program` of only forward and backward actions, or a function of K and M that returns such a
              `Program`.

            If a rank has several stages and `partitions` is a list, the list has one entry per stage.
        remat: Which micro-batches discard their activations and recompute them in the backward pass:

            - `"always"` (default): all micro-batches.
            - `"except_last"` (torchgpipe's name): all except micro-batch 0, whose backward pass comes first. This
              option keeps the activations of one additional micro-batch.
            - `"never"`: no micro-batches.
            - a number: at most this number of micro-batches keep their activations at the same time.
            - `"offload"`: no micro-batches, but gpipe moves activations to host memory, or from a CPU to a file.
            - `"offload_inputs"`: all micro-batches, and gpipe moves the inputs of the stages in the same way.
            - `"auto"`: as few micro-batches as the memory of the device allows. Requires `sample`.
            - `gpipe.Remat(memory=...)`: as few micro-batches as this number of bytes per rank allows.
              `schedule="auto"` supports this option.
            - a list with one of the first six options for each stage.

            A micro-batch whose backward pass follows its forward pass immediately is never recomputed.
        devices: One device per partition, or one device for all partitions. Default: the accelerators of this host in
            turn, or the CPU on a host without accelerators.
        mesh: For several processes, a `DeviceMesh` with a dimension `"pp"` of size K and optionally a dimension
            `"dp"` of replicas, whose gradients are summed. Default: all processes, with K consecutive processes per
            replica.
        batch_norm: Which rows BatchNorm uses in training:

            - `"micro"` (default): normalizes each micro-batch, and updates running statistics once per micro-batch.
              Each replica has its own running statistics.
            - `"deferred"`: normalizes each micro-batch, and computes running statistics over the whole mini-batch and
              all replicas, as in one forward pass without micro-batches (paper, section 2.2).
            - `"synchronized"`: normalizes corresponding micro-batches of all replicas together, like
              `torch.nn.SyncBatchNorm`. Running statistics cover all replicas. Requires the same number of
              micro-batches in each replica.
        ties: Groups of names of parameters to share, such as `[("0.weight", "5.weight")]`. Parameters that are
            already the same tensor are found automatically.
        seed: The seed of all random numbers in the layers. Default: a random number from torch's generator.
        driver: How the partitions run:

            - `"threads"` (default), or `gpipe.Threads` with its options: each partition in a thread.
            - `"lockstep"`, or `gpipe.Lockstep`: all partitions in the calling thread, for debugging.
            - `"process"`, or `gpipe.Processes` with its options: one partition in this process. Every process makes
              the same calls. `reads_inputs` and `reads_targets` are True in the processes that need data.

            `driver` is required if torch.distributed is initialized with several processes and you do not pass
            `mesh`.
        weights: Where the weights are between actions:

            - `"device"` (default): the weights of all stages stay on their devices.
            - `"host"`: weights and gradients are in host memory, or, for CPUs, in temporary files. Each rank copies
              the weights of a stage to its device before the stage computes, and frees them afterwards. A model can
              therefore be larger than all devices together. Requires `schedule=gpipe.BreadthFirst(...)`, and
              `remat="always"` or `"offload_inputs"`. Create the optimizer after the pipe: it runs on the host.

    Raises:
        ValueError: If arguments are invalid. The message lists all errors that gpipe can detect at once.
        RemoteError: If a different process failed. `step`, calls and backward passes also raise it.

    Note:
        *Small mini-batches.* If a mini-batch has fewer than M micro-batches, a `Program` and the result of `"auto"`
        are restricted to these micro-batches. If a named schedule does not support this number, gpipe uses the
        schedule `"gpipe"`.

        *schedule="auto"* takes three to five seconds on one core. `partitions` must be a number, and `remat` must
        have its default value or be a `gpipe.Remat`. `pipe.summary()` shows how close the result is to the lower
        bound.

        *Memory* limits cover weights, gradients, the state of an optimizer like Adam, and activations. gpipe assumes
        that actions take as long as predicted. Messages that arrive earlier need additional memory.

        *mesh:* After the pipe is built, you can shard layers over `mesh["dp"]` with `fully_shard`, and optimizers
        with `ZeroRedundancyOptimizer`. Before the pipe is built, you can shard layers over a different dimension with
        `parallelize_module`. These functions use collective communication, so a failed rank is detected only after
        the timeout of the process group.

        *Sliced* schedules require a causal language model of transformers, a `sample` with labels, and the model's
        own loss. With S slices, the bubble and the memory are as with M x S micro-batches. A change of S changes the
        rounding of results, like a change of M.

    Example:
        >>> import torch, gpipe
        >>> layers = [torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
        >>> pipe = gpipe.GPipe(layers, partitions=2, micro_batches=4)
        >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        >>> loss = pipe.step(torch.ones(8, 4), torch.ones(8, 1), torch.nn.functional.mse_loss)
        >>> optimizer.step(); optimizer.zero_grad()
    """

    @checked_entrance
    def __init__(
        self,
        model: Layers | nn.Module | ModelLayers,
        partitions: int | Sequence[int] | None = None,
        micro_batches: int | None = None,
        *,
        sample: Tree = None,
        plan: Plan | None = None,
        schedule: Named | Program | Maker = "gpipe",
        remat: str | int | Remat | Sequence[str | int] = "always",
        devices: object = None,
        mesh: "DeviceMesh | None" = None,
        batch_norm: BatchNorm = "micro",
        ties: Sequence[Sequence[str]] = (),
        seed: int | None = None,
        driver: str | Driver | None = None,
        weights: str = "device",
    ) -> None:
        """Builds a pipe. `help(gpipe.GPipe)` describes the arguments."""
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(*assemble(Arguments(**arguments)))
        self.step_number = 0
        self._calls = 0  # completed calls of the pipe, without steps
        self._paths: dict[object, Path] = {}  # for generate()
        self.recorder: Recorder | None = None
        settings = self._settings
        self._findings = Findings([*settings.layers.values()], settings.schedule, self._plan, self._processes)
        self._verifier = Verifier()
        self._hold_layers()
        if isinstance(model, nn.Sequential):
            self._given = weakref.ref(model), list(map(id, model._modules.values()))

    @property
    def verify_steps(self) -> bool:
        """Whether the first step of each new combination of modes, inputs and program is verified. Default: True.

        Assign False to train without this verification.
        """
        return self._verifier.enabled

    @verify_steps.setter
    def verify_steps(self, verify_steps: bool) -> None:
        self._verifier.enabled = verify_steps

    @property
    def findings(self) -> list[str]:
        """Messages about settings and steps that cost speed or may change results, each with a fix.

        New steps can add messages. The page "Findings" of the reference explains these messages.
        """
        return self._findings.messages

    @property
    def seed(self) -> int:
        """The seed of all random numbers in the layers. You can assign a new seed.

        The random numbers of a layer depend on the seed and on the numbers of the step, layer and micro-batch.
        """
        return self._settings.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._settings = replace(self._settings, seed=seed)

    @property
    def program(self) -> Program:
        """The program of a training step with M micro-batches: the actions of each rank, in order."""
        slices = self._plan.slices
        return self._stages.compiled(ProgramKey(self.micro_batches * slices, trains=True, slices=slices)).program

    @property
    def prediction(self) -> Prediction:
        """The predicted timeline of a training step, with its partition, program and memory.

        Times are in seconds if costs were measured. The prediction accounts for `fully_shard` from the first step on.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Identity()] * 4, partitions=2, micro_batches=4)
        >>> round(pipe.prediction.bubble, 3)
        0.158
        """
        plan, sharded, replicas = self._plan, self._stages.gathered, self._stages.replicas
        costs = tuple(cost.divided_by(plan.slices) for cost in plan.costs)  # plan.costs are per micro-batch
        held = tuple(
            sharded[stage].cost(cost, replicas) if stage in sharded else cost for stage, cost in enumerate(plan.costs)
        )
        return predict(
            plan.partition, self.program, costs, in_seconds=plan.measured, held=held if plan.counted else None
        )

    @overload
    def step(
        self,
        inputs: Tree,
        /,
        targets: Tree = None,
        loss_fn: LossModule[Tensor] | None = None,
        **options: Unpack[StepOptions],
    ) -> Tensor: ...
    @overload
    def step(
        self, inputs: Tree, /, targets: Tree, loss_fn: LossModule[tuple[Tensor, T]], **options: Unpack[StepOptions]
    ) -> tuple[Tensor, list[T]]: ...
    @overload
    def step(
        self, inputs: Tree, /, targets: Tree, loss_fn: Callable[..., Tensor], **options: Unpack[StepOptions]
    ) -> Tensor: ...
    @overload
    def step(
        self, inputs: Tree, /, targets: Tree, loss_fn: Callable[..., tuple[Tensor, T]], **options: Unpack[StepOptions]
    ) -> tuple[Tensor, list[T]]: ...
    @checked_entrance
    @untraced
    def step(
        self,
        inputs: Tree,
        /,
        targets: Tree = None,
        loss_fn: Callable[..., object] | None = None,
        *,
        reduction: Reduction | None = None,
        scale: float = 1.0,
        scaler: torch.amp.GradScaler | None = None,
        losses: list[Tensor] | None = None,
    ) -> Any:
        """Runs the forward and backward pass of one mini-batch and accumulates gradients in `.grad`.

        Do not call `loss.backward()` afterwards: the returned loss is detached, so torch would raise "element 0 of
        tensors does not require grad". Under `torch.no_grad()`, only the
        forward pass runs, as is needed for validation.

        Args:
            inputs: Input of the first layer: a tensor, or any pytree of tensors, with N rows each. Or
                `gpipe.MicroBatches`, which are used without splitting.
            targets: Second argument of `loss_fn`, with N rows per tensor. Or `gpipe.MicroBatches`, with the same
                number of micro-batches as `inputs`.
            loss_fn: A function that is called on each micro-batch: `(output, target) -> loss`, or `(output, target)
                -> (loss, metrics)`.
            reduction: How to combine the losses of micro-batches:

                - `"mean"`: the average, weighted by rows.
                - `"sum"`: the sum.
                - a function that takes the target of a micro-batch and returns its weight, such as its number of
                  tokens. Micro-batches with weight 0 are ignored.

                Default: the reduction of the loss itself (see Note).
            scale: Factor for the gradients. Does not affect the returned loss. Default: 1.
            scaler: A `torch.amp.GradScaler`, or a `gpipe.GradScaler` with several processes. The scale of the scaler
                replaces `scale`. Do not pass `scaler.get_scale()` as `scale`, because methods of the scaler would
                then raise an error.
            losses: A list to fill with the losses of the micro-batches (or slices), as `loss_fn` or the model
                returned them: detached, unweighted and unscaled. Existing entries are removed. With several
                processes, each process can pass a list, which receives the losses of all replicas in order.

        Returns:
            The loss of the mini-batch as a detached scalar tensor. If `loss_fn` returns metrics, a tuple `(loss,
            metrics)` with a list of the metrics of each micro-batch.

        Raises:
            ValueError: If inputs and targets have different numbers of rows, or no rows. If a `gpipe.MicroBatches`
                has more than M elements, or different numbers of elements in inputs and targets. If replicas pass
                different values for `reduction` or `scale`.
            TypeError: If inputs or targets cannot be split, or if `loss_fn` is not a function or does not return a
                loss.
            VerificationError: If the first step of a new combination of modes and inputs differs from the reference
                loop.

        Note:
            By default, a loss from `torch.nn` or `torch.nn.functional` (also in a `functools.partial`) has the same
            result as for the whole mini-batch, according to its `reduction`, `ignore_index` and `weight`. The same is
            true of a function that returns the result of one of these losses. gpipe assumes that any other function
            returns a mean over labels that are not ignored if the function calls one of these losses on labels, and
            otherwise a mean over rows. The first step compares the result with the loss of several micro-batches
            together, and reports a difference in `pipe.findings`.
        """
        if "_original_forward" in vars(self):
            raise ValueError(PREPARED)
        is_own = targets is None and loss_fn is None and self.is_model
        if is_own and reduction is not None:
            raise ValueError(
                f"reduction={reduction!r} requires a loss_fn: the model's own loss has its own reduction. Remove "
                "reduction=, or pass targets and loss_fn. [reduction-without-loss-fn]"
            )
        slices = self._plan.slices
        if slices > 1 and not is_own:
            raise ValueError(OWN_LOSS.format(slices=slices))
        self._processes.admit_replicas()

        def run_once(run: Run) -> list[Any]:
            run.slices = slices
            run.loss_fn = own_loss if is_own else loss_fn
            with run.context.run_scope():
                if not isinstance(losses, list | None):
                    raise TypeError(f"losses is a {type(losses).__name__}, not a list. Pass losses=[].")
                factor = read_scale(scale, scaler, self.devices, processes=self._processes.size)
                target_parts = self._split(run, plain(inputs), targets, reduction)
                verification = run.feature(Verification)
                assert verification is not None
                verification.decide(run)
                run.context.agree(run, Request.STEP)
                watch = self._weigh(run, targets, target_parts, reduction, factor, checks=verification.wanted)
                run_step(run)
                if watch is not None and verification.wanted:
                    run.report_findings(watch.check(run))
                return run.context.finish(run, run.result(), trains=run.trains)

        run, results = self._repeat_if_lost(run_once)
        loss, metrics = None, list[object]()
        for process_loss, process_metrics, _ in results:
            if process_loss is not None:
                loss = process_loss if loss is None else loss + process_loss
            metrics += process_metrics or ()
        if losses is not None:
            losses[:] = chain.from_iterable(each for _, _, each in results if each is not None)
        self._end(run, self)
        if self.recorder is not None and run.trains and loss is not None:
            self.recorder.losses.append(loss)
        return (loss, metrics) if metrics else loss

    def _split(self, run: Run, inputs: Tree, targets: Tree, reduction: Reduction | None) -> list[Tree]:
        """Splits the inputs of a step into micro-batches.

        Returns:
            The targets of each micro-batch if this process reads inputs and targets, otherwise an empty list.
        """
        if self._stages.reads_targets:
            check_loss_fn(run.loss_fn)
            if reduction is not None:
                run.report_findings(find_contradiction(run.loss_fn, reduction))
        values, target_parts = list[Tree](), list[list[Tree]]()
        if self._stages.reads_inputs:
            both = self._stages.reads_targets and run.loss_fn is not own_loss
            values, *target_parts = self._cut(run, {"inputs": inputs} | ({"targets": targets} if both else {}))
        if run.trains:
            reject_gradients_of_inputs(values)
        run.inputs = [BoundaryValue(value, []) for value in values]
        if self._stages.stashes or hasattr(run.loss_fn, "pop"):
            run.loss_pops = find_loss_pops(self._stages.layers, skip_names(run.loss_fn, "pop"))
        return target_parts[0] if target_parts else []

    def _cut(self, run: Run, trees: Mapping[str, Tree], *, for_output: bool = False) -> list[list[Tree]]:
        """Splits trees into micro-batches. The inputs of a traced model become the inputs of its first layer."""
        rows, (values, *others) = split_alike(self._stages.micro_batches, **trees)
        run.micro_batch_sizes, run.ready_made = tuple(rows), isinstance(trees["inputs"], MicroBatches)
        if (traced := self._settings.traced) is not None:
            over_replicas = run.context.sum_over_replicas if run.loss_fn is own_loss else None
            if run.slices > 1:
                begun = traced.begin_slices(values, run.slices, over_replicas)
                run.micro_batch_sizes = tuple(size for size in rows for _ in range(run.slices))
            else:
                begun = traced.begin(values, over_replicas, for_output=for_output)
            run.path, run.own_weights = begun.trace, tuple(begun.shares)
            run.report_findings(begun.findings)
            values = begun.states
        return [values, *others]

    def _weigh(
        self, run: Run, targets: Tree, split: list[Tree], reduction: Reduction | None, scale: float, *, checks: bool
    ) -> LossWatch | None:
        """Sets the targets of a run and the weights of its micro-batches, in the process with the last stage.

        Returns:
            A `LossWatch` that observes the loss function if its average is unknown or must be checked, otherwise
            None.
        """
        watch: LossWatch | None = None
        if not self._stages.reads_targets:
            return watch
        run.scale = scale
        keyed: dict[str, object] = {"pipe.seed": run.seed, "autocast": run.thread_state.autocasts}
        if run.loss_fn is own_loss:
            run.context.check_same(reduction="the model's own", scale=scale, **keyed)
            run.targets = [None] * len(run.micro_batch_sizes)
            run.set_weights(run.own_weights)
            return watch
        run.targets = split or split_targets(targets, run.micro_batch_sizes, ready_made=run.ready_made)
        if reduction is None:
            average = read_average(run.loss_fn, run.targets, run.micro_batch_sizes, ready_made=run.ready_made)
            if average is None or checks:
                watch = LossWatch(average, is_of_torch=average is not None, checks=checks)
                run.call_loss = watch.call_loss
            if average is not None:
                reduction = average.reduction
        description = "weights of the targets" if callable(reduction) else str(reduction or "mean")
        run.context.check_same(reduction=description, scale=scale, **keyed)
        if reduction is not None:  # Otherwise the first call of the loss function determines the weights.
            run.weigh(reduction)
        return watch

    @checked_entrance
    @untraced
    def forward(self, inputs: Tree = None, /, *, gather: bool = False, **batch: Tree) -> Any:
        """Runs the forward pass through the pipeline. `backward()` of the result runs the backward pass through it.

        For training, prefer `step`, because it does not keep the outputs of the whole mini-batch.

        Args:
            inputs: Input of the first layer: a tensor, or any pytree of tensors, with N rows each. Or
                `gpipe.MicroBatches`, which are used without splitting.
            gather: Whether every process receives the output. Required with several processes if gradients are
                recorded. Every process must then call `backward()` on a loss of the output, but only the loss in the
                process with the last stage determines the gradients. Default: False.
            **batch: Keyword arguments of the model's forward, instead of `inputs`.

        Returns:
            The output of the last layer, with the rows of all micro-batches concatenated. For `gpipe.MicroBatches`, a
            list with the output of each micro-batch. None in processes without the last stage, unless `gather=True`.

        Raises:
            ValueError: If inputs have different numbers of rows, or no rows, or if a `gpipe.MicroBatches` has more
                than M elements.
            TypeError: If the first dimension of an output is not the rows of its micro-batch.
        """
        inputs = plain(inputs)
        if batch:
            check_names(batch, is_model=self.is_model, has_inputs=inputs is not None)
            inputs = batch
        reject_transforms(inputs)
        returned: list[Tree] = []
        run, shapes = self._repeat_if_lost(partial(self._call, inputs, returned, gather=gather))
        self._calls += 1
        run.input_shapes = shapes
        run.context.check_inputs(shapes)  # All processes have the same shapes, so all of them raise the error.
        self._end(run)
        return returned[-1]

    def _call(self, inputs: Tree, returned: list[Tree], run: Run, *, gather: bool) -> list[Any]:
        """Runs the forward pass of a call, and appends its output to `returned`.

        Returns:
            For each process, the shapes of its inputs that require gradients.
        """
        if self._processes.survives and run.trains:
            raise ValueError(CALL_CANNOT_BE_REPEATED)
        with run.context.run_scope():
            if run.trains and not gather and self._processes.position is not None:
                raise ValueError(NOT_GATHERED)
            run.call, run.gathers = self._calls + 1, gather
            leaves: list[list[Tensor]] = []
            needs_gradient = run.trains and any(tensor.requires_grad for tensor in tensors_in(inputs))
            if self._stages.reads_inputs or needs_gradient:
                (values,) = self._cut(run, {"inputs": inputs}, for_output=True)
                cuts = list(map(detach_boundary, values))
                run.inputs, leaves = [crossing for crossing, _ in cuts], [roots for _, roots in cuts]
            verification = run.feature(Verification)
            assert verification is not None
            verification.decide(run)
            run.context.agree(run, Request.CALL)
            if not self._stages.reads_inputs:
                run.inputs = [BoundaryValue(None, [])] * len(run.micro_batch_sizes)
                run.input_gradients = {m: [] for m in range(len(run.micro_batch_sizes))}
            if run.trains:
                outputs = pipelined(run, leaves)
            else:
                run_step(run)
                last_outputs = run.take_outputs() if self._stages.reads_targets else []
                if gather:
                    last_outputs = run.context.gather_outputs(last_outputs, len(run.micro_batch_sizes))
                outputs = [output.value for output in last_outputs]
            returned.append(self._combine(run, outputs))
            return run.context.finish(run, [list(root.shape) for roots in leaves for root in roots])

    if TYPE_CHECKING:  # Otherwise type checkers and editors show the signature of nn.Module.__call__.

        @overload
        def __call__(self, inputs: MicroBatches, /, *, gather: Literal[True]) -> list[Any]: ...
        @overload
        def __call__(self, inputs: Tree = None, /, *, gather: bool = False) -> Any: ...
        @overload
        def __call__(self, **batch: Tree) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Calls `forward`."""

    @checked_entrance
    @untraced
    def verify(
        self,
        inputs: Tree,
        targets: Tree = None,
        loss_fn: Callable[..., object] | None = None,
        *,
        reduction: Reduction | None = None,
        against: Literal["model"] | None = None,
    ) -> VerificationReport:
        """Compares a training step with the reference loop, bit by bit, without changing the state of the pipe.

        Replays two micro-batches of the step, stage by stage, in the order of the reference loop. The first step of
        each new combination of modes, inputs and program does the same automatically, unless `verify_steps` is False.
        Weights, `.grad`, buffers, random generators and counters do not change.

        Args:
            inputs: A mini-batch, as for `step`.
            targets: The targets of the mini-batch, as for `step`.
            loss_fn: The loss function, as for `step`.
            reduction: As for `step`.
            against: `"model"` also runs the whole reference loop, and compares losses, outputs, gradients and
                buffers. The model must be in one process, on one device. Gradients of tied weights are compared
                up to rounding, because they are summed in a different order. Statistics of deferred BatchNorm are
                not compared.

        Returns:
            A `VerificationReport`. `report.equal` is True if all results are bitwise identical. `report.differences`
            lists the results that differ, and `print(report)` shows both.

        Raises:
            ValueError: If `against="model"` is not possible with this pipe, or if inputs or targets are invalid.

        Note:
            The comparison needs memory for a copy of the weights, and for the gradients of two steps.

        Example:
            >>> import torch, gpipe
            >>> layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)]
            >>> pipe = gpipe.GPipe(layers, partitions=2, micro_batches=4)
            >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
            >>> pipe.verify(x, y, torch.nn.functional.mse_loss, against="model").equal
            True
        """
        if against not in (None, "model"):
            raise ValueError(f"against={against!r} is unknown. Use None or 'model'.")
        is_own = targets is None and loss_fn is None
        return verify(
            self, inputs, targets, None if is_own else loss_fn, reduction, against_model=against is not None
        )

    @untraced
    def generate(self, inputs: Tree = None, **settings: Any) -> Any:
        """Generates tokens with the model's own `generate` method, through the pipeline.

        Prompts are split into micro-batches, which also run as a pipeline during decoding. A micro-batch leaves the
        pipeline when all its rows have finished. Each rank keeps the KV cache of its own layers. With several
        processes, every process must call this method.

        Args:
            inputs: Prompts with N rows, or a dict with N rows per entry, such as the output of a tokenizer.
            **settings: Arguments of the model's `generate`, except for a cache, a streamer, an assistant model and
                `return_dict_in_generate`. Tensors are split by rows. Tensors in a `GenerationConfig`, and all other
                values, are passed to every micro-batch.

        Returns:
            The tokens that the model's `generate` returns for all rows together, in every process. Sampling draws
            from torch's generator in the same order as the model does. With several processes, the generator of the
            first process is used. Tokens may differ only if two candidates are equally likely up to rounding.

        Raises:
            ValueError: If the pipe is in training mode, if the model has no `generate`, or if its cache has no
                separate entry for each layer.

        Example:
            >>> import torch, transformers
            >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
            >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2)).eval()
            >>> prompts = torch.randint(3, 32, (4, 5))
            >>> pipe = GPipe(model, partitions=2, micro_batches=2, sample=prompts)
            >>> torch.equal(pipe.generate(prompts, max_new_tokens=3), model.generate(prompts, max_new_tokens=3))
            True
        """
        arguments = _generate_arguments(inputs, settings)
        traced, context = self._settings.traced, self._processes.context()
        return generate(self._stages, traced, context, self._paths, arguments, training=self.training)

    @untraced
    def cache_bytes(self, inputs: Tree = None, **settings: Any) -> list[int]:
        """Returns the size of each rank's KV cache at the end of `generate` with the same arguments, in bytes.

        Pass `max_new_tokens` or `max_length`. Nothing is computed, because the model runs on tensors without values.
        While a layer appends a token, it briefly needs memory for its previous cache as well. With several processes,
        every process must pass the prompts, and receives the sizes of all ranks.

        >>> import torch, transformers
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=3)).eval()
        >>> prompts = torch.randint(3, 32, (4, 5))
        >>> pipe = GPipe(model, partitions=2, micro_batches=2, sample=prompts)
        >>> pipe.cache_bytes(prompts, max_new_tokens=3)  # 4 rows, 7 tokens, 16 keys and 16 values of 4 bytes a layer
        [7168, 3584]
        """
        arguments = _generate_arguments(inputs, settings)
        return cache_bytes(self._stages, self._settings.traced, arguments, training=self.training)

    def _combine(self, run: Run, outputs: list[Tree]) -> Tree:
        """Concatenates the outputs of micro-batches, unless inputs were `MicroBatches`. None without outputs."""
        if not outputs:
            return None
        if run.ready_made:
            return outputs
        rows = run.micro_batch_sizes
        return join(outputs, rows, run.own_weights) if self.is_model else merge(outputs, rows, run.report_findings)

    def _new_run(self) -> Run:
        """Returns the run of a new mini-batch, with the thread-local modes of the caller."""
        model_ref, layers = self._given or (None, [])
        model = None if model_ref is None else model_ref()
        if model is not None and list(map(id, model._modules.values())) != layers:
            raise ValueError(REPLACED)
        if self._processes.position is None and any_sharded(self._stages.modules):
            raise ValueError(SHARDED)
        context = self._processes.context()
        context.notes_messages = self.recorder is not None
        return Run(
            self._stages,
            context,
            ThreadState.here(),
            self._settings.seed,
            self.step_number,
            self.training,
            [Verification(self._verifier), *([] if self.recorder is None else [self.recorder])],
            choose_features,
            report_findings=self._findings.report,
        )

    def _repeat_if_lost(self, run_once: Callable[[Run], list[Any]]) -> tuple[Run, list[Any]]:
        """Runs a mini-batch, and repeats it if a replica was lost. Returns the last run and its results."""
        last_run: list[Run] = []

        def attempt() -> list[Any]:
            last_run[:] = [self._new_run()]
            return run_once(last_run[0])

        def late(gathered: list[Any]) -> list[Any]:
            """Completes a mini-batch that the other processes have completed, although it failed here."""
            if self.recorder is not None:
                self.recorder.ended = None  # The other processes have not recorded it.
            last_run[0].hooks.complete(last_run[0])
            return [result for result, *_ in gathered]

        grad = torch.is_grad_enabled()
        try:
            results = self._processes.survive(attempt, late, partial(save_gradients_and_buffers, self))
        except BaseException:
            torch.set_grad_enabled(grad)  # An interrupt can prevent torch.no_grad() from restoring the mode.
            raise
        return last_run[0], results

    def _end(self, run: Run, whole: nn.Module | None = None) -> None:
        """Counts a mini-batch that has succeeded, reports its findings, and records the time spent inside it."""
        if self.training:
            self.step_number += 1
        if run.trains and run.training:
            self._findings.examine_step(run, whole)
        if self.recorder is not None:
            self.recorder.inside.append((run.began, time.perf_counter()))

    def join(self, *stateful: Any) -> int:
        """Connects this replica with all other replicas, and returns the number of the next step.

        Requires `driver=gpipe.Processes(survive=True)`. Every process calls this method once, before the first step.
        A restarted replica waits in this call until the other replicas admit it between two steps. The restarted
        replica then receives their state: weights, buffers, gradients, `seed` and `step_number`.

        Args:
            *stateful: Objects with `state_dict` and `load_state_dict` whose state a restarted replica also receives,
                such as the optimizer and the scheduler. Pass the same number of objects in each replica.

        Returns:
            `step_number`, the number of the next step. In a restarted replica, it is the number of the other
            replicas.

        Raises:
            ValueError: If the pipe was built without `survive=True`, if layers are sharded with `fully_shard`, or if
                replicas start with different weights or optimizers.
        """
        if any_sharded(self.modules()):
            raise ValueError(
                "join(): survive=True does not support fully_shard, because a lost replica takes its shards with it. "
                "Remove fully_shard. [survive-with-fully-shard]"
            )
        keep, take = partial(self._keep, stateful), partial(self._take, stateful)
        self._processes.join(keep, take, describe_initial_state(self, stateful), describe_classes(stateful))
        return self.step_number

    @property
    def living(self) -> list[int]:
        """The numbers of the replicas that take part, as their launchers count them. Without `survive`: all."""
        return self._processes.living

    def _keep(self, stateful: Sequence[Any]) -> dict[str, Any]:
        """Returns the state that a restarted replica receives."""
        return {**replica_state(self, stateful), "numbers": [self.seed, self.step_number, self._calls]}

    def _take(self, stateful: Sequence[Any], kept: Mapping[str, Any]) -> None:
        load_replica_state(self, stateful, kept)
        self.seed, self.step_number, self._calls = kept["numbers"]

    def exchange(self, message: bytes) -> list[bytes]:
        """Sends a message to all processes, and returns the messages of all processes, by rank.

        Every process must call this method. With one process, the list has one entry.
        """
        return self._processes.all_gather(message)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the norm of all gradients of the model, and returns the norm before clipping.

        Use this method instead of `torch.nn.utils.clip_grad_norm_`, which would clip by the norm of one process's
        gradients. The result does not depend on the partitions. Call this method in every process. All processes
        return the same norm, so every process can skip a step whose norm is not finite.

        Shared parameters and replicas count once. Gradients of layers under `fully_shard` are gathered one at a time.
        The norm is therefore bitwise identical to the norm without `fully_shard`.

        Args:
            max_norm: Maximum norm of all gradients together.
            norm_type: Order of the norm. Default: 2.

        Returns:
            The norm of all gradients before clipping, as a scalar tensor.

        Raises:
            TypeError: If `max_norm` or `norm_type` is not a number.
            ValueError: If `max_norm` is negative, or if processes pass different values.

        Note:
            With several processes, `torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...)` raises an error. gpipe
            cannot detect this call if you pass a list of parameters that you made earlier.
        """
        check_numbers(max_norm=max_norm, norm_type=norm_type)
        names = () if self._settings.traced is None else self._settings.traced.parameter_names
        return clip_grad_norm_(self._processes, self, self.devices[0], max_norm, norm_type, names)

    def summary(self) -> str:
        """Returns a text with the partitions, their costs, the bubble and the findings."""
        return summary(self._settings, self._plan, self.prediction, self.findings)

    def _repr_html_(self) -> str | None:
        return notebook_html("pipe", self)


def _generate_arguments(inputs: Tree, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the model's `generate` by name."""
    plain_inputs = plain(inputs)
    if plain_inputs is None or isinstance(plain_inputs, Mapping):
        return {**(plain_inputs or {}), **settings}
    return {"inputs": plain_inputs, **settings}
