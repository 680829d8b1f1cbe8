"""Asks the autograd graph which leaves a backward reaches, which tensors others were made from, which node raised."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gpipe.torch_private.autograd import node_number


def find_ancestors(roots: Sequence[Tensor]) -> set[int]:
    """The indices of those tensors from which others of them were made.

    >>> import torch
    >>> one = torch.ones(2, requires_grad=True) * 2
    >>> find_ancestors([one, one * 3, one.detach()])
    {0}
    """
    edges: set[tuple[Node | None, int]] = set()
    todo = [edge for root in roots if root.grad_fn is not None for edge in root.grad_fn.next_functions]
    while todo:
        edge = todo.pop()
        if edge not in edges:
            edges.add(edge)
            todo += () if edge[0] is None else edge[0].next_functions
    return {
        at for at, root in enumerate(roots) if root.grad_fn is not None and (root.grad_fn, root.output_nr) in edges
    }


def leaves_of(roots: Sequence[Tensor], until: Collection[Node] = ()) -> Iterator[Tensor]:
    """The leaves that autograd would reach from these tensors, not past certain nodes.

    >>> import torch
    >>> weight = torch.ones(2, requires_grad=True)
    >>> [leaf is weight for leaf in leaves_of([(weight * 2).sum()])]
    [True]
    """
    todo: list[Node] = [root.grad_fn for root in roots if root.grad_fn is not None and root.grad_fn not in until]
    seen = {*todo, *until}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)


def failed_node(error: BaseException) -> int | None:
    """The sequence number of the autograd node that raised, if it is written in Python."""
    traceback = error.__traceback__
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("self")
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node_number(node)
        traceback = traceback.tb_next
    return None
