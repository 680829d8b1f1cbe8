"""SIGTERM ends a run at the end of a step, with its state saved; the second one ends it at once."""

import os
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

import gpipe
from gpipe.checkpoint.sigterm import TERMINATED
from tests.support.checkpointed import make, trained
from tests.support.progress import run as run_watched
from tests.support.thread_ranks import RankPipe, all_well, rank_pipes, run_ranks

SCRIPT = """
    import os, signal, sys, torch, gpipe
    pipe = gpipe.GPipe([torch.nn.Linear(2, 1)], 1, 2, driver="lockstep")
    loss = torch.nn.functional.mse_loss
    def tell_self(output, target):
        if pipe.step_number == 2 and float(target.sum()) == 1:
            for _ in range(int(sys.argv[2])):
                os.kill(os.getpid(), signal.SIGTERM)
        return loss(output, target)
    with gpipe.catch_sigterm(pipe) as is_to_end:
        while pipe.step_number < 9:
            pipe.step(torch.ones(2, 2), torch.tensor([[1.0], [2.0]]), tell_self)
            if is_to_end():
                gpipe.save(sys.argv[1], pipe, background=True)
                raise SystemExit(143)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_the_first_sigterm_saves_and_the_second_quits(times: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(times)]
    done = run_watched(command)
    if times == 1:
        assert done.returncode == TERMINATED == 143
        assert gpipe.load(tmp_path).step_number == 3
    else:
        assert done.returncode == -signal.SIGTERM
        assert gpipe.find_checkpoint(tmp_path) is None


def test_all_ranks_end_at_the_same_step(caplog: pytest.LogCaptureFixture) -> None:
    """In threads there are no signals. Only rank 1 is asked to stop; all ranks stop after the same step."""

    def run(own: RankPipe) -> tuple[int, int]:
        steps = count()
        with gpipe.catch_sigterm(own, should_stop=lambda: own._processes.rank == 1 and next(steps) == 4) as is_to_end:
            for step in range(9):
                if number := is_to_end():
                    return step, number
        return -1, 0

    before = signal.getsignal(signal.SIGTERM)
    assert all_well(run_ranks(run, rank_pipes(trained()[0], 2))) == [(4, signal.SIGTERM)] * 6
    assert signal.getsignal(signal.SIGTERM) is before
    assert "sigterm" not in caplog.text


def test_outside_the_main_thread_only_a_warning_says_that_nothing_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> int:
        with gpipe.catch_sigterm(make()) as is_to_end:
            return is_to_end()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(run).result() == 0
    assert [record.message.split()[-1] for record in caplog.records] == ["[sigterm-off-main-thread]"]


def test_in_the_main_thread_both_count() -> None:
    answers = [None, "a node will be stopped"]
    with gpipe.catch_sigterm(make(), should_stop=lambda: answers.pop(0)) as is_to_end:
        assert [is_to_end(), is_to_end()] == [0, signal.SIGTERM]
    with gpipe.catch_sigterm(make(), should_stop=lambda: None) as is_to_end:
        os.kill(os.getpid(), signal.SIGTERM)
        assert is_to_end() == signal.SIGTERM


def test_an_error_of_should_stop_reaches_all_ranks() -> None:
    def run(own: RankPipe) -> str:
        def ask() -> bool:
            if own._processes.rank == 1:
                raise OSError("no answer")
            return False

        with gpipe.catch_sigterm(own, should_stop=ask) as is_to_end:
            try:
                is_to_end()
            except (OSError, gpipe.RemoteError) as error:
                return f"{type(error).__name__}: {error}"
        return ""

    texts = all_well(run_ranks(run, rank_pipes(trained()[0], 2)))
    assert set(texts) == {"OSError: no answer", "RemoteError: rank 1 failed: OSError: no answer"}


@pytest.mark.parametrize(
    ("number", "second"), [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)]
)
def test_the_first_signal_is_noted_and_the_callers_handler_comes_back(number: signal.Signals, second: object) -> None:
    before = signal.getsignal(number)
    with gpipe.catch_sigterm(make(), ctrl_c=number == signal.SIGINT) as is_to_end:
        assert not is_to_end()
        os.kill(os.getpid(), number)
        assert is_to_end() == is_to_end() == number
        assert signal.getsignal(number) is second
    assert signal.getsignal(number) is before


def test_what_is_no_pipe_is_refused() -> None:
    with pytest.raises(TypeError, match="pipe is a int"), gpipe.catch_sigterm(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="should_stop is a bool"), gpipe.catch_sigterm(make(), should_stop=True):  # type: ignore[arg-type]
        pass
