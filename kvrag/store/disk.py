"""The disk tier: one immutable file per chunk, and an index that can be rebuilt from the files.

::

    root/format.json                          {"format": "kvrag", "version": 3}
    root/objects/<key[:2]>/<key>.safetensors  the chunks
    root/references/<..>/<digest>.json        which document holds on to which text
    root/index/                               rows about both
    root/tmp/                                 files being written
    root/quarantine/                          files that failed the proof of identity or integrity
    root/ballast                              space that is given up when the disk is full, so that erasing works
    root/lock, root/evict.lock                held while a process opens the store, or evicts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.fingerprint import chunk_key
from kvrag.store import blob, recovery
from kvrag.store.base import DEFAULT_PRIORITY, Record, Retention
from kvrag.store.disk_reads import DiskReads
from kvrag.store.events import StoreEvent
from kvrag.store.objects import KEY
from kvrag.store.references import ReferenceFile
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

ATTEMPTS = 3
"""How often a put begins anew when another process erases the chunk in its midst."""

KEEP = Retention(100)


class Withdrawn(StoreError):
    """A chunk that room was reserved for was erased before it was written."""


class DiskStore(DiskReads):
    """KV in a directory that several processes may share.

    Parameters
    ----------
    root
        The directory; made if absent.
    config
        Limits, durability, kind of index, keys, events; ``ram_bytes`` is not used.
    keys
        The config's keys, where they were read already.

    Raises
    ------
    ConfigError
        If a key can't be had.
    MissingDependencyError
        If chunks are to be encrypted and ``cryptography`` is not installed.
    StoreError
        If the directory can't be used. One that holds a store and can't be written to is opened for reading.
    StoreFormatError
        If it was written by a newer kvrag.
    """

    def put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
        reason: str = "put",
    ) -> int:
        """Store a chunk and return the bytes written; 0 if it was there already (then only the reference is added).

        ``reason`` is that of the event.

        Raises
        ------
        StoreError
            If it can't be written, or there is no room for it. Nothing of it is left then.
        """
        return self._put(identity, kv, text=text, doc_id=doc_id, retention=retention, is_reserved=False, reason=reason)

    def fulfil(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None = None,
        retention: Retention | None = None,
    ) -> int:
        """Write a chunk that :class:`~kvrag.store.write_behind.WriteBehind` has given room and a row; otherwise as :meth:`put`.

        Raises
        ------
        Withdrawn
            If it was erased since, and nothing is left of it.
        StoreError
            If it can't be written.
        """
        return self._put(identity, kv, text=text, doc_id=doc_id, retention=retention, is_reserved=True)

    def _put(
        self,
        identity: ChunkIdentity,
        kv: ChunkKV,
        *,
        text: TextEntry | None,
        doc_id: str | None,
        retention: Retention | None,
        is_reserved: bool,
        reason: str = "put",
    ) -> int:
        self._check_writable()
        for _ in range(ATTEMPTS):
            if self._link(identity, text, doc_id, is_reserved=is_reserved):
                return 0
            plan = blob.plan(identity, kv, text=text, guard=self.objects.guard)
            if not is_reserved:
                self.make_room(plan.header.num_bytes, retention=retention)
            written = self._write(plan, kv, doc_id, is_reserved=is_reserved, reason=reason)
            if self.objects.contains(chunk_key(identity)):
                if retention is not None:
                    self.rows.retain(chunk_key(identity), retention)
                return written
        raise StoreError(f"the chunk is erased from {self._root} as fast as it is written; try again later")

    def link(self, identity: ChunkIdentity, *, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add a reference to a chunk that is stored already; return whether it is."""
        return self._link(identity, text, doc_id, is_reserved=False)

    def _link(self, identity: ChunkIdentity, text: TextEntry | None, doc_id: str | None, *, is_reserved: bool) -> bool:
        key = chunk_key(identity)
        if self._closed or self.read_only or not self.contains(key):
            return False
        record = self.rows.get(key)
        if record is None:
            header = self._reading(key, lambda: self.objects.header(key))
            if header is None:
                return False
            self._restore(header)
            record = header.record()
        self._add(replace(record, text=text), doc_id, is_reserved=is_reserved)
        if self.contains(key):
            return True
        # Erased meanwhile by another process, which did not see the new reference.
        self.rows.remove(key)
        return False

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Erase chunks and return how many were there.

        Raises
        ------
        StoreError
            If something could not be erased; everything else is.
        """
        self._check_writable()
        found = 0
        fault: OSError | None = None
        for key in dict.fromkeys(keys):
            if not KEY.fullmatch(key):
                continue
            try:
                found += self._erase(key)
            except OSError as error:
                fault = error
        recovery.drop_references(self.rows, self.references)
        self.rows.scrub()
        if fault is not None:
            raise StoreError(
                f"not everything could be erased from {self._root}: {fault}; make it writable, then delete again"
            )
        return found

    def forget(self, namespace: str, doc_id: str) -> int:
        """Erase a document and all KV that only it held on to; return how many chunks were erased.

        It is one step: killed in its midst, it is finished when the store is opened next, and a chunk that another
        process adds again meanwhile stays.

        Raises
        ------
        StoreError
            If something could not be erased; it will be at the next opening.
        """
        self._check_writable()
        erased = 0
        for key in self.rows.unlink(namespace, doc_id):
            if self.rows.settle((key,), partial(self.objects.erase, key)):
                erased += 1
                self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "deleted"))
        recovery.drop_references(self.rows, self.references)
        self.rows.scrub()
        return erased

    def clear(self) -> int:
        """Erase all chunks, texts and references but what other keys protect, and return how many chunks there were."""
        self._check_writable()
        # Reading a header notes whether the file is of other keys, which may share the index.
        keys = self.objects.keys() | set(self.rows.keys())
        own = [key for key in keys if self.header(key) or key not in self.objects.foreign]
        found = sum(self.rows.drop(key, partial(self.objects.erase, key)) for key in own)
        self.objects.empty_quarantine()
        for namespace, digest, _ in self.rows.references():
            if not self.rows.text_keys(namespace, digest):
                self.rows.unlink_text(namespace, digest)
        recovery.drop_references(self.rows, self.references)
        self.rows.scrub()
        self._events.emit(StoreEvent("AllBlocksCleared", "disk", reason="cleared"))
        return found

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> None:
        """Give chunks a priority for eviction; unknown ones are left out."""
        self._check_writable()
        for key in keys:
            self.rows.retain(key, retention)

    def make_room(self, need: int = 0, *, retention: Retention | None = KEEP) -> None:
        """Evict what is worth no more than ``retention`` until the budgets hold with ``need`` more bytes; ``StoreError`` if it can't be."""
        self._check_writable()
        self._flush_hits()
        self._evictor.make_room(need, priority=DEFAULT_PRIORITY if retention is None else retention.priority)

    def _write(self, plan: blob.Plan, kv: ChunkKV, doc_id: str | None, *, is_reserved: bool, reason: str) -> int:
        """Write a blob, its reference and its row; return the bytes written, 0 if another writer was faster."""
        record = plan.header.record()
        is_new = self._publish(record.key, plan, kv)
        try:
            self._add(record, doc_id, is_reserved=is_reserved)
        except StoreError:
            if is_new:
                # Without its row a chunk can't be found by its text nor erased with its document.
                with suppress(OSError):
                    self.objects.erase(record.key)
            raise
        if is_new:
            event = StoreEvent("BlockStored", "disk", (record.key,), reason, record.num_tokens, record.num_bytes)
            self._events.emit(event)
        return record.num_bytes if is_new else 0

    def _publish(self, key: ChunkKey, plan: blob.Plan, kv: ChunkKV) -> bool:
        """Write a blob; ``False`` if another writer was faster."""
        try:
            return self.objects.publish(plan, kv, key)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"the chunk {key[:12]} can't be written to {self._root}: {error.strerror or error}; "
                "make sure that the directory exists, is writable and has free space"
            ) from error

    def _add(self, record: Record, doc_id: str | None, *, is_reserved: bool) -> None:
        """Add a row, with the file of its reference, which comes first: no chunk may outlive its document."""
        if doc_id is None or record.text is None:
            return self._add_row(record, doc_id, is_reserved=is_reserved)
        file = ReferenceFile(record.namespace, doc_id, record.text, record.key)
        for _ in range(ATTEMPTS):
            try:
                is_new = self.references.add(file)
            except OSError as error:
                raise StoreError(
                    f"a reference can't be written to {self._root}: {error.strerror or error}; "
                    "make sure that the directory exists, is writable and has free space"
                ) from error
            try:
                self._add_row(record, doc_id, is_reserved=is_reserved)
            except StoreError:
                if is_new:
                    with suppress(OSError):
                        self.references.remove(file.reference)
                raise
            if self.references.contains(file.reference):
                return None
        raise StoreError(f"the document is erased from {self._root} as fast as it is written; try again later")

    def _add_row(self, record: Record, doc_id: str | None, *, is_reserved: bool) -> None:
        if not is_reserved:
            self.rows.add(record, doc_id=doc_id)
        elif not self.rows.confirm(record, doc_id):
            raise Withdrawn(
                f"the chunk {record.key[:12]} was erased before it was written; put it again if it is wanted"
            )

    def _erase(self, key: ChunkKey) -> bool:
        """Erase a chunk everywhere; on a full disk the file goes first, which may make the room for the rest."""
        try:
            erased = self.rows.drop(key, partial(self.objects.erase, key))
        except StoreError:
            erased = self.objects.erase(key)
            self.rows.remove(key)
        if erased:
            self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "deleted"))
        return erased

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self._root} is closed; open it again")
        if self.read_only:
            raise StoreError(f"the store {self._root} is open for reading only; make it writable and open it again")
