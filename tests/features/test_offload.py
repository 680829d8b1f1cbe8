"""What autograd keeps goes to the host and comes back: which memory, when, and what is told if it cannot."""

import ctypes
import gc
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe
from gpipe.features import offload
from gpipe.features.offload import FileHost, OffloadedActivations
from gpipe.runtime.streams import RankStream
from gpipe.schedule.action import Action, Kind
from gpipe.schedule.schedules.by_name import program_of
from gpipe.schedule.simulate import figures
from tests.support.planned import pipe_by_costs

M, WIDTH = 8, 16
X = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(1))


class Shared(nn.Module):
    """Saves one tensor twice, views of one memory, its weight, and something that it holds on to."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.weight).chunk(2, dim=1)
        self.held = torch.sigmoid(a)
        both = (self.held * b).exp()
        out: Tensor = torch.cat([both * both, both.t().t() * a], dim=1) * self.scale
        return F.dropout(out, 0.2)


def layers() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), Shared(), nn.LayerNorm(WIDTH))]


def trained(**how: Any) -> tuple[list[Tensor], gpipe.GPipe]:
    with pipe_by_costs(layers(), how.pop("partitions", 2), M, costs=[1.0] * 12, seed=3, **how) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        found = []
        for _ in range(2):
            found.append(pipe.step(X, X, F.mse_loss))
            found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        pipe(X).sum().backward()
        return [*found, *(p.grad for p in pipe.parameters() if p.grad is not None)], pipe


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others)) and len(some) == len(others)


def inside_of(layer: nn.Module, x: Tensor) -> tuple[OffloadedActivations, Tensor]:
    inside = OffloadedActivations()
    with inside.watched():
        out = layer(x)
    return inside, out


def test_what_others_hold_stays_and_what_is_saved_twice_is_moved_once() -> None:
    layer, x = Shared(), X.clone().requires_grad_()
    inside, out = inside_of(layer, x)
    saved = len(inside.saved)
    inside.select_storages()
    stays = {t.untyped_storage().data_ptr() for t in (x, layer.weight, layer.scale, layer.held, out)}
    moved = [one.storage.data_ptr() for one in inside.moved if one.storage is not None]
    assert moved
    assert not stays & {*moved}
    assert len(moved) == len({*moved}) < sum(len(one.saved) for one in inside.moved) < saved
    for one in inside.moved:
        one.free()
    with pytest.raises(RuntimeError, match="are offloaded to host memory"):
        out.sum().backward()


def test_what_was_changed_since_it_was_saved_is_refused_as_torch_does() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x.exp()
            out: Tensor = kept * 1.0
            kept.mul_(2)
            return out

    for remat in ("never", "offload"):
        with gpipe.GPipe([nn.Linear(WIDTH, WIDTH), Writes()], 1, M, remat=remat) as pipe:
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
                pipe.step(X, X, F.mse_loss)
            assert any("in the backward of micro-batch 0" in note for note in raised.value.__notes__)


def test_a_layer_that_allows_no_hooks_is_named_with_the_remedy() -> None:
    class Differentiates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.func.grad(lambda a: a.square().sum())(x)

    for remat in ("offload", "never"):
        with gpipe.GPipe([nn.Linear(WIDTH, WIDTH), Differentiates()], 2, M, remat=[remat, "never"][::-1]) as pipe:
            if remat == "never":
                pipe.step(X, X, F.mse_loss)
                continue
            with pytest.raises(RuntimeError, match=r"torch\.func.* saved tensor hooks") as raised:
                pipe.step(X, X, F.mse_loss)
            said = "\n".join(raised.value.__notes__)
            assert "layer 1 (1: Differentiates)" in said
            assert "[offload-without-hooks]" in said


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_full_disk_is_told_with_its_type_and_place_and_the_pipe_goes_on(
    driver: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = trained(remat="never")
    files, made = count(), tempfile.TemporaryFile

    def full(**how: Any) -> Any:
        return open("/dev/full", "wb", buffering=0) if next(files) >= after else made(**how)

    with pipe_by_costs(layers(), 2, M, costs=[1.0] * 12, seed=3, remat="offload", driver=driver) as pipe:
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "TemporaryFile", full)
            with pytest.raises(OSError, match="No space left") as raised:
                pipe.step(X, X, F.mse_loss)
        notes = "\n".join(raised.value.__notes__)
        assert "which was in flight" in notes
        assert f"bytes could not be written to {tempfile.gettempdir()}. Set TMPDIR" in notes
        assert "OFFLOAD" in notes
        pipe.zero_grad()
        pipe.step_number = 0
        assert torch.equal(pipe.step(X, X, F.mse_loss), wanted[0])


class Saves(torch.autograd.Function):
    """Saves what is made of its input, and multiplies a gradient by what is read of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor], read: Callable[[Any], Tensor]) -> Tensor:
        ctx.read = read
        ctx.save_for_backward(make(x.detach()))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.read(*ctx.saved_tensors), None, None


