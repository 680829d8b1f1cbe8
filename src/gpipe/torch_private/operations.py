"""The operations that torch does, those of backwards included, as they are done."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe.torch_private.trees import tree_leaves


class Operations(TorchDispatchMode):
    """Sees the tensors that operations inside make; it may be entered again and again, by one thread at a time."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sees an operation."""
        given = tree_leaves((args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        self.see(
            [leaf for leaf in given if isinstance(leaf, Tensor)],
            [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)],
        )
        return made

    @abstractmethod
    def see(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Is told of an operation's tensors."""
