"""How a mini-batch becomes micro-batches and one output again, and what each weighs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gpipe
from gpipe.batch.microbatch import count_rows, loss_weights, merge, rows_of_parts, split
from gpipe.stages.tree import Tree
from tests.support.planned import pipe_by_costs

LAW = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def trees(rows: int) -> st.SearchStrategy[Tree]:
    """Draws nested trees of tensors with the same number of rows, scalar tensors and other values."""
    shapes = st.lists(st.integers(0, 3), max_size=2).map(lambda rest: (rows, *rest))
    tensors = st.builds(
        lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
        shapes,
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    )
    others = st.sampled_from([None, 3, 2.5, "text", True])
    leaves = tensors | others | st.builds(torch.tensor, st.integers(0, 9))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[Tree, int, int]:
    rows = draw(st.integers(1, 9))
    return draw(trees(rows)), rows, draw(st.integers(1, rows))


@LAW
@given(splits())
def test_each_part_has_the_rows_of_tensor_split_and_all_else_as_it_is(drawn: tuple[Tree, int, int]) -> None:
    tree, rows, parts = drawn
    leaves, spec = pytree.tree_flatten(tree)
    found = split(tree, rows, parts, "inputs")
    assert len(found) == parts
    for at, part in enumerate(found):
        assert pytree.tree_structure(part) == spec
        for whole, leaf in zip(leaves, pytree.tree_leaves(part), strict=True):
            if isinstance(whole, Tensor) and whole.dim():
                assert torch.equal(leaf, whole.tensor_split(parts)[at])
            else:
                assert leaf is whole


@LAW
@given(splits())
def test_merge_puts_together_what_split_took_apart(drawn: tuple[Tree, int, int]) -> None:
    tree, rows, parts = drawn
    leaves, spec = pytree.tree_flatten(tree)
    without_scalars = pytree.tree_unflatten(
        [leaf if not isinstance(leaf, Tensor) or leaf.dim() else int(leaf) for leaf in leaves], spec
    )
    again = merge(split(without_scalars, rows, parts, "inputs"), rows_of_parts(rows, parts), print)
    assert pytree.tree_structure(again) == spec
    for one, other in zip(pytree.tree_leaves(without_scalars), pytree.tree_leaves(again), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_the_first_tensor_with_dimensions_says_how_many_rows_there_are() -> None:
    assert count_rows((None, 3, torch.tensor(1.0), {"x": torch.zeros(7, 2)}, torch.zeros(5))) == 7


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean() + 0 * target.sum()


class Positioned(nn.Module):
    """Has position ids of shape [3, rows, tokens], as multimodal models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, words: Tensor, position_ids: Tensor) -> Any:
        first, second, third = position_ids[..., None]
        value = self.embed(words) + first.sin() + second.cos() * third
        for block in self.blocks:
            value = block(value)
        return value


@pytest.mark.parametrize("rows", [3, 8])
def test_the_advice_for_rows_in_a_later_dimension_works(rows: int) -> None:
    model = Positioned().eval()
    words, positions = torch.randint(10, (rows, 5)), torch.arange(15 * rows).view(3, rows, 5)
    given = {"words": words, "position_ids": positions}
    with pytest.raises(ValueError, match=r"position_ids.* dimension 1 holds the rows.*(ambiguous|later-dimension)"):
        pipe_by_costs(model, 2, 2, sample=given, costs="params").step(given, words, mean_of_squares)
    parts = zip(words.tensor_split(2), positions.tensor_split(2, 1), strict=True)
    ready: Any = gpipe.MicroBatches([{"words": some, "position_ids": theirs} for some, theirs in parts])
    pipe = pipe_by_costs(model, 2, 2, sample=ready, costs="params").eval()
    with torch.no_grad():
        assert torch.equal(torch.cat(pipe(ready)), torch.cat([model(**part) for part in ready]))


