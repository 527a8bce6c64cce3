"""Load several chunks at once, and leave in time even if a read never returns."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvrag.types import ChunkIdentity, ChunkKV

log = logging.getLogger(__name__)

THREADS = 4
"""Readers per call: enough to keep a disk busy while another one hashes."""

MAX_STUCK = 16
"""With this many readers hanging, the storage is taken for dead until one of them returns."""

Load = Callable[[ChunkIdentity], ChunkKV | None]


class Loader:
    """Runs ``load`` in threads of its own for each call.

    A pool would be blocked for ever by a few reads that hang, and the threads of ``concurrent.futures`` are waited
    for at interpreter exit; a daemon thread that is left behind costs nothing but itself.

    Parameters
    ----------
    load
        Returns the KV or ``None``; may be called from several threads.
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        self._left_behind: list[threading.Thread] = []

    def load_many(self, identities: Sequence[ChunkIdentity], *, timeout_s: float) -> list[ChunkKV | None]:
        """Return each identity's KV, or ``None`` where it is absent or late; repeated identities are loaded once."""
        if not identities:
            return []
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= MAX_STUCK:
            log.warning("%s reads hang; the storage is not asked until one of them returns", len(self._left_behind))
            return [None] * len(identities)
        job = _Job(self._load, identities)
        results = job.run(timeout_s)
        self._left_behind += [thread for thread in job.threads if thread.is_alive()]
        return [results.get(identity) for identity in identities]


class _Job:
    """One call: what is left to load, and what has been."""

    def __init__(self, load: Load, identities: Sequence[ChunkIdentity]) -> None:
        self._load = load
        self._left = deque(dict.fromkeys(identities))
        self._total = len(self._left)
        self._results: dict[ChunkIdentity, ChunkKV | None] = {}
        self._changed = threading.Condition()
        self.threads: list[threading.Thread] = []

    def run(self, timeout_s: float) -> dict[ChunkIdentity, ChunkKV | None]:
        """Load until all is there or the time is over."""
        deadline = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        for _ in range(min(THREADS, self._total)):
            thread = threading.Thread(target=self._work, name="kvrag-load", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # Too many threads, or the interpreter is about to exit: what nobody loads is late.
                log.warning("a reader could not be started: %s", error)
                break
            self.threads.append(thread)
        with self._changed:
            if self.threads:
                self._changed.wait_for(self._is_done, max(0.0, deadline - time.monotonic()))
            self._left.clear()
            return dict(self._results)

    def _is_done(self) -> bool:
        return len(self._results) == self._total

    def _work(self) -> None:
        while True:
            try:
                identity = self._left.popleft()
            except IndexError:
                return
            kv = None
            try:
                kv = self._load(identity)
            except Exception:
                log.warning("a chunk could not be loaded and will be computed", exc_info=True)
            with self._changed:
                self._results[identity] = kv
                if self._is_done():
                    self._changed.notify()
