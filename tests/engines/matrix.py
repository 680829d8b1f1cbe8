"""Runs one training under each launcher: `python -m tests.engines.matrix` prints which recover from which faults.

Each engine starts copies of the scripts in examples/clusters, and a fault is written into the copy of train.py. The
weights at the end are compared, bit by bit, with those of one process with a thread per partition, or, if there are
two replicas, with those of torchrun without a fault. Engines that are not installed are named and left out.
"""

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import gpipe
from tests.support.processes.slurm import without_slurm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clusters"
MARK = 'if __name__ == "__main__":'
REFERENCE = """
import train
train.dist.get_world_size = lambda: train.PARTITIONS
train.dist.get_rank = lambda: 0
process = train.gpipe.GPipe
train.gpipe.GPipe = lambda layers, partitions, micro_batches, driver: process(layers, partitions, micro_batches)
train.train("reference")
"""
FAULT = """
_batch = batch


def batch(step: int):  # A fault in one rank, in one life of the job.
    if step == 12 and dist.get_rank() == 1 and not os.path.exists("{folder}/faulted"):
        open("{folder}/faulted", "w").close()
        {fault}
    return _batch(step)


"""
FAULTS = {
    "raises": 'raise ValueError("a bad batch")',
    "is killed": "os.kill(os.getpid(), 9)",
}
TIMEOUT = 600  # seconds, of a job that hangs
HUNG = 124  # its status
NAMES = ("a bad batch", "rank 1 ", "Signal 9", "sig=9")  # of these faults, in the output of a job


@dataclass(frozen=True)
class Engine:
    """A way to start the processes.

    Attributes:
        command: Returns the command that starts a training, for a folder with the scripts.
        restarts: Whether the engine starts the processes again after a failure.
        missing: Why the engine cannot run here; empty if it can.
        processes: The number of ranks.
    """

    command: Callable[[Path], Sequence[str]]
    restarts: bool
    missing: str = ""
    processes: int = 2


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its exit status, seconds and output."""

    status: int
    seconds: float
    output: str


def facts() -> str:
    """Returns the machine, the versions and the commit."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT).strip()
    return f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, commit {commit}"


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torchrun(folder: Path, processes: int = 2, restarts: int = 0) -> list[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    return [*launcher, "--nproc-per-node", str(processes), "--max-restarts", str(restarts), str(folder / "train.py")]


def _two_agents(folder: Path) -> list[str]:
    launcher = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 2"
    agent = f"{launcher} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} {folder / 'train.py'}"
    return ["sh", "-c", f"{agent} --rdzv-conf is_host=0 & {agent}; first=$?; wait $! && exit $first"]


def _ray_two_nodes(folder: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "engines" / "two_ray_nodes.py"), str(folder)]


def _srun_two_nodes(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.engines.srun_two_nodes", str(folder)]


def _python(script: str) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, str(folder / script)]


def _mpirun(folder: Path) -> list[str]:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return [*launcher, str(folder / "mpi.sh"), sys.executable, str(folder / "train.py")]


def _missing(module: str = "", program: str = "") -> str:
    if module and find_spec(module) is None:
        return f"the package {module} is not installed"
    return f"the program {program} is not installed" if program and not shutil.which(program) else ""


ENGINES = {
    "torchrun": Engine(_torchrun, restarts=False),
    "torchrun --max-restarts 2": Engine(lambda folder: _torchrun(folder, restarts=2), restarts=True),
    "torchrun, two agents": Engine(_two_agents, restarts=True),
    "Ray Train": Engine(_python("ray_train.py"), restarts=True, missing=_missing("ray")),
    "Ray Train, two nodes, 2 replicas": Engine(_ray_two_nodes, restarts=True, missing=_missing("ray"), processes=4),
    "Monarch": Engine(_python("monarch_train.py"), restarts=False, missing=_missing("monarch")),
    "srun, two nodes": Engine(_srun_two_nodes, restarts=False, missing=without_slurm()),
    "mpirun": Engine(_mpirun, restarts=False, missing=_missing(program="mpirun")),
}


