"""Changes of the catalog: chunks, texts, documents and retention.

Processes share the catalog; every change is a transaction.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvrag.config import Retention
from kvrag.kv.crypto import Keys, RowCipher
from kvrag.store.base import CatalogRows, ChunkRecord
from kvrag.store.catalog.hits import Hits
from kvrag.store.catalog.ledger import (
    PAGE,
    PER_PAGE,
    RANGE,
    STATE,
    ChunkRow,
    State,
    Text,
    one_step,
)
from kvrag.store.catalog.rows import open_table
from kvrag.store.eviction import Usage
from kvrag.types import ChunkKey, DocIds, TextEntry

# Chunk to write: its record, text, documents that refer to it, and retention, if given.
# Without documents, the text must have been registered.
New = tuple[ChunkRecord, TextEntry | None, DocIds, Retention | None]

# Revisions of chunks, as they were when a write or an erasure began.
Revisions = Mapping[ChunkKey, int]

DELETED = -1


class Catalog(Hits):
    """Rows of a store; queries on them are in :mod:`kvrag.store.catalog.ledger`.

    ``folder``, ``read_only`` and ``durable`` are as for
    :func:`~kvrag.store.catalog.rows.open_table`. With ``keys``, digests of texts, ids of
    documents and all values are encrypted. ``may_have_blobs`` returns whether a new catalog may
    find blobs of an earlier catalog. ``rows``, called with the cipher of rows, ``read_only`` and
    ``begin``, makes rows in a database that machines share; without it they are in ``folder``.
    Raises ``StoreError`` if the folder can't be used; changes that can't be made raise it, too.
    """

    def __init__(
        self,
        folder: Path | None,
        keys: Keys | None = None,
        *,
        read_only: bool = False,
        durable: bool = True,
        may_have_blobs: Callable[[], bool] = lambda: True,
        rows: Callable[..., CatalogRows] | None = None,
    ) -> None:
        self._seal = None if keys is None or keys.cipher is None else RowCipher(keys.cipher)
        self._may_have_blobs = may_have_blobs
        self.folder = folder
        super().__init__()
        make = rows or partial(open_table, folder, durable=durable)
        self._rows = make(seal=self._seal, read_only=read_only, begin=self._begin)
        self.read_only = self._rows.read_only
        # The end of a sentence that refuses a change of a store open for reading only.
        self.remedy = self._rows.remedy

    def link(self, key: ChunkKey, text: TextEntry | None, doc_ids: DocIds) -> bool:
        """Add text and documents to a stored chunk, and return whether the chunk is stored.

        Without ``doc_ids``, text and documents must have been registered (:meth:`register`);
        returns ``False`` if they were deleted since.
        """
        chunk = self.stored_row(key)
        if chunk is not None and not self._has(chunk, text, doc_ids):
            return self._rows.change(partial(self._link, key, text, doc_ids))
        return chunk is not None

    def _link(self, key: ChunkKey, text: TextEntry | None, doc_ids: DocIds) -> bool:
        chunk = self.stored_row(key)
        if chunk is None or self._is_deleted(chunk.namespace, text, doc_ids):
            return False
        self._attach(key, chunk, text, doc_ids)
        return True

    @one_step
    def register(self, namespace: str, texts: Sequence[tuple[str | None, TextEntry]]) -> None:
        """Register texts, each with its document, before their KV is computed.

        The text of a document is the last; its earlier texts stay until :meth:`unlink`.
        """
        names = [f"n {namespace}"]
        for doc_id, text in texts:
            names += [self._name("t", namespace, text.digest), self._document(namespace, doc_id)]
        self._rows.ahead(names)
        for doc_id, text in texts:
            self._refer(namespace, text, doc_id)

    @one_step
    def begin(self, chunks: Sequence[New]) -> list[int | None]:
        """Add pending rows for chunks to write, and return their revisions.

        Returns ``None`` for a chunk that is stored already, and :data:`DELETED` for a chunk without
        ``doc_ids`` whose text was deleted. Writers share a pending row: they write the same bytes.
        """
        names = list[str]()
        for record, text, doc_ids, _ in chunks:
            space = record.namespace
            names += [f"c {record.key}", f"n {space}"]
            if text:
                names.append(self._name("t", space, text.digest))
            names += [self._document(space, each) for each in doc_ids]
        self._rows.ahead(names)
        return [self._note(*chunk) for chunk in chunks]

    def _note(
        self,
        record: ChunkRecord,
        text: TextEntry | None,
        doc_ids: DocIds,
        retention: Retention | None,
    ) -> int | None:
        if self.link(record.key, text, doc_ids):
            return None
        if self._is_deleted(record.namespace, text, doc_ids):
            return DELETED
        # A random revision does not come back in a catalog that is begun anew.
        chunk = self._chunk(record.key) or ChunkRow._make(
            [*record[1:], [], Usage(), True, secrets.randbits(60)]
        )
        if retention is not None:
            chunk = chunk._replace(usage=chunk.usage.retained(retention))
        self._attach(record.key, chunk, text, doc_ids)
        return chunk.revision

    @one_step
    def confirm(self, begun: Revisions) -> set[ChunkKey]:
        """Mark chunks as stored once their blobs exist, and return their keys.

        Chunks that were erased since :meth:`begin` returned these revisions are left out: another
        writer may have begun after the erasure, and its blob may not exist yet.
        """
        there = set[ChunkKey]()
        sizes = list[int]()
        accesses = self.state().accesses
        for key, chunk in self._ahead_of(begun).items():
            if chunk.pending and chunk.revision != begun[key]:
                continue
            there.add(key)
            if chunk.pending:
                variants = f"i {chunk.content}"
                # As if it were just hit: a new chunk must not be the first to go.
                self._rows.set(
                    f"c {key}",
                    chunk._replace(
                        usage=chunk.usage._replace(last=accesses),
                        pending=False,
                        revision=secrets.randbits(60),
                    ),
                )
                self._rows.set(
                    variants, [*(other for other in self._strings(variants) if other != key), key]
                )
                sizes.append(chunk.num_bytes)
        if sizes:
            self._count(len(sizes), sum(sizes))
        return there

    @one_step
    def cancel(self, key: ChunkKey) -> None:
        """Remove a chunk that :meth:`begin` added, unless another writer has confirmed it.

        Documents stay: they may have other chunks, which must go when they are deleted.
        """
        chunk = self._chunk(key)
        if chunk and chunk.pending:
            self._drop(key, chunk)

    @one_step
    def remove(self, erased: Revisions) -> int:
        """Remove chunks after their blobs were erased; return how many were stored. Documents stay.

        ``erased`` is the result of :meth:`revisions` before the erasure: a chunk that was written
        again since has a blob, and stays.
        """
        sizes = list[int]()
        chunks = self._ahead_of(erased)
        for key in erased.keys() - chunks.keys():
            self._rows.delete(f"c {key}")  # absent, or malformed
        for key, chunk in chunks.items():
            if chunk.revision == erased[key]:
                self._drop(key, chunk)
                if not chunk.pending:
                    sizes.append(chunk.num_bytes)
        self._count(-len(sizes), -sum(sizes), erasures=1)
        return len(sizes)

    @one_step
    def unlink(
        self,
        namespace: str,
        doc_id: str,
        erased: Revisions,
        digests: Sequence[str] | None = None,
    ) -> bool:
        """Remove a document, and the chunks that only it refers to, after their blobs were erased.

        With ``digests``, remove only these of its texts. See :meth:`remove`. Returns ``False``, and
        changes nothing, if the document has further such chunks by now.
        """
        if not (
            self.revisions(self.only_held_by(namespace, doc_id, digests)).items() <= erased.items()
        ):
            return False
        self.remove(erased)
        self._unrefer(namespace, doc_id, digests or self.document_texts(namespace, doc_id))
        self._mark(namespace)
        return True

    @one_step
    def clear(self, namespace: str | None = None) -> int:
        """Remove all rows, or a namespace's; return the number of stored chunks among them."""
        state = self.state()
        if namespace is None:
            self._rows.clear()
            self._rows.set(
                "s", state._replace(generation=state.generation + 1, chunks=0, num_bytes=0)
            )
            self._mark("")
            return state.chunks
        count = self.remove(self.revisions(self.present(namespace)))
        for doc_id in self.documents(namespace):
            self._unrefer(namespace, doc_id, self.document_texts(namespace, doc_id))
        for text in self._texts(namespace, [entry.digest for entry in self.texts(namespace, 0)[0]]):
            self._settle(namespace, text._replace(keys=[], refs=0))  # texts without a document
        self._mark(namespace)
        return count

    @one_step
    def no_dormant(self) -> None:
        """Note that the blobs of an earlier catalog were erased, and erase it, of whatever version.

        Catalogs of earlier versions named documents; what was damaged lay beside them.
        """
        for name in ("index", "references", "quarantine"):
            if self.folder is not None:
                with suppress(FileNotFoundError):
                    shutil.rmtree(self.folder.with_name(name))
        self._rows.set("s", self.state()._replace(dormant=False))

    def scrub(self) -> None:
        """Purge erased rows from the database's journal, as far as other readers allow."""
        self._rows.scrub()

    def close(self) -> None:
        """Release resources; idempotent. A closed catalog is empty and can't be changed."""
        self.flush()
        self._rows.close()

    def _begin(self, rows: CatalogRows, is_other: bool) -> None:
        """Initialise a new database; if it has replaced another, there may be dormant blobs."""
        self._rows = rows  # still being opened: the caller has not assigned them yet
        state = self._read(STATE, "s") or State(time.time_ns(), dormant=self._may_have_blobs())
        rows.set("s", state._replace(dormant=state.dormant or is_other))
        self._mark("")

    def _keep(self, name: str, value: Any) -> None:
        """Write a row, or remove an empty one."""
        if value:
            self._rows.set(name, value)
        else:
            self._rows.delete(name)

    def _count(self, chunks: int, num_bytes: int, *, erasures: int = 0) -> None:
        generation, count, size, *rest = self.state()
        self._rows.set("s", [generation + erasures, count + chunks, size + num_bytes, *rest])

    def _mark(self, namespace: str) -> None:
        """Signal to all processes that documents were erased; see :meth:`erased`."""
        self._rows.set(f"e {namespace}", secrets.randbits(60))

    def _has(self, chunk: ChunkRow, text: TextEntry | None, doc_ids: DocIds) -> bool:
        """Whether :meth:`_attach` would change nothing."""
        return text is None or (
            text.digest in chunk.digests
            and self.knows_text(chunk.namespace, text.digest)
            and all(
                text.digest in self.document_texts(chunk.namespace, doc_id)
                for doc_id in doc_ids
                if doc_id is not None
            )
        )

    def _attach(
        self,
        key: ChunkKey,
        chunk: ChunkRow,
        text: TextEntry | None,
        doc_ids: DocIds,
    ) -> None:
        """Write a chunk's row, and link its text and its documents."""
        if text is not None:
            for doc_id in doc_ids or (None,):
                self._refer(chunk.namespace, text, doc_id, key)
            chunk = chunk._replace(digests=list(dict.fromkeys([*chunk.digests, text.digest])))
        self._rows.set(f"c {key}", chunk)

    def _refer(self, namespace: str, text: TextEntry, doc_id: str | None, *keys: ChunkKey) -> None:
        """Link a text to its chunks, and a document to its text, which becomes its last."""
        digest = text.digest
        found = self._text(namespace, digest)
        known = found or self._announce(namespace, text)
        held = [digest] if doc_id is None else self.document_texts(namespace, doc_id)
        refs = known.refs
        if held[-1:] != [digest]:
            rest = [other for other in held if other != digest]
            self._rows.set(self._document(namespace, doc_id), [*rest, digest])
            # A document that had the text before only makes it its last.
            refs += len(rest) == len(held)
        every = list(dict.fromkeys([*known.keys, *keys]))
        if found != (new := known._replace(keys=every, refs=refs)):
            self._rows.set(self._name("t", namespace, digest), new)

    def _announce(self, namespace: str, entry: TextEntry) -> Text:
        """Give a new text a number, and put it on the last page."""
        first, last = self._read(RANGE, f"n {namespace}") or (0, 0)
        # Higher than any cursor of a lost catalog.
        number = last + 1 if last else time.time_ns() // 1000
        page = f"l {namespace} {number // PER_PAGE}"
        self._rows.set(page, (self._read(PAGE, page) or {}) | {number: entry})
        self._rows.set(f"n {namespace}", [first or number, number])
        return Text(entry, number, [], 0)

    def _drop(self, key: ChunkKey, chunk: ChunkRow) -> None:
        """Remove a chunk's row, and its texts without another chunk and without a document."""
        self._rows.delete(f"c {key}")
        for text in self._texts(chunk.namespace, chunk.digests):
            self._settle(
                chunk.namespace, text._replace(keys=[other for other in text.keys if other != key])
            )
        variants = f"i {chunk.content}"
        self._keep(variants, [other for other in self._strings(variants) if other != key])

    def _unrefer(self, namespace: str, doc_id: str, digests: Collection[str]) -> None:
        """Remove texts from a document.

        The document is removed with its last text, a text with its last document.
        """
        held = self.document_texts(namespace, doc_id)
        for text in self._texts(namespace, set(held) & set(digests)):
            left = text._replace(refs=max(0, text.refs - 1))
            if not left.refs:
                left = left._replace(keys=[])
                for key, chunk in self._chunks(text.keys):  # another text keeps it
                    self._rows.set(
                        f"c {key}",
                        chunk._replace(
                            digests=[x for x in chunk.digests if x != text.entry.digest]
                        ),
                    )
            self._settle(namespace, left)
        self._keep(
            self._document(namespace, doc_id),
            [digest for digest in held if digest not in digests],
        )

    def _settle(self, namespace: str, text: Text) -> None:
        """Write a text's row, or remove it if the text has neither chunks nor documents."""
        row = self._name("t", namespace, text.entry.digest)
        if text.keys or text.refs:
            self._rows.set(row, text)
            return
        self._rows.delete(row)
        page = f"l {namespace} {text.number // PER_PAGE}"
        self._keep(
            page,
            {n: entry for n, entry in (self._read(PAGE, page) or {}).items() if n != text.number},
        )
