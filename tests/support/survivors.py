"""Replicas that each have a launcher of their own, to be killed and started again; and what they must compute."""

import atexit
import json
import multiprocessing
import os
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpipe
from gpipe.checkpoint import save as saving
from gpipe.distributed import context, elastic, endpoint, folder_rendezvous, reduce
from gpipe.distributed.failures import FailureDetector
from gpipe.distributed.folder_rendezvous import FolderRendezvous
from gpipe.planner.search import table_search
from tests.support.plain_loop import accumulated, one_thread, parts_of, run_layers
from tests.support.planned import pipe_by_costs
from two_hosts.relay import WIRE, enter

MICRO_BATCHES, ROWS, SEED = 3, 7, 5
LIMIT = 120.0  # seconds for a fleet
Record: TypeAlias = dict[str, Any]


class Slow(nn.Module):
    """Takes as long as a layer does, so that a kill at a random moment is in the middle of something."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return value


def network(seconds: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(SEED)
    return [
        nn.Sequential(nn.Linear(6, 8), Slow(seconds)),
        nn.BatchNorm1d(8),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(8, 8), Slow(seconds)),
        nn.Tanh(),
        nn.Linear(8, 3),
    ]


def data(step: int, replica: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + replica)
    rows = ROWS + replica
    return torch.randn(rows, 6, generator=drawn), torch.randn(rows, 3, generator=drawn)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def begin(folder: str, replica: int, replicas: int, row: int, rows: int, how: dict[str, Any]) -> Any:
    """Joins the process group of a replica; gives the log of this process."""
    if "networks" in how:  # a host for each replica
        enter(how["networks"][replica])
        os.environ |= {"GPIPE_INTERFACE": WIRE, **how["tls"]}
    os.environ |= {
        "GPIPE_MEETING": f"{folder}/meeting",
        "GPIPE_REPLICA": str(replica),
        "GPIPE_REPLICAS": str(replicas),
    }
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    folder_rendezvous.DONE_SECONDS = 1.0
    if how["life"] and "exits" in how:
        os.environ[folder_rendezvous.RESTARTS] = str(how["life"])
    torch.set_num_threads(1)
    store, life = how["store"], how["life"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=row,
        world_size=rows,
        timeout=timedelta(seconds=how.get("timeout", 90)),
    )
    return open(f"{folder}/log-{replica}-{life}-{row}", "a", buffering=1)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, replica: int, replicas: int, row: int, rows: int, steps: int, how: dict[str, Any]) -> None:
    """What the user's script does, in one process; `how` says where it is to die, and the like."""
    log, life = begin(folder, replica, replicas, row, rows, how), how["life"]
    partitions = how.get("partitions", rows)
    settings: dict[str, Any] = {
        "seed": SEED,
        "schedule": how.get("schedule", "gpipe"),
        "batch_norm": "deferred" if how.get("deferred") else "micro",
    }
    if settings["schedule"] == "auto":
        table_search.MAX_LISTED = 5_000
        layers, devices = network(how.get("seconds", 0.0)), [gpipe.Device(how["memory"], 1.0)] * partitions
        searched: Any = {"costs": "params", "schedule": settings.pop("schedule")}
        settings["plan"] = gpipe.find_plan(
            layers, data(0, 0)[0], devices, partitions=partitions, micro_batches=MICRO_BATCHES, **searched
        )
        partitions = None
    pipe = gpipe.GPipe(
        network(how.get("seconds", 0.0)), partitions, MICRO_BATCHES, driver=gpipe.Processes(survive=True), **settings
    )
    optimizer = optimizer_of(pipe.parameters()) if [*pipe.parameters()] else None
    kept: list[Any] = [] if optimizer is None else [optimizer]
    if "returns_with" in how and optimizer is not None:
        returns = life > 0
        if returns and how["returns_with"] == "optimizer":
            optimizer = torch.optim.RAdam(pipe.parameters(), lr=0.01)
        if returns and how["returns_with"] == "groups":
            optimizer = optimizer_of([{"params": [parameter]} for parameter in pipe.parameters()])
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        step: Any = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        if how["returns_with"] == "nested":
            schedulers = [step, decay if returns else torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]
            step = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [100])
        kept = [optimizer, decay if returns and how["returns_with"] == "scheduler" else step]
    new_run = pipe._new_run

    def noted() -> Any:
        log.write(json.dumps({"begins": pipe.step_number, "at": time.monotonic()}) + "\n")
        return new_run()

    pipe._new_run = noted  # type: ignore[method-assign]
    if "die" in how and how["die"][:2] == [replica, row] and not life:
        arm(pipe, how.get("signal", signal.SIGKILL), *how["die"][2:])
    if "dies_in" in how and how["dies_in"][:3] == [replica, row, life]:
        if how["dies_in"][3] == "evaluates":
            next(iter(pipe)).register_forward_pre_hook(lambda layer, _: None if layer.training else die())
        else:
            setattr(*CALLS[how["dies_in"][3]], die)
    if row in how.get("blind", ()):
        FailureDetector.gone = lambda self: []  # type: ignore[method-assign]
    if how.get("odd") == [replica, "optimizer"] and optimizer is not None:
        optimizer.param_groups[0]["lr"] = 0.02
    if how.get("odd") == [replica, "weights"]:
        torch.nn.init.zeros_(next(pipe.parameters()))
    saved = f"{folder}/saved" + (f"/host-{replica}-{row}" if how.get("apart") else "")
    try:
        if how.get("saves_first"):
            gpipe.save(saved, pipe, optimizer)
        if how.get("loads") and gpipe.find_checkpoint(saved, pipe):
            log.write(json.dumps({"loaded": gpipe.load(saved, pipe, optimizer).step_number}) + "\n")
        pipe.join(*kept)
    except (ValueError, gpipe.RemoteError) as error:
        log.write(json.dumps({"refused": str(error)}) + "\n")
        raise
    links = pipe._processes._endpoint.connections.items()  # type: ignore[attr-defined]  # over processes
    log.write(json.dumps({"by TLS": [p for p, one in links if isinstance(one.control.socket, ssl.SSLSocket)]}) + "\n")
    stop = Path(f"{folder}/stop")
    while pipe.step_number < (int(stop.read_text()) if stop.exists() else steps):
        step = pipe.step_number
        if (waits := how.get("waits", {}).get(str(step))) is not None:  # until others have come back
            while not Path(waits).exists():
                time.sleep(0.01)
        x, y = data(step, replica)
        if step in how.get("saves", ()):
            gpipe.save(saved, pipe, optimizer, background=how["background"])
        if how.get("evaluates") == step:
            pipe.eval()
            with torch.no_grad():
                assert len(pipe(x, gather=True)) == len(x)
            pipe.train()
        losses: list[Tensor] = []
        before = pipe.living
        loss = pipe.step(x, y, mse_loss, losses=losses)
        each = [float(one.item()).hex() for one in losses]
        ends = len(losses) == MICRO_BATCHES * len(pipe.living)  # or it ended, and then the loss
        living = pipe.living if ends else before
        ended = {
            "ended": step,
            "loss": float(loss.item()).hex(),
            "living": living,
            "each": each,
            "at": time.monotonic(),
            "plan": pipe.plan.to_json() | {"other_cores": None},  # each process measures this number
        }
        log.write(json.dumps(ended) + "\n")
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    torch.save([pipe.state_dict(), [one.state_dict() for one in kept]], f"{folder}/end-{replica}-{life}-{row}")
    if "exits" in how:  # multiprocessing does not
        if how["exits"] == "with an error":
            sys.last_value = ValueError()
        atexit._run_exitfuncs()