def prepare(folder: Path, fault: str = "") -> None:
    """Copies the scripts to a folder, and writes a fault into the copy of train.py."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    script = folder / "train.py"
    text = script.read_text()
    if fault:
        text = text.replace(MARK, FAULT.format(folder=folder, fault=fault) + MARK)
    script.write_text(text)


def start(command: Sequence[str], folder: Path) -> Outcome:
    """Runs a job to its end, or for at most `TIMEOUT` seconds."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CHECKPOINTS": str(folder / "checkpoints"),
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "GPIPE_INTERFACE": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    before = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )
        return Outcome(done.returncode, time.perf_counter() - before, done.stdout)
    except subprocess.TimeoutExpired as hung:
        output = hung.stdout or b""
        return Outcome(HUNG, time.perf_counter() - before, output.decode() if isinstance(output, bytes) else output)


def reference(folder: Path, processes: int = 2) -> dict[str, torch.Tensor]:
    """Returns the weights of the training without a fault.

    It runs in one process with a thread per partition, or under torchrun if there are several replicas.
    """
    prepare(folder)
    threads = processes == 2
    done = start([sys.executable, "-c", REFERENCE] if threads else _torchrun(folder, processes), folder)
    assert done.status == 0, done.output
    return gpipe.load(folder / ("reference" if threads else "checkpoints")).state_dict()


def equal(checkpoints: Path, weights: dict[str, torch.Tensor]) -> bool:
    """Whether the newest checkpoint has exactly these weights after the last step."""
    checkpoint = gpipe.load(checkpoints)
    state = checkpoint.state_dict()
    return (
        checkpoint.step_number == 20
        and state.keys() == weights.keys()
        and all(torch.equal(state[name], weights[name]) for name in weights)
    )


def try_start(engine: Engine, weights: dict[str, torch.Tensor], folder: Path) -> tuple[str, bool]:
    """Runs a training without a fault; returns what happened, and whether the weights are equal."""
    prepare(folder)
    done = start(engine.command(folder), folder)
    same = done.status == 0 and equal(folder / "checkpoints", weights)
    return f"{'equal' if same else f'status {done.status}'}, {done.seconds:.0f} s", same


def try_fault(engine: Engine, weights: dict[str, torch.Tensor], folder: Path, fault: str) -> tuple[str, bool]:
    """Runs a training with a fault, and again if the engine does not; returns what happened, and whether it is right.

    A job with a fault must end within `TIMEOUT`, name the fault, and resume to equal weights.
    """
    prepare(folder, FAULTS[fault])
    done = start(engine.command(folder), folder)
    named = any(words in done.output for words in NAMES)
    restarted = engine.restarts and done.status == 0
    ended = "restarted by the engine" if restarted else f"ends with {done.status}"
    again = done if restarted else start(engine.command(folder), folder)
    same = again.status == 0 and equal(folder / "checkpoints", weights)
    words = f"{ended}{'' if named else ', not named'}, {done.seconds:.0f} s; {'equal' if same else 'differs'}"
    return words, same and named and restarted == engine.restarts and done.status != HUNG


def row(engine: Engine, weights: dict[str, torch.Tensor]) -> list[str]:
    """Returns the cells of an engine: start, a rank raises, a rank is killed."""
    with tempfile.TemporaryDirectory() as folder:
        cells = [try_start(engine, weights, Path(folder))[0]]
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            cells.append(try_fault(engine, weights, Path(folder), fault)[0])
    return cells


def main() -> None:
    """Prints the table in Markdown, of all engines or of those named."""
    print(f"# One training under each engine\n\n{facts()}\n")
    print("| engine | start | a rank raises; resumed | a rank is killed; resumed |\n|---|---|---|---|")
    weights = dict[int, dict[str, torch.Tensor]]()  # by the number of ranks
    for name, engine in ENGINES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        if not engine.missing and engine.processes not in weights:
            with tempfile.TemporaryDirectory() as folder:
                weights[engine.processes] = reference(Path(folder), engine.processes)
        cells = [engine.missing] * 3 if engine.missing else row(engine, weights[engine.processes])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
