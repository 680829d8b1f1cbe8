"""An optimizer whose state is on the host makes the same steps."""

import errno
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adagrad import Adagrad

import gpipe

Make = Callable[[Iterable[Tensor]], Optimizer]
MAKES: list[Make] = [
    partial(AdamW, lr=0.01, amsgrad=True),
    partial(Adam, lr=0.01, foreach=True),
    partial(Adam, lr=0.01, fused=True),
    partial(SGD, lr=0.01, momentum=0.9),
    partial(Adagrad, lr=0.01),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64, 32))
    return whole.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(whole: nn.Module, optimizer: Optimizer, steps: int) -> list[Tensor]:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        whole(torch.randn(2, 3, 3, 3)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in whole.parameters()]


def train_on_plainly() -> list[Tensor]:
    plain = model()
    optimizer = AdamW(plain.parameters(), lr=0.01)
    train(plain, optimizer, 2)
    return train(plain, optimizer, 2)


def in_files(optimizer: Optimizer) -> list[bool]:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [value.untyped_storage().filename is not None for value in values if value.nbytes >= 4096]


@pytest.mark.parametrize("make", MAKES, ids=["adamw", "foreach", "fused", "sgd", "adagrad"])
def test_its_state_lies_in_files_and_weights_have_the_same_bits(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    whole, other = model(), model()
    expected, optimizer = train(whole, make(whole.parameters()), 3), make(other.parameters())
    gpipe.offload(optimizer)
    assert all(map(torch.equal, train(other, optimizer, 3), expected))
    files = in_files(optimizer)
    assert files
    assert all(files)
    assert not [*tmp_path.glob(f"{tempfile.template}*")]  # they have no names


def test_a_first_step_makes_state_in_files_one_tensor_after_another() -> None:
    class Own(Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in whole.parameters():
                self.state[parameter]["seen"] = torch.zeros(2048)
                assert in_files(self) == [True] * len(self.state)

    whole = model()
    optimizer = Own(whole.parameters(), {})
    gpipe.offload(optimizer)
    optimizer.step()
    assert all(type(state) is dict for state in optimizer.state.values())


def test_state_that_is_there_or_loaded_goes_too_and_is_saved_as_ever() -> None:
    whole, other = model(), model()
    first, second = AdamW(whole.parameters(), lr=0.01), AdamW(other.parameters(), lr=0.01)
    train(whole, first, 2)
    gpipe.offload(first)
    assert all(in_files(first))
    other.load_state_dict(whole.state_dict())
    gpipe.offload(second)
    second.load_state_dict(deepcopy(first.state_dict()))
    found, again = train(whole, first, 2), train(other, second, 2)
    assert all(map(torch.equal, found, again))
    assert all(in_files(second))
    assert all(map(torch.equal, found, train_on_plainly()))


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files with room for 64 KiB; where none may be mounted, one that seems to have none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    mounted = sys.platform == "linux" and not subprocess.run(mount, capture_output=True).returncode
    if not mounted:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=full), raising=False)
    yield tmp_path
    if mounted:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_disk_that_is_full_raises_and_tells_how_many_bytes_were_to_go_where(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was mapped from a file without room ended the process when it was written to."""
    whole = nn.Linear(128, 256)
    optimizer, told = (
        AdamW(whole.parameters(), lr=0.01),
        f"131,072 bytes could not be written to {full_disk}. Set TMPDIR",
    )
    gpipe.offload(optimizer)
    whole(torch.ones(2, 128)).square().sum().backward()
    before = whole.weight.detach().clone()
    with pytest.raises(OSError, match="No space left") as raised:
        optimizer.step()
    assert told in raised.value.__notes__[0]
    assert torch.equal(whole.weight, before)
    monkeypatch.undo()
    optimizer.step()  # where there is room, as if nothing had been
    assert len(optimizer.state[whole.weight]) == 3


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_steps_with_files_of_its_own_or_not_at_all(steps: int) -> None:
    """Bug story: the step of a child changed the state of its parent, which is mapped shared."""
    whole = model()
    optimizer = AdamW(whole.parameters(), lr=0.01)
    gpipe.offload(optimizer)
    train(whole, optimizer, steps)

    def work() -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and a child that needs them hangs.
        whole(torch.ones(2, 3, 3, 3)).square().sum().backward()
        if steps:
            with pytest.raises(RuntimeError, match="offloaded-state-before-fork"):
                optimizer.step()
        else:
            train(whole, optimizer, 2)
            assert all(in_files(optimizer))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    train(whole, optimizer, 2 - steps)
    assert all(map(torch.equal, train(whole, optimizer, 2), train_on_plainly()))


def test_state_that_is_sparse_stays_where_it_is() -> None:
    def run(offloaded: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(64, 64, sparse=True)
        optimizer = SGD(table.parameters(), lr=0.1, momentum=0.9)
        if offloaded:
            gpipe.offload(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.arange(5)).square().sum().backward()
            optimizer.step()
        return table.weight.detach(), optimizer.state[table.weight]["momentum_buffer"]

    (expected, kept), (weight, average) = run(False), run(True)
    assert torch.equal(weight, expected)
    assert average.is_sparse
    assert torch.equal(average.to_dense(), kept.to_dense())


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a Linear"):
        gpipe.offload(nn.Linear(1, 1))  # type: ignore[arg-type]
