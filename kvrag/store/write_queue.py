"""What has yet to be written to the disk, and the thread that does it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from kvrag.errors import StoreError
from kvrag.store.base import Record
from kvrag.store.disk import DiskStore
from kvrag.store.disk_writes import Withdrawn
from kvrag.store.retention import Retention
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a chunk that has yet to be written was put with: a text and a document, in the rows of one generation of the index."""

    text: TextEntry | None
    doc_id: str | None
    generation: int


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk that has yet to be written, with the references that it was put with."""

    identity: ChunkIdentity
    kv: ChunkKV
    record: Record
    retention: Retention | None
    references: list[Reference]
    pin: ExitStack


EXIT_S = 5.0
"""How long an exit waits for the thread, when nothing is left to write."""

_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


@atexit.register
def _write_all() -> None:
    """Lose nothing when the interpreter exits; a queue that has work is kept alive by its thread."""
    for queue in list(_queues):
        writer = queue.writer
        queue.drain()
        if writer is not None and queue.pid == os.getpid():
            # A thread that is still letting go of its tensors when the interpreter is taken down aborts the process.
            writer.join(EXIT_S)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Queue:
    """What one process has yet to write.

    ``changes`` guards the fields and is held for moments; ``writing`` is held during each write, and by erasures. Who needs both takes
    ``writing`` first.
    """

    disk: DiskStore
    pid: int = field(default_factory=os.getpid)
    changes: threading.RLock = field(default_factory=threading.RLock)
    writing: threading.RLock = field(default_factory=threading.RLock)
    entries: dict[ChunkKey, Entry] = field(default_factory=dict)
    num_bytes: int = 0
    errors: dict[ChunkKey, str] = field(default_factory=dict)
    failed: int = 0
    writer: threading.Thread | None = None

    def __post_init__(self) -> None:
        _queues.add(self)

    def append(self, entry: Entry) -> None:
        """Add a chunk; ``changes`` is held."""
        self.entries[entry.record.key] = entry
        self.num_bytes += entry.kv.num_bytes
        if self.writer is None or not self.writer.is_alive():
            self.writer = threading.Thread(target=self.work, name="kvrag-write", daemon=True)
            try:
                self.writer.start()
            except RuntimeError:  # too many threads, or the interpreter is about to exit: flush() writes what is left
                self.writer = None

    def drop(self, key: ChunkKey) -> bool:
        """Forget a chunk; ``changes`` is held."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return False
        entry.pin.close()
        self.num_bytes -= entry.kv.num_bytes
        return True

    def work(self) -> None:
        """Write until nothing is left."""
        while self.write_next():
            pass

    def drain(self) -> None:
        """Write what is left, and wait for what another thread is writing; nothing in a forked child, whose parent does."""
        if self.pid == os.getpid():
            self.work()

    def write_next(self) -> bool:
        """Write the oldest chunk; ``False`` if there is none, and then the writer is over."""
        with self.writing:
            with self.changes:
                entry = next(iter(self.entries.values()), None)
                if entry is None:
                    if self.writer is threading.current_thread():
                        self.writer = None
                    return False
            try:
                self._write(entry)
            except Exception as error:
                self._failed(entry, error)
        return True

    def _write(self, entry: Entry) -> None:
        """Write a chunk and its references, those too that come meanwhile; ``StoreError`` if one of them was lost with the index."""
        done, key, is_whole = 0, entry.record.key, True
        while True:
            with self.changes:
                references = entry.references[done:]
                if not references:
                    self.drop(key)
                    break
            for reference in references:
                is_whole &= self._write_for(entry, reference)
            done += len(references)
        if not is_whole:
            # Not put again: nothing is left to tell whether another process had erased it before.
            raise StoreError(
                f"the index was lost before the chunk {key[:12]} was written, and with it the row that it was put with, if that was not "
                "erased; put it again if it is wanted"
            )

    def _write_for(self, entry: Entry, reference: Reference) -> bool:
        """Write a chunk, or one more reference to it; ``False`` if its row was lost with the index, perhaps."""
        text, doc_id = reference.text, reference.doc_id
        try:
            self.disk.fulfil(entry.identity, entry.kv, text=text, doc_id=doc_id, retention=entry.retention)
        except Withdrawn as withdrawn:
            if self.disk.rows.generation != reference.generation:
                return False
            if doc_id is None:  # not by its document: the caller, who believes it stored, is told
                raise
            log.info("%s", withdrawn)
        return True

    def _failed(self, entry: Entry, error: Exception) -> None:
        key = entry.record.key
        log.warning("the chunk %s could not be written as it was put: %s", key[:12], error)
        with self.changes:
            self.errors[key] = str(error)
            self.failed += 1
            self.drop(key)
        with suppress(
            StoreError, OSError
        ):  # a row that can't be removed now is absent to all, and goes when this process has ended
            if not self.disk.contains(key):
                self.disk.index.remove(key)
