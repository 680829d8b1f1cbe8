"""The same over real processes: two and three, by gloo, each holding a part; bits equal to the local loop.

python -m tests.soak.processes --configurations 60 --seed 0 --out results
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .case import Case, Kind, Setting
from .judge import FAILED, Outcome, Verdict, attempt, compare, decide, loop
from .kinds import KINDS
from .piped import Piped
from .run import keep, matches, show, table

# Kinds whose scripts, hooks and switches do not need all layers in one process.
SUBSET = """
s1_tensor_hook s1_hook_on_view s1_module_hook s1_multi_grad_hook s1_hook_on_one_of_two s2_slice_of_data
s2_view_between s2_gradient_view s2_strided_inputs s2_inplace_first s3_stateful_loss s3_loss_closure s3_random_loss
s4_own_checkpoint s5_undefined_gradients s5_several_routes s6_unknown_containers s7_unseen_writes s7_begins_later
s7_resized_buffers s10_loss_pops s11_contextvars s12_foreign_draws s13_torch_losses s13_places_of_images
checkpoint_with_dropout checkpoint_of_attention known_containers values_between changing_values pytree_inputs
several_outputs double_use skip_connections skip_of_none stride_zero_between views_of_one_memory channels_last
custom_functions detach_inside mixture_of_experts capacity_drops low_rank_adapters frozen_parts unused_parameters
recurrent attention encoder_decoder complex_numbers low_precision everything_random weighted_reduction
reductions_and_scale loss_with_metrics batch_norm reparametrizations state_in_buffers vector_quantization
accumulating_steps batches_of_changing_size autocast tied_parameters s8_self_references s14_total_norm
s15_no_stale_weights
"""
PLAIN = "recurrent"


def prepared(name: str, number: int, world: int) -> tuple[Kind, Case, Setting]:
    """The case, cut for as many processes, stepping only; what one process alone cannot see is not compared."""
    kind = KINDS.get(name, KINDS[PLAIN])
    case, setting = kind.case(number)
    optimizer, source = case.optimizer, random.Random(f"{name}:{number}:{world}")
    inner = sorted(source.sample(range(1, len(case.layers)), world - 1))
    cut = tuple(b - a for a, b in zip([0, *inner], [*inner, len(case.layers)], strict=True))
    case.optimizer = lambda parameters: optimizer(held) if (held := list(parameters)) else None
    case.extra = dict
    remat = tuple(source.choice(case.remats) for _ in cut)
    return kind, case, replace(setting, cut=cut, driver="process", way="step", remat=remat)


def total_norm(number: int, world: int) -> tuple[str, str]:
    """S14: torch's `clip_grad_norm_` over this process's parameters: the total norm, or a refusal."""
    _, case, setting = prepared(PLAIN, number, world)
    plain, _ = KINDS[PLAIN].case(number)
    reference = loop_of(plain, replace(setting, way="step"))
    reference.step(*plain.batches[0])
    norm = torch.nn.utils.clip_grad_norm_(list(reference.model.parameters()), 0.01)
    piped = Piped(case, setting)
    try:
        piped.step(*case.batches[0])
        got = torch.nn.utils.clip_grad_norm_(piped.pipe.parameters(), 0.01)
        own = dict(piped.pipe.named_parameters())
        expected = {n: p.grad for n, p in reference.model.named_parameters() if n in own}
        near = compare({"norm": norm, **expected}, {"norm": got, **{n: p.grad for n, p in own.items()}}, 1e-4)
        return ("SILENT", near) if near else ("equal", "")
    except (ValueError, TypeError, RuntimeError) as error:
        right = "clip_grad_norm_" in str(error)
        return ("refused" if right else "MISLEADING"), f"{type(error).__name__}: {error}"
    finally:
        piped.close()


def no_stale_weights(number: int, world: int) -> tuple[str, str]:
    """S15: the user's own layers of other stages hold no weights, so that using them says so."""
    _, case, setting = prepared(PLAIN, number, world)
    piped = Piped(case, setting)
    try:
        piped.step(*case.batches[0])
        own = {id(p) for p in piped.pipe.parameters()}
        stale = [
            p for layer in case.layers for p in layer.parameters() if id(p) not in own and p.device.type != "meta"
        ]
        if stale:
            return "SILENT", f"{len(stale)} parameters of other stages hold initial weights"
        try:
            torch.nn.Sequential(*case.layers)(case.batches[0][0])
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            return "refused", str(error)
        return "SILENT", "the model ran"
    finally:
        piped.close()


def loop_of(case: Case, setting: Setting) -> Any:
    """The plain loop over a case."""
    from .reference import Loop

    return Loop(case, setting)


FURTHER: dict[str, Callable[[int, int], tuple[str, str]]] = {
    "s14_total_norm": total_norm,
    "s15_no_stale_weights": no_stale_weights,
}


