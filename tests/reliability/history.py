"""Several processes on the same few keys: every read returns what was last stored, or a miss that something explains."""

import json
import random
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from world import METHODS, PLAIN, TIERED, Outcome, Stalls, agree, key, put, start_together, state

from kvrag.errors import StoreError
from kvrag.testing.chunks import NAMESPACE

KEYS = range(1, 13)
KINDS = (PLAIN, TIERED)
"""What the processes open, in turn: the same directory with and without memory above it."""
PATIENCE_S = 60
"""Longest time of an operation: what takes longer hangs, or is never given its turn."""
Event = tuple[str, int, int, int, str]
"""Operation, chunk, begin and end (monotonic ns, the same clock in all processes), result."""


def worker(root: Path, logs: Path, seconds: float, number: int) -> None:
    """Do random things and write down when each began and ended."""
    rng, events = random.Random(number), []
    kind = KINDS[number % len(KINDS)]
    store = kind.open(root)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        operation, chunk = rng.choices(("put", "get", "forget"), (3, 8, 1))[0], rng.choice(KEYS)
        begin = time.monotonic_ns()
        try:
            if operation == "put":
                result = "new" if kind.put(store, chunk) else "known"
            elif operation == "get":
                result = kind.state(store, chunk)
            else:
                result = str(store.forget(NAMESPACE, f"doc {chunk}"))
        except StoreError as error:
            result = f"error: {error}"
        events.append((operation, chunk, begin, time.monotonic_ns(), result))
        if rng.random() < 0.01:
            store.close()
            store = kind.open(root)
    store.close()
    (logs / str(number)).write_text(json.dumps(events))


def run(folder: Path, *, processes: dict[str, int], seconds: float) -> Outcome:
    """Let processes of every kind of start run on one store, and check the history."""
    outcome, root, logs = Outcome(), folder / "store", folder / "logs"
    logs.mkdir()
    inherited = PLAIN.open(root)  # open in the parent, and in what is forked
    with Stalls() as stalls:
        codes = start_together(folder, processes, worker, root, logs, seconds)
    inherited.close()
    outcome.check(set(codes) == {0}, f"a process failed: {codes}")
    outcome.counts["processes"] = processes
    events: list[Any] = [event for log in logs.iterdir() for event in json.loads(log.read_text())]
    outcome.counts["longest_stall_of_the_machine_ms"] = round(stalls.longest_s * 1e3)
    check(events, outcome, patience_s=PATIENCE_S + stalls.longest_s)
    store = PLAIN.open(root)
    agree(store, outcome, "at the end", is_whole=True)
    store.close()
    return outcome


def check(events: list[Event], outcome: Outcome, *, patience_s: float) -> None:
    """A miss is explained if no store was complete before it, or an erasure was not over before the latest such store began.

    A hit is explained if some store was not over before the latest erasure that was complete before the read began.
    """
    for operation, _, _, _, result in events:
        outcome.add(f"{operation}: {result if len(result) < 12 else 'error'}")
        outcome.check(not result.startswith("error"), result)
    longest = max((end - begin for _, _, begin, end, _ in events), default=0)
    outcome.counts["longest_ms"] = round(longest / 1e6)
    outcome.check(longest < patience_s * 1e9, f"something took more than {patience_s:.1f} s")
    for number in KEYS:
        mine = [event for event in events if event[1] == number]
        puts = [(begin, end) for operation, _, begin, end, _ in mine if operation == "put"]
        erasures = [(begin, end) for operation, _, begin, end, _ in mine if operation == "forget"]
        ended_put, begun_put = _Latest((end, begin) for begin, end in puts), _Latest(puts)
        ended_erasure, begun_erasure = (
            _Latest((end, begin) for begin, end in erasures),
            _Latest(erasures),
        )
        for operation, _, begin, end, result in mine:
            if operation != "get":
                continue
            outcome.check(result != "wrong", f"wrong bytes of chunk {number}")
            stored, erased = ended_put.before(begin), ended_erasure.before(begin)
            is_explained = stored == NEVER or begun_erasure.before(end) > stored
            outcome.check(
                result != "missing" or is_explained, f"chunk {number} was stored, and is missing"
            )
            is_stored = begun_put.before(end) > erased
            outcome.check(
                result != "readable" or is_stored, f"chunk {number} was erased, and is read"
            )


NEVER = -1


class _Latest:
    """The latest of the second times of all pairs whose first time is before one that is asked for."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(pairs)
        self._times = [time for time, _ in ordered]
        self._latest = [NEVER, *accumulate((value for _, value in ordered), max)]

    def before(self, time: int) -> int:
        return self._latest[bisect_left(self._times, time)]


def openings(folder: Path, *, processes: dict[str, int], rounds: int) -> Outcome:
    """Several processes make the same store at once; each key is written, and all agree."""
    outcome = Outcome()
    for number in range(rounds):
        root = folder / f"store{number}"
        codes = start_together(folder, processes, _open_and_put, root)
        outcome.check(set(codes) == {0}, f"a process failed to open a new store: {codes}")
        store = PLAIN.open(root)
        agree(store, outcome, "after concurrent first openings", is_whole=True)
        outcome.check(len(store.catalog.keys()) == 4, "a chunk is missing")
        store.close()
        outcome.add("openings", len(codes))
    outcome.counts["processes"] = processes
    return outcome


def _open_and_put(root: Path, number: int) -> None:
    store = PLAIN.open(root)
    order = random.Random(number).sample(range(1, 5), 4)
    for chunk in order:
        put(store, chunk)
    ok = all(state(store, chunk) == "readable" and store.known([key(chunk)]) for chunk in order)
    store.close()
    if not ok:
        sys.exit(2)


def inheritance(folder: Path, *, rounds: int, methods: tuple[str, ...] = METHODS) -> Outcome:
    """Start processes while threads of the parent write: no lock is left behind, and what is open in the parent stays whole."""
    outcome, root = Outcome(), folder / "store"
    store, stop = PLAIN.open(root), threading.Event()

    def write(first: int) -> None:
        while not stop.is_set():
            put(store, first)
            store.forget(NAMESPACE, f"doc {first}")

    threads = [threading.Thread(target=write, args=(first,)) for first in (101, 102)]
    for thread in threads:
        thread.start()
    try:
        for number in range(rounds):
            for method in methods if number == 0 else methods[:1]:
                codes = start_together(
                    folder, {method: 2}, _put_one, root, 10 * number + len(method)
                )
                outcome.check(set(codes) == {0}, f"{method}: a process failed: {codes}")
                outcome.add(method, len(codes))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    outcome.check(
        put(store, 103) > 0 and state(store, 103) == "readable", "the parent's store is broken"
    )
    agree(store, outcome, "in the parent", is_whole=True)
    store.close()
    return outcome


def _put_one(root: Path, chunk: int, number: int) -> None:
    signal.alarm(60)  # a lock that is held for ever
    store = PLAIN.open(root)
    put(store, chunk)
    if state(store, chunk) != "readable":
        sys.exit(2)
    store.close()
