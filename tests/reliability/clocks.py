"""Clocks that jump by ten years, forwards and backwards: nothing is lost, nothing leaves, everything is found."""

import time
from dataclasses import replace
from pathlib import Path

from world import CONFIG, Kind, Outcome, agree, fork, identity, key, put, state, wait

from kvrag.store import Retention
from kvrag.testing.chunks import NAMESPACE, make_kv

YEAR_S = 365 * 86_400
JUMPS = (10, -10, 1, -20, 20)
LIMITED = Kind(replace(CONFIG, disk_bytes=40 * make_kv(identity(1)).num_bytes))


def run(folder: Path) -> Outcome:
    """Each process lives in another year; what the others stored is there, and priorities hold."""
    outcome, root = Outcome(), folder / "store"
    store = LIMITED.open(root)
    put(store, 1, retention=Retention(priority=90, duration_s=3600))
    store.close()
    for index, years in enumerate(JUMPS):
        outcome.check(
            wait(fork(lambda y=years, i=index: _live(root, y, i))) == 0,
            f"a process {years} years away failed",
        )
        outcome.add("jumps")
    store = LIMITED.open(root)
    agree(store, outcome, "in the present")
    expected = [1, *(n for index in range(len(JUMPS)) for n in _numbers(index))]
    missing = [number for number in expected if state(store, number) != "readable"]
    outcome.check(not missing, f"chunks {missing} left with the clock")
    texts, cursor = store.catalog.texts(NAMESPACE, 0)
    outcome.check(len(texts) == len(expected), "texts are missing")
    put(store, 97)
    outcome.check(
        len(store.catalog.texts(NAMESPACE, cursor)[0]) == 1,
        "a new text is not announced after the jumps",
    )
    for number in range(201, 240):
        if number % 5:
            put(store, number)
    outcome.check(state(store, 1) == "readable", "a priority ended with the clock")
    outcome.check(store.known([key(239)]), "the newest chunk left")
    store.close()
    return outcome


def _numbers(index: int) -> list[int]:
    return [100 + 10 * index + n for n in range(1, 4)]


def _live(root: Path, years: int, index: int) -> int:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + years * YEAR_S
    time.time_ns = lambda: real_ns() + years * YEAR_S * 10**9
    store = LIMITED.open(root)
    _, cursor = store.catalog.texts(NAMESPACE, 0)
    for number in _numbers(index):
        put(store, number)
    new, _ = store.catalog.texts(NAMESPACE, cursor)
    ok = (
        len(new) == 3
        and state(store, 1) == "readable"
        and all(state(store, n) == "readable" for n in _numbers(index))
    )
    store.close()
    return 0 if ok else 1
