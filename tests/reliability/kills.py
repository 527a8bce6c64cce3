"""SIGKILL at random moments of writers, readers, erasers and evictors on one store."""

import random
from functools import partial
from pathlib import Path

from world import PLAIN, Journal, Kind, Outcome, agree, fork, kill_after

from kvrag.errors import StoreError
from kvrag.store import Retention
from kvrag.testing.chunks import NAMESPACE

WRITERS = 2
RANGE = 400_000
SAMPLE = 60
KILLS_PER_STORE = 250
ROOM = 4 * 10**5
"""Bytes that whoever evicts finds free; its chunks are of 72,000 at most."""


def writer(kind: Kind, root: Path, me: int, start: int, journal: Journal) -> None:
    """Store one chunk after the other, and write each down when it was acknowledged."""
    store = kind.open(root)
    for number in range(start, start + RANGE):
        kind.put(store, me * RANGE + number)
        journal.note(me * RANGE + number)


def reader(kind: Kind, root: Path, journals: list[Journal], wrong: Journal, seed: int) -> None:
    """Read what writers acknowledged."""
    store, rng = kind.open(root), random.Random(seed)
    while True:
        known = [number for journal in journals for number in journal.read()[-200:]]
        for number in rng.sample(known, min(20, len(known))):
            if kind.state(store, number) == "wrong":
                wrong.note(number)


def eraser(kind: Kind, root: Path, start: int, journal: Journal) -> None:
    """Store chunks of its own and erase them again; what it wrote down twice is erased."""
    store = kind.open(root)
    for number in range(start, start + RANGE):
        mine = 8 * RANGE + number
        kind.put(store, mine)
        journal.note(mine)
        store.forget(NAMESPACE, f"doc {mine}")
        journal.note(mine)


def evictor(kind: Kind, root: Path, start: int) -> None:
    """Store chunks of low priority, which evict each other; nobody else's may leave."""
    store = kind.open(root)
    full = store.catalog.totals()[1] + ROOM
    store.close()
    store = kind.open(root, disk_bytes=full)
    for number in range(start, start + RANGE):
        try:
            kind.put(store, 9 * RANGE + number, retention=Retention(priority=10))
        except StoreError:  # the others have filled it
            store.delete([kind.key(9 * RANGE + number - 1)])


def run(folder: Path, *, kills: int, seed: int = 0, kind: Kind = PLAIN) -> Outcome:
    """Kill until there were enough kills; open, check, go on. A new store is begun before checks of a large one take most of the time."""
    if kind.needs:
        return Outcome(skipped=kind.needs)
    outcome, rng = Outcome(), random.Random(seed)
    for number, start in enumerate(range(0, kills, KILLS_PER_STORE)):
        on_one_store(folder / str(number), min(KILLS_PER_STORE, kills - start), rng, kind, outcome)
    return outcome


def on_one_store(
    folder: Path, kills: int, rng: random.Random, kind: Kind, outcome: Outcome
) -> None:
    """Kill so often on a new store."""
    folder.mkdir()
    root = folder / "store"
    journals = [Journal(folder / f"writer{me}") for me in range(WRITERS)]
    erased, wrong = Journal(folder / "eraser"), Journal(folder / "wrong")
    kind.open(root).close()
    start, left = 0, kills
    while left > 0:
        start += 400
        work = [partial(writer, kind, root, me, start, journals[me]) for me in range(WRITERS)]
        work += [
            partial(reader, kind, root, journals, wrong, start),
            partial(eraser, kind, root, start, erased),
        ]
        pids = [fork(each) for each in (*work, partial(evictor, kind, root, start))]
        ended = kill_after(pids, rng, 0.1, 0.35)
        outcome.check(set(ended) == {-9}, f"a process failed before it was killed: {ended}")
        outcome.add("kills", len(pids))
        left -= len(pids)
        check(kind, root, journals, erased, outcome, rng)
    outcome.add("acknowledged", sum(len(journal.read()) for journal in journals))
    outcome.add("erased", len(erased.read()) // 2)
    outcome.check(not wrong.read(), f"wrong bytes were served: {wrong.read()[:5]}")
    final(kind, root, journals, outcome)


def check(
    kind: Kind,
    root: Path,
    journals: list[Journal],
    erased: Journal,
    outcome: Outcome,
    rng: random.Random,
) -> None:
    """Open the store as the next process would, and prove what it says."""
    outcome.add("drafts_left_by_kills", len([*(root / "tmp").glob("*")]))
    store = kind.open(root)
    agree(store, outcome, "after a kill")
    known = [number for journal in journals for number in journal.read()]
    for number in {*rng.sample(known, min(SAMPLE, len(known))), *known[-5:]}:
        outcome.check(
            kind.state(store, number) == "readable",
            f"acknowledged chunk {number} is {kind.state(store, number)}",
        )
        outcome.add("checked")
    done, documents = erased.read(), set(store.catalog.documents(NAMESPACE))
    for number in {number for number in done[-40:] if done.count(number) == 2}:
        outcome.check(
            kind.state(store, number) == "missing",
            f"erased chunk {number} is {kind.state(store, number)}",
        )
        outcome.check(
            f"doc {number}" not in documents, f"erased document {number} is registered again"
        )
    outcome.check(store.stats()["disk"].rejected == 0, "a killed writer left a damaged blob")
    store.close()


def final(kind: Kind, root: Path, journals: list[Journal], outcome: Outcome) -> None:
    """Prove every acknowledged chunk."""
    store = kind.open(root)
    lost = [
        number
        for journal in journals
        for number in journal.read()
        if kind.state(store, number) != "readable"
    ]
    outcome.add("lost", len(lost))
    outcome.check(not lost, f"acknowledged chunks are lost: {lost[:5]}")
    store.close()
