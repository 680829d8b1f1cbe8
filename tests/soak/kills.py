"""Kills a random process at a random moment, again and again, and starts its replica anew: who goes on, and when.

    python -m tests.soak.kills RANKS KILLS [REPLICAS | hosts | cut]

With `hosts` two replicas are on two hosts, by TLS; with `cut` there, the wire is cut in place of a kill, and mended.

After each kill the others have to begin a step, and then the replica comes back, by a launcher of its own. At the end
every step's losses and the weights are compared with those of plain loops in which each step had these replicas.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.certificates import authority
from tests.support.survivors import Fleet, assert_undisturbed
from two_hosts.hosts import Hosts, two_hosts

LIMIT = 60.0  # seconds after which what did not happen hangs


def last_begun(fleet: Fleet, replica: int) -> float:
    """When the process of a replica that was last to begin its newest step did so."""
    found = [[one for one in fleet.records(replica, row) if "begins" in one] for row in range(fleet.rows)]
    return min(float(records[-1]["at"]) if records else 0.0 for records in found)


def begun(fleet: Fleet, replica: int) -> int:
    """How many steps all processes of a replica have begun since it was started."""
    return min(sum("begins" in one for one in fleet.records(replica, row)) for row in range(fleet.rows))


def soak(fleet: Fleet, kills: int, seed: int, wire: Hosts | None = None) -> dict[str, Any]:
    """Kills, or cuts the wire, and starts again; gives the seconds until the others begin, and of each return."""
    drawn = random.Random(seed)
    begins, returns, hangs, back = list[float](), list[float](), 0, 0.0
    for replica in range(fleet.replicas):
        fleet.start(replica)
    for kill in range(kills):
        until = time.monotonic() + LIMIT
        started = time.monotonic()
        while min(last_begun(fleet, replica) for replica in range(fleet.replicas)) < started:  # all take part
            if time.monotonic() > until:
                raise TimeoutError(f"kill {kill}: not all are back after {LIMIT:g} s")
            fleet.start_ended()
            time.sleep(0.02)
        if kill:
            returns.append(time.monotonic() - back)
        joined = drawn.randrange(4)  # steps that a process does first which has come back
        while min(begun(fleet, replica) for replica in range(fleet.replicas)) <= joined:
            time.sleep(0.002)
        time.sleep(drawn.uniform(0.0, 0.1))
        replica, row = drawn.randrange(fleet.replicas), drawn.randrange(fleet.rows)
        process = fleet.processes[replica, fleet.lives[replica], row]
        killed = time.monotonic()
        if wire is None:
            os.kill(process.pid, signal.SIGKILL)
        else:
            wire.cut(replica)
            killed = time.monotonic()
            ended = list[int]()
            while not ended and time.monotonic() < killed + LIMIT:  # either may be the one that goes on
                ended = [one for one in range(fleet.replicas) if None not in fleet.end(one, 0.001)]
            replica = ended[0]
        others = [other for other in range(fleet.replicas) if other != replica]
        while min(last_begun(fleet, other) for other in others) <= killed + 0.5 * (wire is not None) + 0.001:
            if time.monotonic() > killed + LIMIT:
                hangs += 1
                break
            time.sleep(0.002)
        begins.append(min(last_begun(fleet, other) for other in others) - killed)
        assert None not in fleet.end(replica, LIMIT), "a process of the lost replica does not end"
        if wire is not None:
            for host in range(fleet.replicas):
                wire.mend(host)
        back = time.monotonic()
        fleet.start(replica)
    return {"begins": begins, "returns": returns, "hangs": hangs}


def main(ranks: int, kills: int, where: str = "2") -> None:
    """One fleet, killed so often."""
    replicas, how = int(where) if where.isdecimal() else 2, dict[str, Any](seconds=0.002)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        hosts = None if where.isdecimal() else stack.enter_context(two_hosts())
        if hosts is not None:
            how |= {"networks": hosts.networks, "tls": authority().files}
        fleet = Fleet(Path(folder), replicas, ranks, 10**9, how)
        try:
            found = soak(fleet, kills, ranks, hosts if where == "cut" else None)
            fleet.stop(300)
            codes = [fleet.end(replica) for replica in range(replicas)]
            assert codes == [[0] * ranks] * replicas, codes
            living = assert_undisturbed(fleet, range(replicas))
        finally:
            fleet.close()
    lost = sum(len(after) < len(before) for before, after in pairwise(living))
    begins, returns = (sorted(found[name]) for name in ("begins", "returns"))
    print(
        json.dumps(
            {
                "replicas x ranks": f"{replicas}x{ranks}",
                "where": where,
                "kills": kills,
                "hangs": found["hangs"],
                "steps": len(living),
                "steps with fewer": sum(len(now) < replicas for now in living),
                "losses seen": lost,
                "until the next step begins": {"median": begins[len(begins) // 2], "most": begins[-1]},
                "returns": len(returns),
                "until a return takes part": {"median": returns[len(returns) // 2], "most": returns[-1]},
                "bits": "as undisturbed, of every loss and of the weights",
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