PLACES_OF_A_RETURN = {
    "asked": (FolderRendezvous, "_choose"),
    "let in": (FolderRendezvous, "greet"),
    "given the state": (elastic, "_deserialize"),
    "linked": (elastic.ElasticProcesses, "_log_changes"),
    "joined": (elastic.ElasticProcesses, "admit_replicas"),
}
"""What a replica that comes back calls next, by what it has done."""
PLACES_OF_A_SAVE = {
    "begins": (saving, "gather"),
    "agreed": (saving, "write_part"),
    "written": (saving, "finish"),
    "saved": (saving.Saving, "wait_once"),
}
"""What a process that saves calls next."""
CALLS: dict[str, tuple[Any, str]] = {**PLACES_OF_A_RETURN, **PLACES_OF_A_SAVE}


def generate(folder: str, replica: int, replicas: int, row: int, rows: int, steps: int, how: dict[str, Any]) -> None:
    """As `train`, for a model that generates while a process dies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    log = begin(folder, replica, replicas, row, rows, how)
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).eval()
    prompts = torch.arange(3, 23).view(4, 5)
    settings: Any = {"sample": prompts, "driver": gpipe.Processes(survive=True), "seed": SEED}
    pipe = pipe_by_costs(model, rows, 2, **settings)
    pipe.join()
    forward, calls = nn.Linear.forward, list[None]()

    def counted(self: nn.Linear, value: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 100 and [replica, row] == how["generates"]:
            die()
        return forward(self, value)

    nn.Linear.forward = counted  # type: ignore[assignment, method-assign]
    try:
        log.write(json.dumps({"generated": pipe.generate(prompts, max_new_tokens=20).tolist()}) + "\n")
    except gpipe.RemoteError as error:
        log.write(json.dumps({"refused": str(error)}) + "\n")
        raise


def arm(pipe: gpipe.GPipe, number: int, step: int, place: str) -> None:
    """Has this process send itself a signal at a place in a step."""

    def die_in_step(*_: Any) -> None:
        if pipe.step_number == step:
            os.kill(os.getpid(), number)

    first = next(iter(pipe))
    if place == "forward":
        first.register_forward_pre_hook(die_in_step)
    elif place == "backward":
        for parameter in pipe.parameters():
            parameter.register_hook(die_in_step)
    elif place == "reduce":
        add_up = reduce.add_over_replicas

        def killed(*given: Any) -> Any:
            die_in_step()
            return add_up(*given)

        setattr(context, "add_over_replicas", killed)  # noqa: B010
    elif place == "between":
        run = pipe._new_run

        def before() -> Any:
            die_in_step()
            return run()

        pipe._new_run = before  # type: ignore[method-assign]
    else:  # in the exchange at the end, before or behind what this process says; its hub when it has told one other
        exchange, send = endpoint.Endpoint.finish_run, endpoint.Endpoint.send_value
        told: list[int] = []

        def partly(self: Any, peer: int, *given: Any) -> None:
            if place == "told two" and len(told) == 2:
                die_in_step()
            send(self, peer, *given)
            told.append(peer)

        def in_end(self: Any, value: Any) -> Any:
            if place == "end":
                die_in_step()
            told.clear()
            setattr(endpoint.Endpoint, "send_value", partly)  # noqa: B010
            try:
                return exchange(self, value)
            finally:
                endpoint.Endpoint.send_value = send  # type: ignore[method-assign]

        endpoint.Endpoint.finish_run = in_end  # type: ignore[method-assign]


optimizer_of([nn.Parameter(torch.ones(1))])  # loads much of torch, once for all processes
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.survivors"])


@dataclass
class Fleet:
    """The processes of some replicas."""

    folder: Path
    replicas: int
    rows: int
    steps: int
    how: dict[str, Any] = field(default_factory=dict)
    processes: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # by replica, life and row
    lives: dict[int, int] = field(default_factory=dict)

    def start(self, replica: int) -> None:
        """Starts a replica, perhaps again, as its launcher would; its other processes must have ended."""
        life = self.lives[replica] = self.lives.get(replica, -1) + 1
        how = {**self.how, "life": life, "store": f"{self.folder}/store-{replica}-{life}"}
        for row in range(self.rows):
            given = (str(self.folder), replica, self.replicas, row, self.rows, self.steps, how)
            process = _context.Process(target=generate if "generates" in how else train, args=given, daemon=True)
            process.start()
            self.processes[replica, life, row] = process

    def kill(self, replica: int, row: int | None = None) -> None:
        for (of, life, at), process in self.processes.items():
            if of == replica and life == self.lives[of] and row in (None, at) and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)

    def end(self, replica: int, limit: float = LIMIT) -> list[int | None]:
        """Waits for the processes of a replica; gives their exit codes, None for one that does not end."""
        until = time.monotonic() + limit
        codes = []
        for (of, life, _), process in self.processes.items():
            if of == replica and life == self.lives[of]:
                process.join(max(0.0, until - time.monotonic()))
                codes.append(process.exitcode)
        return codes

    def start_ended(self) -> None:
        """Starts replicas again that have ended with an error, as when they could not yet be reached."""
        for replica in range(self.replicas):
            if all(self.end(replica, 0.001)):
                self.start(replica)

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()

    def stop(self, steps: int) -> None:
        """Has all end after so many more steps than any has ended by now."""
        self.steps = max(self.ended()) + steps
        new = self.folder / "new-stop"
        new.write_text(str(self.steps))
        new.rename(self.folder / "stop")

    def records(self, replica: int, row: int, life: int | None = None) -> list[Record]:
        path = self.folder / f"log-{replica}-{self.lives[replica] if life is None else life}-{row}"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def ended(self) -> dict[int, Record]:
        """What every step has given, the same to all that took part; who is lost may have seen one end alone."""
        found: dict[int, Record] = {}
        lasts = []
        for replica, life, row in self.processes:
            records = [record for record in self.records(replica, row, life) if "ended" in record]
            if life < self.lives[replica] or not (self.folder / f"end-{replica}-{life}-{row}").exists():
                lasts += records[-1:]
                records = records[:-1]
            for record in records:
                told = {name: record[name] for name in ("loss", "living", "each")}
                assert found.setdefault(record["ended"], told) == told, (record, found[record["ended"]])
        for record in lasts:
            found.setdefault(record["ended"], {name: record[name] for name in ("loss", "living", "each")})
        return found

    def final(self, replica: int) -> list[Any]:
        """The weights and the state of the optimizer of each process."""
        return [torch.load(f"{self.folder}/end-{replica}-{self.lives[replica]}-{row}") for row in range(self.rows)]


@one_thread()
def undisturbed(living: Sequence[Sequence[int]]) -> tuple[list[Record], dict[int, nn.Module]]:
    """A run of plain loops in which each step has these replicas; what steps give, and the replicas at the end."""
    whole: dict[int, nn.Module] = {replica: nn.Sequential(*network()) for replica in living[0]}
    optimizers = {replica: optimizer_of(model.parameters()) for replica, model in whole.items()}
    records: list[Record] = []
    for step, now in enumerate(living):
        source = next((replica for replica in now if replica in whole), min(whole))  # who came back may be alone
        for replica in {*now} - whole.keys():
            whole[replica] = deepcopy(whole[source])
            optimizers[replica] = optimizer_of(whole[replica].parameters())
            optimizers[replica].load_state_dict(deepcopy(optimizers[source].state_dict()))
        whole = {replica: whole[replica] for replica in now}
        batches = {replica: [parts_of(part, MICRO_BATCHES) for part in data(step, replica)] for replica in now}
        rows = float(sum(ROWS + replica for replica in now))
        total: Any = 0
        each: list[str] = []
        for at, (replica, (inputs, targets)) in enumerate(batches.items()):
            layers: Any = whole[replica]
            parts = enumerate(zip(inputs, targets, strict=True), at * MICRO_BATCHES)
            outputs = ((run_layers([*layers], x, seed=SEED, step=step, micro_batch=m), y) for m, (x, y) in parts)
            losses = [mse_loss(*both) for both in cast(Any, outputs)]
            each += [float(loss.item()).hex() for loss in losses]
            total = total + accumulated(losses, [len(x) / rows for x in cast(Any, inputs)])
        for some in zip(*(model.parameters() for model in whole.values()), strict=True):
            gradient = some[0].grad.clone()
            for other in some[1:]:
                gradient.add_(other.grad)
            for parameter in some:
                parameter.grad = gradient.clone()
        for replica in now:
            optimizers[replica].step()
            optimizers[replica].zero_grad()
        records.append({"loss": total.item().hex(), "living": [*now], "each": each})
    return records, whole


def assert_undisturbed(fleet: Fleet, replicas: Sequence[int]) -> list[list[int]]:
    """Every step and the weights at the end have the bits of a run that was not disturbed; gives who lived when."""
    ended = fleet.ended()
    assert sorted(ended) == list(range(fleet.steps))
    living = [ended[step]["living"] for step in range(fleet.steps)]
    records, models = undisturbed(living)
    for step, record in enumerate(records):
        assert ended[step] == record, step
    for replica in replicas:
        state = {name: tensor for own, _ in fleet.final(replica) for name, tensor in own.items()}
        expected = models[replica].state_dict()
        assert sorted(state) == sorted(expected)
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), (replica, name)
    return living
