"""Threads that stand in for processes: each holds one stage of a pipe, as a process would; they meet at a barrier."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import gpipe
from gpipe.distributed.communicator import Communicator
from gpipe.errors import RemoteError

Made = TypeVar("Made")


class Meeting:
    def __init__(self, size: int) -> None:
        self.size, self.left = size, False
        self.told: dict[int, dict[int, bytes]] = {}  # by exchange and rank
        self.news = threading.Condition()

    def leave(self) -> None:
        with self.news:
            self.left = True
            self.news.notify_all()


class Member(Communicator):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.exchanges = 0

    def all_gather(self, told: bytes) -> list[bytes]:
        self.exchanges += 1
        with self.meeting.news:
            heard = self.meeting.told.setdefault(self.exchanges, {})
            heard[self.rank] = told
            self.meeting.news.notify_all()
            self.meeting.news.wait_for(lambda: self.meeting.left or len(heard) == self.size)
        if len(heard) < self.size:
            raise RemoteError("a rank is gone", -1)
        return [heard[rank] for rank in range(self.size)]

    def gone(self) -> tuple[int, ...]:
        return ()


class RankPipe(nn.Module):
    """What a pipe is in one of several processes: the layers of one stage, under their names in the whole model."""

    def __init__(self, whole: gpipe.GPipe, member: Member) -> None:
        super().__init__()
        self.partitions = whole.partitions
        self.layers_per_partition = whole.layers_per_partition
        self.micro_batches, self.plan = whole.micro_batches, whole.plan
        self.step_number = whole.step_number
        self._processes = member
        self.seed = whole.seed
        names: dict[int, str] = {}
        every = whole.state_dict(keep_vars=True).items()
        self.ties_of_names = {name: names.setdefault(id(tensor), name) for name, tensor in every}
        stage, counts = member.rank % self.partitions, self.layers_per_partition
        first = sum(counts[:stage])
        own = list(whole._modules.items())[first : first + counts[stage]]
        self._modules.update({name: copy.deepcopy(layer) for name, layer in own})
        self.stage_of = dict.fromkeys(self._modules, stage)
        self.held_before: frozenset[str] = frozenset()


def rank_pipes(whole: gpipe.GPipe, replicas: int = 1) -> list[RankPipe]:
    """The pipe in as many processes as it has stages, times replicas."""
    size = whole.partitions * replicas
    meeting = Meeting(size)
    return [RankPipe(whole, Member(meeting, rank)) for rank in range(size)]


def run_ranks(act: Callable[[Any], Made], pipes: Sequence[nn.Module]) -> list[Made | BaseException]:
    """What each rank's thread makes, or raises; a rank that raises is gone for the others."""
    with ThreadPoolExecutor(len(pipes)) as threads:
        futures = [threads.submit(act, pipe) for pipe in pipes]
        return [future.exception() or future.result() for future in futures]


def all_well(made: Sequence[Made | BaseException]) -> list[Made]:
    """What the ranks made, none of which raised."""
    for each in made:
        if isinstance(each, BaseException):
            raise each
    return list(made)  # type: ignore[arg-type]  # none is an exception


def optimizer_of(whole: nn.Module, optimizer: torch.optim.Optimizer | None, own: nn.Module) -> Any:
    """An optimizer of a rank's own parameters, with the state that the whole one has for them; None without any."""
    if optimizer is None or not list(own.parameters()):
        return None
    ties = getattr(own, "ties_of_names", {})
    by_name = dict(whole.named_parameters(remove_duplicate=False))
    groups = []
    for group in optimizer.param_groups:
        inside = {id(parameter) for parameter in group["params"]}
        mine = [p for name, p in own.named_parameters() if id(by_name[ties.get(name, name)]) in inside]
        groups.append({**group, "params": mine})
    kind: Any = type(optimizer)
    made = kind([{"params": group["params"]} for group in groups if group["params"]])
    for name, parameter in own.named_parameters():
        made.state[parameter] = copy.deepcopy(dict(optimizer.state[by_name[ties.get(name, name)]]))
    for group, options in zip(made.param_groups, [group for group in groups if group["params"]], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    return made


def save_in_ranks(
    folder: Path, whole: gpipe.GPipe, optimizer: torch.optim.Optimizer | None, replicas: int = 1, **options: Any
) -> Path:
    """Saves a pipe as processes would that hold a stage each."""

    def save(own: RankPipe) -> Path:
        return gpipe.save(folder, own, optimizer_of(whole, optimizer, own), **options).wait()  # type: ignore[arg-type]

    return all_well(run_ranks(save, rank_pipes(whole, replicas)))[0]
