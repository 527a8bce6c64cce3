"""What a store's index keeps beside the rows of :class:`~kvrag.store.row_index.RowIndex`: erasures, rows without files, and usage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from kvrag.store.base import Record
from kvrag.store.retention import Retention, Worth
from kvrag.store.row_index import RowIndex
from kvrag.store.rows import erasures_of, first_names, names_of, row_of, sizes_of, strings_of, text_of, texts_of
from kvrag.store.usage import Usage
from kvrag.types import ChunkKey, TextEntry

T = TypeVar("T")

Reference = tuple[str, str, str]
"""Namespace, text digest and document id."""


class StoreIndex(RowIndex):
    """An index with what a store needs to erase, to rebuild and to evict."""

    generation = 0
    """Another number whenever the rows are others than before: what was noted in those may be lost."""

    def refer(self, namespace: str, digest: str, doc_id: str) -> None:
        """Let a document reference a text that may have no KV now."""
        with self._transaction():
            self._refer(namespace, digest, doc_id)

    def refers(self, reference: Reference) -> bool:
        """Whether a document references a text now."""
        return self._peek(row_of("ref", *reference)) is not None

    def hold(self, record: Record, doc_id: str | None, holder: str) -> None:
        """Add the row of a chunk that has no file yet, with the name of its holder's :class:`~kvrag.store.claims.Claim`."""
        with self._transaction():
            self._add(record, doc_id)
            self._write(row_of("held", record.key), holder)

    def holder(self, key: ChunkKey) -> str | None:
        """Name of the claim that a row without a file was added under."""
        value = self._peek(row_of("held", key))
        return value if isinstance(value, str) else None

    def confirm(self, record: Record, doc_id: str | None, publish: Callable[[], T]) -> T | None:
        """Publish the files of a row that :meth:`hold` has added, and return what ``publish`` does; ``None`` if it was erased since.

        It is one step with looking: who erases it does so before, and nothing is published, or after, and finds what was. A document
        that was erased holds no reference, and a chunk that was erased by its key has no row; no reader drops the row of a live holder.
        """
        with self._transaction():
            rows = [row_of("key", record.key)]
            if doc_id is not None and record.text is not None:
                rows.append(row_of("ref", record.namespace, record.text.digest, doc_id))
            if any(self._read(row) is None for row in rows):
                return None
            published = publish()
            self._add(record, doc_id)
            self._erase(row_of("held", record.key))
        return published

    def restore(self, record: Record, is_there: Callable[[], bool]) -> bool:
        """Give a file that has no row its row; ``False`` if it is being erased, or ``is_there`` says that it was."""
        with self._transaction():
            if self._read(row_of("gone", record.key)) is not None or not is_there():
                return False
            self._add(record, None)
        return True

    def abandon(self, key: ChunkKey, is_abandoned: Callable[[str | None], bool]) -> bool:
        """Remove the row of a chunk that has no file, if ``is_abandoned`` says so, in one step; it is told the row's :meth:`holder`."""
        with self._transaction():
            if not is_abandoned(self.holder(key)):
                return False
            self._drop_key(key)
            self._erase(row_of("gone", key))
        return True

    def erasure_mark(self) -> str | None:
        """Return what is another value after every erasure and every eviction, by whatever process; ``None`` where that can't be told.

        :func:`~kvrag.store.rows.erasures_of` is the part of it that changes with erasures alone.
        """
        value = self._peek("erased")
        return value if isinstance(value, str) else None

    def mark_erasure(self) -> None:
        """Give :meth:`erasure_mark` another value."""
        with self._transaction():
            self._on_erased()

    def mark_eviction(self) -> None:
        """Give :meth:`erasure_mark` another value, and :func:`~kvrag.store.rows.erasures_of` it the same."""
        with self._transaction():
            if self.has_files:
                before = self._read("erased")
                self._write(
                    "erased", f"{erasures_of(before if isinstance(before, str) else '')}+{secrets.token_hex(8)}"
                )

    def known(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return those of many keys that have a row."""
        return {key for key in keys if self.get(key) is not None}

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

    def drop(self, key: ChunkKey, erase: Callable[[], bool], *, is_erasure: bool = False) -> bool:
        """Erase a chunk's file and remove its row in one step, and return what ``erase`` did.

        With ``is_erasure`` no copy in memory may outlive it; without, it only makes room, and :meth:`mark_eviction` says so for many.
        """
        with self._transaction():
            erased = erase()
            self._drop_key(key)
            self._erase(row_of("gone", key))
            if is_erasure:
                self._on_erased()
        return erased

    def scrub(self) -> None:
        """Let nothing of erased rows remain where others could read it, as far as that is possible now."""

    def priority(self, key: ChunkKey) -> int:
        """Return a chunk's priority at present."""
        return Usage.of(self._peek(row_of("use", key))).priority_now()

    def worth(self, key: ChunkKey) -> Worth:
        """Return a chunk's recent hits and its cost."""
        usage = Usage.of(self._peek(row_of("use", key)))
        return Worth(usage.recent_hits(self._clock()), usage.retention().cost_ms)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return what was said of a chunk's worth, as it is at present, for another store to go by; ``None`` if nothing was."""
        retention = Usage.of(self._peek(row_of("use", key))).retention()
        return None if retention == Retention() else retention

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Give chunks a priority for eviction, in one step, and return how many were known."""
        found = 0
        with self._transaction():
            for key in keys:
                if self._read(row_of("key", key)) is not None:
                    found += 1
                    usage = Usage.of(self._read(row_of("use", key)))
                    self._write(row_of("use", key), usage.retained(retention).row())
        return found

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

    def _on_erased(self) -> None:
        # By chance and not by counting: an index that is made anew must not come to a value that it had before.
        if self.has_files:
            self._write("erased", secrets.token_hex(8))

    def _drop_key(self, key: ChunkKey) -> None:
        super()._drop_key(key)
        self._erase(row_of("held", key))

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
