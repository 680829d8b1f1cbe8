"""Which layers are alike, so that it is enough to measure or to count one of them."""

import pickle
from collections.abc import Collection
from io import BytesIO
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor, nn

from gpipe._torch.dispatcher import is_fake
from gpipe.stages.tree import Tree
from gpipe.tracing.stage import Essence, SingleLayer


class _Likeness(pickle.Pickler):
    """Writes tensors by how they are laid out, and which of their storages are kept; types and functions as such."""

    def __init__(self, file: BytesIO, kept: Collection[int], essence: Essence) -> None:
        super().__init__(file)
        self._kept, self._own, self._shared = kept, essence.own, essence.shared
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: object) -> str | None:
        """What is written for such an object; None for others, of which all that they hold is written."""
        if isinstance(item, (type, FunctionType, BuiltinFunctionType)) or id(item) in self._shared:
            return str(id(item))
        if type(item) is int and item == self._own:
            return "its own number"
        if isinstance(item, Tensor) and (type(item) in (Tensor, nn.Parameter) or is_fake(item)):
            storage = item.untyped_storage()
            which = [self._numbers.setdefault(id(each), len(self._numbers)) for each in (item, storage)]
            layout = type(item), item.shape, item.stride(), item.dtype, item.requires_grad, item.storage_offset()
            return str((which, layout, storage.nbytes(), id(storage) in self._kept))
        if isinstance(item, (Tensor, torch.jit.ScriptModule)):
            raise pickle.PicklingError("it cannot be told what it does")
        return None


def likeness(what: object, kept: Collection[int] = ()) -> bytes | None:
    """The same for layers, and what they take, of which all is alike but numbers in tensors; None: it is not known.

    All attributes are compared: that a layer prints like another is not enough. Of storages that are `kept`, by their
    identities, it matters that they are.

    >>> likeness(nn.Linear(2, 3)) == likeness(nn.Linear(2, 3)) != likeness(nn.Linear(2, 3, bias=False))
    True
    """
    found = BytesIO()
    try:
        essence = what if isinstance(what, Essence) else Essence(what)
        _Likeness(found, kept, essence).dump(essence.what)
    except Exception:  # what cannot be pickled raises whatever it likes
        return None
    return found.getvalue()


def likeness_of(layer: nn.Module, value: Tree, kept: Collection[int] = ()) -> bytes | None:
    """The same for layers that cost the same on values: of a model's, by what runs in them."""
    return likeness(layer.essence(value) if isinstance(layer, SingleLayer) else (layer, value), kept)
