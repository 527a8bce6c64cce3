"""Faults below the store: kills, failing system calls, damage, full disks, racing processes, clocks that jump.

    python tests/reliability/run.py            # long form, for `make reliability`
    python tests/reliability/run.py --short    # what CI runs

Exit status 1 if a promise was broken; figures go to benchmarks/results/reliability.json.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import clocks
import damage
import faults
import history
import identities
import kills
import powercuts
import space
from world import ALL_AT_ONCE, PROTECTED, ROUNDED, Outcome, warm_up

Scenario = Callable[[Path], Outcome]

QUICK: dict[str, Scenario] = {
    "kills": partial(kills.run, kills=10),
    "bit flips": partial(damage.flips, count=500, header_step=7),
    "bit flips, with a key and rounded KV": partial(
        damage.flips, count=500, kind=PROTECTED, header_step=7
    ),
    "bit flips, rounded KV": partial(damage.flips, count=500, kind=ROUNDED, header_step=7),
    "hostile files": damage.hostile,
    "identities": identities.run,
    "starts amid writes": partial(history.inheritance, rounds=3, methods=("fork",)),
    "clocks": clocks.run,
}
"""A few rounds of what takes a second or two."""
SHORT: dict[str, Scenario] = {
    "kills": partial(kills.run, kills=120),
    "kills, with a key and rounded KV": partial(kills.run, kills=30, kind=PROTECTED),
    "kills, all at once": partial(kills.run, kills=60, kind=ALL_AT_ONCE),
    "system calls": partial(faults.run, limit=200),
    "bit flips": partial(damage.flips, count=20_000),
    "bit flips, with a key and rounded KV": partial(
        damage.flips, count=2000, kind=PROTECTED, header_step=7
    ),
    "bit flips, rounded KV": partial(damage.flips, count=2000, kind=ROUNDED, header_step=7),
    "hostile files": damage.hostile,
    "identities": identities.run,
    "full disk": space.full_disk,
    "read-only": space.read_only,
    "directory lost": space.vanished,
    "power cuts": partial(powercuts.run, limit=60),
    "histories": partial(
        history.run, processes={"fork": 6, "spawn": 1, "forkserver": 1}, seconds=6
    ),
    "first openings": partial(
        history.openings, processes={"fork": 6, "spawn": 1, "forkserver": 1}, rounds=2
    ),
    "starts amid writes": partial(history.inheritance, rounds=2),
    "clocks": clocks.run,
}
LONG: dict[str, Scenario] = {
    **SHORT,
    "kills": partial(kills.run, kills=1500),
    "kills, with a key and rounded KV": partial(kills.run, kills=300, kind=PROTECTED),
    "kills, all at once": partial(kills.run, kills=300, kind=ALL_AT_ONCE),
    "system calls": partial(faults.run, limit=None),
    "bit flips": partial(damage.flips, count=100_000),
    "bit flips, with a key and rounded KV": partial(damage.flips, count=10_000, kind=PROTECTED),
    "bit flips, rounded KV": partial(damage.flips, count=10_000, kind=ROUNDED),
    "power cuts": partial(powercuts.run, limit=600),
    "histories": partial(
        history.run, processes={"fork": 4, "spawn": 2, "forkserver": 2}, seconds=180
    ),
    "first openings": partial(
        history.openings, processes={"fork": 4, "spawn": 2, "forkserver": 2}, rounds=10
    ),
    "starts amid writes": partial(history.inheritance, rounds=20),
}
RAM_DISK = Path("/dev/shm")


def run(name: str, scenario: Scenario) -> dict[str, Any]:
    """Run one scenario in a folder of its own."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(
        dir=RAM_DISK if RAM_DISK.is_dir() else None, prefix="kvrag-"
    ) as folder:
        outcome = scenario(Path(folder))
    result = {
        "failures": outcome.failures,
        **outcome.counts,
        "seconds": round(time.monotonic() - start, 1),
    }
    if outcome.skipped:
        result["skipped"] = outcome.skipped
    print(f"{name}: {result}", flush=True)
    return result


def main(doc: str | None, short: dict[str, Scenario], long: dict[str, Scenario], file: str) -> None:
    """Run the scenarios asked for on the command line, and write ``results/<file>.json``."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from common import RESULTS, machine, write_result

    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument(
        "--only", action="append", choices=list(long), help="keep the others as they were"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warm_up()
    chosen = short if args.short else long
    form, here = "short" if args.short else "long", machine()
    before = args.out / f"{file}.json"
    known: dict[str, Any] = {}
    if args.only and before.exists():
        old = json.loads(before.read_text())
        origin = {"form": old.get("form"), "commit": old["machine"]["commit"][:10]}
        known = {name: origin | result for name, result in old["scenarios"].items()}
    results: dict[str, Any] = {}
    for name, scenario in chosen.items():
        if not args.only or name in args.only:
            results[name] = run(name, scenario) | {"form": form, "commit": here["commit"][:10]}
            # After each one: what a long run has found is not lost with what it has yet to find.
            kept = {
                other: (known | results)[other]
                for other in chosen
                if other in known or other in results
            }
            write_result(file, {"machine": here, "scenarios": kept}, args.out)
    if any(result["failures"] for result in results.values()):
        sys.exit("a promise was broken")


if __name__ == "__main__":
    main(__doc__, SHORT, LONG, "reliability")
