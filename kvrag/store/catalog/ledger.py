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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Annotated, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.kv.crypto import RowCipher
from kvrag.store.base import CatalogRows, ChunkRecord
from kvrag.store.eviction import Usage
from kvrag.types import ChunkIdentity, ChunkKey, DocIds, TextEntry

P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound="Ledger")
Count = Annotated[int, Field(ge=0, lt=2**62)]


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


class Text(NamedTuple):
    """Row ``t``: entry, number, keys of the text's chunks, and number of its documents."""

    entry: TextEntry
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
PAGE = TypeAdapter(dict[Count, TextEntry])
STRINGS = TypeAdapter(list[str])
RANGE = TypeAdapter(tuple[Count, Count])

PER_PAGE = 64  # texts in a row
AT_ONCE = 1024  # rows that are read in one round trip
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

    _rows: CatalogRows
    _seal: RowCipher | None

    def get(self, key: ChunkKey) -> ChunkRecord | None:
        """Return the record of a stored chunk."""
        chunk = self.stored_row(key)
        return chunk and chunk.record(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return the stored keys among ``keys``."""
        return set(self.stored(keys))

    def stored(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkRow]:
        """Return the rows of the stored chunks among ``keys``."""
        return {key: chunk for key, chunk in self._chunks(keys) if not chunk.pending}

    def keys(self, *, pending: bool = False) -> list[ChunkKey]:
        """Return the keys of all stored chunks; with ``pending``, of all pending chunks.

        The writer of a pending chunk is writing, or was killed.
        """
        return [key for key, chunk in self._all_chunks() if chunk.pending is pending]

    @one_step
    def present(self, namespace: str | None = None) -> set[ChunkKey]:
        """Return the keys of all chunks, or of a namespace's, stored or pending.

        Raises ``StoreError`` rather than omit a key.
        """
        if namespace is None:
            return set(map(ChunkKey, self._rows.names("c ")))
        return {key for key, chunk in self._all_chunks() if chunk.namespace == namespace}

    @one_step
    def absent(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return the keys without a row; raises ``StoreError`` if rows can't be read."""
        return set(keys) - {key for key, _ in self._chunks(keys)}

    def revisions(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, int]:
        """Return the revisions of chunks, stored or pending; 0 if a row is absent or malformed."""
        wanted = list(keys)
        return dict.fromkeys(wanted, 0) | {
            key: chunk.revision for key, chunk in self._chunks(wanted)
        }

    def variants(self, content: str) -> list[ChunkRecord]:
        """Return the stored chunks with this content key, oldest first.

        They may be behind any prefix and context.
        """
        return [
            chunk.record(key)
            for key, chunk in self.stored(map(ChunkKey, self._strings(f"i {content}"))).items()
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
        pages = range(start // PER_PAGE, last // PER_PAGE + 1)
        found = list[TextEntry]()
        for texts in self._read_all(PAGE, [f"l {namespace} {page}" for page in pages]):
            found += [
                text for number, text in sorted((texts or {}).items()) if start <= number <= last
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
        return list(self.stored(text.keys)) if text else []

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts of a stored chunk."""
        return [
            text.entry
            for chunk in self.stored([key]).values()
            for text in self._texts(chunk.namespace, chunk.digests)
        ]

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents of a namespace, with or without stored chunks.

        Raises ``StoreError`` rather than omit a document.
        """
        found = []
        names = partial(self._rows.names, f"z {namespace} ")
        for name in names() or self._rows.change(names):  # no names may be a fault
            text = name if self._seal is None else self._seal.open(name, "z")
            with suppress(ValueError, TypeError, RecursionError):
                doc_id = json.loads(text or "")
                if isinstance(doc_id, str):
                    found.append(doc_id)
        return found

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the digests of a document's texts."""
        return self._strings(self._document(namespace, doc_id))

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all stored chunks of a document's texts."""
        texts = self._texts(namespace, self.document_texts(namespace, doc_id))
        return list(self.stored(key for text in texts for key in text.keys))

    def only_held_by(
        self, namespace: str, doc_id: str, digests: Sequence[str] | None = None
    ) -> set[ChunkKey]:
        """Return the keys of a document's chunks, stored or pending, that no other has.

        With ``digests``, only chunks of these of its texts.
        """
        held = self.document_texts(namespace, doc_id)
        mine = [digest for digest in held if digest in (digests or held)]
        keys = {key for text in self._texts(namespace, mine) if text.refs <= 1 for key in text.keys}
        chunks = dict(self._chunks(keys))
        known = {digest for chunk in chunks.values() for digest in chunk.digests}
        shared = {
            text.entry.digest
            for text in self._texts(namespace, known)
            if text.refs > (text.entry.digest in mine)
        }
        return {key for key in keys if key not in chunks or shared.isdisjoint(chunks[key].digests)}

    def state(self) -> State:
        """Return the totals; their generation changes with every erasure by any process.

        Evictions are erasures, too.
        """
        return self._read(STATE, "s") or State(time.time_ns())

    def erased(self, namespace: str) -> tuple[int, int] | None:
        """Return a pair that changes with every erasure of documents of a namespace.

        ``None`` if it is unknown now.
        """
        here, everywhere, state = self._rows.many([f"e {namespace}", "e ", "s"])
        if _parsed(STATE, state) is None:
            return None
        return _parsed(MARK, here) or 0, _parsed(MARK, everywhere) or 0

    def totals(self) -> tuple[int, int]:
        """Return the numbers of stored chunks and of their bytes."""
        return self.state()[1:3]

    # -- rows --------------------------------------------------------------------------------------

    def _read(self, form: TypeAdapter[T], name: str) -> T | None:
        """Return a row's value; ``None`` if it is absent or malformed."""
        return _parsed(form, self._rows.get(name))

    def _read_all(self, form: TypeAdapter[T], names: Sequence[str]) -> Iterator[T | None]:
        """Yield the values of rows, which are read many at a time."""
        for first in range(0, len(names), AT_ONCE):
            for text in self._rows.many(names[first : first + AT_ONCE]):
                yield _parsed(form, text)

    def _chunk(self, key: ChunkKey) -> ChunkRow | None:
        return self._read(CHUNK, f"c {key}")

    def stored_row(self, key: ChunkKey) -> ChunkRow | None:
        """Return the row of a stored chunk."""
        return self.stored([key]).get(key)

    def _chunks(self, keys: Iterable[ChunkKey]) -> list[tuple[ChunkKey, ChunkRow]]:
        """Return the rows of chunks, stored or pending; absent rows are left out."""
        wanted = list(dict.fromkeys(keys))
        found = self._read_all(CHUNK, [f"c {key}" for key in wanted])
        return [(key, chunk) for key, chunk in zip(wanted, found, strict=True) if chunk]

    def _all_chunks(self) -> list[tuple[ChunkKey, ChunkRow]]:
        return self._chunks(map(ChunkKey, self._rows.names("c ")))

    def _text(self, namespace: str, digest: str) -> Text | None:
        return self._read(TEXT, self._name("t", namespace, digest))

    def _texts(self, namespace: str, digests: Iterable[str]) -> list[Text]:
        names = [self._name("t", namespace, digest) for digest in digests]
        return [text for text in self._read_all(TEXT, names) if text]

    def _is_deleted(self, namespace: str, text: TextEntry | None, doc_ids: DocIds) -> bool:
        return bool(not doc_ids and text and not self.knows_text(namespace, text.digest))

    def _strings(self, name: str) -> list[str]:
        return self._read(STRINGS, name) or []

    def _ahead_of(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, ChunkRow]:
        """Return the rows of chunks, and read the rows that changing them will ask for."""
        found = dict(self._chunks(keys))
        names = [f"i {chunk.content}" for chunk in found.values()]
        for chunk in found.values():
            names += [self._name("t", chunk.namespace, digest) for digest in chunk.digests]
        self._rows.ahead(names)
        return found

    def _document(self, namespace: str, doc_id: str | None) -> str:
        return self._name("z", namespace, json.dumps(doc_id))

    def _name(self, kind: str, namespace: str, text: str) -> str:
        """Return the name of a row; with a key, its text is encrypted."""
        if self._seal is not None:
            text = self._seal.seal(text, kind)
        return f"{kind} {namespace} {text}"


def _parsed(form: TypeAdapter[T], text: str | None) -> T | None:
    """Return the value of a row; ``None`` if it is absent or malformed."""
    with suppress(ValidationError):
        return form.validate_json(text or "")
    return None


def record_of(of: ChunkIdentity, num_bytes: int) -> ChunkRecord:
    """Return the catalog record of a chunk."""
    return ChunkRecord(
        chunk_key(of),
        content_key(of),
        of.model,
        of.namespace,
        of.prefix,
        of.context,
        len(of.token_ids),
        num_bytes,
    )
