"""`GPipe`, the facade that a user sees."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from gpipe._torch.modes import untraced
from gpipe.batch.inputs import (
    check_loss_fn,
    check_numbers,
    read_scale,
    refuse_gradients_of_inputs,
    refuse_transforms,
    split_alike,
    split_targets,
)
from gpipe.batch.losses import LossModule, check_weights_of_rows, find_contradiction, own_loss, read_average
from gpipe.batch.microbatch import MicroBatches, Reduction, merge, plain
from gpipe.config.assemble import assemble
from gpipe.config.check import Arguments
from gpipe.config.findings import Examination, summary
from gpipe.config.options import BatchNorm, Driver, Remat
from gpipe.config.reference import VerificationReport, verify
from gpipe.config.unknown_arguments import check_names, checked_entrance
from gpipe.distributed.norms import clip_grad_norm_
from gpipe.distributed.replica_state import (
    describe_initial_state,
    load_replica_state,
    replica_state,
    save_gradients_and_buffers,
)
from gpipe.features.chosen import choose_features
from gpipe.features.loss_check import LossWatch
from gpipe.features.recorder import Recorder
from gpipe.features.sharding import reject_sharded
from gpipe.features.verification.feature import Verification
from gpipe.features.verification.verifier import Verifier
from gpipe.generation.generate import cache_bytes, generate
from gpipe.generation.paths import Path
from gpipe.module import Partitioned
from gpipe.planner.search.found import Plan
from gpipe.runtime.autograd import pipelined
from gpipe.runtime.executor import run_step
from gpipe.runtime.run import Run
from gpipe.schedule.lowering import ProgramKey
from gpipe.schedule.program import Program, in_cell
from gpipe.schedule.schedules.by_name import Maker, Named
from gpipe.schedule.simulate import Prediction, predict
from gpipe.stages.boundary import BoundaryValue, detach_boundary
from gpipe.stages.dtensor import is_sharded
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
    "accelerator.prepare(pipe) has put mixed precision around forward, which step() does not call: leave the pipe "
    "out of prepare(), and call step() under accelerator.autocast()"
)
REPLACED = (
    "the nn.Sequential that the pipe was given has other layers by now, and the pipe goes on with those that it was "
    "given: replace or add layers before, or make a new pipe"
)


class StepOptions(TypedDict, total=False):
    """What `GPipe.step` takes by name, whatever the loss is."""

    reduction: Reduction | None
    scale: float
    scaler: torch.amp.GradScaler | None
    losses: list[Tensor] | None


class GPipe(Partitioned):
    """Trains a model as a pipeline of K partitions, with mini-batches split into M micro-batches (paper, section 2).

    Call `step` to run the forward and backward pass of one mini-batch through the pipeline. Results are bitwise
    identical for every number of partitions, schedule, recomputation mode and driver. They equal those of the unsplit
    layers, run one micro-batch after the other.

    Your modules are used in place, not copied. They are moved to `devices` and keep their names: `state_dict()` has
    the keys of `nn.Sequential(*layers)`.

    Most pipes need only `model`, `partitions` and `micro_batches`, and `sample` if the model is not a sequence of
    layers.

    Args:
        model: The network: an `nn.Sequential`, or a sequence of modules or of callables that each build one. Any
            other `nn.Module` also works if you pass `sample`. Or the layers that `gpipe.layers_of` returns, which
            need no `sample`.
        partitions: K, the number of ranks, each on its own device. Or a list with the number of layers of each stage.
        micro_batches: M, the number of micro-batches per mini-batch. A mini-batch with fewer rows is split into one
            micro-batch per row. Also the maximum number of `gpipe.MicroBatches`.
        sample: An example mini-batch of inputs. gpipe runs it to measure the cost of each layer, so that stages take
            the same time, and to trace the forward of a model. Without it, stages have the same number of parameters.
            Other mini-batches can have other sizes. State that the run changes is restored, except parameters, files
            and objects that cannot be copied.
        plan: A plan from `gpipe.find_plan`, or the `plan` of another pipe. It replaces `partitions`, `schedule` and
            `remat`: passing one of these as well raises an error, unless it has its default value. The plan also sets
            `micro_batches`, unless you pass it.
        schedule: The order in which ranks execute micro-batches, and the stages that each rank holds. Does not change
            results. One of:

            - `"gpipe"` (default): all forward passes, then all backward passes.
            - `"1f1b"` or `"interleaved"`.
            - `"zb_h1"`, `"zb_h2"`, `"interleaved_zb"`, `"zb_v"`, `"v_half"` or `"v_min"`: split backward passes.
            - `"dualpipe_v"`: requires M >= 2K.
            - `"auto"`: searches for split points, stages per rank, schedule and recomputation together (see Note).
            - `gpipe.Interleaved(4)`: a schedule with this number of stages on each rank.
            - `gpipe.Sliced("1f1b", 4)`: a schedule that also splits micro-batches along the sequence dimension (see
              Note).
            - a `Program` of only forward and backward actions, or a function of K and M that returns one.

            If a rank has several stages, `partitions` as a list has one entry per stage.
        remat: Which micro-batches discard their activations and recompute them in the backward pass:

            - `"always"` (default): all of them.
            - `"except_last"` (torchgpipe's name): all except micro-batch 0, whose backward pass comes first. Needs
              the activations of one more micro-batch.
            - `"never"`: none.
            - a number: at most that many micro-batches keep their activations at the same time.
            - `"offload"`: none; moves activations to host memory, or from a CPU to a file.
            - `"auto"`: as few as the memory of the device allows. Requires `sample`.
            - `gpipe.Remat(memory=...)`: as few as this number of bytes per rank allows. Also for `schedule="auto"`.
            - a list with one of the first five for each stage.

            A micro-batch whose backward pass follows its forward pass immediately is never recomputed.
        devices: One device per partition, or one for all. Default: this host's accelerators in turn, otherwise the
            CPU.
        mesh: For several processes, a `DeviceMesh` with a dimension `"pp"` of size K and optionally a dimension
            `"dp"` of replicas, whose gradients are summed. Default: all processes, with K consecutive ranks per
            replica.
        batch_norm: Which rows BatchNorm uses in training:

            - `"micro"` (default): normalizes each micro-batch, and updates running statistics once per micro-batch.
              Each replica has its own.
            - `"deferred"`: normalizes each micro-batch, and computes running statistics over the whole mini-batch and
              all replicas, as in one forward pass without micro-batches (paper, section 2.2).
            - `"synchronized"`: normalizes corresponding micro-batches of all replicas together, like
              `torch.nn.SyncBatchNorm`. Running statistics cover all replicas. Requires the same number of
              micro-batches in each replica.
        ties: Groups of names of parameters that are shared although the modules do not show it, such as
            `[("0.weight", "5.weight")]`.
        seed: Seed of all random numbers in the layers. Default: drawn from torch's generator.
        driver: What runs the partitions:

            - `"threads"` (default), or `gpipe.Threads` with its options: each partition in a thread.
            - `"lockstep"`, or `gpipe.Lockstep`: all partitions in the calling thread, for debugging.
            - `"process"`, or `gpipe.Processes` with its options: one partition in this process. Every process makes
              the same calls; `reads_inputs` and `reads_targets` say which of them need data.

            Required if torch.distributed is initialized with several processes and there is no `mesh`.

    Raises:
        ValueError: If arguments are invalid. The message lists all errors that can be detected together.
        RemoteError: If another process failed. `step`, calls and backward passes raise it, too.

    Note:
        *Small mini-batches.* With fewer than M micro-batches, a `Program` is restricted to the micro-batches there
        are. With `"auto"`, fill-drain is used if no schedule for that number exists.

        *schedule="auto"* takes three to five seconds on one core. It requires `partitions` as a number, and `remat`
        at its default or a `gpipe.Remat`. `pipe.summary()` shows how close the result is to the lower bound.

        *Memory* limits cover weights, gradients, the state of an optimizer like Adam, and activations. They assume
        that ranks take as long as predicted: messages that arrive earlier need extra memory.

        *mesh:* After the pipe is built, you can shard layers over `mesh["dp"]` with `fully_shard`, and optimizers
        with `ZeroRedundancyOptimizer`. Before, you can shard layers over another dimension with `parallelize_module`.
        All of these communicate collectively, so a failed rank is detected only after the process group's timeout.

        *Sliced* schedules require a causal language model of transformers, a `sample` with labels, and the model's
        own loss. Bubble and memory are those of M x S micro-batches. Like a change of M, a change of the number of
        slices S changes the rounding of results.

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
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(*assemble(Arguments(**given)))
        self.step_number = 0
        self._calls = 0  # that have ended well
        self._paths: dict[object, Path] = {}  # in generation
        self.recorder: Recorder | None = None
        self._examination = Examination(self._settings, self._plan, self._processes)
        self._verifier = Verifier()
        self._hold_layers()
        if isinstance(model, nn.Sequential):
            self._given = weakref.ref(model), list(map(id, model._modules.values()))

    @property
    def verify_steps(self) -> bool:
        """Whether the first step of each new combination of modes, inputs and program is verified; settable."""
        return self._verifier.enabled

    @verify_steps.setter
    def verify_steps(self, verify_steps: bool) -> None:
        self._verifier.enabled = verify_steps

    @property
    def findings(self) -> list[str]:
        """What was found so far that costs time or numbers, each with what to do."""
        return self._examination.findings

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
        slices = self._plan.slices
        return self._engine.compiled(ProgramKey(self.micro_batches * slices, trains=True, slices=slices)).program

    @property
    def prediction(self) -> Prediction:
        """The partition, the program, and the timeline that they foretell; in seconds if costs were measured.

        Of layers under `fully_shard` it knows from the first step on.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Identity()] * 4, partitions=2, micro_batches=4)
        >>> round(pipe.prediction.bubble, 3)
        0.158
        """
        plan, sharded, replicas = self._plan, self._engine.gathered, self._engine.replicas
        costs = tuple(cost.shared_by(plan.slices) for cost in plan.costs)  # which are those of whole micro-batches
        each = enumerate(plan.costs)
        held = tuple(sharded[stage].cost(cost, replicas) if stage in sharded else cost for stage, cost in each)
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

        Do not call `loss.backward()` afterwards: the returned loss is detached. Under `torch.no_grad()`, only the
        forward pass runs; use this for validation.

        Args:
            inputs: Input of the first layer: a tensor, or any pytree of tensors, with N rows each. Or
                `gpipe.MicroBatches`, which are used without splitting.
            targets: Second argument of `loss_fn`, with N rows per tensor. Or `gpipe.MicroBatches`, as many as in
                `inputs`.
            loss_fn: A function `(output, target) -> loss` of one micro-batch, or `(output, target) -> (loss,
                metrics)`.
            reduction: How to combine the losses of micro-batches:

                - `"mean"`: average, weighted by rows.
                - `"sum"`: sum.
                - a function that takes the target of a micro-batch and returns its weight, such as its number of
                  tokens. Micro-batches with weight 0 are ignored.

                Default: the loss's own reduction, see Note.
            scale: Factor for the gradients. Does not affect the returned loss. Default: 1.
            scaler: A `torch.amp.GradScaler`, or a `gpipe.GradScaler` with several processes. Its scale replaces
                `scale`. Do not pass `scaler.get_scale()` as `scale`: the scaler would not know that it is in use.
            losses: A list to fill with the losses of the micro-batches (or slices), as `loss_fn` or the model
                returned them: detached, unweighted and unscaled. Existing entries are removed. With several
                processes, each process can pass a list; it receives the losses of all replicas in order.

        Returns:
            The loss of the mini-batch as a detached scalar tensor. If `loss_fn` returns metrics, a tuple `(loss,
            metrics)` with a list of the metrics of each micro-batch.

        Raises:
            ValueError: If inputs and targets have different numbers of rows, or none; if there are more than M
                `gpipe.MicroBatches`, or different numbers in inputs and targets; or if replicas pass different values
                for `reduction` or `scale`.
            TypeError: If inputs or targets cannot be split, or if `loss_fn` is not a function or does not return a
                loss.
            VerificationError: If the first step of a new combination of modes and inputs differs from the reference
                loop.

        Note:
            By default, a loss from `torch.nn` or `torch.nn.functional` (also in a `functools.partial`) is combined to
            the value that it has for the whole mini-batch, according to its `reduction`, `ignore_index` and `weight`.
            A function that returns the result of one of these losses is combined in the same way. Other functions are
            assumed to return a mean over rows, or over the labels that are not ignored, if they call one of these
            losses on labels. The first step compares the result with the loss of several micro-batches together, and
            reports a difference in `pipe.findings`.
        """
        if "_original_forward" in vars(self):
            raise ValueError(PREPARED)
        is_own = targets is None and loss_fn is None and self.is_model
        if is_own and reduction is not None:
            raise ValueError("reduction= is for loss_fn; the model's own loss says by itself how it averages")
        slices = self._plan.slices
        if slices > 1 and not is_own:
            raise ValueError(OWN_LOSS.format(slices=slices))
        self._processes.let_in()

        def do(run: Run) -> list[Any]:
            run.slices = slices
            run.loss_fn = own_loss if is_own else loss_fn
            with run.context.run_scope():
                if not isinstance(losses, list | None):
                    raise TypeError(f"losses is a {type(losses).__name__}; give a list, which will hold each")
                devices = [stage.device for stage in self._engine.all]
                factor = read_scale(scale, scaler, devices, processes=self._processes.size)
                parts = self._split(run, plain(inputs), targets, reduction)
                verification = run.feature(Verification)
                assert verification is not None
                verification.decide(run)
                run.context.agree(run, Request.STEP)
                watch = self._weigh(run, targets, parts, reduction, factor, checks=verification.wanted)
                run_step(run)
                if watch is not None and verification.wanted:
                    run.report_findings(watch.check(run))
                return run.context.finish(run, run.result(), trains=run.trains)

        run, results = self._until_done(do)
        loss, metrics, each = None, list[object](), list[Tensor]()
        for share, some, theirs in results:
            if share is not None:
                loss = share if loss is None else loss + share
            metrics += some or ()
            each += () if theirs is None else theirs.unbind()
        if losses is not None:
            losses[:] = each
        self._end(run, self)
        if self.recorder is not None and run.trains and loss is not None:
            self.recorder.losses.append(loss)
        return (loss, metrics) if metrics else loss

    def _split(self, run: Run, inputs: Tree, targets: Tree, reduction: Reduction | None) -> list[Tree]:
        """Cuts the inputs of a step into micro-batches, and targets that are read here as well, which it gives."""
        if self._engine.reads_targets:
            check_loss_fn(run.loss_fn)
            if reduction is not None:
                run.report_findings(find_contradiction(run.loss_fn, reduction))
        values, parts = list[Tree](), list[list[Tree]]()
        if self._engine.reads_inputs:
            both = self._engine.reads_targets and run.loss_fn is not own_loss
            values, *parts = self._cut(run, {"inputs": inputs} | ({"targets": targets} if both else {}))
        if run.trains:
            refuse_gradients_of_inputs(values)
        run.inputs = [BoundaryValue(value, []) for value in values]
        if self._engine.stashes or hasattr(run.loss_fn, "pop"):
            run.loss_pops = find_loss_pops(self._engine.layers, skip_names(run.loss_fn, "pop"))
        return parts[0] if parts else []

    def _cut(self, run: Run, trees: Mapping[str, Tree], *, for_output: bool = False) -> list[list[Tree]]:
        """Cuts trees into micro-batches; of a traced model, the inputs are then what its path through it takes."""
        rows, (values, *others) = split_alike(self._engine.micro_batches, **trees)
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
        self, run: Run, targets: Tree, parts: list[Tree], reduction: Reduction | None, scale: float, *, checks: bool
    ) -> LossWatch | None:
        """Sets the targets of a run and the weights of micro-batches, where the last stage is.

        Returns the watch of the loss function, unless its average is known and need not be checked.
        """
        watch: LossWatch | None = None
        if not self._engine.reads_targets:
            return watch
        run.scale = scale
        keyed: dict[str, object] = {"pipe.seed": run.seed, "autocast": run.thread_state.autocasts}
        if run.loss_fn is own_loss:
            run.context.check_same(reduction="the model's own", scale=scale, **keyed)
            run.targets = [None] * len(run.micro_batch_sizes)
            run.set_weights(run.own_weights)
            return watch
        run.targets = parts or split_targets(targets, run.micro_batch_sizes, ready_made=run.ready_made)
        if reduction is None:
            rows = run.micro_batch_sizes
            average = read_average(run.loss_fn, run.targets[0], rows[0], ready_made=run.ready_made)
            if average is None or checks:
                watch = LossWatch(average, is_of_torch=average is not None, checks=checks)
                run.call_loss = watch.call_loss
            if average is not None:
                check_weights_of_rows(run.loss_fn, run.targets, rows)
                reduction = average.reduction
        told = "weights of the targets" if callable(reduction) else str(reduction or "mean")
        run.context.check_same(reduction=told, scale=scale, **keyed)
        if reduction is not None:  # Otherwise the first call of the loss function decides.
            run.weigh(reduction)
        return watch

    @checked_entrance
    @untraced
    def forward(self, inputs: Tree = None, /, *, gather: bool = False, **batch: Tree) -> Any:
        """Runs the pipelined forward; under grad, `backward()` of what comes of it runs the pipelined backward.

        Args:
            inputs: What the first layer takes: a tensor, or any pytree of tensors, of N rows each. Or
                `gpipe.MicroBatches`, which are taken as they are.
            gather: Over processes: gives the output in every one. Under grad it must, and every process calls
                `backward()` of a loss of it; what the last stage's loss gives counts.
            **batch: Instead of a mini-batch, the arguments of a model's forward by name.

        Returns:
            What the last layer returns, the rows of all micro-batches together, or a list with what it returns for
            each of `gpipe.MicroBatches`; over processes without `gather` None but at the last stage.

        Raises:
            ValueError: The rows of the inputs differ, or there are none. Or ready-made micro-batches are more than M.
            TypeError: An output does not have the rows of its micro-batch in its first dimension.
        """
        inputs = plain(inputs)
        if batch:
            check_names(batch, is_model=self.is_model, has_inputs=inputs is not None)
            inputs = batch
        refuse_transforms(inputs)
        returned: list[Tree] = []
        run, shapes = self._until_done(partial(self._call, inputs, returned, gather=gather))
        self._calls += 1
        run.input_shapes = shapes
        run.context.check_inputs(shapes)  # by all alike: nobody need be told
        self._end(run)
        return returned[-1]

    def _call(self, inputs: Tree, returned: list[Tree], run: Run, *, gather: bool) -> list[Any]:
        """Runs the forward of a call; adds what it returns, gives the shapes of inputs that want a gradient."""
        if self._processes.survives and run.trains:
            raise ValueError(
                "survive=True: a step is done again without a lost replica, and a call with a backward to come "
                "cannot be; use step(), or torch.no_grad()"
            )
        with run.context.run_scope():
            if run.trains and not gather and self._processes.position is not None:
                why = "under grad every process needs the output, to call backward()"
                raise ValueError(f"{why}: use pipe(inputs, gather=True), or torch.no_grad()")
            run.call, run.gathers = self._calls + 1, gather
            leaves: list[list[Tensor]] = []
            wanted = run.trains and any(tensor.requires_grad for tensor in tensors_in(inputs))
            if self._engine.reads_inputs or wanted:  # else others read them, and no gradient comes back
                (values,) = self._cut(run, {"inputs": inputs}, for_output=True)
                cuts = list(map(detach_boundary, values))
                run.inputs, leaves = [crossing for crossing, _ in cuts], [roots for _, roots in cuts]
            verification = run.feature(Verification)
            assert verification is not None
            verification.decide(run)
            run.context.agree(run, Request.CALL)
            if not self._engine.reads_inputs:
                run.inputs = [BoundaryValue(None, [])] * len(run.micro_batch_sizes)
                run.input_gradients = {m: [] for m in range(len(run.micro_batch_sizes))}
            if run.trains:
                outputs = pipelined(run, leaves)
            else:
                run_step(run)
                made = run.take_outputs() if self._engine.reads_targets else []
                made = run.context.gather_outputs(made, len(run.micro_batch_sizes)) if gather else made
                outputs = [output.value for output in made]
            returned.append(self._as_given(run, outputs))
            return run.context.finish(run, [list(root.shape) for roots in leaves for root in roots])

    if TYPE_CHECKING:  # else checkers and editors know it as nn.Module's, of any arguments

        @overload
        def __call__(self, inputs: MicroBatches, /, *, gather: Literal[True]) -> list[Any]: ...
        @overload
        def __call__(self, inputs: Tree = None, /, *, gather: bool = False) -> Any: ...
        @overload
        def __call__(self, **batch: Tree) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Runs `forward`."""

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
        """Compares a training step with the reference loop, bit by bit, and leaves the pipe as it was.

        Replays two micro-batches of the step, stage by stage, in the order of the reference loop. The first step of
        each new combination of modes, inputs and program does the same by itself, unless `verify_steps` is False.
        Weights, `.grad`, buffers, random generators and counters are left as they were.

        Args:
            inputs: A mini-batch, as for `step`.
            targets: Its targets, as for `step`.
            loss_fn: The loss, as for `step`.
            reduction: As for `step`.
            against: `"model"` runs the whole reference loop beside the pipe as well, and compares losses, outputs,
                gradients and buffers. The model must be in one process, on one device. Gradients of tied weights and
                statistics of deferred BatchNorm are not compared, because they are rounded differently.

        Returns:
            A `VerificationReport`. `report.equal` says whether everything is bitwise identical, `report.differences`
            lists what is not, and `print(report)` shows both.

        Raises:
            ValueError: If `against` is not possible here, or inputs or targets are invalid.

        Note:
            Needs memory for a copy of the weights, and for the gradients of two steps.

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
        """Generates by the model's own `generate`, a token at a time through the pipeline.

        Prompts are cut into micro-batches, which follow each other through the ranks in decoding as well, and leave
        where all their rows have ended. Each rank has the cache of its own layers. Over processes all call it.

        Args:
            inputs: Prompts of N rows, or a dict of what `generate` takes of as many, as a tokenizer gives it.
            **settings: What `generate` of the model takes, but for a cache, a streamer, an assistant, and
                `return_dict_in_generate`. Tensors are cut by rows, but those of a `GenerationConfig`, which like all
                others go to every micro-batch.

        Returns:
            The tokens that `generate` of the model gives for all rows together. Sampled ones, too: torch's generator
            draws as it does there. As there, they may differ where two are as likely but for rounding. Over
            processes all get them, drawn from the generator of the first.

        Raises:
            ValueError: The pipe is in training mode, or was not made of a model that has `generate`; or that keeps a
                cache that cannot be told apart by layers.

        Example:
            >>> import torch, transformers
            >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
            >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2)).eval()
            >>> prompts = torch.randint(3, 32, (4, 5))
            >>> pipe = GPipe(model, partitions=2, micro_batches=2, sample=prompts)
            >>> torch.equal(pipe.generate(prompts, max_new_tokens=3), model.generate(prompts, max_new_tokens=3))
            True
        """
        given = _prompts(inputs, settings)
        traced, context = self._settings.traced, self._processes.context()
        return generate(self._engine, traced, context, self._paths, given, training=self.training)

    @untraced
    def cache_bytes(self, inputs: Tree = None, **settings: Any) -> list[int]:
        """What the caches of each rank will hold, in bytes, when `generate` of the same arguments ends.

        Among them is `max_new_tokens` or `max_length`. Nothing is computed: the model runs without values. A layer
        that takes in a token is larger for a moment, by what it held before. Every process is given the prompts, and
        finds the bytes of all ranks.

        >>> import torch, transformers
        >>> sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=3)).eval()
        >>> prompts = torch.randint(3, 32, (4, 5))
        >>> pipe = GPipe(model, partitions=2, micro_batches=2, sample=prompts)
        >>> pipe.cache_bytes(prompts, max_new_tokens=3)  # 4 rows, 7 tokens, 16 keys and 16 values of 4 bytes a layer
        [7168, 3584]
        """
        given = _prompts(inputs, settings)
        return cache_bytes(self._engine, self._settings.traced, given, training=self.training)

    def _as_given(self, run: Run, outputs: list[Tree]) -> Tree:
        """Outputs as inputs were given: together, or of each ready-made micro-batch; None where there are none."""
        if not outputs:
            return None
        if run.ready_made:
            return outputs
        rows = run.micro_batch_sizes
        return join(outputs, rows, run.own_weights) if self.is_model else merge(outputs, rows, run.report_findings)

    def _new_run(self) -> Run:
        """A mini-batch that begins here."""
        given, layers = self._given or (None, [])
        if given is not None and (model := given()) is not None and list(map(id, model._modules.values())) != layers:
            raise ValueError(REPLACED)
        if self._processes.position is None:
            reject_sharded(self._engine.modules)
        context = self._processes.context()
        context.notes_messages = self.recorder is not None
        return Run(
            self._engine,
            context,
            ThreadState.here(),
            self._settings.seed,
            self.step_number,
            self.training,
            [Verification(self._verifier), *([] if self.recorder is None else [self.recorder])],
            choose_features,
            report_findings=self._examination.tell,
        )

    def _until_done(self, do: Callable[[Run], list[Any]]) -> tuple[Run, list[Any]]:
        """Runs a mini-batch, and again from its beginning if a replica was lost; returns the results of all."""
        begun: list[Run] = []

        def attempt() -> list[Any]:
            begun[:] = [self._new_run()]
            return do(begun[0])

        def late(gathered: list[Any]) -> list[Any]:  # it has ended well for others, and so for this process
            if self.recorder is not None:
                self.recorder.ended = None  # the other processes have recorded nothing of it
            begun[0].hooks.complete(begun[0])
            return [theirs for theirs, *_ in gathered]

        grad = torch.is_grad_enabled()
        try:
            results = self._processes.survive(attempt, late, partial(save_gradients_and_buffers, self))
        except BaseException:
            torch.set_grad_enabled(grad)  # an interrupt may come where torch.no_grad() was about to put it back
            raise
        return begun[0], results

    def _end(self, run: Run, whole: nn.Module | None = None) -> None:
        """Counts a mini-batch that has ended well, tells what it has shown, and notes when the caller was inside."""
        if self.training:
            self.step_number += 1
        if run.trains and run.training:
            self._examination.compare(run, whole)
        if self.recorder is not None:
            self.recorder.inside.append((run.began, time.perf_counter()))

    def join(self, *stateful: Any) -> int:
        """Links this replica with all others, which survive each other; gives the number of the step that comes next.

        Every process calls it once before the first step. A replica that comes back waits here until it is let in
        between two steps, and then has what the others have: weights, buffers, gradients, `seed`, `step_number`.

        Args:
            stateful: The optimizer, scheduler and whatever else has `state_dict` and `load_state_dict` and is to be
                as it is in the others; as many in each replica.

        Raises:
            ValueError: The pipe was not made with `survive=True`, or is sharded by `fully_shard`. Or replicas
                begin with other weights than others, or with other optimizers.
        """
        if any(is_sharded(part) for part in self.modules()):
            raise ValueError("survive=True: fully_shard has parts of a weight in each replica, and one may be lost")
        keep, take = partial(self._keep, stateful), partial(self._take, stateful)
        self._processes.join(keep, take, describe_initial_state(self, stateful))
        return self.step_number

    @property
    def living(self) -> list[int]:
        """The numbers of the replicas that take part, by which their launchers know them; without `survive` all."""
        return self._processes.living

    def _keep(self, stateful: Sequence[Any]) -> dict[str, Any]:
        """What a replica that comes back is given."""
        return {**replica_state(self, stateful), "numbers": [self.seed, self.step_number, self._calls]}

    def _take(self, stateful: Sequence[Any], kept: Mapping[str, Any]) -> None:
        load_replica_state(self, stateful, kept)
        self.seed, self.step_number, self._calls = kept["numbers"]

    def exchange(self, message: bytes) -> list[bytes]:
        """Sends a message to all processes, and gathers those of all, by rank; every process calls it, as often.

        In one process there is its own alone.
        """
        return self._processes.exchange(message)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm together is at most `max_norm`; gives the norm they had.

        The norms of the parameters are put together in the order of `parameters()`, on one device, so the result
        does not depend on the partitions, and is the same on all ranks, which all call it: a step that is left out
        because it is not finite is left out everywhere. Shared parameters count once, replicas too; gradients under
        `fully_shard` are put together, one at a time, to the bits of those that replicas hold. Over processes
        `torch.nn.utils.clip_grad_norm_(pipe.parameters(), ...)` would clip each partition by a norm of its own, and
        is refused; given a list made before, it cannot be.

        Raises:
            TypeError: The norm is no number.
            ValueError: It is less than 0, or the ranks were given different ones.
        """
        check_numbers(max_norm=max_norm, norm_type=norm_type)
        names = () if self._settings.traced is None else self._settings.traced.parameter_names
        return clip_grad_norm_(self._processes, self, self.devices[0], max_norm, norm_type, names)

    def summary(self) -> str:
        """The partitions, what they cost, the bubble, and `findings`: what to do for speed or numbers."""
        return summary(self._settings, self._plan, self.prediction, self.findings)

    def _repr_html_(self) -> str | None:
        return in_cell("pipe", self)


def _prompts(inputs: Tree, settings: dict[str, Any]) -> dict[str, Any]:
    """What `generate` was given, by name."""
    given = plain(inputs)
    named = given if isinstance(given, Mapping) else {} if given is None else {"inputs": given}
    return {**named, **settings}
