"""Each system call of each operation fails in turn: strace injects an error, a lie about its result, or a kill."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kinds import BEHIND
from world import CONFIG, Outcome, agree, fork, put, state, wait

from kvrag.errors import StoreError
from kvrag.store import DiskStore
from kvrag.testing.chunks import NAMESPACE

CALLS = (
    *(
        "openat",
        "pwrite64",
        "pwritev",
        "pwritev2",
        "pread64",
        "preadv",
        "preadv2",
        "write",
        "fallocate",
        "fdatasync",
        "fsync",
        "link",
        "linkat",
    ),
    *("unlink", "unlinkat", "mkdir", "mkdirat", "newfstatat", "fstat", "stat", "lstat", "ftruncate", "flock", "fcntl"),
    *("rename", "renameat", "renameat2", "statfs", "getdents64", "mmap"),
)
TRANSFERS = ("pwrite64", "pwritev", "pwritev2", "write", "preadv", "preadv2", "pread64")
MAKE_ERRORS = ("ENOSPC", "EIO", "EINTR", "EACCES")
KEPT, VICTIM, NEW = (1, 2, 5), 3, 10
ACKNOWLEDGED, REFUSED = 10, 11


def open_(root: Path) -> None:
    DiskStore(root, CONFIG)


def put_(root: Path) -> Callable[[], object]:
    store = DiskStore(root, CONFIG)
    return lambda: put(store, NEW)


def put_behind_(root: Path) -> Callable[[], object]:
    store = BEHIND.open(root)
    return lambda: BEHIND.put(store, NEW)


def get_(root: Path) -> Callable[[], object]:
    store = DiskStore(root, CONFIG)
    return lambda: state(store, KEPT[0])


def forget_(root: Path) -> Callable[[], object]:
    store = DiskStore(root, CONFIG)
    return lambda: store.forget(NAMESPACE, f"doc {VICTIM}")


def evict_(root: Path) -> Callable[[], object]:
    from kvrag.store import Retention

    store = DiskStore(root, CONFIG)
    store.retain([k for k in store.index.keys() if k == _victim_key()], Retention(priority=1))  # noqa: SIM118
    return lambda: store._evictor.evict(1, max_priority=1)


def _victim_key() -> str:
    from world import key

    return key(VICTIM)


OPERATIONS: dict[str, Callable[[Path], Callable[[], object] | None]] = {
    "put": put_,
    "put behind": put_behind_,
    "get": get_,
    "forget": forget_,
    "evict": evict_,
    "open": lambda root: lambda: open_(root),
}


def can_inject() -> str:
    """Return why faults can't be injected here; nothing if they can."""
    if not shutil.which("strace"):
        return "strace is not installed"
    done = subprocess.run(["strace", "-o", "/dev/null", "-e", "inject=getppid:error=EIO", "true"], capture_output=True)
    return "" if done.returncode == 0 else "strace may not trace here: " + done.stderr.decode()[-100:]


def traced(root: Path, operation: str, option: str, log: Path) -> int:
    """Run one operation in a child under strace and return its status."""
    ready_out, ready_in = os.pipe()
    go_out, go_in = os.pipe()

    def child() -> int:
        work = OPERATIONS[operation](root)
        os.write(ready_in, b"1")
        os.read(go_out, 1)
        try:
            result = work()
        except StoreError:
            return REFUSED
        return 12 if result == "wrong" else ACKNOWLEDGED

    pid = fork(child)
    os.read(ready_out, 1)
    command = ["strace", "-f", "-q", "-o", str(log), "-e", f"trace={','.join('?' + call for call in CALLS)}"]
    strace = subprocess.Popen([*command, *option.split(), "-p", str(pid)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.write(go_in, b"1")
    status = wait(pid)
    strace.wait(20)
    for fd in (ready_out, ready_in, go_out, go_in):
        os.close(fd)
    return status


def template(folder: Path) -> Path:
    """Make a store that every case starts from."""
    root = folder / "template"
    store = DiskStore(root, CONFIG)
    for number in (*KEPT, VICTIM):
        put(store, number)
    store.close()
    return root


def cases(folder: Path, root: Path) -> list[tuple[str, str]]:
    """Count each operation's calls, and list every (operation, injection)."""
    found = []
    for operation in OPERATIONS:
        shutil.copytree(root, folder / "count")
        log = folder / "count.log"
        traced(folder / "count", operation, "", log)
        calls = Counter(re.findall(r"^\d+ +(\w+)\(", log.read_text(), re.MULTILINE))
        shutil.rmtree(folder / "count")
        for call, count in sorted(calls.items()):
            for number in range(1, min(count, 12) + 1):
                faults = [f"error={name}" for name in MAKE_ERRORS] + ["signal=KILL"]
                faults += ["retval=7"] if call in TRANSFERS else []
                found += [
                    (operation, f"-e inject={call}:{fault}:when={number}") for fault in faults if _fair(call, fault)
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
        status = traced(work, operation, option, folder / "case.log")
        judge(work, operation, option, status, outcome)
        shutil.rmtree(work)
        outcome.add("cases")
    return outcome


def judge(root: Path, operation: str, option: str, status: int, outcome: Outcome) -> None:
    """Open the store again, without faults, and prove it."""
    what = f"{operation} {option}"
    outcome.check(status in (ACKNOWLEDGED, REFUSED, -9), f"{what}: the process ended with {status}")
    outcome.add({ACKNOWLEDGED: "acknowledged", REFUSED: "refused", -9: "killed"}.get(status, "other"))
    store = DiskStore(root, CONFIG)
    agree(store, outcome, what)
    is_lie = "retval" in option
    for number in KEPT:
        found = state(store, number)
        outcome.check(found == "readable" or (is_lie and found == "missing"), f"{what}: chunk {number} is {found}")
    for number in (NEW, VICTIM):
        found = state(store, number)
        outcome.check(found != "wrong", f"{what}: chunk {number} is {found}")
        outcome.add(found)
    if status == ACKNOWLEDGED and not is_lie:
        outcome.check(
            not operation.startswith("put") or state(store, NEW) == "readable", f"{what}: acknowledged and lost"
        )
        outcome.check(operation != "forget" or state(store, VICTIM) == "missing", f"{what}: erased and still there")
    store.close()