class Own(Tensor):
    scale: float


def scaled(x: Tensor) -> Own:
    own = x.tanh().as_subclass(Own)
    own.scale = 3.0
    return own


STRANGE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Tensor]]] = {
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1:].flatten()]), lambda own: own.unbind()[0]),
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), lambda own: own.dequantize()),
    "a class with attributes": (scaled, lambda own: own.as_subclass(Tensor) * own.scale),
}


class Strange(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(WIDTH, WIDTH), name

    def forward(self, x: Tensor) -> Any:
        if self.name == "forward mode":
            return torch.func.jvp(torch.sin, (self.linear(x),), (torch.ones_like(x),))[1]
        return Saves.apply(self.linear(x), *STRANGE[self.name])


@pytest.mark.filterwarnings("ignore")  # of torch, where such tensors are made
@pytest.mark.parametrize("name", [*STRANGE, "forward mode"])
def test_what_is_no_dense_memory_stays_and_is_as_it_was_saved(name: str) -> None:
    found = []
    for remat in ("never", "offload"):
        torch.manual_seed(0)
        each = [nn.Linear(WIDTH, WIDTH), Strange(name), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        with pipe_by_costs(each, 2, M, costs=[1.0] * 4, remat=remat, driver="lockstep") as pipe:
            loss = pipe.step(X, X, F.mse_loss)
            found.append([loss, *(p.grad for p in pipe.parameters() if p.grad is not None)])
    assert same(*found)


def test_a_fork_cannot_go_on_with_what_was_offloaded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe_by_costs(layers(), 2, M, costs=[1.0] * 12, remat="offload", driver="lockstep") as pipe:
        loss = pipe(X).sum()
        monkeypatch.setattr(os, "getpid", partial(int, os.getpid() + 1))  # as in a fork
        with pytest.raises(RuntimeError, match=r"\[offloaded-before-fork\]"):
            loss.backward()
        monkeypatch.undo()


def open_files() -> int:
    """How many there are when the threads that move are gone."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(offload.NAME):
            thread.join(10)
            assert not thread.is_alive()
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_files_and_threads_are_gone_behind_a_step_and_with_a_call_that_is_dropped() -> None:
    with pipe_by_costs(layers(), 2, M, costs=[1.0] * 12, remat="offload") as pipe:
        pipe.step(X, X, F.mse_loss)
        before = open_files()
        pipe.step(X, X, F.mse_loss)
        assert open_files() == before
        out = pipe(X)
        assert len(os.listdir("/proc/self/fd")) == before + 2 * M
        del out
        assert open_files() == before


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(calls) == M - 2:
                raise KeyError("mine")
            return x

    calls = count()
    with pipe_by_costs([*layers(), Fails()], 2, M, costs=[1.0] * 13, remat="offload") as pipe:
        before = open_files()
        with pytest.raises(KeyError, match="mine"):
            pipe.step(X, X, F.mse_loss)
        assert open_files() == before
        pipe.step(X, X, F.mse_loss)
        assert open_files() == before


def test_what_came_back_holds_no_file_open_and_can_be_written_to() -> None:
    x = torch.arange(3000.0, requires_grad=True)  # storages end within a page
    host = FileHost(RankStream(torch.device("cpu"), single_device=True))
    before = open_files()
    inside, out = inside_of(nn.Sequential(*[nn.Softplus() for _ in range(9)]), x)
    gradient = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    host.offload(Action(Kind.OFFLOAD, 0, 0), inside)
    host.fetch(Action(Kind.FETCH, 0, 0), inside)
    host.finish(inside)
    host.close()
    assert open_files() == before
    assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], gradient)
    assert len(inside.moved) == 8
    for one in inside.moved:
        one.bytes().zero_()
    assert not any(one.bytes().any() for one in inside.moved)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the allocator is not glibc's")
def test_what_is_away_and_what_came_back_and_was_used_are_no_memory_of_the_process() -> None:
    x = torch.randn(64, 4096, requires_grad=True)  # 1 MiB
    host = FileHost(RankStream(torch.device("cpu"), single_device=True))

    def resident() -> int:
        host.offload(Action(Kind.OFFLOAD, 0, 1), OffloadedActivations())  # a move has what is free given back
        host.finish()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    inside, out = inside_of(nn.Sequential(*[nn.Softplus() for _ in range(9)]), x)
    gradient = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    before = resident()
    host.offload(Action(Kind.OFFLOAD, 0, 0), inside)
    host.finish()
    assert len(inside.moved) == 8
    assert before - resident() > 7 * 2**20
    host.fetch(Action(Kind.FETCH, 0, 0), inside)
    host.finish(inside)
    assert all(one.saved[0].tensor.data_ptr() % 64 == 0 for one in inside.moved)
    inside.release()
    assert resident() > before - 2**20
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)
    assert before - resident() > 7 * 2**20
    host.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_insides_are_held_however_many_micro_batches_there_are(schedule: str) -> None:
    x = torch.ones(M * 64, WIDTH)
    peaks = {}
    for remat in ("never", "always", "offload"):
        deep = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Softplus() for _ in range(10)]) for _ in range(6)]
        with gpipe.GPipe(deep, 6, M, remat=remat, schedule=schedule, driver="lockstep") as pipe:
            with gpipe.record(pipe, memory=True) as recording:
                pipe.step(x, x, F.mse_loss)
            peaks[remat] = recording.memory()[0].activations or 0
    inside = (peaks["never"] - peaks["always"]) / (figures(program_of(schedule, 6, M)).peaks[0] - 1)
    assert peaks["offload"] < 1.02 * (peaks["always"] + inside) < peaks["never"]


@pytest.mark.parametrize("driver", ["threads", "lockstep"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_inputs_and_optimizer_state_on_the_host_change_no_bit(partitions: int, driver: str) -> None:
    found = []
    for remat in ("never", "offload_inputs"):
        schedule = gpipe.Interleaved(3, "breadth_first")
        sizes = [12 // (3 * partitions)] * (3 * partitions)
        with gpipe.GPipe(layers(), sizes, M, schedule=schedule, remat=remat, seed=3, driver=driver) as pipe:
            optimizer = torch.optim.Adam(pipe.parameters())
            if remat == "offload_inputs":
                gpipe.offload(optimizer)
                assert any(action.kind is Kind.OFFLOAD for action in pipe.program.actions)
            found.append([pipe.step(X, X, F.mse_loss)])
            optimizer.step()
            pipe.zero_grad()
            found[-1] += [pipe.step(X, X, F.mse_loss), *(p.grad for p in pipe.parameters() if p.grad is not None)]
            optimizer.step()
            found[-1] += [p.detach().clone() for p in pipe.parameters()]
    assert same(*found)


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_inputs_of_three_micro_batches_are_held_however_many_there_are(micro_batches: int) -> None:
    rows, kept = 64, {}
    x = torch.ones(rows * micro_batches, WIDTH)
    for remat in ("always", "offload_inputs"):
        deep = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        with gpipe.GPipe(deep, 2, micro_batches, remat=remat, driver="lockstep") as pipe:
            with gpipe.record(pipe, memory=True) as recording:
                pipe.step(x, x, F.mse_loss)
            kept[remat] = recording.memory()[1].activations or 0
    one = rows * WIDTH * 4
    assert kept["always"] >= micro_batches * one
    # One is copied, one is used, and one has arrived from rank 0. A digest has a few bytes.
    assert kept["offload_inputs"] <= kept["always"] - (micro_batches - 3) * one + 64
