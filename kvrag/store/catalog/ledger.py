"""Rows of the catalog: their forms and the queries on them.

::

    c <key>                   a chunk, stored or pending
    e <namespace>             a number that changes with every erasure of documents there;
                              without a namespace: of all documents
    i <content>               keys of the chunk's variants, oldest first
    l <namespace> <page>      a page of the texts, by number, in the order in which they came
    n <namespace>             numbers of the first and of the last text
    s                         totals of the store
    t <namespace> <digest>    a text
    z <namespace> <document>  digests of a document's texts

A malformed row counts as absent: anyone who can write to the directory may have made it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial, wraps
from typing import Annotated, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from kvrag.store.base import ChunkRecord
from kvrag.store.catalog.rows import RowTable
from kvrag.store.crypto import RowCipher
from kvrag.store.eviction import Usage
from kvrag.types import ChunkKey, TextEntry

P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound="Ledger")
Count = Annotated[int, Field(ge=0, lt=2**62)]
Hash = Annotated[int, Field(ge=0, lt=2**64)]


class ChunkRow(NamedTuple):
    """Row ``c``: a record without its key, digests of the chunk's texts, and its usage.

    ``pending``: the blob is not written yet. ``revision`` changes when a write of the chunk begins,
    and when it ends.
    """

    content: str
    model: str
    namespace: str
    prefix: str
    context: str
    num_tokens: Count
    num_bytes: Count
    digests: list[str]
    usage: Usage
    pending: bool
    revision: Count = 0

    def record(self, key: ChunkKey) -> ChunkRecord:
        """Return the record of the chunk under its key."""
        return ChunkRecord(key, *self[:7])


class EntryRow(NamedTuple):
    """Row form of a :class:`~kvrag.types.TextEntry`."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    head: Hash
    tail: Hash
    num_chars: Annotated[int, Field(ge=0, lt=2**48)]


class Text(NamedTuple):
    """Row ``t``: entry, number, keys of the text's chunks, and number of its documents."""

    entry: EntryRow
    number: Count
    keys: list[ChunkKey]
    refs: Count


class State(NamedTuple):
    """Row ``s``: totals; ``dormant`` tells whether blobs of an earlier catalog may exist."""

    generation: Count
    chunks: int = 0
    num_bytes: int = 0
    accesses: Count = 0
    dormant: bool = True


CHUNK = TypeAdapter(ChunkRow)
TEXT = TypeAdapter(Text)
STATE = TypeAdapter(State)
MARK = TypeAdapter(Count)
PAGE = TypeAdapter(dict[Count, EntryRow])
STRINGS = TypeAdapter(list[str])
RANGE = TypeAdapter(tuple[Count, Count])

PER_PAGE = 64  # texts in a row
MOST_TEXTS = 10**7  # of a namespace: a row from elsewhere must not make reading endless


