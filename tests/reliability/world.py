"""What the scenarios share: kinds of stores, chunks that prove themselves, forked workers, and what they report."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvrag.cli.check import gc
from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.crypto import Keys
from kvrag.kv.quantise import pack
from kvrag.store import TieredStore, open_store
from kvrag.testing.chunks import make_identity, make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, KVDtype

torch.set_num_threads(1)

CONFIG = StoreConfig(min_free_bytes=0, ram_bytes=0)
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


@dataclass(frozen=True)
class Kind:
    """What a scenario runs on: the config of the store, its key included, and the type that KV is rounded to."""

    config: StoreConfig = CONFIG
    kv_dtype: KVDtype = "auto"

    @property
    def needs(self) -> str:
        """What is missing here for this kind; nothing if all is here."""
        is_missing = self.config.encryption_key and importlib.util.find_spec("cryptography") is None
        return "cryptography is not installed" if is_missing else ""

    @property
    def cipher(self) -> bytes | None:
        """The key that its blobs are encrypted with."""
        return Keys.of(self.config).cipher

    def open(self, root: Path, **changed: Any) -> TieredStore:
        """Open a store of this kind."""
        return open_store(root, replace(self.config, **changed))

    def identity(self, number: int, *, tokens: int | None = None) -> ChunkIdentity:
        """Chunk of this number; every fifth is long, so that kills hit writes."""
        length = (LONG_TOKENS if number % 5 == 0 else 3) if tokens is None else tokens
        return replace(make_identity(number, tokens=length), kv_dtype=self.kv_dtype)

    def key(self, number: int) -> ChunkKey:
        """Key of this chunk."""
        return chunk_key(self.identity(number))

    def kv(self, identity: ChunkIdentity) -> ChunkKV:
        """Its KV."""
        return pack(make_kv(identity), self.kv_dtype)

    def put(self, store: TieredStore, number: int, **options: Any) -> int:
        """Store a chunk under a text and a document of its own."""
        me = self.identity(number)
        return store.put(
            me, self.kv(me), text=make_text(str(number)), doc_id=f"doc {number}", **options
        )

    def judge(self, kv: ChunkKV | None, number: int) -> str:
        """Say whether what was read for a chunk is ``readable``, with the right bits, ``missing``, or ``wrong``."""
        if kv is None:
            return "missing"
        return "readable" if same_bits(kv, self.kv(self.identity(number))) else "wrong"

    def state(self, store: TieredStore, number: int) -> str:
        """Read a chunk and judge it."""
        return self.judge(store.get(self.identity(number)), number)


PLAIN = Kind()
TIERED = Kind(replace(CONFIG, ram_bytes=2**20))
PROTECTED = Kind(replace(CONFIG, encryption_key=lambda: bytes([3]) * 32), "int8")
ROUNDED = Kind(kv_dtype="int4")
ALL_AT_ONCE = Kind(replace(PROTECTED.config, ram_bytes=2**20), "int8")
identity, key, put, judge, state = PLAIN.identity, PLAIN.key, PLAIN.put, PLAIN.judge, PLAIN.state


def path_of(root: Path, key: ChunkKey) -> Path:
    """Place of a chunk's file, as docs/format.md has it."""
    return root / "objects" / key[:2] / f"{key}.safetensors"


def warm_up() -> None:
    """Load everything that children would load, so that a fork is ready at once."""
    with tempfile.TemporaryDirectory() as folder:
        store = PLAIN.open(Path(folder))
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


def start_together(
    folder: Path, processes: dict[str, int], work: Callable[..., None], *args: Any
) -> list[int]:
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


def agree(
    store: TieredStore,
    outcome: Outcome,
    where: str,
    *,
    is_whole: bool = False,
    may_lose: bool = False,
) -> None:
    """Check that every file has a row, and with ``is_whole`` that every row has its file, and that nothing waits to be written.

    Whoever is killed may leave rows without a file, which are misses, and a lost catalog files without rows, which it knows; clearing up
    leaves none of these files, and nothing that is pending. With ``may_lose``, what was written last to the catalog may be lost without
    its knowing.
    """
    files, rows, pending = (
        store.blobs.keys(),
        set(store.catalog.keys()),
        set(store.catalog.keys(pending=True)),
    )
    is_known = files <= rows | pending or may_lose or store.catalog.state().dormant
    outcome.check(is_known, f"{where}: a file has no row")
    outcome.check(not rows & pending, f"{where}: a chunk is stored, and waits to be written")
    if is_whole:
        outcome.check(files == rows and not pending, f"{where}: files and rows differ")
        return
    gc(store)
    outcome.check(
        store.blobs.keys() <= set(store.catalog.keys()),
        f"{where}: a file has no row after clearing up",
    )
    outcome.check(
        not store.catalog.keys(pending=True),
        f"{where}: a chunk waits to be written after clearing up",
    )


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
