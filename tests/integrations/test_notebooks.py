"""Tests pipes in a notebook kernel: rerunning a cell leaves no threads, and a pipe works after an interrupt."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from tests.support.notebooks import alone

BEGIN = """
import signal, threading
import gpipe, torch
from torch import nn
from torch.nn.functional import mse_loss

x = torch.ones(8, 4)

def rank_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpipe rank")]

class Slow(nn.Linear):
    until = None

    def forward(self, x):
        if self.until:
            print("asleep", flush=True)
            self.until.wait()
        return super().forward(x)

def make():
    torch.manual_seed(0)
    return gpipe.GPipe([Slow(4, 4) for _ in range(3)], partitions=3, micro_batches=4, seed=0)
"""
OTHERS_END = """
own = pipe._stages.threads._threads
for thread in rank_threads():
    if thread not in own:
        thread.join()
print(len(rank_threads()))
"""


class Notebook:
    """Runs cells; `heard` is called with what a cell prints."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(
        self, code: str, heard: Callable[[str], object] = lambda _: None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """What the kernel answers, and what the cell showed: by type, and what it printed as `printed`."""
        shown = {"printed": ""}

        def hear(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown["printed"] += content["text"]
                heard(content["text"])
            elif message["msg_type"] == "execute_result":
                shown.update(content["data"])

        answer = self.client.execute_interactive(code, timeout=None, output_hook=hear)
        return answer["content"], shown

    def well(self, code: str) -> dict[str, str]:
        answer, shown = self.run(code)
        assert answer["status"] == "ok", "\n".join(answer["traceback"])
        return shown


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    manager, client = start_new_kernel(
        kernel_name="python3", startup_timeout=3600, env=alone(tmp_path_factory.mktemp("kernel"))
    )
    try:
        notebook = Notebook(manager, client)
        notebook.well(BEGIN)
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("last_line", ["pipe", "pipe.prediction", "None"])
def test_a_cell_that_is_run_again_leaves_no_thread_behind(notebook: Notebook, last_line: str) -> None:
    """Bug story: `Out` has what cells have shown, and each pipe among it had its threads."""
    for _ in range(3):
        shown = notebook.well(f"pipe = make()\nloss = pipe.step(x, x, mse_loss)\n{last_line}")
        assert ("text/html" in shown) == (last_line != "None")
        assert notebook.well(OTHERS_END)["printed"] == "3\n"


GENERATES = """
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 8 - 4 * (k < 2)) for k in range(3)])

    def forward(self, words):
        value = self.embed(words)
        for block in self.blocks:
            value = block(value)
        return value

    def generate(self, inputs, count):
        for _ in range(count):
            inputs = torch.cat([inputs, self(inputs)[:, -1:].argmax(-1)], 1)
        return inputs

words = torch.ones(8, 2, dtype=torch.int64)
"""


def test_a_cell_that_generates_and_calls_leaves_no_thread_behind(notebook: Notebook) -> None:
    notebook.well(GENERATES)
    for _ in range(3):
        notebook.well(
            "pipe = gpipe.GPipe(Counts(), 3, 4, sample=words).eval()\ntokens = pipe.generate(words, count=3)\n"
            "with torch.no_grad():\n    output = pipe(words)\npipe"
        )
        assert notebook.well(OTHERS_END)["printed"] == "3\n"


def test_a_pipe_whose_cell_failed_leaves_no_thread_behind_either(notebook: Notebook) -> None:
    answer, _ = notebook.run("pipe = make()\npipe.step(x[:, :2], x, mse_loss)")
    assert answer["ename"] == "RuntimeError"
    notebook.well("pipe = make()\nloss = pipe.step(x, x, mse_loss)")
    assert notebook.well(OTHERS_END)["printed"] == "3\n"


INTERRUPTED = """
heard = pipe[1].until = threading.Event()

def hear(*_):
    heard.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, hear)  # which the kernel puts back behind the cell
pipe.step(x, x, mse_loss)
"""


def test_an_interrupt_ends_a_step_says_what_to_do_and_the_pipe_goes_on(notebook: Notebook) -> None:
    """The layer sleeps until the interrupt is heard: on a busy machine it would else come behind the step."""
    notebook.well("pipe = make()\nfirst = pipe.step(x, x, mse_loss)\npipe.step_number = 0")
    pressed: list[str] = []

    def press(text: str) -> None:
        if not pressed:  # the first of the micro-batches is in the layer
            notebook.manager.interrupt_kernel()
        pressed.append(text)

    answer, _ = notebook.run(INTERRUPTED, press)
    assert answer["ename"] == "KeyboardInterrupt"
    assert "zero_grad() before the next step" in "".join(answer["traceback"])
    shown = notebook.well(
        "pipe[1].until = None\npipe.zero_grad()\nprint(pipe.step(x, x, mse_loss).equal(first), len(rank_threads()))"
    )
    assert shown["printed"] == "True 3\n"
