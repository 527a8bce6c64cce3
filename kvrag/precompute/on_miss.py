"""Write-back: precompute chunks after an answer that had to compute them.

These are retrieved chunks without KV. They are encoded behind the prefix, in batches of a single
chunk, while no request of the engine runs. KV is never taken from the answer, because its rows may
be repaired. Live text, such as questions and other user turns, is never stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import content_key, text_digest
from kvrag.model.lm import LoadedModel
from kvrag.precompute.documents import Guard, Item, Items
from kvrag.precompute.encode import KeptPrefix
from kvrag.precompute.run import Precompute
from kvrag.runtime import POOL
from kvrag.store import TieredStore
from kvrag.store.tiers import ERASURES, Stopped
from kvrag.types import ChunkIdentity, Missed, MissedChunk, TextEntry

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # most queued chunks; more are dropped, and offered again by a later prompt

# Seconds without write-back after a failure. Else, with a full or read-only disk, every miss would
# cost a forward.
RETRY_S = 60.0


class WriteBack:
    """Store missed chunks in a background thread, which ends when the queue is empty.

    ``context`` holds the token ids of the context that chunks are encoded behind.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: TieredStore,
        config: StoreConfig,
        context: Sequence[int] = (),
    ) -> None:
        self.loaded = loaded
        self.store = store
        self.config = config
        self.context = context
        self.closed = threading.Event()
        self._changed = threading.Condition()
        self._waiting: deque[Missed] = deque()
        self._kept_prefix: KeptPrefix = {}
        self._work: Future[None] | None = None
        self._counts: Counter[str] = Counter()
        self._requests = 0
        self._not_before = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Block write-back forwards while a request runs."""
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
        """Queue the missed chunks of a prompt, without waiting.

        Drops them if the queue has no room, after a failure (:data:`RETRY_S`), or once closed.
        """
        with self._changed:
            if (
                self.closed.is_set()
                or len(missed.chunks) + self._num_waiting() > MAX_WAITING
                or time.monotonic() < self._not_before
            ):
                self._counts["dropped"] += len(missed.chunks)
                return
            self._waiting.append(missed)
            if self._work is None:
                try:
                    self._work = POOL.submit(self._store_all, cancel=self.closed)
                except RuntimeError as error:  # too many threads, or the interpreter exits
                    logger.warning("missed chunks are not stored: %s", error)
                    self._counts["dropped"] += len(self._waiting.pop().chunks)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to store; return ``False`` if ``timeout_s`` passes first.

        Call it while no request runs.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._work is None, timeout_s)

    def close(self) -> None:
        """Drop queued chunks and store nothing more; does not wait for a running forward."""
        with self._changed:
            self.closed.set()
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Return chunk counts: ``stored``, ``skipped``, ``failed``, ``dropped``, ``waiting``."""
        with self._changed:
            return {
                "waiting": self._num_waiting(),
                **{name: self._counts[name] for name in ("stored", "skipped", "failed", "dropped")},
            }

    def _num_waiting(self) -> int:
        return sum(len(missed.chunks) for missed in self._waiting)

    def _store_all(self) -> None:
        while True:
            with self._changed:
                if self.closed.is_set() or not self._waiting:
                    self._counts["dropped"] += self._num_waiting()
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

    def has_kv(self, namespace: str, text: str) -> bool:
        """Whether a text has KV behind any prefix and context."""
        identity = ChunkIdentity(
            self.loaded.fingerprint,
            namespace,
            "",
            self.loaded.encoder.chunk_ids(text),
            self.config.kv_dtype,
        )
        return bool(self.store.catalog.variants(content_key(identity)))

    def _store(self, missed: Missed) -> Counter[str]:
        """Store the chunks of a prompt that are still missing, and return counts; never raises."""
        guard = _MissGuard(self, missed)
        rest = "failed"
        skipped = 0
        run = None
        try:
            run = Precompute(
                self.loaded,
                self.store,
                self.config,
                missed.namespace,
                missed.prefix,
                self.context,
                guard=guard,
                kept=self._kept_prefix,
            )
            guard.before_forward()
            wanted = Items(
                Item.of(None, chunk.text) for chunk in missed.chunks if guard.is_wanted(chunk)
            )
            skipped = len(missed.chunks) - len(wanted)
            run.run(wanted, batch_size=1)
        except Stopped:
            rest = "dropped"
        except Exception as error:  # only logged: the answer has been given
            log = logger.debug if self.closed.is_set() else logger.warning
            log("missed chunks were not stored: %s", error)
        counts = Counter[str]()
        if run is not None:
            counts.update(stored=run.stored, skipped=skipped + run.skipped + len(run.short))
        counts[rest] += len(missed.chunks) - counts.total()
        return counts


class _MissGuard(Guard):
    """Delay a run while requests run; end it after an erasure or the engine's close."""

    def __init__(self, owner: WriteBack, missed: Missed) -> None:
        self._owner = owner
        self._missed = missed
        self._registered: set[str] = set()

    def before_forward(self) -> None:
        """Wait until no request runs; raise :class:`Stopped` after an erasure or a close."""
        self._owner.wait_for_turn()
        with self.storing():
            pass

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Block erasures while chunks are written.

        Raises :class:`Stopped` after an erasure or a close.
        """
        with ERASURES.unless_any_since(self._missed.namespace, self._missed.erasures):
            if self._owner.closed.is_set():
                raise Stopped
            yield

    def is_registered(self, entry: TextEntry | None) -> bool:
        """Whether a text is of a document; another process may have erased its last."""
        return entry is not None and entry.digest in self._registered

    def is_wanted(self, chunk: MissedChunk) -> bool:
        """Whether a chunk has no KV, and is an explicit segment or the text of a document."""
        owner = self._owner
        namespace = self._missed.namespace
        if owner.has_kv(namespace, chunk.text):
            return False
        digest = text_digest(chunk.text)
        if owner.store.catalog.knows_text(namespace, digest):
            self._registered.add(digest)
        return chunk.is_given or digest in self._registered
