"""The reference loop, and the comparison of its results with a pipe's, bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from gpipe.batch.microbatch import Reduction
from gpipe.stages.skips import Stashed, run_layer

Tree: TypeAlias = object
LossFunction: TypeAlias = Callable[..., Tensor]

REMATS = ("always", "except_last", "never", "offload", "offload_inputs")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits operations to one thread, as in a pipe, because results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def weights_of(seed: int) -> Iterator[None]:
    """Gives everything that is built inside the same weights every time, and restores torch's own generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mini_batch(given: int, wanted: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, given, generator=generator), torch.randn(rows, wanted, generator=generator)


def squares(output: Any, target: Any) -> Tensor:
    """A custom loss, about which gpipe knows nothing, unlike torch's."""
    return F.mse_loss(output, target)


def run_layers(
    layers: Iterable[nn.Module],
    value: Tree,
    *,
    seed: int,
    step: int,
    micro_batch: int,
    held: dict[str, Stashed] | None = None,
) -> Tree:
    """Runs each layer in turn, with random numbers keyed by step, layer and micro-batch."""
    held = {} if held is None else held
    for index, layer in enumerate(layers):
        with gpipe.rng_scope(seed, step, index, micro_batch):
            value = run_layer(layer, value, held)
    return value


def accumulated(losses: Iterable[Tensor], shares: Sequence[float], scale: float = 1.0) -> Tensor:
    """The loop that everybody writes: forward and loss of each micro-batch as it is asked for, then its backward."""
    total: Tensor | int = 0
    for loss, share in zip(losses, shares, strict=True):
        if share and loss.requires_grad and torch.is_grad_enabled():
            loss.backward(torch.full_like(loss, share * scale))
        if share:
            total = total + loss.detach() * share
    assert isinstance(total, Tensor)
    return total


class Loop(nn.Sequential):
    """The reference loop with the interface of a pipe: steps, and calls with later backward passes."""

    def __init__(
        self, layers: Iterable[nn.Module], micro_batches: int, seed: int, *, step: int = 0, first: int = 0
    ) -> None:
        super().__init__(*layers)
        self.micro_batches, self.seed, self.step_number = micro_batches, seed, step
        self.first = first  # the number of the first micro-batch, in a replica

    def run(self, m: int, part: Tree, held: dict[str, Stashed]) -> Tree:
        """The output of one micro-batch."""
        keys = {"seed": self.seed, "step": self.step_number, "micro_batch": self.first + m}
        return run_layers(self, part, held=held, **keys)

    @one_thread()
    def step(
        self, inputs: Tree, targets: Tree, loss_fn: LossFunction, reduction: Reduction = "mean", scale: float = 1.0
    ) -> Tensor:
        """Forward, loss and backward of each micro-batch in turn."""

        def loss_of(m: int, x: Tree, y: Tree) -> Tensor:
            held: dict[str, Stashed] = {}
            output = self.run(m, x, held)
            popped = {name: held[name].pop(name) for name in getattr(loss_fn, "pop", ())}
            with gpipe.rng_scope(self.seed, self.step_number, len(self), self.first + m):
                return loss_fn(output, y, **popped)

        goals = parts_of(targets, self.micro_batches)
        parts = enumerate(zip(parts_of(inputs, self.micro_batches), goals, strict=True))
        loss = accumulated((loss_of(m, x, y) for m, (x, y) in parts), shares_of(reduction, goals), scale)
        self.step_number += self.training
        return loss

    def forward(self, inputs: Tree, gather: bool = True) -> Any:
        """The forward of each micro-batch in turn; the backward of each in turn follows when autograd asks for it."""
        parts = parts_of(inputs, self.micro_batches)
        given = [[tensor for tensor in tensors_in(part) if tensor.requires_grad] for part in parts]
        leaves = [[tensor.detach().requires_grad_() for tensor in some] for some in given]
        views = [[leaf.view_as(leaf) for leaf in some] for some in leaves]
        with one_thread():
            outputs = [self.run(m, part, {}) for m, part in enumerate(map(replaced, parts, given, views))]
        self.step_number += self.training
        roots = [[tensor for tensor in tensors_in(output) if tensor.requires_grad] for output in outputs]
        if any(roots):
            anchor = torch.empty(0, requires_grad=True)
            made = iter(_Backwards.apply(leaves, roots, anchor, *(tensor for some in given for tensor in some)))
            outputs = [
                replaced(output, some, [next(made) for _ in some])
                for output, some in zip(outputs, roots, strict=True)
            ]
        return as_given(inputs, outputs)


