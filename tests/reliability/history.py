"""Several processes on the same few keys: every read returns what was last stored, or a miss that something explains."""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from world import CONFIG, Outcome, agree, fork, key, put, state, wait

from kvrag.errors import StoreError
from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE

KEYS = range(1, 13)
Event = tuple[str, int, int, int, str]
"""Operation, chunk, begin and end (monotonic ns, the same clock in all processes), result."""


def worker(root: Path, log: Path, seconds: float, seed: int) -> None:
    """Do random things and write down when each began and ended."""
    rng, events = random.Random(seed), []
    store = DiskStore(root, CONFIG)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        operation, number = rng.choices(("put", "get", "forget"), (3, 8, 1))[0], rng.choice(KEYS)
        begin = time.monotonic_ns()
        try:
            if operation == "put":
                result = "new" if put(store, number) else "known"
            elif operation == "get":
                result = state(store, number)
            else:
                result = str(store.forget(NAMESPACE, f"doc {number}"))
        except StoreError as error:
            result = f"error: {error}"
        events.append((operation, number, begin, time.monotonic_ns(), result))
        if rng.random() < 0.01:
            store.close()
            store = DiskStore(root, CONFIG)
    store.close()
    log.write_text(json.dumps(events))


def run(folder: Path, *, processes: int, seconds: float) -> Outcome:
    """Let them run, and check the history."""
    outcome, root = Outcome(), folder / "store"
    logs = [folder / f"log{number}" for number in range(processes)]
    pids = [fork(lambda log=log, seed=seed: worker(root, log, seconds, seed)) for seed, log in enumerate(logs)]
    for pid in pids:
        outcome.check(wait(pid) == 0, "a process failed")
    events: list[Any] = [event for log in logs if log.exists() for event in json.loads(log.read_text())]
    check(events, outcome)
    store = DiskStore(root, CONFIG)
    agree(store, outcome, "at the end")
    outcome.counts["quarantined"] = len(store.directory.names("quarantine"))
    outcome.check(not store.directory.names("quarantine"), "a sound file was put away")
    store.close()
    return outcome


def check(events: list[Event], outcome: Outcome) -> None:
    """A miss is explained if no store was complete before it, or an erasure was not over before the latest such store began."""
    for operation, _, _, _, result in events:
        outcome.add(f"{operation}: {result if len(result) < 12 else 'error'}")
        outcome.check(not result.startswith("error"), result)
    longest = max((end - begin for _, _, begin, end, _ in events), default=0)
    outcome.counts["longest_ms"] = round(longest / 1e6)
    outcome.check(longest < 5e9, "something took more than 5 s")
    for number in KEYS:
        mine = [event for event in events if event[1] == number]
        puts = [(begin, end) for operation, _, begin, end, _ in mine if operation == "put"]
        erasures = [(begin, end) for operation, _, begin, end, _ in mine if operation == "forget"]
        for operation, _, begin, end, result in mine:
            if operation != "get":
                continue
            outcome.check(result != "wrong", f"wrong bytes of chunk {number}")
            before = max((put for put in puts if put[1] < begin), default=None)
            is_explained = before is None or any(erasure[1] > before[0] and erasure[0] < end for erasure in erasures)
            outcome.check(result != "missing" or is_explained, f"chunk {number} was stored, and is missing")


def openings(folder: Path, *, rounds: int) -> Outcome:
    """Several processes make the same store at once; each key is written, and all agree."""
    outcome = Outcome()
    for number in range(rounds):
        root = folder / f"store{number}"
        pids = [fork(partial(_open_and_put, root)) for _ in range(8)]
        for pid in pids:
            outcome.check(wait(pid) == 0, "a process failed to open a new store")
        store = DiskStore(root, CONFIG)
        agree(store, outcome, "after concurrent first openings")
        outcome.check(len(store.index.keys()) == 4, "a chunk is missing")
        store.close()
        outcome.add("openings", len(pids))
    return outcome


def _open_and_put(root: Path) -> int:
    store = DiskStore(root, CONFIG)
    order = random.Random(os.getpid()).sample(range(1, 5), 4)
    for number in order:
        put(store, number)
    ok = all(state(store, number) == "readable" and store.contains(key(number)) for number in order)
    store.close()
    return 0 if ok else 1
