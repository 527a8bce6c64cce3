"""The rows of an index and what they mean, whatever holds them.

=============================  ================================  ===============================================
row                            value                             for
=============================  ================================  ===============================================
``key K``                      fields of a record, ``texts``     one stored chunk
``content C``                  list of keys, oldest first        the variants of a chunk behind other prefixes
``text N D``                   ``entry``, ``seq``, ``keys``      one text of a namespace and its KV
``log N seq``                  text entry                        texts in the order of their arrival
``last N``                     seq                               the newest number in the log
``doc N I D``, ``ref N D I``   1                                 document I references text D, both directions
``total``                      chunks, bytes                     statistics
=============================  ================================  ===============================================

A reference is held by a document on a text, and keeps all KV of that text. Texts may share a key: a tokenizer may
give the same ids for two of them. Rows that are not of this form are treated as absent, because the directory may
have been written by anyone.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from kvrag.store.base import Record
from kvrag.store.header import parse_text
from kvrag.types import ChunkKey, TextEntry

FIELDS = {"content": str, "model": str, "namespace": str, "prefix": str, "num_tokens": int, "num_bytes": int}


class RowIndex(ABC):
    """The :class:`~kvrag.store.base.Index` over any ordered map of strings to JSON values.

    A subclass gives the five primitives. ``_read`` and ``_scan`` must fail rather than lie inside a transaction;
    ``_peek`` and ``_list`` serve the queries and give nothing where the rows can't be read.
    """

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
        return _record(key, self._peek(_row("key", key)))

    def variants(self, content: str) -> list[Record]:
        """Return the rows with this content key, oldest first."""
        found = (self.get(ChunkKey(key)) for key in _strings(self._peek(_row("content", content))))
        return [record for record in found if record is not None]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of ``namespace`` added after cursor ``after`` (0: all), and the new cursor."""
        last = self._peek(_row("last", namespace))
        if type(last) is not int or last == after:
            return [], after
        # A cursor beyond the end is that of an index that was lost since: begin again.
        start = after if after < last else 0
        rows = self._list(_prefix("log", namespace), f"{start:020d}")
        return [entry for number, value in rows if (entry := _text(value)) and number <= f"{last:020d}"], last

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents that hold a reference in ``namespace``."""
        return list(dict.fromkeys(_names(self._list(_prefix("doc", namespace)))))

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the text digests that document ``doc_id`` references."""
        return list(_names(self._list(_prefix("doc", namespace, doc_id))))

    def unlink(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Drop document ``doc_id``; return and remove the keys of the texts that no document references any more."""
        gone: list[ChunkKey] = []
        with self._transaction():
            for digest in _names(self._scan(_prefix("doc", namespace, doc_id))):
                self._erase(_row("doc", namespace, doc_id, digest))
                self._erase(_row("ref", namespace, digest, doc_id))
                if not self._is_referenced(namespace, digest):
                    gone += self._drop_text(namespace, digest)
        return gone

    def unlink_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Drop every reference to the text with this digest; return and remove all its keys."""
        with self._transaction():
            return self._drop_text(namespace, digest)

    def remove(self, key: ChunkKey) -> None:
        """Remove one row; unknown keys are fine. Documents keep their reference to the text, for its return."""
        if self._peek(_row("key", key)) is None:
            return
        with self._transaction():
            self._drop_key(key)

    def keys(self) -> list[ChunkKey]:
        """Return all keys."""
        return [ChunkKey(key) for key in _names(self._list("key "))]

    def totals(self) -> tuple[int, int]:
        """Return the number of chunks and their bytes."""
        return _totals(self._peek("total"))

    def _is_there(self, record: Record, doc_id: str | None) -> bool:
        """Whether adding changes nothing; spares a transaction where a chunk is precomputed again."""
        row = self._peek(_row("key", record.key))
        if not isinstance(row, dict) or row != _merged(row, record):
            return False
        if record.text is None:
            return True
        name = (record.namespace, record.text.digest)
        text = self._peek(_row("text", *name))
        is_known = isinstance(text, dict) and record.key in _strings(text.get("keys"))
        return is_known and (doc_id is None or self._peek(_row("ref", *name, doc_id)) is not None)

    def _add(self, record: Record, doc_id: str | None) -> None:
        row = self._read(_row("key", record.key))
        is_new = _record(record.key, row) is None
        merged = _merged({} if is_new else row, record)
        self._write(_row("key", record.key), merged)
        self._count(1 if is_new else 0, record.num_bytes - (0 if is_new else row["num_bytes"]))
        keys = _strings(self._read(_row("content", record.content)))
        if record.key not in keys:
            self._write(_row("content", record.content), [*keys, record.key])
        if record.text is None:
            return
        self._add_text(record.namespace, record.text, record.key)
        if doc_id is not None:
            self._write(_row("doc", record.namespace, doc_id, record.text.digest), 1)
            self._write(_row("ref", record.namespace, record.text.digest, doc_id), 1)

    def _add_text(self, namespace: str, text: TextEntry, key: ChunkKey) -> None:
        keys, seq, known = self._text_row(namespace, text.digest)
        if known != text:
            self._erase(_log_row(namespace, seq))
            last = self._read(_row("last", namespace))
            seq = 1 + (last if type(last) is int else self._first_number())
            self._write(_log_row(namespace, seq), _as_list(text))
            self._write(_row("last", namespace), seq)
        keys = keys if key in keys else [*keys, key]
        self._write(_row("text", namespace, text.digest), {"entry": _as_list(text), "seq": seq, "keys": keys})

    def _text_row(self, namespace: str, digest: str) -> tuple[list[str], int, TextEntry | None]:
        """Return a text's keys, its number in the log and its entry."""
        row = self._read(_row("text", namespace, digest))
        if not isinstance(row, dict) or type(row.get("seq")) is not int:
            return [], 0, None
        return _strings(row.get("keys")), row["seq"], _text(row.get("entry"))

    def _is_referenced(self, namespace: str, digest: str) -> bool:
        return bool(self._scan(_prefix("ref", namespace, digest), limit=1))

    def _drop_text(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Remove a text with its references, and return the keys removed with it: no other referenced text has them."""
        for doc_id in list(_names(self._scan(_prefix("ref", namespace, digest)))):
            self._erase(_row("ref", namespace, digest, doc_id))
            self._erase(_row("doc", namespace, doc_id, digest))
        keys = self._text_row(namespace, digest)[0]
        self._forget_text(namespace, digest)
        gone = []
        for key in map(ChunkKey, keys):
            row = self._read(_row("key", key))
            others = [text for text in _texts(row) if text.digest != digest]
            if any(self._is_referenced(namespace, text.digest) for text in others):
                self._write(_row("key", key), {**row, "texts": [_as_list(text) for text in others]})
            else:
                self._drop_key(key)
                gone.append(key)
        return gone

    def _drop_key(self, key: ChunkKey) -> None:
        row = self._read(_row("key", key))
        record = _record(key, row)
        self._erase(_row("key", key))
        if record is None:
            return
        self._count(-1, -record.num_bytes)
        keys = [other for other in _strings(self._read(_row("content", record.content))) if other != key]
        self._write(_row("content", record.content), keys) if keys else self._erase(_row("content", record.content))
        for text in _texts(row):
            held, seq, entry = self._text_row(record.namespace, text.digest)
            held = [other for other in held if other != key]
            if held or self._is_referenced(record.namespace, text.digest):
                value = {"entry": _as_list(entry or text), "seq": seq, "keys": held}
                self._write(_row("text", record.namespace, text.digest), value)
            else:
                self._forget_text(record.namespace, text.digest)

    def _forget_text(self, namespace: str, digest: str) -> None:
        self._erase(_log_row(namespace, self._text_row(namespace, digest)[1]))
        self._erase(_row("text", namespace, digest))

    def _count(self, chunks: int, num_bytes: int) -> None:
        if chunks or num_bytes:
            old = _totals(self._read("total"))
            self._write("total", [old[0] + chunks, old[1] + num_bytes])


def _prefix(kind: str, *names: str) -> str:
    """Begin a row's name; JSON strings end visibly, so no name can imitate another."""
    return " ".join([kind, *map(json.dumps, names), ""])


def _row(kind: str, *names: str) -> str:
    return _prefix(kind, *names)[:-1]


def _log_row(namespace: str, seq: int) -> str:
    return f"{_prefix('log', namespace)}{seq:020d}"


def _names(rows: list[tuple[str, Any]]) -> Iterator[str]:
    """Yield the first name in the rest of each row's name."""
    decoder = json.JSONDecoder()
    for rest, _ in rows:
        try:
            name, _ = decoder.raw_decode(rest)
        except ValueError:
            continue
        if isinstance(name, str):
            yield name


def _as_list(text: TextEntry) -> list[Any]:
    return [text.digest, text.head, text.tail, text.num_chars]


def _text(value: object) -> TextEntry | None:
    try:
        return parse_text(value)
    except ValueError:
        return None


def _texts(row: Any) -> list[TextEntry]:
    values = row.get("texts") if isinstance(row, dict) else None
    return [text for value in values if (text := _text(value))] if isinstance(values, list) else []


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _totals(value: object) -> tuple[int, int]:
    match value:
        case [int(chunks), int(num_bytes)]:
            return chunks, num_bytes
    return 0, 0


def _record(key: ChunkKey, row: Any) -> Record | None:
    if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in FIELDS.items()):
        return None
    texts = _texts(row)
    return Record(key=key, text=texts[-1] if texts else None, **{name: row[name] for name in FIELDS})


def _merged(row: dict[str, Any], record: Record) -> dict[str, Any]:
    """Value of a key's row after ``record`` was added to it; the newest text stands last."""
    fields = asdict(record)
    texts = _texts(row)
    if record.text is not None:
        texts = [*(text for text in texts if text.digest != record.text.digest), record.text]
    return {**{name: fields[name] for name in FIELDS}, "texts": [_as_list(text) for text in texts]}
