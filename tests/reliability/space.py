"""A disk that is full, and a directory that is lost while the store is open."""

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from world import PLAIN, TIERED, Outcome, agree, identity, judge, key, put, state

from kvrag.errors import StoreError
from kvrag.store import Retention, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_kv, make_text

SIZE = "24m"
FILLERS = range(0, 4000, 5)  # the long ones
ROUNDS_PER_S = 5


def used(path: Path) -> int:
    """Bytes of the file system that are in use."""
    return shutil.disk_usage(path).used


def on_a_small_disk(folder: Path, scenario: Callable[[Path], Outcome]) -> Outcome:
    """Run a scenario on a file system of its own."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", disk], capture_output=True
    )
    if done.returncode:
        return Outcome(skipped="file systems may not be mounted here")
    try:
        return scenario(disk)
    finally:
        subprocess.run(["umount", "-l", disk], check=False, capture_output=True)


def full_disk(folder: Path) -> Outcome:
    """Fill a small tmpfs to the brim; reads go on, erasing works, writing works again when there is room."""
    return on_a_small_disk(folder, _fill)


def _fill(disk: Path) -> Outcome:
    outcome = Outcome()
    root = disk / "store"
    store = PLAIN.open(root)
    acknowledged, fault = [], None
    for number in FILLERS:
        try:
            put(store, number)
            acknowledged.append(number)
        except StoreError as error:
            fault = error
            break
    outcome.check(fault is not None, "the disk never was full")
    outcome.check(
        "No space left" in str(fault) or "full" in str(fault),
        f"the error does not say why: {fault}",
    )
    fill_the_rest(disk)
    before = used(disk)
    for number in FILLERS[len(acknowledged) : len(acknowledged) + 30]:
        try:
            put(store, number)
            outcome.check(False, f"chunk {number} was stored on a full disk")
        except StoreError:
            outcome.add("refused")
    outcome.counts["leaked_bytes"] = max(0, used(disk) - before)
    outcome.check(used(disk) <= before, f"{used(disk) - before} bytes leaked by refused writes")
    outcome.counts["stored"] = len(acknowledged)
    for number in acknowledged:
        outcome.check(
            state(store, number) == "readable", f"chunk {number} can't be read on a full disk"
        )
    tiered = TIERED.open(root)
    outcome.check(
        TIERED.state(tiered, acknowledged[0]) == "readable",
        "memory above does not answer on a full disk",
    )
    tiered.close()
    _recover(disk, store, acknowledged, outcome)
    return outcome


def fill_the_rest(disk: Path) -> None:
    """Leave not one byte."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def _recover(disk: Path, store: TieredStore, acknowledged: list[int], outcome: Outcome) -> None:
    first, second, third, *rest = acknowledged
    outcome.check(
        store.forget(NAMESPACE, f"doc {first}") == 1, "a document can't be erased on a full disk"
    )
    outcome.check(state(store, first) == "missing", "an erased chunk is still there")
    outcome.check(store.delete([key(second)]) == 1, "a chunk can't be erased on a full disk")
    outcome.check(
        store.retain([key(third)], Retention(priority=0)) == 1,
        "nothing can be retained on a full disk",
    )
    outcome.check(
        put(store, 1) > 0 and state(store, 1) == "readable", "it does not heal when there is room"
    )
    outcome.check(
        all(state(store, number) == "readable" for number in rest), "something else was lost"
    )
    store.close()
    (disk / "filler").unlink()
    # The same disk with a budget: what is there makes room by itself.
    small = PLAIN.open(disk / "store", disk_bytes=6 * 10**6)
    for number in FILLERS[1000 // 5 : 1000 // 5 + 60]:
        put(small, number)
        outcome.check(small.stats()["disk"].num_bytes <= 6 * 10**6, "the budget does not hold")
    outcome.check(
        state(small, FILLERS[1000 // 5 + 59]) == "readable", "the newest chunk was evicted"
    )
    outcome.check(state(small, third) == "missing", "the chunk of the lowest priority stayed")
    small.close()


def read_only(folder: Path) -> Outcome:
    """Let the file system become read-only under an open store: reads go on, writes are refused at no cost, and it heals."""
    return on_a_small_disk(folder, _made_read_only)


def _made_read_only(disk: Path) -> Outcome:
    outcome, root = Outcome(), disk / "store"
    store = PLAIN.open(root)
    for number in range(1, 5):
        put(store, number)
    tiered = TIERED.open(root)
    outcome.check(TIERED.state(tiered, 1) == "readable", "memory above does not answer")
    for each in (store, tiered):
        each.catalog._rows.at_thread_end()  # a file system with a file that is open for writing is not made read-only by mount
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, capture_output=True)
    _refuse(store, outcome, "readable")
    _refuse(tiered, outcome, "readable")
    shipped = PLAIN.open(root)
    outcome.check(
        shipped.read_only, "a store that can't be written to is not open for reading only"
    )
    outcome.check(
        all(state(shipped, number) == "readable" for number in range(1, 5)),
        "it can't be read when opened anew",
    )
    shipped.close()
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True, capture_output=True)
    outcome.check(
        put(store, 9) > 0 and state(store, 9) == "readable", "it does not take writes again"
    )
    outcome.check(TIERED.put(tiered, 8) > 0, "memory above does not take writes again")
    tiered.close()
    agree(store, outcome, "after it was read-only")
    store.close()
    return outcome


def _refuse(store: Any, outcome: Outcome, expected: str) -> None:
    """Read and write five times a second, for three seconds: reads give what is expected, writes are refused, hardly any time is used.

    Only the store's own time counts, not the making and comparing of chunks here. Of the rounds the median is judged: whoever
    tries again and again does so in each of them, and uses up a core.
    """
    present, absent = identity(1), identity(9)
    kv, text = make_kv(absent), make_text("9")
    shares, start = [], time.monotonic()
    while time.monotonic() < start + 3:
        began, cpu = time.monotonic(), time.process_time()
        found = store.get(present)
        try:
            store.put(absent, kv, text=text, doc_id="doc 9")
            outcome.check(False, "a chunk was written")
        except StoreError:
            outcome.add("refused")
        time.sleep(1 / ROUNDS_PER_S)
        shares.append((time.process_time() - cpu) / (time.monotonic() - began))
        outcome.check(judge(found, 1) == expected, f"chunk 1 is {judge(found, 1)}")
    share = statistics.median(shares)
    outcome.counts["share_of_a_core"] = max(
        round(share, 4), outcome.counts.get("share_of_a_core", 0.0)
    )
    outcome.check(share < 0.5, f"{share:.0%} of a core was used")


def vanished(folder: Path) -> Outcome:
    """Take the directory away: misses and refusals at no cost; give it back: everything is there."""
    outcome, root = Outcome(), folder / "store"
    store = PLAIN.open(root)
    for number in range(1, 5):
        put(store, number)
    tiered = TIERED.open(root)
    outcome.check(TIERED.state(tiered, 1) == "readable", "memory above does not answer")
    root.rename(folder / "away")
    _refuse(store, outcome, "missing")
    _refuse(tiered, outcome, "missing")  # nobody can tell what was erased
    outcome.check(not root.exists(), "the directory was made again")
    (folder / "away").rename(root)
    outcome.check(
        all(state(store, number) == "readable" for number in range(1, 5)), "it does not heal"
    )
    outcome.check(put(store, 9) > 0, "it does not take writes again")
    outcome.check(TIERED.state(tiered, 1) == "readable", "memory above does not heal")
    outcome.check(TIERED.put(tiered, 8) > 0, "memory above does not take writes again")
    tiered.close()
    store.close()
    return outcome
