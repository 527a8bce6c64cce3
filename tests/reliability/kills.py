"""SIGKILL at random moments of writers, readers, erasers and evictors on one store."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from world import CONFIG, Journal, Outcome, agree, fork, identity, kill_after, put, state

from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE, make_kv, same_bits

WRITERS = 2
RANGE = 400_000
SAMPLE = 60


def writer(root: Path, me: int, start: int, journal: Journal) -> None:
    """Store one chunk after the other, and write each down when it was acknowledged."""
    store = DiskStore(root, CONFIG)
    for number in range(start, start + RANGE):
        put(store, me * RANGE + number)
        journal.note(me * RANGE + number)


def reader(root: Path, journals: list[Journal], wrong: Journal, seed: int) -> None:
    """Read what writers acknowledged."""
    store, rng = DiskStore(root, CONFIG), random.Random(seed)
    while True:
        known = [number for journal in journals for number in journal.read()[-200:]]
        for number in rng.sample(known, min(20, len(known))):
            kv = store.get(identity(number))
            if kv is not None and not same_bits(kv, make_kv(identity(number))):
                wrong.note(number)


def eraser(root: Path, start: int, journal: Journal) -> None:
    """Store chunks of its own and erase them again; what it wrote down twice is erased."""
    store = DiskStore(root, CONFIG)
    for number in range(start, start + RANGE):
        mine = 8 * RANGE + number
        put(store, mine)
        journal.note(mine)
        store.forget(NAMESPACE, f"doc {mine}")
        journal.note(mine)


def evictor(root: Path, start: int) -> None:
    """Store chunks of low priority and evict them; nobody else's may leave."""
    from kvrag.store import Retention

    store = DiskStore(root, CONFIG)
    for number in range(start, start + RANGE):
        put(store, 9 * RANGE + number, retention=Retention(priority=10))
        store._evictor.evict(1, max_priority=10)


def run(folder: Path, *, kills: int, seed: int = 0) -> Outcome:
    """Kill until there were enough kills; open, check, go on."""
    outcome, rng, root = Outcome(), random.Random(seed), folder / "store"
    journals = [Journal(folder / f"writer{me}") for me in range(WRITERS)]
    erased, wrong = Journal(folder / "eraser"), Journal(folder / "wrong")
    DiskStore(root, CONFIG).close()
    start = 0
    while outcome.counts.get("kills", 0) < kills:
        start += 400
        work = [partial(writer, root, me, start, journals[me]) for me in range(WRITERS)]
        work += [partial(reader, root, journals, wrong, start), partial(eraser, root, start, erased)]
        pids = [fork(each) for each in (*work, partial(evictor, root, start))]
        ended = kill_after(pids, rng, 0.1, 0.35)
        outcome.check(set(ended) == {-9}, f"a process failed before it was killed: {ended}")
        outcome.add("kills", len(pids))
        check(root, journals, erased, outcome, rng)
    outcome.counts["acknowledged"] = sum(len(journal.read()) for journal in journals)
    outcome.counts["erased"] = len(erased.read()) // 2
    outcome.check(not wrong.read(), f"wrong bytes were served: {wrong.read()[:5]}")
    final(root, journals, outcome)
    return outcome


def check(root: Path, journals: list[Journal], erased: Journal, outcome: Outcome, rng: random.Random) -> None:
    """Open the store as the next process would, and prove what it says."""
    outcome.add("orphans_left_by_kills", len(list((root / "tmp").iterdir())))
    store = DiskStore(root, CONFIG)
    agree(store, outcome, "after a kill")
    known = [number for journal in journals for number in journal.read()]
    for number in {*rng.sample(known, min(SAMPLE, len(known))), *known[-5:]}:
        outcome.check(state(store, number) == "readable", f"acknowledged chunk {number} is {state(store, number)}")
        outcome.add("checked")
    done = erased.read()
    for number in {number for number in done[-40:] if done.count(number) == 2}:
        outcome.check(state(store, number) == "missing", f"erased chunk {number} is {state(store, number)}")
    outcome.check(store.stats()["disk"].rejected == 0, "a killed writer left a damaged blob")
    store.close()


def final(root: Path, journals: list[Journal], outcome: Outcome) -> None:
    """Prove every acknowledged chunk."""
    store = DiskStore(root, CONFIG)
    lost = [number for journal in journals for number in journal.read() if state(store, number) != "readable"]
    outcome.counts["lost"] = len(lost)
    outcome.check(not lost, f"acknowledged chunks are lost: {lost[:5]}")
    store.close()
