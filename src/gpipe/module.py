"""What `torch.nn.Module` promises, kept by a pipe: its layers under their own names, copies, moves, attributes."""

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
    """A sequence of layers, of which this process may hold some."""

    recorder: Recorder | None
    _given: tuple[weakref.ref[nn.Module], list[int]] | None = None
    """The `nn.Sequential` that it was given, and the ids of its layers, as they were."""

    def __init__(self, settings: Settings, plan: Plan, processes: SingleProcess) -> None:
        super().__init__()
        self._settings, self._plan = settings, plan
        self._processes, self._engine = processes, processes.engine
        self._foreign: frozenset[str] = frozenset()  # what other processes hold of a model
        guard_partial_parameters(self, processes)
        self.ties_of_names = {} if processes.position is None else find_tied_names(processes.engine)

    def _hold_layers(self) -> None:
        """Takes the layers of this process for modules: at last, and not by add_module, whatever they are named."""
        traced = self._settings.traced
        if traced is None:
            self._modules.update(self._own_layers())
            return
        model = traced.model
        hold_state_of(self, model)
        self.__dict__["training"] = model.training
        if self._processes.position is not None:
            names = traced.names()
            self._foreign = frozenset().union(*names.values()).difference(*map(names.__getitem__, self._own_layers()))

    def _own_layers(self) -> dict[str, nn.Module]:
        return {layer.name: layer.module for stage in self._engine.local for layer in stage.layers}

    @property
    def is_model(self) -> bool:
        """Whether this is a model that is traced, and no sequence of layers."""
        return self._settings.traced is not None

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of all modules, as on the model itself."""
        super().train(mode)
        if self._settings.traced is not None:
            self._settings.traced.model.training = mode
        return self

    def __len__(self) -> int:
        """The number of layers, of all partitions."""
        return len(self._settings.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order; over processes this one's."""
        return iter(self._own_layers().values())

    @overload
    def __getitem__(self, at: int) -> nn.Module: ...

    @overload
    def __getitem__(self, at: slice) -> Sequential: ...

    def __getitem__(self, at: int | slice) -> nn.Module:
        """A layer by its place among all, or a `gpipe.Sequential` of several, as on `nn.Sequential`.

        >>> import gpipe, torch
        >>> pipe = gpipe.GPipe([torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)], 2, 4)
        >>> pipe[-1].out_features, len(pipe), len(pipe[:2])
        (1, 3, 2)

        Raises:
            IndexError: There is no such layer, or another process has it.
        """
        names = list(self._settings.layers)
        if isinstance(at, slice):
            return Sequential(OrderedDict((name, self._own_layer(name)) for name in names[at]))
        try:
            name = names[at]
        except (TypeError, IndexError):
            last = len(names) - 1
            raise IndexError(f"there is no layer {at!r}; give 0 to {last}, -1 for the last, or a slice") from None
        return self._own_layer(name)

    def _own_layer(self, name: str) -> nn.Module:
        own = self._own_layers()
        if name not in own:
            raise IndexError(f"layer {name} is another process's; this one has {', '.join(own)}")
        return own[name]

    @property
    def partitions(self) -> int:
        """K."""
        return len(self._settings.devices)

    @property
    def layers_per_partition(self) -> tuple[int, ...]:
        """The number of layers of each stage: of each partition, where that is one."""
        return self._plan.layers_per_partition

    @property
    def plan(self) -> Plan:
        """The plan that the pipe follows: its cuts, schedule, M and remat, and what they cost."""
        if not self._plan.seconds:
            self._plan = self._plan.timed()
        return self._plan

    @property
    def costs(self) -> tuple[float, ...]:
        """What each layer was taken to cost."""
        return self._plan.partition.layer_costs.costs

    @property
    def micro_batches(self) -> int:
        """M."""
        return self._plan.micro_batches

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each partition."""
        return self._settings.devices

    @property
    def reads_inputs(self) -> bool:
        """Whether this process has the first stage, and reads inputs; in one process always."""
        return self._engine.reads_inputs

    @property
    def reads_targets(self) -> bool:
        """Whether this process has the last stage, and reads targets; in one process always."""
        return self._engine.reads_targets

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each layer of this process, by its name; of a model, of each parameter and buffer by its."""
        traced = self._settings.traced
        layers = [(layer.name, stage.index) for stage in self._engine.local for layer in stage.layers]
        if traced is None:
            return dict(layers)
        names = traced.names()
        return {name: stage for layer, stage in reversed(layers) for name in names[layer]}

    @property
    def held_before(self) -> frozenset[str]:
        """The names of what the process of an earlier layer has too, under the same name."""
        traced = self._settings.traced
        if traced is None or self._processes.position is None:
            return frozenset()
        own, layers = self._own_layers(), [*traced.names().items()]
        buffers = [name for name, _ in traced.model.named_buffers(remove_duplicate=False)]
        layers.append((layers[0][0], buffers))  # those that every layer reads count to the first
        first = {name: layer for layer, names in reversed(layers) for name in names}
        return frozenset(name for name, layer in first.items() if layer not in own)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process by name, one that is shared with another under its first name there."""
        guard_partial_parameters(self, self._processes)
        first = self.ties_of_names if remove_duplicate else {}
        every = super().named_parameters("", recurse, remove_duplicate=False)
        for name, parameter in self._own_among(every, remove_duplicate):
            yield ".".join(filter(None, (prefix, first.get(name, name)))), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this process by name."""
        every = super().named_buffers("", recurse, remove_duplicate=False)
        for name, buffer in self._own_among(every, remove_duplicate):
            yield ".".join(filter(None, (prefix, name))), buffer

    def _own_among(self, named: Iterable[tuple[str, T]], remove_duplicate: bool) -> Iterator[tuple[str, T]]:
        """Those of this process, one of several names under the first that is not another process's."""
        seen: set[int] = set()
        for name, tensor in named:
            if name not in self._foreign and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield name, tensor

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of this process, by name; in one process that of all layers."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name in self._foreign:
            found.pop(f"{prefix}{name}", None)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads the state of this process; of a model what others hold may be there, too."""
        others = {name: value for name, value in super().state_dict().items() if name in self._foreign}
        return super().load_state_dict({**others, **state_dict}, strict, assign)

    def close(self) -> None:
        """Ends the rank threads, and the links to other processes; the next step makes new ones."""
        self._engine.threads.close()
        self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what is the pipe's own also where a layer has the same name; layers stay what they are."""
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif name not in self.__dict__.get("_modules", ()):
            super().__setattr__(name, value)
        elif name in self.__dict__:
            self.__dict__[name] = value
        else:
            why = f"layer {name!r} stands in a partition and cannot be replaced: the old one would go on running"
            raise TypeError(f"{why}; replace it before, or make a new pipe")

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle leaves the recorder behind, as it does threads."""
        return {**vars(self), "recorder": None, "_given": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves nothing to other devices: partitions stay where `devices` put them. Other changes are fine."""
        devices = dict.fromkeys(self._settings.devices)
        for device in devices:
            if fn(torch.empty(0, device=device)).device != device:
                remedy = "a pipe cannot be moved as a whole, make a new one with devices=..."
                raise ValueError(f"the partitions are on {', '.join(map(str, devices))}; {remedy}")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Sequence[str]:
        """What `DistributedDataParallel` asks of a module that it wraps; others that list attributes find none."""
        if sys._getframe(1).f_globals.get("__name__") != nn.parallel.distributed.__name__:
            raise AttributeError("_ddp_params_and_buffers_to_ignore")
        raise TypeError(
            "DistributedDataParallel cannot wrap a pipe: it would reduce the gradients of every micro-batch by "
            "itself, M times a step; make replicas by driver='process' over a multiple of K processes, which add up "
            "their gradients by themselves"
        )

    def __prepare_scriptable__(self) -> Self:
        """What `torch.jit.script` asks for."""
        raise TypeError(NO_GRAPH)
