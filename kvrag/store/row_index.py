"""The index over any ordered map of strings to JSON values; :mod:`kvrag.store.rows` has the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from kvrag.store.base import Record
from kvrag.store.rows import (
    as_list,
    first_names,
    log_row,
    merged,
    prefix_of,
    record_of,
    row_of,
    strings_of,
    text_of,
    texts_of,
    totals_of,
)
from kvrag.types import ChunkKey, TextEntry


class RowIndex(ABC):
    """The :class:`~kvrag.store.base.Index` over any ordered map of strings to JSON values.

    A subclass gives the five primitives. ``_read`` and ``_scan`` must fail rather than lie inside a transaction;
    ``_peek`` and ``_list`` serve the queries and give nothing where the rows can't be read.
    """

    has_files = False
    """Whether there are files that have to go with rows."""

    @abstractmethod
    def _read(self, row: str) -> Any:
        """Return a row's value, ``None`` if absent."""

    @abstractmethod
    def _write(self, row: str, value: Any) -> None:
        """Insert or replace a row."""

    @abstractmethod
    def _erase(self, row: str) -> None:
        """Remove a row; absent ones are fine."""

    @abstractmethod
    def _scan(self, prefix: str, after: str = "", limit: int = -1) -> list[tuple[str, Any]]:
        """Return ``(rest of name, value)`` of the rows that begin with ``prefix``, in order, from beyond ``after``."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[None]:
        """Make what happens inside one atomic step for all threads and processes."""

    def _first_number(self) -> int:
        """Where the log of a new index begins; later than any cursor of an index that was lost."""
        return 0

    def _peek(self, row: str) -> Any:
        return self._read(row)

    def _list(self, prefix: str, after: str = "") -> list[tuple[str, Any]]:
        return self._scan(prefix, after)

    def add(self, record: Record, *, doc_id: str | None) -> None:
        """Insert or update the row of ``record.key``; with ``doc_id``, let that document reference its text."""
        if self._is_there(record, doc_id):
            return
        with self._transaction():
            self._add(record, doc_id)

    def get(self, key: ChunkKey) -> Record | None:
        """Return the row of ``key``."""
        return record_of(key, self._peek(row_of("key", key)))

    def variants(self, content: str) -> list[Record]:
        """Return the rows with this content key, oldest first."""
        found = (self.get(ChunkKey(key)) for key in strings_of(self._peek(row_of("content", content))))
        return [record for record in found if record is not None]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of ``namespace`` added after cursor ``after`` (0: all), and the new cursor."""
        last = self._peek(row_of("last", namespace))
        if type(last) is not int or last == after:
            return [], after
        # A cursor beyond the end is that of an index that was lost since: begin again.
        start = after if after < last else 0
        rows = self._list(prefix_of("log", namespace), f"{start:020d}")
        return [entry for number, value in rows if (entry := text_of(value)) and number <= f"{last:020d}"], last

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents that hold a reference in ``namespace``."""
        return list(dict.fromkeys(first_names(self._list(prefix_of("doc", namespace)))))

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the text digests that document ``doc_id`` references."""
        return list(first_names(self._list(prefix_of("doc", namespace, doc_id))))

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all KV of a document's texts."""
        rows = (self._peek(row_of("text", namespace, digest)) for digest in self.document_texts(namespace, doc_id))
        return [ChunkKey(key) for row in rows if isinstance(row, dict) for key in strings_of(row.get("keys"))]

    def unlink(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Drop document ``doc_id``; return and remove the keys of the texts that no document references any more."""
        gone: list[ChunkKey] = []
        with self._transaction():
            digests = list(first_names(self._scan(prefix_of("doc", namespace, doc_id))))
            for digest in digests:
                self._drop_reference(namespace, digest, doc_id)
                if not self._is_referenced(namespace, digest):
                    gone += self._drop_text(namespace, digest)
            if digests:
                self._on_erased()
        return gone

    def unlink_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Drop every reference to the text with this digest; return and remove all its keys."""
        with self._transaction():
            self._on_erased()
            return self._drop_text(namespace, digest)

    def remove(self, key: ChunkKey) -> None:
        """Remove one row; unknown keys are fine. Documents keep their reference to the text, for its return."""
        if self._peek(row_of("key", key)) is None and self._peek(row_of("gone", key)) is None:
            return
        with self._transaction():
            self._drop_key(key)
            self._erase(row_of("gone", key))

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""
        return [ChunkKey(key) for key in first_names(self._list("key "))]

    def totals(self) -> tuple[int, int]:
        """Return the number of chunks and their bytes."""
        return totals_of(self._peek("total"))

    def _on_new(self, key: ChunkKey) -> None:
        """Do what a new chunk needs, in the same transaction; nothing by itself."""
        return

    def _on_erased(self) -> None:
        """Do what an erasure needs, in the same transaction; nothing by itself."""
        return

    def _is_there(self, record: Record, doc_id: str | None) -> bool:
        """Whether adding changes nothing; spares a transaction where a chunk is precomputed again."""
        row = self._peek(row_of("key", record.key))
        if not isinstance(row, dict) or row != merged(row, record):
            return False
        if record.text is None:
            return True
        name = (record.namespace, record.text.digest)
        text = self._peek(row_of("text", *name))
        is_known = isinstance(text, dict) and record.key in strings_of(text.get("keys"))
        return is_known and (doc_id is None or self._peek(row_of("ref", *name, doc_id)) is not None)

    def _add(self, record: Record, doc_id: str | None) -> None:
        row = self._read(row_of("key", record.key))
        is_new = record_of(record.key, row) is None
        self._write(row_of("key", record.key), merged({} if is_new else row, record))
        if is_new:
            self._on_new(record.key)
        self._count(1 if is_new else 0, record.num_bytes - (0 if is_new else row["num_bytes"]))
        keys = strings_of(self._read(row_of("content", record.content)))
        if record.key not in keys:
            self._write(row_of("content", record.content), [*keys, record.key])
        self._erase(row_of("gone", record.key))
        if record.text is None:
            return
        self._add_text(record.namespace, record.text, record.key)
        if doc_id is not None:
            self._refer(record.namespace, record.text.digest, doc_id)

    def _refer(self, namespace: str, digest: str, doc_id: str) -> None:
        self._write(row_of("doc", namespace, doc_id, digest), 1)
        self._write(row_of("ref", namespace, digest, doc_id), 1)
        self._erase(row_of("unref", namespace, digest, doc_id))

    def _add_text(self, namespace: str, text: TextEntry, key: ChunkKey) -> None:
        keys, seq, known = self._text_row(namespace, text.digest)
        if known != text:
            self._erase(log_row(namespace, seq))
            last = self._read(row_of("last", namespace))
            seq = 1 + (last if type(last) is int else self._first_number())
            self._write(log_row(namespace, seq), as_list(text))
            self._write(row_of("last", namespace), seq)
        keys = keys if key in keys else [*keys, key]
        self._write(row_of("text", namespace, text.digest), {"entry": as_list(text), "seq": seq, "keys": keys})

    def _text_row(self, namespace: str, digest: str) -> tuple[list[str], int, TextEntry | None]:
        """Return a text's keys, its number in the log and its entry."""
        row = self._read(row_of("text", namespace, digest))
        if not isinstance(row, dict) or type(row.get("seq")) is not int:
            return [], 0, None
        return strings_of(row.get("keys")), row["seq"], text_of(row.get("entry"))

    def _is_referenced(self, namespace: str, digest: str) -> bool:
        return bool(self._scan(prefix_of("ref", namespace, digest), limit=1))

    def _drop_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Remove a text with its references, and return the keys removed with it: no other referenced text has them."""
        for doc_id in list(first_names(self._scan(prefix_of("ref", namespace, digest)))):
            self._drop_reference(namespace, digest, doc_id)
        keys = self._text_row(namespace, digest)[0]
        self._forget_text(namespace, digest)
        gone = []
        for key in map(ChunkKey, keys):
            row = self._read(row_of("key", key))
            others = [text for text in texts_of(row) if text.digest != digest]
            if any(self._is_referenced(namespace, text.digest) for text in others):
                self._write(row_of("key", key), {**row, "texts": [as_list(text) for text in others]})
            else:
                self._drop_key(key)
                self._note("gone", key)
                gone.append(key)
        return gone

    def _drop_reference(self, namespace: str, digest: str, doc_id: str) -> None:
        self._erase(row_of("doc", namespace, doc_id, digest))
        self._erase(row_of("ref", namespace, digest, doc_id))
        self._note("unref", namespace, digest, doc_id)

    def _note(self, kind: str, *names: str) -> None:
        """Remember, in the same transaction, that a file has yet to be erased."""
        if self.has_files:
            self._write(row_of(kind, *names), 1)

    def _drop_key(self, key: ChunkKey) -> None:
        row = self._read(row_of("key", key))
        record = record_of(key, row)
        self._erase(row_of("key", key))
        self._erase(row_of("use", key))
        if record is None:
            return
        self._count(-1, -record.num_bytes)
        keys = [other for other in strings_of(self._read(row_of("content", record.content))) if other != key]
        self._write(row_of("content", record.content), keys) if keys else self._erase(row_of("content", record.content))
        for text in texts_of(row):
            held, seq, entry = self._text_row(record.namespace, text.digest)
            held = [other for other in held if other != key]
            if held or self._is_referenced(record.namespace, text.digest):
                value = {"entry": as_list(entry or text), "seq": seq, "keys": held}
                self._write(row_of("text", record.namespace, text.digest), value)
            else:
                self._forget_text(record.namespace, text.digest)

    def _forget_text(self, namespace: str, digest: str) -> None:
        self._erase(log_row(namespace, self._text_row(namespace, digest)[1]))
        self._erase(row_of("text", namespace, digest))

    def _count(self, chunks: int, num_bytes: int) -> None:
        if chunks or num_bytes:
            old = totals_of(self._read("total"))
            self._write("total", [old[0] + chunks, old[1] + num_bytes])
