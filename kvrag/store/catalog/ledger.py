"""The rows of the catalog: their forms, and what can be asked of them.

::

    c <key>                   a chunk, stored or being written
    e <namespace>             a number, another one after each erasure of documents there; without a namespace: of all
    i <content>               keys of the chunk's variants, oldest first
    l <namespace> <page>      a page of the texts, by number, in the order in which they came
    n <namespace>             numbers of the first and of the last text
    s                         totals of the store
    t <namespace> <digest>    a text
    z <namespace> <document>  digests of a document's texts

A row that is not of its form counts as absent: anyone who can write to the directory may have made it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial, wraps
from typing import Annotated, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from kvrag.store.base import Record
from kvrag.store.catalog.rows import Rows
from kvrag.store.crypto import Seal
from kvrag.store.worth import Usage
from kvrag.types import ChunkKey, TextEntry

P = ParamSpec("P")
T = TypeVar("T")
L = TypeVar("L", bound="Ledger")
Count = Annotated[int, Field(ge=0, lt=2**62)]
Hash = Annotated[int, Field(ge=0, lt=2**64)]


class Chunk(NamedTuple):
    """The row ``c``: a record without its key, digests of the chunk's texts, its usage, and whether its blob is yet to be written.

    ``revision`` is another one when the chunk begins to be written, and when it is.
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

    def record(self, key: ChunkKey) -> Record:
        """Return the chunk with its key."""
        return Record(key, *self[:7])


class Entry(NamedTuple):
    """A :class:`~kvrag.types.TextEntry`."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    head: Hash
    tail: Hash
    num_chars: Annotated[int, Field(ge=0, lt=2**48)]


class Text(NamedTuple):
    """The row ``t``: its entry, its number, the keys of its chunks, and how many documents refer to it."""

    entry: Entry
    number: Count
    keys: list[ChunkKey]
    refs: Count


class State(NamedTuple):
    """The row ``s``; ``dormant`` says whether there may be blobs of an earlier catalog."""

    generation: Count
    chunks: int = 0
    num_bytes: int = 0
    accesses: Count = 0
    dormant: bool = True


CHUNK, TEXT, STATE = TypeAdapter(Chunk), TypeAdapter(Text), TypeAdapter(State)
MARK, PAGE, STRINGS, RANGE = (
    TypeAdapter(Count),
    TypeAdapter(dict[Count, Entry]),
    TypeAdapter(list[str]),
    TypeAdapter(tuple[Count, Count]),
)

PER_PAGE = 64  # texts in one row
MOST_TEXTS = 10**7  # of a namespace: a row from elsewhere must not make reading endless


def one_step(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Let all changes that a method makes be one step. It changes nothing but rows, for it is run again where another was first."""

    @wraps(method)
    def changed(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._rows.change(partial(method, self, *args, **kwargs))

    return cast("Callable[Concatenate[L, P], T]", changed)


class Ledger:
    """What can be asked of the rows of one store."""

    _rows: Rows
    _seal: Seal | None

    def get(self, key: ChunkKey) -> Record | None:
        """Return what is known of a stored chunk."""
        chunk = self._stored(key)
        return None if chunk is None else chunk.record(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored."""
        return {key for key in keys if self._stored(key)}

    def keys(self, *, pending: bool = False) -> list[ChunkKey]:
        """Return the keys of all stored chunks; with ``pending``, of those that are being written, or whose writers were killed."""
        return [key for key, chunk in self._chunks() if chunk.pending is pending]

    def present(self, namespace: str | None = None) -> set[ChunkKey]:
        """Return the keys of all chunks, or a namespace's, stored or being written; raises ``StoreError`` rather than leave one out."""
        if namespace is None:
            return {ChunkKey(key) for key in self._rows.change(lambda: self._rows.names("c "))}
        return {
            key for key, chunk in self._rows.change(self._chunks) if chunk.namespace == namespace
        }

    def revisions(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, int]:
        """Return what tells each chunk, stored or being written, from itself written again; 0 for a row of no form."""
        return {key: chunk.revision if (chunk := self._chunk(key)) else 0 for key in keys}

    def variants(self, content: str) -> list[Record]:
        """Return the stored chunks with this content key (behind any prefix and context), oldest first."""
        return [
            record for key in self._strings(f"i {content}") if (record := self.get(ChunkKey(key)))
        ]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of a namespace that came after cursor ``after`` (0: all), and the new cursor.

        A text that was erased meanwhile may be missing from the list or still be in it; its chunks are unknown then.
        """
        first, last = self._read(RANGE, f"n {namespace}") or (0, 0)
        if last in (0, after):
            return [], after
        # A cursor beyond the end is that of a catalog that was lost since: begin again.
        start, found = (
            max(first, after + 1 if after < last else 0, last - MOST_TEXTS),
            list[TextEntry](),
        )
        for page in range(start // PER_PAGE, last // PER_PAGE + 1):
            texts = self._read(PAGE, f"l {namespace} {page}") or {}
            found += [
                TextEntry(*texts[number]) for number in sorted(texts) if start <= number <= last
            ]
        return found, last

    def knows_text(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered, with or without KV; not after its last document was erased."""
        return self._text(namespace, digest) is not None

    def text_keys(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Return the keys of the stored chunks of a text."""
        text = self._text(namespace, digest)
        return [] if text is None else [key for key in text.keys if self._stored(key)]

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts that a stored chunk is the KV of."""
        chunk = self._stored(key)
        return (
            []
            if chunk is None
            else [TextEntry(*text.entry) for text in self._texts(chunk.namespace, chunk.digests)]
        )

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents of a namespace, whether or not their chunks are stored now."""
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
        """Return the keys, stored or being written, of chunks all of whose texts no other document refers to."""
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
        """Return the totals; its generation changes with each erasure or eviction by any process."""
        return self._read(STATE, "s") or State(time.time_ns())

    def erased(self, namespace: str) -> tuple[int, int] | None:
        """Return what is another one after each erasure of documents of a namespace; ``None`` where that can't be known now."""
        marks = tuple(self._read(MARK, f"e {space}") or 0 for space in (namespace, ""))
        return (marks[0], marks[1]) if self._read(STATE, "s") else None

    def totals(self) -> tuple[int, int]:
        """Return how many chunks are stored, and their bytes."""
        return self.state()[1:3]

    def usage(self, key: ChunkKey) -> Usage:
        """Return what eviction must know of a chunk."""
        chunk = self._stored(key)
        return Usage() if chunk is None else chunk.usage

    # -- rows ------------------------------------------------------------------------------------------------------------

    def _read(self, form: TypeAdapter[T], name: str) -> T | None:
        """Return a row's value; ``None`` for one that is absent or of another form."""
        text = self._rows.get(name)
        with suppress(ValidationError):
            return None if text is None else form.validate_json(text)
        return None

    def _chunk(self, key: ChunkKey) -> Chunk | None:
        return self._read(CHUNK, f"c {key}")

    def _stored(self, key: ChunkKey) -> Chunk | None:
        return None if (chunk := self._chunk(key)) is None or chunk.pending else chunk

    def _chunks(self) -> list[tuple[ChunkKey, Chunk]]:
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
        """Return the name of a row that must not tell whose it is."""
        return f"{kind} {namespace} {text if self._seal is None else self._seal.seal(text, kind)}"