class _Backwards(torch.autograd.Function):
    """Hands on the outputs of all micro-batches; one backward of all would add up what each use of a weight gives."""

    @staticmethod
    def forward(
        ctx: Any, leaves: list[list[Tensor]], roots: list[list[Tensor]], anchor: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.held = leaves, roots
        return tuple(root.detach() for some in roots for root in some)

    @staticmethod
    @one_thread()
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        leaves, roots = ctx.held
        came = iter(gradients)
        for some in roots:
            known = [(root, gradient) for root in some if (gradient := next(came)) is not None]
            if known:
                torch.autograd.backward([root for root, _ in known], [gradient for _, gradient in known])
        return None, None, None, *(leaf.grad for some in leaves for leaf in some)


def plain_loop(
    layers: Iterable[nn.Module],
    inputs: Tree,
    targets: Tree,
    loss_fn: LossFunction,
    *,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    **keys: int,
) -> Tensor:
    """Runs the equivalent of `pipe.step` with a `Loop`."""
    return Loop(layers, **keys).step(inputs, targets, loss_fn, reduction, scale)


@one_thread()
def plain_call(
    layers: Iterable[nn.Module], inputs: Tree, targets: Tree, loss_fn: LossFunction, **keys: int
) -> Tensor:
    """Runs the equivalent of `loss_fn(pipe(inputs), targets).backward()`: one loss, then all backward passes."""
    loss = loss_fn(Loop(layers, **keys)(inputs), targets)
    loss.backward()
    return loss.detach()


def plain_outputs(layers: Iterable[nn.Module], inputs: Tree, **keys: int) -> Tree:
    with torch.no_grad():
        return Loop(layers, **keys)(inputs)


def train(
    pipe: gpipe.GPipe | Loop,
    inputs: Tree,
    targets: Tree,
    loss_fn: LossFunction,
    way: str = "step",
    **how: Any,
) -> Tensor:
    """Trains a pipe on one mini-batch: by `step`, or by a "call", which supports neither reduction nor scale."""
    if way == "step":
        return pipe.step(inputs, targets, loss_fn, **how)
    loss = loss_fn(pipe(inputs, gather=True), targets)
    loss.backward()
    return loss.detach()


def train_plainly(
    layers: Sequence[nn.Module],
    inputs: Tree,
    targets: Tree,
    loss_fn: LossFunction,
    way: str = "step",
    *,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    **keys: Any,
) -> Tensor:
    given = layers, inputs, targets, loss_fn
    if way == "step":
        return plain_loop(*given, reduction=reduction, scale=scale, **keys)
    return plain_call(*given, **keys)


def replaced(tree: Tree, old: Sequence[Tensor], new: Sequence[Tensor]) -> Tree:
    known = {id(tensor): other for tensor, other in zip(old, new, strict=True)}
    return pytree.tree_map(lambda leaf: known.get(id(leaf), leaf), tree)


def tensors_in(tree: Tree) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def parts_of(tree: Tree, micro_batches: int) -> list[Tree]:
    """Returns copies of the micro-batches of a mini-batch. The first ones may have one more row. None is empty."""
    if isinstance(tree, gpipe.MicroBatches):
        return [pytree.tree_map(part_taken, part) for part in tree]
    leaves, spec = pytree.tree_flatten(tree)
    parts = min(micro_batches, next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()))
    columns = [
        [copied(part) for part in leaf.tensor_split(parts)]
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * parts
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[m] for column in columns], spec) for m in range(parts)]


def part_taken(leaf: object) -> object:
    """What is in a ready-made micro-batch, in memory of its own."""
    leaf = leaf.tensor if isinstance(leaf, gpipe.Whole) else leaf
    return copied(leaf) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else leaf


def as_given(inputs: Tree, outputs: Iterable[Tree]) -> Tree:
    return list(outputs) if isinstance(inputs, gpipe.MicroBatches) else joined(outputs)


def copied(tensor: Tensor) -> Tensor:
    """A copy in a graph, that lies in memory as the tensor does: strides, and address modulo 512."""
    once = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: these elements are one in memory, which can be written only once
            once = once.narrow(dim, 0, 1)
    storage = tensor.untyped_storage()
    ahead = storage.data_ptr() % 512
    memory = torch.empty(ahead + 512 + storage.nbytes(), dtype=torch.uint8, device=tensor.device)
    start = -memory.data_ptr() % 512 + ahead
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory.untyped_storage()[start:], once.storage_offset(), once.shape, once.stride()
    )
    copy.copy_(once)
    return copy if once is tensor else copy.expand(tensor.shape)


def joined(parts: Iterable[Tree]) -> Tree:
    outputs = list(parts)
    if len(outputs) == 1:
        return outputs[0]
    return pytree.tree_map(
        lambda *column: torch.cat(column) if isinstance(column[0], Tensor) else column[0], *outputs
    )


def shares_of(reduction: Reduction, targets: Sequence[Tree]) -> list[float]:
    if reduction == "sum":
        return [1.0] * len(targets)
    rows = [float(len(pytree.tree_leaves(target)[0])) for target in targets]
    raw = rows if reduction == "mean" else [float(reduction(target)) for target in targets]  # type: ignore[arg-type]
    return [weight / sum(raw) for weight in raw]


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are bitwise identical, including NaN and the sign of zero, or both are None."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    row_major = (t.detach().clone(memory_format=torch.contiguous_format) for t in (one, other))  # in strides of 1
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in row_major))


def all_same_bits(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(same_bits(one, other) for one, other in zip(some, others, strict=True))


def assert_same_bits(pipe: nn.Module, reference: Sequence[nn.Module]) -> None:
    """Asserts that a pipe's parameters, gradients and buffers are those of unsplit layers."""
    plain = nn.Sequential(*reference)
    parameters, buffers = dict(plain.named_parameters()), dict(plain.named_buffers())
    assert [name for name, _ in pipe.named_parameters()] == list(parameters)
    assert [name for name, _ in pipe.named_buffers()] == list(buffers)
    wrong = [f"{name}.grad" for name, p in pipe.named_parameters() if not same_bits(p.grad, parameters[name].grad)]
    wrong += [name for name, p in pipe.named_parameters() if not same_bits(p, parameters[name])]
    wrong += [name for name, b in pipe.named_buffers() if not same_bits(b, buffers[name])]
    assert not wrong, f"not the bits of the plain loop: {', '.join(wrong)}"
