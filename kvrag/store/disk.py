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
from dataclasses import replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, recovery
from kvrag.store.disk_writes import ATTEMPTS, DiskWrites
from kvrag.store.erasures import Erasing
from kvrag.store.events import StoreEvent
from kvrag.store.objects import KEY
from kvrag.store.retention import DEFAULT_PRIORITY, Retention, check_retention
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, TextEntry

KEEP = Retention(100)


class DiskStore(DiskWrites):
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
        """Write a chunk that was given room and a row by :meth:`hold`; otherwise as :meth:`put`.

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
        check_retention(retention)
        for _ in range(ATTEMPTS):
            if self._link(identity, text, doc_id, is_reserved=is_reserved):
                return 0
            plan = blob.plan(identity, kv, text=text, guard=self.objects.guard)
            if not is_reserved:
                self.make_room(plan.header.num_bytes, retention=retention)
            written = self._write(plan, kv, doc_id, is_reserved=is_reserved, reason=reason)
            if self.objects.contains(chunk_key(identity)):
                # A row that was reserved has it since then, and its duration goes on; one that was made anew since has none.
                if retention is not None and not (is_reserved and self.rows.retention(chunk_key(identity))):
                    self.rows.retain([chunk_key(identity)], retention)
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
        record = replace(record, text=text)
        self._confirm(record, doc_id, lambda: False) if is_reserved else self._add(record, doc_id)
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
            remedy = "" if isinstance(fault, StoreError) else "; make it writable, then delete again"
            raise StoreError(f"not everything could be erased from {self._root}: {fault}{remedy}")
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
        erased, texts = 0, set[str]()
        for attempt in range(ATTEMPTS):
            generation = self.rows.generation
            texts |= set(self.rows.document_texts(namespace, doc_id))
            # What was to go was noted in an index that is lost, and the new one has it back from the files that there still are.
            for digest in texts if attempt else ():
                self.rows.refer(namespace, digest, doc_id)
            try:
                erased += self._forget_document(namespace, doc_id)
            except StoreError:
                self.rows.totals()  # opens the index again if that is it
                if self.rows.generation == generation:
                    raise
            if self.rows.generation == generation:
                return erased
        raise StoreError(f"the index of {self._root} is lost as fast as it is rebuilt; try again later")

    def _forget_document(self, namespace: str, doc_id: str) -> int:
        erased = 0
        for key in self.rows.unlink(namespace, doc_id):
            if self.rows.settle((key,), partial(self.objects.erase, key)):
                erased += 1
                self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "deleted"))
        recovery.drop_references(self.rows, self.references)
        self.rows.scrub()
        return erased

    def clear(self, namespace: str | None = None) -> int:
        """Erase all chunks, texts and references but what other keys protect, and return how many chunks there were.

        ``namespace`` is the digest of the one that is erased; ``None``: every one. What was put away goes in either case: nobody can
        tell whose it was.
        """
        self._check_writable()
        keys = self.objects.keys() | set(self.rows.keys())
        found = 0
        for key in [key for key in keys if self._is_of(key, namespace)]:
            if self.rows.drop(key, partial(self.objects.erase, key), is_erasure=True):
                found += 1
                if namespace is not None:
                    self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "deleted"))
        self.objects.empty_quarantine()
        self._clear_references(namespace)
        self.rows.scrub()
        if namespace is None:
            self._events.emit(StoreEvent("AllBlocksCleared", "disk", reason="cleared"))
        return found

    def _clear_references(self, namespace: str | None) -> None:
        """Drop all references to texts without KV, of a namespace or of every one, and let every process look at what it has in memory."""
        for _ in range(ATTEMPTS):
            generation = self.rows.generation
            for space, digest, _ in self.rows.references():
                if namespace in (None, space) and not self.rows.text_keys(space, digest):
                    self.rows.unlink_text(space, digest)
            recovery.drop_references(self.rows, self.references)
            self.rows.mark_erasure()  # also for what budgets have evicted, and any process has in its memory
            if self.rows.generation == generation:
                return
            # What was to go was noted in an index that is lost, and the new one has it back from the files that there still are.
        raise StoreError(f"the index of {self._root} is lost as fast as it is rebuilt; try again later")

    def _is_of(self, key: ChunkKey, namespace: str | None) -> bool:
        """Whether a chunk is of a namespace, as its file says, or its row where it has none; of ``None`` is all but that of other keys."""
        header = self.header(key)  # notes whether the file is of other keys, which may share the index
        if header is not None:
            return namespace in (None, header.identity.namespace)
        if namespace is None or key in self.objects.foreign:
            return key not in self.objects.foreign
        record = self.rows.get(key)
        return record is not None and record.namespace == namespace

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Say anew what chunks are worth, and return how many there are; unknown ones are left out."""
        self._check_writable()
        check_retention(retention, is_needed=True)
        # Few at a time: others wait for each step.
        return sum(self.rows.retain(batch, retention) for batch in recovery.batches(dict.fromkeys(keys)))

    def make_room(self, need: int = 0, *, retention: Retention | None = KEEP) -> None:
        """Evict what is worth no more than ``retention`` until the budgets hold with ``need`` more bytes; ``StoreError`` if it can't be."""
        self._check_writable()
        self._flush_hits()
        self._evictor.make_room(need, priority=DEFAULT_PRIORITY if retention is None else retention.priority)

    def _erase(self, key: ChunkKey) -> bool:
        """Erase a chunk everywhere; on a full disk the file goes first, which may make the room for the rest."""
        erase = Erasing(partial(self.objects.erase, key))
        try:
            self.rows.drop(key, erase, is_erasure=True)
        except StoreError:
            erase()
            if (self._root / "objects").is_dir():  # a directory that is gone holds nothing, and can't be told so
                self.rows.drop(key, lambda: False, is_erasure=True)
        finally:
            if erase.found:
                self._events.emit(StoreEvent("BlockRemoved", "disk", (key,), "deleted"))
        return erase.found