class Weighted(nn.Module):
    """Has a table that all rows use, a number and None as inputs."""

    def forward(self, given: tuple[Tensor, Tensor, Tensor, float, None]) -> Tensor:
        x, table, factor, number, nothing = given
        assert nothing is None
        assert table.shape == (2, 3)
        return x @ table.t() * factor + number


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_whole_tensors_scalars_and_other_values_go_to_every_micro_batch(micro_batches: int) -> None:
    x, table = torch.randn(7, 3), torch.randn(2, 3)
    pipe = gpipe.GPipe([Weighted()], partitions=1, micro_batches=micro_batches)
    out = pipe((x, gpipe.Whole(table), torch.tensor(2.0), 0.5, None))
    torch.testing.assert_close(out, x @ table.t() * 2 + 0.5)


def test_whole_stays_whole_though_its_rows_are_those_of_the_mini_batch() -> None:
    parts = split((torch.zeros(4, 1), gpipe.Whole(torch.arange(4))), 4, 2, "inputs")
    assert all(isinstance(part, tuple) and torch.equal(part[1], torch.arange(4)) for part in parts)


def test_outputs_without_the_rows_of_their_micro_batch_are_refused_and_several_for_each_told() -> None:
    """Bug story: with rows in the second dimension 12 of them gave an output of 32, and no word was said."""
    ones = torch.ones
    refused: list[tuple[list[Tree], str]] = [
        ([torch.tensor(1.0), torch.tensor(1.0)], r"output has the shape \(\) for 3 rows and \(\) for 2 rows"),
        ([(ones(3),), [ones(2)]], "output does not have the same structure"),
        ([{"rows": 3}, {"rows": 2}], r"output\['rows'\] is 3 for the first"),
        ([(ones(3), ones(2)), (ones(2), None)], r"output\[1\] has the shape \(2,\) for 3 rows and None for 2 rows"),
        ([ones(8, 3), ones(8, 2)], r"output has the shape \(8, 3\) for 3 rows and \(8, 2\) for 2 rows"),
        ([{"h": ones(1, 3)}, {"h": ones(1, 2)}], r"output\['h'\] has the shape \(1, 3\)"),
        ([ones(1, 8), ones(1, 8)], r"output has the shape \(1, 8\)"),
        ([ones(6), ones(2)], r"output has the shape \(6,\)"),
        ([ones(3, 5), ones(2, 4)], r"output has the shape \(3, 5\) for 3 rows and \(2, 4\)"),
    ]
    for parts, why in refused:
        with pytest.raises(TypeError, match=f"{why}.*outputs-cannot-be-joined"):
            merge(parts, [3, 2], list[object]().append)
        assert merge(parts[:1], [3]) is parts[0]
    for times in range(4):
        told: list[str] = []
        whole = torch.arange(5 * times * 2).reshape(5 * times, 2)
        merged: Any = merge([{"a": whole[: 3 * times]}, {"a": whole[3 * times :]}], [3, 2], told.extend)
        assert torch.equal(merged["a"], whole)
        assert [text.partition(" for each row")[0] for text in told] == ["output['a'] has several rows"] * (times > 1)


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_refuses_rows_that_are_not_first_and_tells_once_of_several(grad: bool) -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(0, 1)

    x = torch.randn(14, 4)
    for rows in (12, 14):
        pipe = gpipe.GPipe([nn.Linear(4, 8), Turned()], 2, 4)
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(TypeError, match=r"shape \(8, 3\)|shape \(8, 4\) for 4 rows"),
        ):
            pipe(x[:rows])
    pipe = gpipe.GPipe([nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten(0, 1)], 2, 4)
    with torch.set_grad_enabled(grad):
        for rows in (12, 14, 1):
            assert pipe(x[:rows]).shape == (2 * rows, 4)
    assert len([text for text in pipe.findings if "several rows" in text]) == 1


@LAW
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_a_function_weighs_by_the_target(found: list[int]) -> None:
    shares = loss_weights(lambda target: target, [1] * len(found), found)
    assert shares == [weight / sum(found) for weight in found]
    assert loss_weights(lambda target: torch.tensor(target), [1] * len(found), found) == shares
