"""How a chunk comes into a directory: its file, its reference and its row, in an order that no kill can turn against an erasure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

from kvrag.errors import StoreError
from kvrag.store import blob
from kvrag.store.base import Record
from kvrag.store.disk_reads import DiskReads
from kvrag.store.events import StoreEvent
from kvrag.store.objects import Confirm, place_of
from kvrag.store.references import ReferenceFile
from kvrag.store.references import place_of as place_of_reference
from kvrag.types import ChunkKey, ChunkKV

ATTEMPTS = 3
"""How often a put begins anew when another process erases the chunk in its midst."""


class Withdrawn(StoreError):
    """A chunk that room was reserved for was erased before it was written."""


class DiskWrites(DiskReads):
    """Writes of a :class:`~kvrag.store.disk.DiskStore`, one chunk at a time."""

    def hold(self, record: Record, doc_id: str | None) -> None:
        """Give a chunk in this process's memory its row, before it has a file or without one; it lasts no longer than the process.

        Raises
        ------
        StoreError
            If it can't be written.
        """
        self._check_writable()
        try:
            holder = self._claim.name()
        except OSError as error:
            raise self._unwritable("a claim", error) from error
        self.rows.hold(record, doc_id, holder)

    def _write(self, plan: blob.Plan, kv: ChunkKV, doc_id: str | None, *, is_reserved: bool, reason: str) -> int:
        """Write a blob, its reference and its row; return the bytes written, 0 if another writer was faster."""
        record = plan.header.record()
        if is_reserved:
            is_new = self._publish(record.key, plan, kv, lambda name: self._confirm(record, doc_id, name))
        else:
            is_new = self._publish(record.key, plan, kv)
            try:
                self._add(record, doc_id)
            except StoreError:
                # Without its row a chunk can't be found by its text nor erased with its document.
                self._undo(is_new, lambda: self.objects.erase(record.key))
                raise
        if is_new:
            event = StoreEvent("BlockStored", "disk", (record.key,), reason, record.num_tokens, record.num_bytes)
            self._events.emit(event)
        return record.num_bytes if is_new else 0

    def _publish(self, key: ChunkKey, plan: blob.Plan, kv: ChunkKV, confirm: Confirm | None = None) -> bool:
        """Write a blob; ``False`` if another writer was faster."""
        try:
            return self.objects.publish(plan, kv, key, confirm)
        except StoreError:
            raise
        except OSError as error:
            raise self._unwritable(f"the chunk {key[:12]}", error) from error

    def _add(self, record: Record, doc_id: str | None) -> None:
        """Add a row, with the file of its reference, which comes first: no chunk may outlive its document."""
        file = _reference(record, doc_id)
        if file is None:
            return self.rows.add(record, doc_id=doc_id)
        for _ in range(ATTEMPTS):
            is_new = self._refer(file)
            try:
                self.rows.add(record, doc_id=doc_id)
            except StoreError:
                self._undo(is_new, lambda: self.references.remove(file.reference))
                raise
            if self.references.contains(file.reference):
                return None
        raise StoreError(f"the document is erased from {self._root} as fast as it is written; try again later")

    def _confirm(self, record: Record, doc_id: str | None, name: Callable[[], bool]) -> bool:
        """Publish what :meth:`hold` has announced, in one step with looking whether it was erased; return what ``name`` does.

        An erasure that has returned must not be undone, not even by a kill: so nothing has its name before the look, and no other
        process erases between the look and the names. Others wait for that step, so what takes long comes before it, and after it.
        """
        file = _reference(record, doc_id)
        try:
            with nullcontext(_nothing) if file is None else self.references.prepared(file) as refer:
                return self._name(record, doc_id, file, refer, name)
        except StoreError:
            raise
        except OSError as error:
            raise self._unwritable("a reference", error) from error

    def _name(
        self,
        record: Record,
        doc_id: str | None,
        file: ReferenceFile | None,
        refer: Callable[[], bool],
        name: Callable[[], bool],
    ) -> bool:
        """Give file and reference their names; nothing of them is left if that can't be done."""
        is_referred = is_named = False

        def publish() -> bool:
            nonlocal is_referred, is_named
            try:
                is_referred = refer()
                is_named = name()
            except OSError as error:
                raise self._unwritable(f"the chunk {record.key[:12]}", error) from error
            return is_named

        try:
            published = self.rows.confirm(record, doc_id, publish)
            for is_made, place in (
                (is_named, place_of(record.key)),
                (is_referred, file and place_of_reference(file.reference)),
            ):
                if is_made and place:
                    self.directory.sync(*place[:-1])
        except OSError as error:
            self._undo(is_named, lambda: self.objects.erase(record.key))
            self._undo(is_referred, lambda: file is not None and self.references.remove(file.reference))
            if isinstance(error, StoreError):
                raise
            raise self._unwritable(f"the chunk {record.key[:12]}", error) from error
        if published is None:
            raise Withdrawn(
                f"the chunk {record.key[:12]} was erased before it was written; put it again if it is wanted"
            )
        return published

    def _refer(self, file: ReferenceFile) -> bool:
        """Write a reference; ``False`` if it is there."""
        try:
            return self.references.add(file)
        except OSError as error:
            raise self._unwritable("a reference", error) from error

    def _undo(self, is_made: bool, erase: Callable[[], bool]) -> None:
        """Erase what was made, if it was; what can't be erased is found at the next opening."""
        if is_made:
            with suppress(OSError):
                erase()

    def _unwritable(self, what: str, error: OSError) -> StoreError:
        return StoreError(
            f"{what} can't be written to {self._root}: {error.strerror or error}; "
            "make sure that the directory exists, is writable and has free space"
        )

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self._root} is closed; open it again")
        if self.read_only:
            raise StoreError(f"the store {self._root} is open for reading only; make it writable and open it again")


def _nothing() -> bool:
    return False


def _reference(record: Record, doc_id: str | None) -> ReferenceFile | None:
    """File that lets a document hold on to a chunk's text; ``None`` if it does not."""
    if doc_id is None or record.text is None:
        return None
    return ReferenceFile(record.namespace, doc_id, record.text, record.key)
