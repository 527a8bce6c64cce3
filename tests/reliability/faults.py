"""Each system call of each operation fails in turn: strace injects an error, a lie about its result, or a kill."""

import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syscalls import traced
from world import PLAIN, Outcome, agree, identity, key, put, state

from kvrag.errors import StoreError
from kvrag.store import Retention, TieredStore
from kvrag.testing.chunks import NAMESPACE, make_kv

_CALLS = """
openat pwrite64 pwritev pwritev2 writev pread64 preadv preadv2 write fallocate fdatasync fsync
link linkat unlink unlinkat mkdir mkdirat newfstatat fstat stat lstat ftruncate flock fcntl
rename renameat renameat2 statfs getdents64 mmap
"""
CALLS = tuple(_CALLS.split())
TRANSFERS = ("pwrite64", "pwritev", "pwritev2", "write", "writev", "preadv", "preadv2", "pread64")
MAKE_ERRORS = ("ENOSPC", "EIO", "EINTR", "EACCES")
KEPT, VICTIM, NEW = (1, 2, 5), 3, 10
"""Of which 5 and 10 are long ones."""
ACKNOWLEDGED, REFUSED = 10, 11


def opened(
    work: Callable[[TieredStore], object], **config: Any
) -> Callable[[Path], Callable[[], object]]:
    """Return what opens a store, and returns what does the work on it."""

    def open_(root: Path) -> Callable[[], object]:
        store = PLAIN.open(root, **config)
        return lambda: work(store)

    return open_


def evict(store: TieredStore) -> object:
    """Store a chunk where there is no room: another one of so low a priority leaves."""
    return put(store, NEW + 1, retention=Retention(priority=1))


FULL = sum(make_kv(identity(number)).num_bytes for number in (*KEPT, VICTIM))
BUDGET: dict[str, Any] = {"disk_bytes": FULL}
OPERATIONS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "put": opened(lambda store: put(store, NEW)),
    "get": opened(lambda store: state(store, KEPT[0])),
    "forget": opened(lambda store: store.forget(NAMESPACE, f"doc {VICTIM}")),
    "delete": opened(lambda store: store.delete([key(VICTIM)])),
    "clear": opened(lambda store: store.clear()),
    "evict": opened(evict, **BUDGET),
    "open": lambda root: lambda: PLAIN.open(root),
}
ERASES = ("forget", "delete", "clear")
"""What must be gone once it is acknowledged. A put whose look at the totals fails may go over the budget, until room is made again."""


def can_inject() -> str:
    """Return why faults can't be injected here; nothing if they can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-o", "/dev/null", "-e", "inject=getppid:error=EIO", "true"], capture_output=True
    )
    return (
        "" if done.returncode == 0 else "strace may not trace here: " + done.stderr.decode()[-100:]
    )


def outcome_of(root: Path, operation: str, option: str, log: Path) -> int:
    """Run one operation in a child under strace and return its status."""

    def begin() -> Callable[[], int]:
        work = OPERATIONS[operation](root)

        def run() -> int:
            try:
                result = work()
            except StoreError:
                return REFUSED
            return 12 if result == "wrong" else ACKNOWLEDGED

        return run

    calls = f"trace={','.join('?' + call for call in CALLS)}"
    return traced(begin, ["-f", "-e", calls, *option.split()], log)


def template(folder: Path) -> Path:
    """Make a store that every case starts from."""
    root = folder / "template"
    store = PLAIN.open(root)
    for number in KEPT:
        put(store, number)
    put(store, VICTIM, retention=Retention(priority=1))
    store.close()
    return root


def cases(folder: Path, root: Path) -> list[tuple[str, str]]:
    """Count each operation's calls, and list every (operation, injection)."""
    found = []
    for operation in OPERATIONS:
        shutil.copytree(root, folder / "count")
        log = folder / "count.log"
        outcome_of(folder / "count", operation, "", log)
        calls = Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE))
        shutil.rmtree(folder / "count")
        for call, count in sorted(calls.items()):
            for number in range(1, min(count, 12) + 1):
                faults = [f"error={name}" for name in MAKE_ERRORS] + ["signal=KILL"]
                faults += ["retval=7"] if call in TRANSFERS else []
                found += [
                    (operation, f"-e inject={call}:{fault}:when={number}")
                    for fault in faults
                    if _fair(call, fault)
                ]
    return found


def _fair(call: str, fault: str) -> bool:
    """Leave out what a kernel never does, or what kills Python before it is ours."""
    if call in ("mmap",):
        return fault == "signal=KILL"
    if call in ("fstat", "newfstatat", "stat", "lstat", "getdents64", "statfs", "flock", "fcntl"):
        return fault in ("error=EIO", "error=EACCES", "signal=KILL")
    return True


def run(folder: Path, *, limit: int | None, seed: int = 0) -> Outcome:
    """Run all cases, or a random part of them."""
    outcome = Outcome(skipped=can_inject())
    if outcome.skipped:
        return outcome
    root = template(folder)
    todo = cases(folder, root)
    outcome.counts["cases_known"] = len(todo)
    random.Random(seed).shuffle(todo)
    for operation, option in todo[:limit]:
        work = folder / "case"
        shutil.copytree(root, work)
        status = outcome_of(work, operation, option, folder / "case.log")
        judge(work, operation, option, status, outcome)
        shutil.rmtree(work)
        outcome.add("cases")
    return outcome


def judge(root: Path, operation: str, option: str, status: int, outcome: Outcome) -> None:
    """Open the store again, without faults, and prove it."""
    what = f"{operation} {option}"
    outcome.check(status in (ACKNOWLEDGED, REFUSED, -9), f"{what}: the process ended with {status}")
    outcome.add(
        {ACKNOWLEDGED: "acknowledged", REFUSED: "refused", -9: "killed"}.get(status, "other")
    )
    store = PLAIN.open(root, **(BUDGET if operation == "evict" else {}))
    is_lie = "retval" in option
    if operation == "evict":
        store.make_room()
        stored = [
            number for number in (*KEPT, VICTIM, NEW + 1) if state(store, number) == "readable"
        ]
        outcome.check(
            sum(make_kv(identity(number)).num_bytes for number in stored) <= FULL,
            f"{what}: over the budget",
        )
    agree(store, outcome, what, may_lose=is_lie)
    for number in KEPT:
        found = state(store, number)
        may_miss = is_lie or operation == "clear"
        outcome.check(
            found == "readable" or (may_miss and found == "missing"),
            f"{what}: chunk {number} is {found}",
        )
    for number in (NEW, VICTIM):
        found = state(store, number)
        outcome.check(found != "wrong", f"{what}: chunk {number} is {found}")
        outcome.add(found)
    if status == ACKNOWLEDGED and not is_lie:
        outcome.check(
            operation != "put" or state(store, NEW) == "readable", f"{what}: acknowledged and lost"
        )
        outcome.check(
            operation not in ERASES or state(store, VICTIM) == "missing",
            f"{what}: erased and still there",
        )
        outcome.check(
            operation != "clear" or not store.blobs.keys(), f"{what}: cleared and still there"
        )
    store.close()
