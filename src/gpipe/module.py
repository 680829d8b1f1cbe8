"""Implements the methods of `torch.nn.Module` for a pipe, whose layers may be in several processes.

Layers keep their own names. The pipe supports copies, `state_dict`, attributes and iteration. Partitions cannot be
moved.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn

from gpipe._torch.modules import hold_state_of
from gpipe.batch.inputs import NO_GRAPH
from gpipe.config.arguments import Settings
from gpipe.distributed.parameters import find_tied_names, guard_partial_parameters
from gpipe.distributed.processes import SingleProcess
from gpipe.features.recorder import Recorder
from gpipe.planner.search.plan import Plan
from gpipe.stages.skips import Sequential

T = TypeVar("T", bound=Tensor)


class Partitioned(nn.Module):
    """A sequence of layers or a traced model, of which this process may have only some layers.

    Attributes:
        ties_of_names: The first name of each tied parameter in this process.
    """

    recorder: Recorder | None
    _given: tuple[weakref.ref[nn.Module], list[int]] | None = None
    """The `nn.Sequential` that the user passed, and the ids of its layers at that time."""

    def __init__(self, settings: Settings, plan: Plan, processes: SingleProcess) -> None:
        super().__init__()
        self._settings, self._plan = settings, plan
        self._processes, self._stages = processes, processes.engine
        self._remote_names: frozenset[str] = frozenset()  # Parameters and buffers of a model in other processes.
        guard_partial_parameters(self, processes)
        self.ties_of_names = {} if processes.position is None else find_tied_names(processes.engine)

    def _hold_layers(self) -> None:
        """Adds the layers of this process as submodules. Call this method after all attributes are set.

        `add_module` would reject a layer that has the same name as an attribute.
        """
        traced = self._settings.traced
        if traced is None:
            self._modules.update(self._own_layers())
            return
        model = traced.model
        hold_state_of(self, model)
        self.__dict__["training"] = model.training
        if self._processes.position is not None:
            names = traced.names()
            self._remote_names = (
                frozenset().union(*names.values()).difference(*map(names.__getitem__, self._own_layers()))
            )

    def _own_layers(self) -> dict[str, nn.Module]:
        return {layer.name: layer.module for stage in self._stages.local for layer in stage.layers}

    @property
    def is_model(self) -> bool:
        """Whether the pipe was created from a model, not from a sequence of layers."""
        return self._settings.traced is not None

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode of all modules, and of the model itself."""
        super().train(mode)
        if self._settings.traced is not None:
            self._settings.traced.model.training = mode
        return self

    def __len__(self) -> int:
        """Returns the number of layers in all partitions."""
        return len(self._settings.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterates over the layers. With several processes, iterates over the layers of this process."""
        return iter(self._own_layers().values())

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequential: ...

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Returns a layer. For a slice, returns a `gpipe.Sequential` of layers.

        Args:
            index: The index of a layer, or a slice, as for `nn.Sequential`.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)], 2, 4)
        >>> pipe[-1].out_features, len(pipe), len(pipe[:2])
        (1, 3, 2)

        Raises:
            IndexError: If the index is out of range, or if the layer is in another process.
        """
        names = list(self._settings.layers)
        if isinstance(index, slice):
            return Sequential(OrderedDict((name, self._own_layer(name)) for name in names[index]))
        try:
            name = names[index]
        except (TypeError, IndexError):
            last = len(names) - 1
            raise IndexError(
                f"There is no layer {index!r}. Use an index from 0 to {last}, -1 for the last, or a slice."
            ) from None
        return self._own_layer(name)

    def _own_layer(self, name: str) -> nn.Module:
        own = self._own_layers()
        if name not in own:
            raise IndexError(
                f"Layer {name} is in another process. Use one of the layers of this process: {', '.join(own)}."
            )
        return own[name]

    @property
    def partitions(self) -> int:
        """The number of partitions, K."""
        return len(self._settings.devices)

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each stage. If each rank has one stage, these are the layers per partition."""
        return self._plan.layers_per_partition

    @property
    def plan(self) -> Plan:
        """The plan of the pipe: its split points, schedule, M and recomputation modes, and the predicted costs."""
        if not self._plan.seconds:
            self._plan = self._plan.timed()
        return self._plan

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each layer, from which the split points were chosen."""
        return self._plan.partition.layer_costs.costs

    @property
    def micro_batches(self) -> int:
        """The maximum number of micro-batches per step, M."""
        return self._plan.micro_batches

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each partition."""
        return self._settings.devices

    @property
    def reads_inputs(self) -> bool:
        """Whether this process has the first stage, which reads the inputs. With one process, this is always True."""
        return self._stages.reads_inputs

    @property
    def reads_targets(self) -> bool:
        """Whether this process has the last stage, which reads the targets. With one process, this is always True."""
        return self._stages.reads_targets

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each layer of this process, by name. For a model, the stage of each parameter and buffer."""
        traced = self._settings.traced
        layers = [(layer.name, stage.index) for stage in self._stages.local for layer in stage.layers]
        if traced is None:
            return dict(layers)
        names = traced.names()
        return {name: stage for layer, stage in reversed(layers) for name in names[layer]}

    @property
    def held_before(self) -> frozenset[str]:
        """The names of parameters and buffers that the process of an earlier layer also has, under the same name."""
        traced = self._settings.traced
        if traced is None or self._processes.position is None:
            return frozenset()
        own, layers = self._own_layers(), [*traced.names().items()]
        buffers = [name for name, _ in traced.model.named_buffers(remove_duplicate=False)]
        layers.append((layers[0][0], buffers))  # A buffer that every layer reads belongs to the first layer.
        first = {name: layer for layer, names in reversed(layers) for name in names}
        return frozenset(name for name, layer in first.items() if layer not in own)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over the parameters of this process with their names.

        A parameter that several processes have is listed under its first name.
        """
        guard_partial_parameters(self, self._processes)
        first_names = self.ties_of_names if remove_duplicate else {}
        named = super().named_parameters("", recurse, remove_duplicate=False)
        for name, parameter in self._local(named, remove_duplicate):
            yield ".".join(filter(None, (prefix, first_names.get(name, name)))), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterates over the buffers of this process with their names."""
        named = super().named_buffers("", recurse, remove_duplicate=False)
        for name, buffer in self._local(named, remove_duplicate):
            yield ".".join(filter(None, (prefix, name))), buffer

    def _local(self, named: Iterable[tuple[str, T]], remove_duplicate: bool) -> Iterator[tuple[str, T]]:
        """Yields the tensors of this process. A tensor with several names has its first name that is not remote."""
        seen: set[int] = set()
        for name, tensor in named:
            if name not in self._remote_names and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield name, tensor

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state of this process's layers. With one process, this is the state of all layers."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name in self._remote_names:
            state.pop(f"{prefix}{name}", None)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of this process's layers. The state of a model may include layers of other processes."""
        remote = {name: value for name, value in super().state_dict().items() if name in self._remote_names}
        return super().load_state_dict({**remote, **state_dict}, strict, assign)

    def close(self) -> None:
        """Ends the rank threads and the connections to other processes. The next step creates new ones.

        `with gpipe.GPipe(...) as pipe:` closes the pipe too. If the block raises an error, the other processes raise
        a `gpipe.RemoteError` with its text, so that they do not wait for this process.
        """
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        self._stages.threads.close()
        self._processes.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(error)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the pipe, even if a layer has the same name. Rejects the replacement of a layer."""
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif name not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        elif name in self.__dict__:
            self.__dict__[name] = value
        else:
            raise TypeError(
                f"Layer {name!r} cannot be replaced, because its partition would still run the old one. Replace it "
                f"before you create the pipe, or create a new pipe."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without the recorder."""
        return {**vars(self), "recorder": None, "_given": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies a function to all tensors, unless it moves them to a different device.

        Raises:
            ValueError: If the function changes the device. Partitions stay on their devices.
        """
        devices = dict.fromkeys(self._settings.devices)
        for device in devices:
            if fn(torch.empty(0, device=device)).device != device:
                raise ValueError(
                    f"The partitions are on {', '.join(map(str, devices))} and cannot be moved. Create a new pipe "
                    f"with devices=..."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        """Rejects `DistributedDataParallel`, which reads this attribute. For other code, it does not exist."""
        if sys._getframe(1).f_globals.get("__name__") != nn.parallel.distributed.__name__:
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise TypeError(
            "DistributedDataParallel cannot wrap a pipe, because it would all-reduce the gradients of every "
            "micro-batch. Use driver='process' with a multiple of K processes: the pipe then sums the gradients of "
            "its replicas once per step. [ddp-around-pipe]"
        )

    def __prepare_scriptable__(self) -> Self:
        """Rejects `torch.jit.script`, which calls this method."""
        raise TypeError(NO_GRAPH)
