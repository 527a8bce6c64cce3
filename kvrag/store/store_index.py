"""What a store's index keeps beside the rows of :class:`~kvrag.store.row_index.RowIndex`: unfinished erasures, and usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvrag.store.base import Record, Retention
from kvrag.store.row_index import RowIndex
from kvrag.store.rows import first_names, names_of, row_of, sizes_of, strings_of, text_of, texts_of
from kvrag.store.usage import Usage
from kvrag.types import ChunkKey, TextEntry

Reference = tuple[str, str, str]
"""Namespace, text digest and document id."""


class StoreIndex(RowIndex):
    """An index with what a store needs to erase, to rebuild and to evict."""

    def refer(self, namespace: str, digest: str, doc_id: str) -> None:
        """Let a document reference a text that may have no KV now."""
        with self._transaction():
            self._refer(namespace, digest, doc_id)

    def confirm(self, record: Record, doc_id: str | None) -> bool:
        """Add a row that was added before, in one step with looking whether it was erased since; ``False`` if so, or perhaps so.

        A document that was erased holds no reference. Without a document the row itself must still be there, which may also have been
        dropped by a process that looked for the file too early.
        """
        with self._transaction():
            if doc_id is None or record.text is None:
                row = row_of("key", record.key)
            else:
                row = row_of("ref", record.namespace, record.text.digest, doc_id)
            if self._read(row) is None:
                return False
            self._add(record, doc_id)
        return True

    def references(self) -> list[Reference]:
        """Return all references as (namespace, text digest, document id)."""
        return _triples(self._list("ref "))

    def text(self, namespace: str, digest: str) -> TextEntry | None:
        """Return a text's entry."""
        row = self._peek(row_of("text", namespace, digest))
        return text_of(row.get("entry")) if isinstance(row, dict) else None

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts that a chunk is the KV of."""
        return texts_of(self._peek(row_of("key", key)))

    def text_keys(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Return the keys of a text's KV."""
        row = self._peek(row_of("text", namespace, digest))
        return [ChunkKey(key) for key in strings_of(row.get("keys"))] if isinstance(row, dict) else []

    def is_gone(self, key: ChunkKey) -> bool:
        """Whether a chunk was unlinked and its file has yet to be erased: it must not come back by itself."""
        return self._peek(row_of("gone", key)) is not None

    def gone(self) -> list[ChunkKey]:
        """Return the chunks that :meth:`is_gone` is true of."""
        return [ChunkKey(key) for key in first_names(self._list("gone "))]

    def gone_references(self) -> list[Reference]:
        """Return the references that were dropped and whose files have yet to be erased, as :meth:`references`."""
        return _triples(self._list("unref "))

    def settle(self, names: tuple[str, ...], erase: Callable[[], bool]) -> bool:
        """Erase the file of a chunk ``(key,)`` or a reference ``(namespace, digest, document id)`` if it still is to go.

        Who adds it again meanwhile does so before, and it stays, or after, and finds no file: never between.
        """
        row = row_of("gone" if len(names) == 1 else "unref", *names)
        with self._transaction():
            if self._read(row) is None:
                return False
            erased = erase()
            self._erase(row)
        return erased

    def drop(self, key: ChunkKey, erase: Callable[[], bool]) -> bool:
        """Erase a chunk's file and remove its row in one step, and return what ``erase`` did."""
        with self._transaction():
            erased = erase()
            self._drop_key(key)
            self._erase(row_of("gone", key))
        return erased

    def scrub(self) -> None:
        """Let nothing of erased rows remain where others could read it, as far as that is possible now."""

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return Usage.of(self._peek(row_of("use", key))).priority_now()

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, as it is at present, for another store to go by; ``None`` if nothing was."""
        retention = Usage.of(self._peek(row_of("use", key))).retention()
        return None if retention == Retention() else retention

    def retain(self, key: ChunkKey, retention: Retention) -> None:
        """Give a chunk a priority for eviction; nothing for an unknown one."""
        with self._transaction():
            if self._read(row_of("key", key)) is not None:
                usage = Usage.of(self._read(row_of("use", key)))
                self._write(row_of("use", key), usage.retained(retention).row())

    def touch(self, hits: Mapping[ChunkKey, int]) -> None:
        """Count accesses to chunks, many at a time: counting each one would make reads write."""
        with self._transaction():
            now = self._clock() + sum(hits.values())
            self._write("clock", now)
            for key, count in hits.items():
                if self._read(row_of("key", key)) is not None:
                    usage = Usage.of(self._read(row_of("use", key)))
                    self._write(row_of("use", key), usage.touched(count, now).row())

    def usage(self) -> tuple[int, list[tuple[Record, Usage]]]:
        """Return the logical time, and every chunk with what eviction must know of it; the records come without their texts."""
        uses = {names[0]: Usage.of(value) for names, value in _named(self._list("use "), 1)}
        records = [sizes_of(ChunkKey(names[0]), value) for names, value in _named(self._list("key "), 1)]
        return self._clock(), [(record, uses.get(record.key, Usage())) for record in records if record]

    def _on_new(self, key: ChunkKey) -> None:
        now = self._clock() + 1
        self._write("clock", now)
        self._write(row_of("use", key), Usage(last=now).row())

    def _clock(self) -> int:
        value = self._peek("clock")
        return value if type(value) is int else 0


def _triples(rows: list[tuple[str, Any]]) -> list[Reference]:
    return [(names[0], names[1], names[2]) for names, _ in _named(rows, 3)]


def _named(rows: list[tuple[str, Any]], count: int) -> Iterator[tuple[list[str], Any]]:
    """Yield the names and the value of each row that has this many names."""
    for rest, value in rows:
        names = names_of(rest)
        if len(names) == count:
            yield names, value
