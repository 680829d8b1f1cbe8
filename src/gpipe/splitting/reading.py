"""Tells a model from a sequence of layers, and records it."""

from collections import UserDict
from collections.abc import Sequence

import torch
from torch import nn

from gpipe.layers.skips import Sequential
from gpipe.splitting.layers_of import ModelLayers
from gpipe.splitting.model import ReplayedModel
from gpipe.torch_private.modes import is_compiled
from gpipe.values.microbatch import MicroBatches
from gpipe.values.tree import Tree

COMPILED = (
    "give the model itself (torch.compile(model) keeps it as ._orig_mod; after model.compile() make it anew), and "
    "compile its blocks: for block in model.layers: block.compile()"
)
SCRIPTED = "give the model that was scripted"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def is_model(given: object) -> bool:
    """Whether what is given as layers is a model with a forward of its own.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x): return super().forward(x) + x
    >>> is_model(nn.Sequential()), is_model(Net()), is_model(nn.Linear(2, 2)), is_model([nn.Linear(2, 2)])
    (False, True, True, False)
    """
    if isinstance(given, (ModelLayers, torch.jit.ScriptModule)):
        return True
    own = (nn.Sequential.forward, Sequential.forward)
    return isinstance(given, nn.Module) and type(given).forward not in own and not isinstance(given, LISTS)


def plain(value: Tree) -> Tree:
    """A mapping of a class that torch's trees do not know, such as what a tokenizer gives, as a dict."""
    if isinstance(value, MicroBatches):
        return MicroBatches([plain(part) for part in value])
    return dict(value) if isinstance(value, UserDict) else value


def read_model(given: object, sample: Tree, blocks: Sequence[str] | None) -> ReplayedModel | None:
    """The model as layers; None if these are layers already, or there is no sample to record it on.

    Raises:
        ValueError: It cannot be cut.
    """
    if isinstance(given, ModelLayers):
        return given.replayed
    if closed := _why_closed(given):
        raise ValueError(closed)
    if sample is None or not isinstance(given, nn.Module) or not is_model(given):
        return None
    return ReplayedModel(given, sample, blocks)


def _why_closed(given: object) -> str | None:
    """Why what a model does cannot be seen, if so."""
    if not is_model(given) or not isinstance(given, nn.Module):
        return None
    compiled = is_compiled(given)
    if not compiled and not isinstance(given, torch.jit.ScriptModule):
        return None
    what, instead = ("compiled", COMPILED) if compiled else ("scripted", SCRIPTED)
    return f"the model is {what} as a whole, and what it does cannot be seen any more; {instead}"


def why_not_layers(given: object, blocks: Sequence[str] | None) -> list[str]:
    """What is wrong with what is to be layers, since there is no sample to make a model some on."""
    if is_model(given):
        return [
            f"a {type(given).__name__} is no sequence of layers; give sample=, an example mini-batch, on which its "
            f"forward is recorded to be cut into layers, or give an nn.Sequential of its layers"
        ]
    if blocks is not None:
        return ["blocks= names the modules between which a model is cut; a sequence of layers needs none"]
    return []
