"""Counts drawn models that are refused as they are given, where they are not if they are told their outer blocks.

python -m tests.soak.cuts --models 2000
"""

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.support.drawn_models import Drawn, W, drawn_batch, drawn_model
from tests.support.planned import pipe_by_costs

from .results import describe, facts

STEPS, M = 3, 2
Batches = list[tuple[dict[str, Tensor], Tensor]]


def trained_plainly(model: Drawn, batches: Batches) -> list[Tensor]:
    """The losses, and then the gradients."""
    losses = []
    for batch, targets in batches:
        total = torch.zeros(())
        parts = zip(batch["x"].chunk(M), batch["ids"].chunk(M), targets.chunk(M), strict=True)
        for x, ids, target in parts:
            loss = mse_loss(model(x, ids), target)
            loss.backward(torch.tensor(1 / M))
            total = total + loss.detach() * (1 / M)
        losses.append(total)
    return [*losses, *gradients(model)]


def gradients(model: Drawn) -> list[Tensor]:
    return [torch.zeros(()) if one.grad is None else one.grad for one in model.parameters()]


def judged(model: Drawn, batches: Batches, sample: dict[str, Tensor], blocks: list[str] | None) -> tuple[str, str]:
    """What becomes of a model that is cut by default, or at these blocks."""
    plain = trained_plainly(copy.deepcopy(model), batches)
    own = copy.deepcopy(model)
    try:
        with pipe_by_costs(own, 2, M, sample=sample, blocks=blocks, driver="lockstep") as pipe:
            found = [pipe.step(batch, targets, mse_loss) for batch, targets in batches]
    except ValueError as error:
        return "refused", str(error)
    found += gradients(own)
    return ("equal" if all(map(torch.equal, found, plain)) else "other numbers"), ""


def count(numbers: range) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for number in numbers:
        torch.manual_seed(number)
        model = drawn_model(number)
        batches = [(drawn_batch(), torch.randn(8, W)) for _ in range(STEPS)]
        given = drawn_batch()
        verdict, why = judged(model, batches, given, None)
        if verdict != "equal":
            verdict += f", and {judged(model, batches, given, model.outer)[0]} if told its outer blocks"
            print(f"{number} {type(model).__name__}: {verdict}: {why}", flush=True)
        verdicts[verdict] += 1
        if verdicts.total() % 100 == 0:
            print(f"{verdicts.total()}: {dict(verdicts)}", flush=True)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    verdicts = count(range(options.first, options.first + options.models))
    print(describe(facts()))
    print("\n".join(f"{some:6}  {verdict}" for verdict, some in verdicts.most_common()))
    return int(any("and equal" in verdict for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
