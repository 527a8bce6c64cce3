"""Write-back of misses: retrieved chunks that had no KV get it after the answer, by the path of index time.

What is stored is computed anew behind the prefix, one chunk at a time, while no request of the engine runs. It is never the KV that the
answer was made with, of which rows may have been repaired, and never live text: questions and other turns of users are not looked at.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from kvrag.config import StoreConfig
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import content_key
from kvrag.model.load import LoadedModel
from kvrag.precompute.run import precompute_texts
from kvrag.store import Naming, Retention, StoreStats, TieredStore
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, Missed, MissedChunk, TextEntry

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Chunks that may wait; more are left to the next prompt that holds them."""

RETRY_S = 60.0
"""Seconds for which nothing is taken after a store took nothing: a full or read-only disk would cost a forward per miss."""

EXIT_S = 30.0
"""Seconds that the end of the process waits for a forward that has begun."""


EVERYWHERE = "*"
"""All namespaces; no digest is called so."""


class _Stopped(Exception):
    """The engine was closed, or documents were erased, since the chunks were seen."""


class Erasures:
    """Counts the erasures of each namespace, so that what was seen before one is not stored after it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, namespace: str) -> int:
        """Return how many there have been."""
        return self._counts[namespace] + self._counts[EVERYWHERE]

    @contextmanager
    def erasing(self, namespace: str) -> Iterator[None]:
        """Count an erasure; what is being stored is finished first, for it to find, and nothing is stored before it is over.

        ``namespace`` is a digest, or :data:`EVERYWHERE`.
        """
        with self._lock:
            self._counts[namespace] += 1
            yield

    @contextmanager
    def unless_any_since(self, namespace: str, count: int) -> Iterator[None]:
        """Keep erasures from beginning; raise if there has been one."""
        with self._lock:
            if self.count(namespace) != count:
                raise _Stopped
            yield


_erasures: weakref.WeakValueDictionary[str, Erasures] = weakref.WeakValueDictionary()
_erasures_lock = threading.Lock()


def erasures_of(kv_dir: str | None) -> Erasures:
    """Return the one counter of a directory for all engines of this process; one of its own for a store in memory."""
    if kv_dir is None:
        return Erasures()
    with _erasures_lock:
        return _erasures.setdefault(os.path.realpath(kv_dir), Erasures())


_open: weakref.WeakSet[WriteBack] = weakref.WeakSet()


class WriteBack:
    """Stores missed chunks in the background; the thread lives as long as there is something to do.

    Parameters
    ----------
    loaded, store, config
        Model, KV store and its limits.
    erasures
        That of the store's directory.
    names
        How texts are called in the store.
    """

    def __init__(
        self, loaded: LoadedModel, store: TieredStore, config: StoreConfig, erasures: Erasures, names: Naming
    ) -> None:
        self.erasures = erasures
        self._names = names
        self._loaded, self._store, self._config = loaded, store, config
        self._changed = threading.Condition()
        self._waiting: deque[Missed] = deque()
        self._counts: Counter[str] = Counter()
        self._requests = 0
        self.thread: threading.Thread | None = None
        self._is_closed = False
        self._not_before = 0.0
        _open.add(self)

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

    def offer(self, missed: Missed) -> None:
        """Take what one prompt missed, and return at once."""
        with self._changed:
            room = MAX_WAITING - sum(len(other.chunks) for other in self._waiting)
            if self._is_closed or len(missed.chunks) > room or time.monotonic() < self._not_before:
                self._counts["dropped"] += len(missed.chunks)
                return
            self._waiting.append(missed)
            if self.thread is None or not self.thread.is_alive():
                thread = threading.Thread(target=self._work, name="kvrag-write-back", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads, or the interpreter is about to exit
                    logger.warning("what a prompt missed is not stored: %s", error)
                    self._counts["dropped"] += len(missed.chunks)
                    self._waiting.pop()
                    return
                self.thread = thread

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to store, and return whether that is so. Only for requests that are over."""
        with self._changed:
            return self._changed.wait_for(lambda: self.thread is None or not self.thread.is_alive(), timeout_s)

    def close(self) -> None:
        """Drop what waits, and store nothing from now on; doesn't wait for a forward that has begun."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Return the chunks ``stored``, ``skipped``, ``failed`` and ``dropped`` so far, and those ``waiting``."""
        with self._changed:
            names = ("stored", "skipped", "failed", "dropped")
            return {**{n: self._counts[n] for n in names}, "waiting": sum(len(m.chunks) for m in self._waiting)}

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or not self._waiting:
                    self._counts["dropped"] += sum(len(missed.chunks) for missed in self._waiting)
                    self._waiting.clear()
                    self.thread = None
                    self._changed.notify_all()
                    return
                missed = self._waiting.popleft()
            counts = self._store_missed(missed)
            with self._changed:
                self._counts.update(counts)
                if counts["failed"] and not counts["stored"]:
                    self._not_before = time.monotonic() + RETRY_S

    def _store_missed(self, missed: Missed) -> Counter[str]:
        """Store what is still missing of one prompt, and count; no fault gets out."""
        counts: Counter[str] = Counter()
        guarded = _GuardedStore(self._store, missed, self)
        try:
            self._wait_for_turn(missed)
            wanted = [chunk.text for chunk in missed.chunks if self._is_wanted(chunk, missed.namespace, guarded)]
            counts["skipped"] = len(missed.chunks) - len(wanted)
            if wanted:
                report = precompute_texts(
                    self._loaded,
                    guarded,
                    [(None, text) for text in wanted],
                    prefix=missed.prefix,
                    namespace=missed.namespace,
                    names=self._names,
                    batch_size=1,
                    min_chunk_tokens=self._config.min_chunk_tokens,
                    kv_dtype=self._config.kv_dtype,
                    show_progress=False,
                    before_batch=lambda: self._wait_for_turn(missed),
                )
                counts.update(stored=report.stored, skipped=report.skipped, failed=len(report.failed))
        except _Stopped:
            counts.update(stored=guarded.stored)
            counts["dropped"] = len(missed.chunks) - counts.total()
        except Exception as error:  # nobody waits for this thread, and the answer has been given
            logger.log(
                logging.DEBUG if self._is_closed else logging.WARNING, "missed chunks were not stored: %s", error
            )
            counts.update(stored=guarded.stored)
            counts["failed"] = len(missed.chunks) - counts.total()
        return counts

    def _is_wanted(self, chunk: MissedChunk, namespace: str, guarded: _GuardedStore) -> bool:
        """Whether a chunk has no KV behind any prefix, and is either given explicitly or registered now."""
        ids = self._loaded.encoder.chunk_ids(chunk.text)
        identity = ChunkIdentity(self._loaded.fingerprint, namespace, "", ids, self._config.kv_dtype)
        if self._store.catalog.variants(content_key(identity)):
            return False
        digest = self._names.digest(chunk.text)
        if guarded.knows(digest):
            guarded.registered.add(digest)
        return chunk.is_given or digest in guarded.registered

    def _wait_for_turn(self, missed: Missed) -> None:
        """Wait until no request runs; raise if there is no use any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._requests)
        with self.unless_over(missed):
            return

    @contextmanager
    def unless_over(self, missed: Missed) -> Iterator[None]:
        """Keep erasures from beginning; raise if there has been one since the chunks were seen, or the engine was closed."""
        with self.erasures.unless_any_since(missed.namespace, missed.erasures):
            if self._is_closed:
                raise _Stopped
            yield


class _GuardedStore:
    """What one precompute sees of a store: nothing enters it that was erased meanwhile, or after the engine was closed."""

    def __init__(self, store: TieredStore, missed: Missed, owner: WriteBack) -> None:
        self._store, self._missed, self._owner = store, missed, owner
        self.registered: set[str] = set()
        self.stored = 0

    def knows(self, digest: str) -> bool:
        """Whether a text is registered now, as far as the store can tell."""
        return self._store.catalog.knows_text(self._missed.namespace, digest)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored."""
        return self._store.known(keys)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth."""
        return self._store.retention(key)

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth."""
        return self._store.retain(keys, retention)

    def stats(self) -> dict[str, StoreStats]:
        """Return the statistics of each tier by name."""
        return self._store.stats()

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference, as the store does."""
        with self._owner.unless_over(self._missed):
            return self._store.link(identity, text=text, doc_id=doc_id)

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Store a chunk, as the store does, unless what it is part of was erased since it was looked at."""
        with self._owner.unless_over(self._missed):
            if text is not None and text.digest in self.registered and not self.knows(text.digest):
                raise StoreError("its last document was erased meanwhile")
            written = self._store.put(identity, kv, text=text, doc_id=doc_id, retention=retention)
        self.stored += text is not None
        return written


@atexit.register
def _close_all() -> None:
    """Let forwards that have begun come to their end: the interpreter must not go away under them."""
    for each in list(_open):
        each.close()
        if (thread := each.thread) is not None:
            thread.join(EXIT_S)
