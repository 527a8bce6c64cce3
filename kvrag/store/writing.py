"""Write chunks: pending rows, then blobs, then confirmed rows.

Several chunks share the two changes of the catalog.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvrag.config import Retention
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.crypto import Keys
from kvrag.kv.format import BlobRejected, Encoded, Foreign, OtherVersion
from kvrag.runtime import POOL
from kvrag.store.base import Blobs, ChunkRecord, NewKV
from kvrag.store.catalog import Catalog
from kvrag.store.catalog.changes import DELETED
from kvrag.store.catalog.ledger import record_of
from kvrag.store.eviction import Evictor, Usage
from kvrag.store.memory import Epochs, Tiers
from kvrag.store.reading import Reader
from kvrag.types import ChunkIdentity, ChunkKey, DocIds, TextEntry

logger = logging.getLogger(__name__)

ATTEMPTS = 10  # times that a chunk is written if it is erased meanwhile
MEANWHILE = "deleted meanwhile: its documents were deleted, or got another text"
TOO_FAST = "the chunk is erased from the KV store as fast as it is written"


@dataclass(slots=True)
class _Job:
    """Chunk that is being written.

    ``result`` is the number of bytes written, or the error; ``None`` while it is open.
    """

    new: NewKV
    encoded: Encoded
    record: ChunkRecord
    revision: int | None = None  # of the pending row; ``None`` if the chunk is stored already
    written: int = 0
    result: int | StoreError | None = None


@dataclass(slots=True, eq=False)
class Writer:
    """Writes of a store: a chunk's blob, between its pending and its confirmed row."""

    # Verifies blobs that are there already.
    reader: Reader
    # Keeps a copy of written chunks.
    memory: Tiers
    blobs: Blobs
    catalog: Catalog
    # Encrypt blobs.
    keys: Keys
    # Makes room for blobs.
    evictor: Evictor
    read_only: bool
    is_closed: bool = False

    @property
    def _far(self) -> Blobs | None:
        """Blobs that machines share over a network, without local copies, if the store has any."""
        blobs = self.blobs.shared or self.blobs
        return blobs if blobs.is_remote else None

    def refusal(self) -> StoreError | None:
        """Return the reason why the store takes no changes; ``None`` if it takes them."""
        if self.is_closed:
            return StoreError("the KV store is closed; open it again")
        if self.read_only:
            return StoreError(f"the KV store is open for reading only; {self.catalog.remedy}")
        return None

    def put_all(self, chunks: Sequence[NewKV], *, reason: str = "put") -> list[int | StoreError]:
        """Store chunks in two changes of the catalog; return :meth:`put`'s results or errors."""
        epochs = self.memory.epochs()
        begun = [self._prepared(chunk) for chunk in chunks]
        jobs = [each for each in begun if isinstance(each, _Job)]
        try:
            if jobs:
                # Evictions must suit the least of the chunks.
                self.evictor.make_room(
                    sum(job.record.num_bytes for job in jobs),
                    priority=min((job.new.retention or Retention()).priority for job in jobs),
                )
        except StoreError as error:
            if len(chunks) > 1:  # some may fit
                return [
                    written for chunk in chunks for written in self.put_all([chunk], reason=reason)
                ]
            return [error]
        for _ in range(ATTEMPTS):
            # Blobs of chunks that are erased meanwhile stay for the next attempt: another writer
            # may count on them.
            left = [job for job in jobs if job.result is None]
            if left:
                self._write(left)
        for job in jobs:
            if job.result is None:
                job.result = StoreError(f"{TOO_FAST}; try again later")
            if isinstance(job.result, StoreError):
                self._take_back(job)
            elif job.revision is not None:
                self._announce(job, epochs, reason)
        return [(each.result or 0) if isinstance(each, _Job) else each for each in begun]

    def _prepared(self, new: NewKV) -> _Job | int | StoreError:
        """Return the job that writes a chunk; 0 if the chunk is stored already, or the error."""
        try:
            if refused := self.refusal():
                return refused
            if self._is_linked(chunk_key(new.identity), new.text, new.doc_ids):
                return 0
            encoded = Encoded(new.identity, new.kv, self.keys.cipher)
        except StoreError as error:
            return error
        return _Job(new, encoded, record_of(new.identity, encoded.header.num_bytes))

    def _write(self, jobs: list[_Job]) -> None:
        """Write pending rows, blobs and confirmed rows; a chunk erased meanwhile gets no result."""
        with _results_of(jobs):
            revisions = self.catalog.begin([(job.record, *job.new[2:]) for job in jobs])
            for job, revision in zip(jobs, revisions, strict=True):
                job.revision = revision
                if revision is None:
                    job.result = 0
                elif revision == DELETED:
                    job.result = StoreError(MEANWHILE)
            # Over a network, a write mostly waits, so blobs are written at the same time.
            write_all = map if self._far is None else POOL.ahead
            list(write_all(self._write_body, [job for job in jobs if job.result is None]))
            left = [job for job in jobs if job.result is None]
            there = self.catalog.confirm({job.record.key: job.revision or 0 for job in left})
            for job in left:
                if job.record.key in there:
                    job.result = job.written

    def _write_body(self, job: _Job) -> None:
        with _results_of([job]):
            job.written = (
                job.record.num_bytes if self._write_blob(job.record.key, job.encoded) else 0
            )

    def _take_back(self, job: _Job) -> None:
        """Remove a chunk that could not be written; its documents stay."""
        key = job.record.key
        with suppress(OSError):
            self.catalog.cancel(key)
        with suppress(OSError):
            # Another writer may have stored the chunk meanwhile; then its blob stays.
            if not self.catalog.known([key]):
                self.blobs.delete([key])

    def _announce(self, job: _Job, epochs: Epochs, reason: str) -> None:
        """Emit the event of a written chunk, set its expiry, and keep it in host memory."""
        (identity, kv, _, _, retention), record = job.new, job.record
        usage = Usage()
        if retention is not None:
            usage = usage.retained(retention)
            if retention.duration_s is not None:
                with suppress(OSError):
                    self.blobs.expire(record.key, retention.duration_s)
        self.memory.tell([record.key], reason, record.num_tokens, record.num_bytes)
        if self.blobs.medium != "host":
            for tier, epoch in epochs[-1:]:  # the host tier
                tier.keep(identity, kv, usage, epoch=epoch, reason="put")

    def _write_blob(self, key: ChunkKey, encoded: Encoded) -> int:
        """Write a blob, in place of a blob that is not this chunk's; 0 if this chunk's is there."""
        written = self.blobs.write(key, encoded)
        if written:
            return written
        try:
            self.reader.blob(key, encoded.header.identity)
        except BlobRejected as fault:
            # An absent blob may be back by now, so it is not deleted.
            if fault.hole != "absent" or isinstance(fault, (Foreign, OtherVersion)):
                self.blobs.delete([key])
            return self.blobs.write(key, encoded)
        return 0

    def link(
        self,
        identity: ChunkIdentity,
        text: TextEntry | None,
        doc_ids: DocIds,
    ) -> bool:
        """Add text and documents to a stored chunk, and return whether the chunk is stored.

        Without ``doc_ids``, the text must have been registered; ``False`` if it was deleted since.
        A dormant blob, left behind by a lost catalog, is adopted: its chunk is stored again without
        being computed.
        """
        if self.refusal():
            return False
        key = chunk_key(identity)
        if self._is_linked(key, text, doc_ids):
            return True
        try:
            record = record_of(identity, self.reader.blob(key, identity).header.num_bytes)
        except BlobRejected as fault:
            if fault.hole == "damaged":
                with suppress(OSError):
                    self.blobs.delete([key])
            return False
        revision = self.catalog.begin([(record, text, doc_ids, None)])[0]
        if revision in (None, DELETED):
            return revision is None
        is_stored = bool(self.catalog.confirm({key: revision or 0}))
        if is_stored:
            self.memory.tell([key], "adopted", record.num_tokens, record.num_bytes)
        return is_stored

    def _is_linked(self, key: ChunkKey, text: TextEntry | None, doc_ids: DocIds) -> bool:
        """Add text and documents to a stored chunk, and return whether the chunk is stored.

        If its remote blob is gone, the chunk is removed from the catalog.
        """
        is_there = self.catalog.link(key, text, doc_ids)
        with suppress(OSError):
            if is_there and self._far is not None and self._far.read(key, 0, 1) is None:
                self.catalog.remove(self.catalog.revisions([key]))
                self.blobs.delete([key])  # the local copy
                return False
        return is_there


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Turn an ``OSError`` or ``MemoryError`` into a ``StoreError`` that says what can't be done."""
    try:
        yield
    except StoreError:
        raise
    except (OSError, MemoryError) as error:
        raise StoreError(
            f"{what}: {str(error) or 'memory is short'}; "
            "make sure that its directory exists, is writable and has free space, then try again"
        ) from error


@contextmanager
def _results_of(jobs: list[_Job]) -> Iterator[None]:
    """Turn a fault into the result of the jobs that have no result yet."""
    what = "the chunk can't be written to the KV store"
    try:
        with in_words(what):
            yield
    except (StoreError, RuntimeError) as error:
        fault = error if isinstance(error, StoreError) else StoreError(f"{what}: {error}")
        for job in jobs:
            if job.result is None:
                job.result = fault
