"""What the scenarios share: chunks that prove themselves, forked workers, and what they report."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkKV

torch.set_num_threads(1)

CONFIG = StoreConfig(min_free_bytes=0)
LONG_TOKENS = 1500


@dataclass
class Outcome:
    """What a scenario did, and every promise that it saw broken."""

    counts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def check(self, kept: bool, what: str) -> None:
        """Note a promise that was not kept."""
        if not kept and len(self.failures) < 20:
            self.failures.append(what)

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        self.counts[name] = self.counts.get(name, 0) + count


def identity(number: int):
    """Chunk of this number; every fifth is long, so that kills hit writes."""
    return make_identity(number, tokens=LONG_TOKENS if number % 5 == 0 else 3)


def put(store: DiskStore, number: int, **options: Any) -> int:
    """Store a chunk under a text and a document of its own."""
    me = identity(number)
    return store.put(me, make_kv(me), text=make_text(str(number)), doc_id=f"doc {number}", **options)


def key(number: int) -> str:
    """Key of this chunk."""
    return chunk_key(identity(number))


def judge(kv: ChunkKV | None, number: int) -> str:
    """Say whether what was read for a chunk is ``readable``, with the right bits, ``missing``, or ``wrong``."""
    if kv is None:
        return "missing"
    return "readable" if same_bits(kv, make_kv(identity(number))) else "wrong"


def state(store: DiskStore, number: int) -> str:
    """Read a chunk and judge it."""
    return judge(store.get(identity(number)), number)


def warm_up() -> None:
    """Load everything that children would load, so that a fork is ready at once."""
    import tempfile

    from kvrag.store.cache import own_schema

    own_schema()
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder, CONFIG)
        put(store, 1)
        assert state(store, 1) == "readable"
        store.close()


def fork(work: Callable[[], int | None]) -> int:
    """Run ``work`` in a child; its result is the exit status, 99 for an exception. Returns the child's process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        status = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Exit status of a child; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


METHODS = ("fork", "spawn", "forkserver")


def start_together(folder: Path, processes: dict[str, int], work: Callable[..., None], *args: Any) -> list[int]:
    """Start processes in each of :data:`METHODS`, as many as are asked for, let them begin at once, and return their exit codes.

    ``work`` is a function of a module; it gets ``args`` and the number of its process. What the parent has open is open in forked
    ones.
    """
    children = []
    for method, count in processes.items():
        context = multiprocessing.get_context(method)
        for _ in range(count):
            mine = (folder, work, args, len(children))
            children.append(context.Process(target=_begin, args=mine))
            children[-1].start()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("ready-*"))) < len(children) and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / "go").touch()
    for child in children:
        child.join(300)
        if child.is_alive():
            child.kill()
            child.join()
    for file in (*folder.glob("ready-*"), folder / "go"):
        file.unlink()
    return [-99 if child.exitcode is None else child.exitcode for child in children]


def _begin(folder: Path, work: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    warm_up()
    (folder / f"ready-{number}").touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
    work(*args, number)


class Stalls:
    """Notices how long this machine gave a process nothing to do at all; a context manager.

    What takes long while others are given the processor, or while everything is paused, is not slow by itself.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.02):
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last - 0.02), now

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def kill_after(pids: list[int], rng: random.Random, low: float, high: float) -> list[int]:
    """Kill children at random moments, and return their statuses."""
    for pid in rng.sample(pids, len(pids)):
        time.sleep(rng.uniform(low, high) / len(pids))
        os.kill(pid, signal.SIGKILL)
    return [wait(pid) for pid in pids]


def agree(store: DiskStore, outcome: Outcome, where: str) -> None:
    """Check that files and rows name the same chunks, and that nothing is left over."""
    outcome.check(store.files() == set(store.index.keys()), f"{where}: files and rows differ")
    outcome.check(not store.directory.names("tmp"), f"{where}: tmp/ is not empty")
    outcome.check(not store.rows.gone(), f"{where}: an erasure was not finished")


class Journal:
    """Numbers that a worker wrote down, each in one write, so that a kill loses none that was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, number: int) -> None:
        """Write a number down."""
        with self.path.open("a") as file:
            file.write(f"{number}\n")

    def read(self) -> list[int]:
        """Return all numbers; a torn last line counts as not written."""
        text = self.path.read_text() if self.path.exists() else ""
        return [int(line) for line in text.split("\n")[:-1]]