def judge_part(name: str, number: int, world: int) -> tuple[str, str, list[str], str]:
    """This process's verdict, and the names that it saw."""
    torch.set_num_threads(1)
    if name in FURTHER:
        return *FURTHER[name](number, world), [], ""
    kind, case, setting = prepared(name, number, world)
    expected = local(name, number, world, setting)
    if expected.error is not None and not case.must_refuse:
        return "void", repr(expected.error), [], str(setting)
    got = attempt(case, setting, Piped)
    names = [key for key in got.observed if "parameter" in key or "gradient" in key]
    own = {key: value for key, value in expected.observed.items() if key in got.observed}
    oracle, case.oracle = case.oracle, "loop"
    if oracle != "loop" and got.error is None:
        near = compare(own, got.observed, tolerance=1e-4)
        return ("SILENT" if near else "equal"), near, names, str(setting)
    verdict, why = decide(kind, number, case, replace(expected, observed=own), got)
    return verdict, why, names, str(setting)


def local(name: str, number: int, world: int, setting: Setting) -> Outcome:
    """What the plain loop gives, in this process, with the same way of training."""
    kind, case, _ = prepared(name, number, world)
    if case.oracle == "whole":
        return loop(kind, number)
    return attempt(case, setting, loop_of)


def serve(rank: int, world: int, meeting: str, link: Connection) -> None:
    """One of the processes: judges what comes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    link.send("ready")
    while (asked := link.recv()) is not None:
        name, number = asked
        link.send(judge_part(name, number, world))
    torch.distributed.destroy_process_group()


class Team:
    """As many processes as a world has; made anew when one is lost or fails."""

    def __init__(self, world: int, limit: float) -> None:
        self.world, self.limit = world, limit
        self.processes: list[Any] = []
        self.links: list[Connection] = []

    def start(self) -> None:
        """Spawns the processes."""
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        context = mp.get_context("spawn")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.world, meeting, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.links.append(ours)
        for link in self.links:
            link.recv()  # ready

    def end(self) -> None:
        """Ends them."""
        for process in self.processes:
            process.kill()
            process.join()
        for link in self.links:
            link.close()
        self.processes, self.links = [], []

    def judge(self, name: str, number: int) -> Verdict:
        """One verdict of those of all processes: the worst; all parameters must have been seen by somebody."""
        start = time.monotonic()
        parts: list[tuple[str, str, list[str], str]] = []
        try:
            if not self.processes:
                self.start()
                start = time.monotonic()
            for link in self.links:
                link.send((name, number))
            for link in self.links:
                if not link.poll(max(0.0, start + self.limit - time.monotonic())):
                    parts.append(("HANG", "nothing came", [], ""))
                    break
                parts.append(link.recv())
        except (EOFError, ConnectionError):
            parts.append(("CRASH", "a process is gone", [], ""))
        verdict, why = worst(name, number, parts)
        if verdict not in ("equal", "told"):
            self.end()
        return Verdict(name, number, verdict, why, f"{self.world} processes, {parts[0][3]}", time.monotonic() - start)


def worst(name: str, number: int, parts: Sequence[tuple[str, str, list[str], str]]) -> tuple[str, str]:
    """The worst of the processes' verdicts, with its rank."""
    for bad in (*FAILED, "refused", "told"):
        for rank, (verdict, why, _, _) in enumerate(parts):
            if verdict == bad:
                return bad, f"rank {rank}: {why}"
    if name in KINDS and name not in FURTHER:
        case, _ = KINDS[name].case(number)
        wanted = {n for n, _ in torch.nn.Sequential(*case.layers).named_parameters()}
        seen = {key.rsplit(" ", 1)[1] for _, _, names, _ in parts for key in names}
        if wanted - seen:
            return "SILENT", f"no process holds {sorted(wanted - seen)}"
    return "equal", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, help="how many; else one of each kind in the subset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--out")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(arguments)
    names = [
        n
        for n in SUBSET.split()
        if not options.only or n in options.only or (n in KINDS and matches(KINDS[n], options.only))
    ]
    KINDS.update({n: Kind(n, n[:3].upper(), KINDS[PLAIN].make) for n in names if n in FURTHER})
    verdicts, deadline = list[Verdict](), time.monotonic() + 60 * options.minutes
    for world in (2, 3):
        team = Team(world, options.limit)
        for i in range(world - 2, options.configurations or 2 * len(names), 2):
            if time.monotonic() < deadline - (300 if world == 2 and options.minutes > 9 else 0):
                verdicts.append(team.judge(names[i // 2 % len(names)], options.seed + i // 2 // len(names)))
                show(verdicts[-1], options.verbose)
        team.end()
    print(table(verdicts))
    if options.out:
        keep(Path(options.out), verdicts)
    return int(any(verdict.verdict in FAILED for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
