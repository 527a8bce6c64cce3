"""Write-back of misses: retrieved chunks that had no KV get it after the answer, in the way of index time.

They are computed anew behind the prefix, one at a time, while no request of the engine runs. Stored KV never comes from the answer, whose
rows may have been repaired, and never from live text: questions and other turns of users are not looked at.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import content_key
from kvrag.model.lm import LoadedModel
from kvrag.precompute.run import Guard, Precompute
from kvrag.store import TieredStore
from kvrag.threads import POOL
from kvrag.types import ChunkIdentity, Missed, MissedChunk, TextEntry

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Chunks that may wait; more are left to the next prompt that contains them."""

RETRY_S = 60.0
"""Seconds without write-back after a failed one: with a full or read-only disk, each miss would cost a forward."""

EVERYWHERE = "*"
"""All namespaces; no digest is equal to it."""


class Stopped(Exception):
    """The engine was closed, or documents were erased, since the chunks were missed."""


class Erasures:
    """Counts the erasures of each namespace, so that what was missed before one is not stored after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, namespace: str) -> int:
        """Return how many there have been."""
        return self._counts[namespace] + self._counts[EVERYWHERE]

    @contextmanager
    def erasing(self, namespace: str) -> Iterator[None]:
        """Count an erasure of a namespace (its digest, or :data:`EVERYWHERE`).

        A write under way ends first, so that the erasure finds it; no other one begins before the erasure is over.
        """
        with self._lock:
            self._counts[namespace] += 1
            yield

    @contextmanager
    def unless_any_since(self, namespace: str, count: int) -> Iterator[None]:
        """Keep erasures from beginning; raise :class:`Stopped` if there has been one."""
        with self._lock:
            if self.count(namespace) != count:
                raise Stopped
            yield


_erasures: weakref.WeakValueDictionary[str, Erasures] = weakref.WeakValueDictionary()
_erasures_lock = threading.Lock()


def erasures_of(kv_dir: str | None) -> Erasures:
    """Return the one counter of a directory for all engines of this process; a new one for a store in memory."""
    if kv_dir is None:
        return Erasures()
    with _erasures_lock:
        return _erasures.setdefault(os.path.realpath(kv_dir), Erasures())


class WriteBack:
    """Stores missed chunks in the background, in a thread that lives as long as there is something to do.

    Parameters
    ----------
    loaded, store, config
        Model, KV store and its limits.
    erasures
        The counter of the store's directory.
    """

    def __init__(self, loaded: LoadedModel, store: TieredStore, config: StoreConfig, erasures: Erasures) -> None:
        self.loaded, self.store, self.config, self.erasures = loaded, store, config, erasures
        self.closed = threading.Event()
        self._changed = threading.Condition()
        self._waiting: deque[Missed] = deque()
        self._work: Future[None] | None = None
        self._counts: Counter[str] = Counter()
        self._requests = 0
        self._not_before = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep forwards of this object from beginning while a request runs."""
        with self._changed:
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def wait_for_turn(self) -> None:
        """Wait until no request runs; raise :class:`Stopped` if the engine was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed.is_set() or not self._requests)
        if self.closed.is_set():
            raise Stopped

    def offer(self, missed: Missed) -> None:
        """Accept what one prompt missed, and return at once."""
        with self._changed:
            room = MAX_WAITING - sum(len(other.chunks) for other in self._waiting)
            if self.closed.is_set() or len(missed.chunks) > room or time.monotonic() < self._not_before:
                self._counts["dropped"] += len(missed.chunks)
                return
            self._waiting.append(missed)
            if self._work is None:
                try:
                    self._work = POOL.submit(self._store_all, cancel=self.closed)
                except RuntimeError as error:  # too many threads, or the interpreter is about to exit
                    logger.warning("missed chunks are not stored: %s", error)
                    self._counts["dropped"] += len(self._waiting.pop().chunks)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to store, and return whether that is so. Only after the requests are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._work is None, timeout_s)

    def close(self) -> None:
        """Drop what waits, and store nothing from now on; doesn't wait for a forward under way."""
        with self._changed:
            self.closed.set()
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Return the chunks ``stored``, ``skipped``, ``failed`` and ``dropped`` so far, and those ``waiting``."""
        with self._changed:
            names = ("stored", "skipped", "failed", "dropped")
            return {**{n: self._counts[n] for n in names}, "waiting": sum(len(m.chunks) for m in self._waiting)}

    def _store_all(self) -> None:
        while True:
            with self._changed:
                if self.closed.is_set() or not self._waiting:
                    self._counts["dropped"] += sum(len(missed.chunks) for missed in self._waiting)
                    self._waiting.clear()
                    self._work = None
                    self._changed.notify_all()
                    return
                missed = self._waiting.popleft()
            counts = self._store(missed)
            with self._changed:
                self._counts.update(counts)
                if counts["failed"] and not counts["stored"]:
                    self._not_before = time.monotonic() + RETRY_S

    def _store(self, missed: Missed) -> Counter[str]:
        """Store what is still missing of one prompt, and count; no fault gets out."""
        guard, rest = _MissGuard(self, missed), "failed"
        run = Precompute(
            self.loaded, self.store, self.config, prefix=missed.prefix, namespace=missed.namespace, guard=guard
        )
        skipped = 0
        try:
            guard.before_forward()
            wanted = [chunk.text for chunk in missed.chunks if guard.is_wanted(chunk)]
            skipped = len(missed.chunks) - len(wanted)
            run.run([(None, text) for text in wanted], batch_size=1)
        except Stopped:
            rest = "dropped"
        except Exception as error:  # nobody waits for this thread, and the answer has been given
            level = logging.DEBUG if self.closed.is_set() else logging.WARNING
            logger.log(level, "missed chunks were not stored: %s", error)
        counts = Counter(stored=run.stored, skipped=skipped + run.skipped)
        counts[rest] += len(missed.chunks) - counts.total()
        return counts


class _MissGuard(Guard):
    """Ends a run when documents were erased or the engine was closed; waits while requests run."""

    def __init__(self, owner: WriteBack, missed: Missed) -> None:
        self._owner, self._missed = owner, missed
        self._registered: set[str] = set()

    def before_forward(self) -> None:
        """Wait until no request runs; raise :class:`Stopped` if storing is no longer wanted."""
        self._owner.wait_for_turn()
        with self._storing():
            pass

    @contextmanager
    def _storing(self) -> Iterator[None]:
        with self._owner.erasures.unless_any_since(self._missed.namespace, self._missed.erasures):
            if self._owner.closed.is_set():
                raise Stopped
            yield

    @contextmanager
    def storing(self, entry: TextEntry | None) -> Iterator[None]:
        """Keep erasures from beginning while a chunk is written; fail a text whose last document another process erased."""
        with self._storing():
            if entry is not None and entry.digest in self._registered and not self._is_registered(entry.digest):
                raise StoreError("its last document was erased meanwhile")
            yield

    def is_wanted(self, chunk: MissedChunk) -> bool:
        """Whether a chunk has no KV behind any prefix, and is either given explicitly or the text of a document now."""
        owner, namespace = self._owner, self._missed.namespace
        ids = owner.loaded.encoder.chunk_ids(chunk.text)
        identity = ChunkIdentity(owner.loaded.fingerprint, namespace, "", ids, owner.config.kv_dtype)
        if owner.store.catalog.variants(content_key(identity)):
            return False
        digest = owner.store.names.digest(chunk.text)
        if self._is_registered(digest):
            self._registered.add(digest)
        return chunk.is_given or digest in self._registered

    def _is_registered(self, digest: str) -> bool:
        return self._owner.store.catalog.knows_text(self._missed.namespace, digest)
