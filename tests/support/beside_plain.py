"""A model trained through a pipe beside the plain loop over the model itself, which nobody cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.batch.losses import own_loss
from gpipe.tracing.model import TracedModel
from gpipe.tracing.runs import arguments
from tests.support.plain_loop import Tree, accumulated, one_thread, parts_of, same_bits, weights_of
from tests.support.planned import pipe_by_costs

SEED = 11
M = 4


def squared(output: Any, target: Tensor) -> Tensor:
    """The loss of cases whose output is one tensor, or has it in the first place."""
    return F.mse_loss(first_tensor(output), target)


def first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else next(iter(vars_or_items(output)))
    return output


def vars_or_items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else list(vars(value).values())


@dataclass
class Case:
    """What is trained: a model, its inputs and targets, and the loss; the model's own where there is none."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tree]  # of so many rows
    target: Callable[[int], Tree] | None = None  # likewise
    loss_fn: Callable[..., Tensor] | None = squared  # of output and target
    sample: Tree = None  # what the pipe is shown; by default the inputs
    blocks: list[str] | None = None
    deep: int = 4  # the most partitions
    settings: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        with weights_of(5):
            return self.build().train()

    def pipe(self, model: nn.Module, partitions: int, **settings: Any) -> gpipe.GPipe:
        """A pipe of the model; its sample has other rows than what it is trained on."""
        sample = self.inputs(5) if self.sample is None else self.sample
        given: dict[str, Any] = {"costs": "params", "seed": SEED, "sample": sample, "blocks": self.blocks}
        return pipe_by_costs(model, partitions, **{"micro_batches": M} | given | self.settings | settings)


@one_thread()
def train_plainly(
    case: Case, model: nn.Module, inputs: Tree, targets: Tree, *, micro_batches: int = M, step: int = 0
) -> Tensor:
    replayed = TracedModel(
        model, unwrapped(parts_of(case.inputs(5) if case.sample is None else case.sample, M)[0]), case.blocks
    )
    parts = parts_of(inputs, micro_batches)
    wanted = [None] * len(parts) if targets is None else parts_of(targets, micro_batches)
    rows = [count_rows(part) for part in parts]

    def loss_of(m: int, part: Tree, target: Tree) -> Tensor:
        given = arguments(model, unwrapped(part))
        with replayed.rng_scope(SEED, step, m):
            output = model(*given.args, **given.kwargs)
        return own_loss(output) if case.loss_fn is None else case.loss_fn(output, target)

    pairs = enumerate(zip(parts, wanted, strict=True))
    return accumulated((loss_of(m, *pair) for m, pair in pairs), [count / sum(rows) for count in rows])


def unwrapped(part: Tree) -> Tree:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.tensor if isinstance(leaf, gpipe.Whole) else leaf, part)


def count_rows(part: Tree) -> int:
    return next(
        len(leaf) for leaf in torch.utils._pytree.tree_leaves(part) if isinstance(leaf, Tensor) and leaf.dim()
    )


def train_piped(case: Case, pipe: gpipe.GPipe, inputs: Tree, targets: Tree) -> Tensor:
    given = () if case.loss_fn is None else (targets, case.loss_fn)
    return pipe.step(inputs, *given)


def shared_names(pipe: gpipe.GPipe) -> set[str]:
    """The parameters that several layers use: their gradients are added up in another order than autograd's."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    return {names[id(one.parameter)] for one in pipe._stages.shared}


def assert_as_plain(
    case: Case,
    partitions: int,
    *,
    steps: int = 2,
    rows: int = 9,
    like: nn.Module | None = None,
    **settings: Any,
) -> nn.Module:
    """Losses, gradients, parameters and buffers are those of the plain loop; gives the trained model.

    What several layers use is that of `like`, and near to the plain loop's.
    """
    plain, model = case.model(), case.model()
    inputs, targets = case.inputs(rows), None if case.target is None else case.target(rows)
    pipe = case.pipe(model, partitions, **settings)
    shared = shared_names(pipe)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, model)]
    micro_batches = settings.get("micro_batches", M)
    for step in range(steps):
        if step and shared:
            plain.load_state_dict(model.state_dict())
        expected = train_plainly(case, plain, inputs, targets, micro_batches=micro_batches, step=step)
        found = train_piped(case, pipe, inputs, targets)
        assert same_bits(found, expected), (step, found, expected)
        assert_same(model, plain, shared)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert [*pipe.state_dict()] == [*plain.state_dict()]
    if like is not None:
        differ = [name for name, one in like.state_dict().items() if not same_bits(one, model.state_dict()[name])]
        assert not differ, f"other bits for another number of partitions, or schedule: {differ}"
    pipe.close()
    return model


def assert_same(model: nn.Module, plain: nn.Module, shared: set[str]) -> None:
    """Gradients and buffers are the same bits; near, where several layers use a parameter."""
    other = dict(plain.named_parameters())
    wrong = []
    for name, one in model.named_parameters():
        grad, expected = one.grad, other[name].grad
        if name in shared and grad is not None and expected is not None:
            scale = float(expected.abs().max()) or 1.0
            good = float((grad - expected).abs().max()) <= 4e-6 * scale
        else:
            good = same_bits(grad, expected)
        wrong += [] if good else [f"{name}.grad"]
    buffers = dict(plain.named_buffers())
    wrong += [name for name, one in model.named_buffers() if not same_bits(one, buffers[name])]
    assert not wrong, f"not the bits of the plain loop: {', '.join(wrong)}"
