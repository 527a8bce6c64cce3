"""Power cuts: what was not synced is lost, all of it or any part of it; what was acknowledged as durable is there."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

from faults import can_inject
from syscalls import Recording, note, rebuild, record
from world import CONFIG, Kind, Outcome, agree, put, state

from kvrag.testing.chunks import NAMESPACE

STORED, ERASED, LONG = (1, 2, 3, 4, 6), (2, 4), 5
SHARES = (0.0, 1.0, 0.5, 0.2, 0.8)
"""How much of what was not synced survives: nothing, all, and random parts of it."""


def work(root: Path, kind: Kind) -> None:
    """Make a store, put, erase, and put again; say what is done."""
    store = kind.open(root)
    for number in (*STORED, LONG):
        put(store, number)
        note(f"put {number}")
    for number in ERASED:
        note(f"erase {number}")
        store.forget(NAMESPACE, f"doc {number}")
        note(f"erased {number}")
    note(f"again {ERASED[0]}")
    put(store, ERASED[0])
    note(f"put {ERASED[0]}")
    store.close()
    store = kind.open(root)
    put(store, 7)
    note("put 7")
    store.close()


def run(folder: Path, *, limit: int | None, seed: int = 0) -> Outcome:
    """Cut the power at every change, or at some, for each durability."""
    outcome = Outcome(skipped=can_inject())
    if outcome.skipped:
        return outcome
    for durability in ("durable", "cache"):
        kind = Kind(replace(CONFIG, durability=durability))
        disk = folder / durability
        disk.mkdir()
        log = folder / "log"
        outcome.check(
            record(lambda k=kind, d=disk: work(d / "store", k), log) == 0,
            "the recorded process failed",
        )
        recording = Recording(log, disk)
        same = folder / "same"
        same.mkdir()
        rebuild(
            recording.root,
            recording.survivors(len(recording.changes), random.Random(), 1.0, torn=False),
            same,
        )
        outcome.check(
            _files(same) == _files(disk), "the replay of everything is not what is on the disk"
        )
        shutil.rmtree(same)
        outcome.add("changes", len(recording.changes))
        _cut(recording, kind, folder / "cut", outcome, limit=limit, seed=seed)
    return outcome


def _files(folder: Path) -> dict[str, bytes]:
    """Content of all files but SQLite's shared memory, which is not written by calls and means nothing after a power cut."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".db-shm"
    }


def _cut(
    recording: Recording,
    kind: Kind,
    folder: Path,
    outcome: Outcome,
    *,
    limit: int | None,
    seed: int,
) -> None:
    luck = random.Random(seed)
    cases = [(end, share) for end in range(len(recording.changes) + 1) for share in SHARES]
    if limit is not None:
        cases = luck.sample(cases, min(limit, len(cases)))
    seen = set()
    for end, share in cases:
        survivors = recording.survivors(end, luck, share, torn=share not in (0.0, 1.0))
        notes = recording.notes(end)
        case = (hash(tuple(map(id, survivors))), len(notes))
        if case in seen:
            continue
        seen.add(case)
        folder.mkdir()
        rebuild(recording.root, survivors, folder)
        what = f"{kind.config.durability}, cut at change {end}, {share:.0%} of the rest kept"
        _judge(folder / "store", kind, notes, outcome, what)
        shutil.rmtree(folder)
        outcome.add("power cuts")


def _judge(root: Path, kind: Kind, notes: list[str], outcome: Outcome, what: str) -> None:
    """Open what is left as the next process would."""
    done = dict(reversed(text.split()) for text in notes)  # the last word about each chunk
    store = kind.open(root)
    is_durable = kind.config.durability == "durable"
    agree(store, outcome, what, may_lose=not is_durable)
    for number in (*STORED, LONG, 7):
        found, said = state(store, number), done.get(str(number))
        outcome.add(found)
        outcome.check(found != "wrong", f"{what}: chunk {number} is wrong")
        if is_durable and said == "put":
            outcome.check(
                found == "readable", f"{what}: chunk {number} was acknowledged and is {found}"
            )
            outcome.check(
                f"doc {number}" in store.catalog.documents(NAMESPACE),
                f"{what}: document {number} is lost",
            )
        if is_durable and said == "erased":
            outcome.check(found == "missing", f"{what}: chunk {number} was erased and is {found}")
    if is_durable:
        outcome.check(
            store.stats()["disk"].rejected == 0, f"{what}: a chunk had its name before its bytes"
        )
    outcome.check(
        put(store, 8) > 0 and state(store, 8) == "readable", f"{what}: it takes no more chunks"
    )
    store.close()