def one_step(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Run a method as a single change.

    The method must change nothing but rows: it is run again if another writer was first.
    """

    @wraps(method)
    def changed(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._rows.change(partial(method, self, *args, **kwargs))

    return cast("Callable[Concatenate[L, P], T]", changed)


class Ledger:
    """Queries on the rows of a store."""

    _rows: RowTable
    _seal: RowCipher | None

    def get(self, key: ChunkKey) -> ChunkRecord | None:
        """Return the record of a stored chunk."""
        chunk = self._stored(key)
        if chunk is None:
            return None
        return chunk.record(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return the stored keys among ``keys``."""
        return {key for key in keys if self._stored(key)}

    def keys(self, *, pending: bool = False) -> list[ChunkKey]:
        """Return the keys of all stored chunks; with ``pending``, of all pending chunks.

        The writer of a pending chunk is writing, or was killed.
        """
        return [key for key, chunk in self._chunks() if chunk.pending is pending]

    def present(self, namespace: str | None = None) -> set[ChunkKey]:
        """Return the keys of all chunks, or of a namespace's, stored or pending.

        Raises ``StoreError`` rather than omit a key.
        """
        if namespace is None:
            return {ChunkKey(key) for key in self._rows.change(lambda: self._rows.names("c "))}
        return {
            key for key, chunk in self._rows.change(self._chunks) if chunk.namespace == namespace
        }

    def revisions(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, int]:
        """Return the revisions of chunks, stored or pending; 0 if a row is absent or malformed."""
        return {key: chunk.revision if (chunk := self._chunk(key)) else 0 for key in keys}

    def variants(self, content: str) -> list[ChunkRecord]:
        """Return the stored chunks with this content key, oldest first.

        They may be behind any prefix and context.
        """
        return [
            record for key in self._strings(f"i {content}") if (record := self.get(ChunkKey(key)))
        ]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of a namespace added after cursor ``after`` (0: all), and a new cursor.

        A text that was erased meanwhile may or may not be in the list; its chunks are unknown then.
        """
        first, last = self._read(RANGE, f"n {namespace}") or (0, 0)
        if last in (0, after):
            return [], after
        # A cursor beyond the end is of a catalog that was lost since: begin again.
        start = max(first, after + 1 if after < last else 0, last - MOST_TEXTS)
        found = list[TextEntry]()
        for page in range(start // PER_PAGE, last // PER_PAGE + 1):
            texts = self._read(PAGE, f"l {namespace} {page}") or {}
            found += [
                TextEntry(*texts[number]) for number in sorted(texts) if start <= number <= last
            ]
        return found, last

    def knows_text(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered, with or without KV.

        Erasing its last document ends that.
        """
        return self._text(namespace, digest) is not None

    def text_keys(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Return the keys of the stored chunks of a text."""
        text = self._text(namespace, digest)
        if text is None:
            return []
        return [key for key in text.keys if self._stored(key)]

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts of a stored chunk."""
        chunk = self._stored(key)
        if chunk is None:
            return []
        return [TextEntry(*text.entry) for text in self._texts(chunk.namespace, chunk.digests)]

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents of a namespace, with or without stored chunks."""
        found = []
        for name in self._rows.names(f"z {namespace} "):
            text = name if self._seal is None else self._seal.open(name, "z")
            with suppress(ValueError, TypeError, RecursionError):
                found += [doc_id] if isinstance(doc_id := json.loads(text or ""), str) else []
        return found

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the digests of a document's texts."""
        return self._strings(self._name("z", namespace, json.dumps(doc_id)))

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all stored chunks of a document's texts."""
        found = (
            key
            for digest in self.document_texts(namespace, doc_id)
            for key in self.text_keys(namespace, digest)
        )
        return list(dict.fromkeys(found))

    def only_held_by(self, namespace: str, doc_id: str) -> set[ChunkKey]:
        """Return the keys of a document's chunks, stored or pending, that no other has."""
        mine = self.document_texts(namespace, doc_id)

        def is_free(key: ChunkKey) -> bool:
            texts = self._texts(namespace, chunk.digests) if (chunk := self._chunk(key)) else []
            return not any(text.refs > (text.entry.digest in mine) for text in texts)

        return {
            key
            for text in self._texts(namespace, mine)
            if text.refs <= 1
            for key in text.keys
            if is_free(key)
        }

    def state(self) -> State:
        """Return the totals; their generation changes with every erasure by any process.

        Evictions are erasures, too.
        """
        return self._read(STATE, "s") or State(time.time_ns())

    def erased(self, namespace: str) -> tuple[int, int] | None:
        """Return a pair that changes with every erasure of documents of a namespace.

        ``None`` if it is unknown now.
        """
        marks = tuple(self._read(MARK, f"e {space}") or 0 for space in (namespace, ""))
        if self._read(STATE, "s"):
            return marks[0], marks[1]
        return None

    def totals(self) -> tuple[int, int]:
        """Return the numbers of stored chunks and of their bytes."""
        return self.state()[1:3]

    def usage(self, key: ChunkKey) -> Usage:
        """Return the usage of a chunk, for eviction."""
        chunk = self._stored(key)
        if chunk is None:
            return Usage()
        return chunk.usage

    # -- rows --------------------------------------------------------------------------------------

    def _read(self, form: TypeAdapter[T], name: str) -> T | None:
        """Return a row's value; ``None`` if it is absent or malformed."""
        text = self._rows.get(name)
        if text is not None:
            with suppress(ValidationError):
                return form.validate_json(text)
        return None

    def _chunk(self, key: ChunkKey) -> ChunkRow | None:
        return self._read(CHUNK, f"c {key}")

    def _stored(self, key: ChunkKey) -> ChunkRow | None:
        if (chunk := self._chunk(key)) is None or chunk.pending:
            return None
        return chunk

    def _chunks(self) -> list[tuple[ChunkKey, ChunkRow]]:
        return [
            (key, chunk)
            for key in map(ChunkKey, self._rows.names("c "))
            if (chunk := self._chunk(key))
        ]

    def _text(self, namespace: str, digest: str) -> Text | None:
        return self._read(TEXT, self._name("t", namespace, digest))

    def _texts(self, namespace: str, digests: Iterable[str]) -> list[Text]:
        return [text for digest in digests if (text := self._text(namespace, digest))]

    def _strings(self, name: str) -> list[str]:
        return self._read(STRINGS, name) or []

    def _name(self, kind: str, namespace: str, text: str) -> str:
        """Return the name of a row; with a key, its text is encrypted."""
        return f"{kind} {namespace} {text if self._seal is None else self._seal.seal(text, kind)}"
