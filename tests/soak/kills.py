"""Kills a random process at a random moment, again and again, and starts its replica anew: who goes on, and when.

    python -m tests.soak.kills RANKS KILLS [REPLICAS]

After each kill the others have to begin a step, and then the replica comes back, by a launcher of its own. At the end
every step's losses and the weights are compared with those of plain loops in which each step had these replicas.
"""

import json
import os
import random
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.survivors import Fleet, assert_undisturbed

LIMIT = 60.0  # seconds after which what did not happen hangs


def last_begun(fleet: Fleet, replica: int) -> float:
    """When the process of a replica that was last to begin its newest step did so."""
    found = [[one for one in fleet.records(replica, row) if "begins" in one] for row in range(fleet.rows)]
    return min(float(records[-1]["at"]) if records else 0.0 for records in found)


def soak(fleet: Fleet, kills: int, seed: int) -> dict[str, Any]:
    """Kills and starts again; gives the seconds of each kill until the others begin, and of each return."""
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
            time.sleep(0.02)
        if kill:
            returns.append(time.monotonic() - back)
        time.sleep(drawn.uniform(0.0, 0.3))
        replica, row = drawn.randrange(fleet.replicas), drawn.randrange(fleet.rows)
        process = fleet.processes[replica, fleet.lives[replica], row]
        killed = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        others = [other for other in range(fleet.replicas) if other != replica]
        while min(last_begun(fleet, other) for other in others) <= killed + 0.001:
            if time.monotonic() > killed + LIMIT:
                hangs += 1
                break
            time.sleep(0.002)
        begins.append(min(last_begun(fleet, other) for other in others) - killed)
        assert None not in fleet.end(replica, LIMIT), "a process of the lost replica does not end"
        back = time.monotonic()
        fleet.start(replica)
    return {"begins": begins, "returns": returns, "hangs": hangs}


def main(ranks: int, kills: int, replicas: int = 2) -> None:
    """One fleet, killed so often."""
    with TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), replicas, ranks, 10**9, {"seconds": 0.002})
        try:
            found = soak(fleet, kills, seed=ranks)
            newest = max(fleet.ended())
            fleet.steps = newest + 300
            new = Path(folder) / "new-stop"
            new.write_text(str(fleet.steps))
            new.rename(Path(folder) / "stop")
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
    main(*map(int, sys.argv[1:]))
