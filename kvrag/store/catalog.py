"""Who has what: chunks, texts, documents, and what chunks are worth. Shared by processes; one transaction per change; no blob is touched.

::

    c <key>                   a stored chunk
    i <content>               keys of the chunk's variants, oldest first
    l <namespace> <page>      entries of texts in the order in which they came
    n <namespace>             numbers of the first and of the last text
    p <key>                   a chunk that is being written
    s                         totals of the store
    t <namespace> <digest>    a text
    z <namespace> <document>  digests of a document's texts

Chunks come first and documents last because diskcache lists names from either end. A row that is not of its form counts as absent: anyone
who can write to the directory may have made it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from kvrag.store.base import Record
from kvrag.store.crypto import Keys, Seal
from kvrag.store.database import FAULTS
from kvrag.store.rows import Rows
from kvrag.store.worth import Retention, Sized, Usage
from kvrag.threads import POOL
from kvrag.types import ChunkKey, TextEntry

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**62)]
Hash = Annotated[int, Field(ge=0, lt=2**64)]

PAGE = 64
"""Texts per row of the log."""

MAX_TOUCHED = 128
"""Chunks whose hits are collected before they are written down, in the background."""


class _Chunk(NamedTuple):
    """A row ``c`` or ``p``: a record without its key, digests of the chunk's texts, and its usage."""

    content: str
    model: str
    namespace: str
    prefix: str
    context: str
    num_tokens: Count
    num_bytes: Count
    digests: list[str]
    usage: Usage

    def record(self, key: ChunkKey) -> Record:
        return Record(key, *self[:7])


class _Entry(NamedTuple):
    """An entry of the log: a :class:`~kvrag.types.TextEntry`."""

    digest: Annotated[str, Field(pattern=r"^[\x00-\x7f]*$")]
    head: Hash
    tail: Hash
    num_chars: Annotated[int, Field(ge=0, lt=2**48)]


class _Text(NamedTuple):
    """A row ``t``: its entry, its number in the log, the keys of its chunks, and how many documents refer to it."""

    entry: _Entry
    number: Count
    keys: list[ChunkKey]
    refs: Count


class _State(NamedTuple):
    """The row ``s``; ``dormant`` says whether there may be blobs of an earlier catalog."""

    generation: Count
    chunks: int = 0
    num_bytes: int = 0
    accesses: Count = 0
    dormant: bool = True


_CHUNK, _TEXT, _STATE = TypeAdapter(_Chunk), TypeAdapter(_Text), TypeAdapter(_State)
_LOG, _STRINGS, _PAIR = TypeAdapter(list[_Entry | None]), TypeAdapter(list[str]), TypeAdapter(tuple[Count, Count])


class Catalog:
    """The rows of one store.

    Parameters
    ----------
    folder
        Of the database; ``None``: a private temporary folder, for as long as the catalog is open.
    keys
        With a key, digests of texts, ids of documents and all values are encrypted.
    read_only
        Change nothing in the folder.
    durable
        Whether a change survives a power cut.
    may_have_blobs
        Returns whether a catalog that is begun anew may find blobs of an earlier one.

    Raises
    ------
    StoreError
        If the folder can't be used. Every change raises it, too, if it can't be made.
    """

    def __init__(
        self,
        folder: Path | None,
        keys: Keys | None = None,
        *,
        read_only: bool = False,
        durable: bool = True,
        may_have_blobs: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seal = None if keys is None or keys.cipher is None else Seal(keys.cipher)
        self._may_have_blobs = may_have_blobs
        self._touched: Counter[ChunkKey] = Counter()
        self._rows = Rows(folder, self._seal, read_only=read_only, durable=durable, begin=self._begin)
        self.read_only = self._rows.read_only  # or its disk is full

    # -- questions -------------------------------------------------------------------------------------------------------

    def get(self, key: ChunkKey) -> Record | None:
        """Return what is known of a stored chunk."""
        chunk = self._chunk(f"c {key}")
        return None if chunk is None else chunk.record(key)

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored."""
        return {key for key in keys if self._rows.has(f"c {key}")}

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all stored chunks."""
        return [ChunkKey(key) for key in self._names("c ")]

    def pending(self) -> list[ChunkKey]:
        """Return the keys of chunks that are being written, or whose writers were killed."""
        return [ChunkKey(key) for key in self._names("p ")]

    def present(self) -> set[ChunkKey]:
        """Return the keys of all chunks, stored or being written; raises ``StoreError`` rather than leave one out."""
        with self._rows.change():
            return {ChunkKey(key) for kind in "cp" for key in self._rows.names(f"{kind} ")}

    def variants(self, content: str) -> list[Record]:
        """Return the stored chunks with this content key (behind any prefix and context), oldest first."""
        found = (self.get(ChunkKey(key)) for key in self._strings(f"i {content}"))
        return [record for record in found if record is not None]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of a namespace that came after cursor ``after`` (0: all), and the new cursor.

        A text that was erased meanwhile may be missing from the list or still be in it; its chunks are unknown then.
        """
        first, last = self._read(_PAIR, f"n {namespace}") or (0, 0)
        if last in (0, after):
            return [], after
        # A cursor beyond the end is that of a catalog that was lost since: begin again.
        start, found = max(first, after + 1 if after < last else 0), list[_Entry | None]()
        for page in range(start // PAGE, last // PAGE + 1):
            entries = self._read(_LOG, f"l {namespace} {page}") or []
            found += entries[max(0, start - page * PAGE) : last - page * PAGE + 1]
        return [TextEntry(*entry) for entry in found if entry is not None], last

    def knows_text(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered, with or without KV; not after its last document was erased."""
        return self._text(namespace, digest) is not None

    def text_keys(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Return the keys of the stored chunks of a text."""
        text = self._text(namespace, digest)
        return [] if text is None else [key for key in text.keys if self._rows.has(f"c {key}")]

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts that a stored chunk is the KV of."""
        if (chunk := self._chunk(f"c {key}")) is None:
            return []
        texts = [self._text(chunk.namespace, digest) for digest in chunk.digests]
        return [TextEntry(*text.entry) for text in texts if text is not None]

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents of a namespace, whether or not their chunks are stored now."""
        return [doc_id for space, doc_id in self.all_documents() if space == namespace]

    def all_documents(self) -> list[tuple[str, str]]:
        """Return namespace and id of all documents."""
        found = ((name.partition(" ")[0], self._document(name.partition(" ")[2])) for name in self._names("z "))
        return [(namespace, doc_id) for namespace, doc_id in found if doc_id is not None]

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the digests of a document's texts."""
        return self._strings(self._document_row(namespace, doc_id))

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all stored chunks of a document's texts."""
        found = (key for digest in self.document_texts(namespace, doc_id) for key in self.text_keys(namespace, digest))
        return list(dict.fromkeys(found))

    def only_held_by(self, namespace: str, doc_id: str) -> set[ChunkKey]:
        """Return the keys, stored or being written, of chunks all of whose texts no other document refers to."""
        digests = self._strings(self._document_row(namespace, doc_id))
        texts = filter(None, (self._text(namespace, digest) for digest in digests))
        keys = {key for text in texts if text.refs <= 1 for key in text.keys}
        return {key for key in keys if not self._is_held_otherwise(namespace, key, digests)}

    def of_namespace(self, namespace: str) -> set[ChunkKey]:
        """Return the keys of a namespace's chunks, stored or being written; raises ``StoreError``."""
        chunks = ((key, self._chunk(f"c {key}") or self._chunk(f"p {key}")) for key in self.present())
        return {key for key, chunk in chunks if chunk is not None and chunk.namespace == namespace}

    def generation(self) -> int:
        """Return a number that changes with each erasure or eviction by any process."""
        return self._state().generation

    def totals(self) -> tuple[int, int]:
        """Return how many chunks are stored, and their bytes."""
        return self._state()[1:3]

    def may_have_dormant(self) -> bool:
        """Whether there may be blobs of an earlier catalog that was lost."""
        return self._state().dormant

    def usage(self, key: ChunkKey) -> Usage:
        """Return what eviction must know of a chunk."""
        chunk = self._chunk(f"c {key}")
        return Usage() if chunk is None else chunk.usage

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with what is left of its duration; ``None`` if it was given none."""
        retention = self.usage(key).retention()
        return None if retention == Retention() else retention

    def usages(self) -> tuple[int, list[Sized]]:
        """Return the number of accesses so far, and what eviction must know of every stored chunk; raises ``StoreError``."""
        self.flush()
        with self._rows.change():  # one look instead of one for each
            chunks = ((key, self._chunk(f"c {key}")) for key in self.keys())
            sized = [
                Sized(key, each.num_tokens, each.num_bytes, each.usage) for key, each in chunks if each is not None
            ]
            return self._state().accesses, sized

    # -- changes ---------------------------------------------------------------------------------------------------------

    def link(self, key: ChunkKey, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add text and document to a stored chunk; whether it is stored."""
        name = f"c {key}"
        chunk = self._chunk(name)
        if chunk is None or self._has(chunk, text, doc_id):
            return chunk is not None
        with self._rows.change():
            if (chunk := self._chunk(name)) is not None:
                self._attach(name, chunk, text, doc_id)
        return chunk is not None

    def begin(self, record: Record, text: TextEntry | None, doc_id: str | None, retention: Retention | None) -> bool:
        """Note that a chunk is about to be written; ``False`` if it is stored already.

        Another writer's note is taken over: both write the same bytes.
        """
        r, name = record, f"p {record.key}"
        with self._rows.change():
            if (chunk := self._chunk(f"c {record.key}")) is not None:
                self._attach(f"c {record.key}", chunk, text, doc_id)
                return False
            own = (r.content, r.model, r.namespace, r.prefix, r.context, r.num_tokens, r.num_bytes)
            chunk = self._chunk(name) or _Chunk(*own, [], Usage())
            usage = chunk.usage if retention is None else chunk.usage.retained(retention)
            self._attach(name, chunk._replace(usage=usage), text, doc_id)
        return True

    def confirm(self, key: ChunkKey) -> bool:
        """Note that a chunk's blob is there; ``False`` if the chunk was erased meanwhile."""
        with self._rows.change():
            chunk = self._chunk(f"p {key}")
            if chunk is None:
                return self._rows.has(f"c {key}")
            state, variants = self._state(), f"i {chunk.content}"
            self._rows.delete(f"p {key}")
            self._rows.set(f"c {key}", chunk._replace(usage=chunk.usage._replace(last=state.accesses)))
            self._rows.set(variants, [*(other for other in self._strings(variants) if other != key), key])
            self._count(state, 1, chunk.num_bytes)
        return True

    def cancel(self, key: ChunkKey, text: TextEntry | None, doc_id: str | None) -> None:
        """Take back :meth:`begin`, unless another writer has confirmed it."""
        with self._rows.change():
            if (chunk := self._chunk(f"p {key}")) is not None:
                self._drop(f"p {key}", key, chunk)
                if text is not None and doc_id is not None:
                    self._unrefer(chunk.namespace, doc_id, {text.digest})

    def remove(self, keys: Iterable[ChunkKey], *, unless: Callable[[], bool] = lambda: False) -> int:
        """Remove chunks whose blobs were erased, and return how many there were. Documents stay.

        Nothing is removed if ``unless()`` is true; while it is asked, nobody stores a chunk.
        """
        count = num_bytes = 0
        with self._rows.change():
            if unless():
                return 0
            for name, key in [(f"{kind} {key}", key) for key in keys for kind in "cp"]:
                if (chunk := self._chunk(name)) is not None:
                    self._drop(name, key, chunk)
                    count, num_bytes = (
                        (count + 1, num_bytes + chunk.num_bytes) if name[0] == "c" else (count, num_bytes)
                    )
            state = self._state()
            self._count(state._replace(generation=state.generation + 1), -count, -num_bytes)
        return count

    def unlink(self, namespace: str, doc_id: str, erased: Collection[ChunkKey]) -> bool:
        """Remove a document, and the chunks that only it held on to, whose blobs were erased.

        Returns
        -------
        bool
            ``False`` if there are more of them than ``erased`` by now: nothing was changed then.
        """
        with self._rows.change():
            if not self.only_held_by(namespace, doc_id) <= set(erased):
                return False
            digests = set(self.document_texts(namespace, doc_id))
            self.remove(erased)
            self._unrefer(namespace, doc_id, digests)
        return True

    def clear(self, namespace: str | None = None) -> int:
        """Remove all rows, or those of a namespace, and return how many stored chunks that were."""
        with self._rows.change():
            state = self._state()
            if namespace is None:
                self._rows.clear()
                self._rows.set("s", _State(state.generation + 1, accesses=state.accesses, dormant=state.dormant))
                return state.chunks
            count = self.remove(self.of_namespace(namespace))
            for doc_id in self.documents(namespace):
                self._unrefer(namespace, doc_id, self.document_texts(namespace, doc_id))
            return count

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Set the retention of stored chunks, and return how many there are."""
        count = 0
        with self._rows.change():
            for name in dict.fromkeys(f"c {key}" for key in keys):
                if (chunk := self._chunk(name)) is not None:
                    self._rows.set(name, chunk._replace(usage=chunk.usage.retained(retention)))
                    count += 1
        return count

    def no_dormant(self) -> None:
        """Note that blobs of an earlier catalog have been erased."""
        with self._rows.change():
            self._rows.set("s", self._state()._replace(dormant=False))

    def touch(self, key: ChunkKey) -> None:
        """Count a hit on a chunk, in whatever tier; written down later."""
        self._touched[key] += 1
        if len(self._touched) == MAX_TOUCHED:
            with suppress(RuntimeError):  # no thread can be had
                POOL.submit(self.flush)

    def flush(self) -> None:
        """Write down the hits; a fault costs them, no more."""
        touched, self._touched = self._touched, Counter()
        if not touched or self.read_only:
            return
        with suppress(OSError), self._rows.change():
            state = self._state()
            state = state._replace(accesses=state.accesses + sum(touched.values()))
            for key, hits in touched.items():
                if (chunk := self._chunk(f"c {key}")) is not None:
                    self._rows.set(f"c {key}", chunk._replace(usage=chunk.usage.touched(hits, state.accesses)))
            self._rows.set("s", state)

    def scrub(self) -> None:
        """Leave nothing of erased rows in the database's journal, as far as other readers allow."""
        self._rows.scrub()

    def close(self) -> None:
        """Release resources; idempotent. A closed catalog is empty and can't be changed."""
        self.flush()
        self._rows.close()

    def reset_after_fork(self) -> None:
        """Let go of what is the parent's."""
        self._touched = Counter()

    # -- rows ------------------------------------------------------------------------------------------------------------

    def _begin(self, rows: Rows, is_other: bool) -> None:
        """Begin a new database; the blobs of one that another has taken the place of may be dormant."""
        self._rows = rows  # which are being opened
        state = self._read(_STATE, "s") or _State(time.time_ns(), dormant=self._may_have_blobs())
        rows.set("s", state._replace(dormant=state.dormant or is_other))

    def _read(self, form: TypeAdapter[T], name: str) -> T | None:
        """Return a row's value; ``None`` for one that is absent or of another form."""
        text = self._rows.get(name)
        with suppress(ValidationError):
            return None if text is None else form.validate_json(text)
        return None

    def _chunk(self, name: str) -> _Chunk | None:
        return self._read(_CHUNK, name)

    def _text(self, namespace: str, digest: str) -> _Text | None:
        return self._read(_TEXT, self._text_row(namespace, digest))

    def _state(self) -> _State:
        return self._read(_STATE, "s") or _State(time.time_ns())

    def _strings(self, name: str) -> list[str]:
        return self._read(_STRINGS, name) or []

    def _names(self, prefix: str) -> list[str]:
        """Return the rest of all names that begin with a prefix; none where they can't be read."""
        with suppress(*FAULTS):
            return self._rows.names(prefix)
        return []

    def _text_row(self, namespace: str, digest: str) -> str:
        return f"t {namespace} {digest if self._seal is None else self._seal.seal(digest, 'text')}"

    def _document_row(self, namespace: str, doc_id: str) -> str:
        name = json.dumps(doc_id)
        return f"z {namespace} {name if self._seal is None else self._seal.seal(name, 'document')}"

    def _document(self, name: str) -> str | None:
        text = name if self._seal is None else self._seal.open(name, "document")
        with suppress(ValueError, RecursionError):
            doc_id = None if text is None else json.loads(text)
            return doc_id if isinstance(doc_id, str) else None
        return None

    def _count(self, state: _State, chunks: int, num_bytes: int) -> None:
        self._rows.set("s", state._replace(chunks=state.chunks + chunks, num_bytes=state.num_bytes + num_bytes))

    def _has(self, chunk: _Chunk, text: TextEntry | None, doc_id: str | None) -> bool:
        """Whether :meth:`_attach` would change nothing."""
        if text is None:
            return True
        is_known = text.digest in chunk.digests and self._text(chunk.namespace, text.digest) is not None
        return is_known and (doc_id is None or text.digest in self.document_texts(chunk.namespace, doc_id))

    def _attach(self, name: str, chunk: _Chunk, text: TextEntry | None, doc_id: str | None) -> None:
        """Write a chunk's row, and let its text and its document know each other."""
        if text is not None:
            namespace, key, refs = chunk.namespace, ChunkKey(name[2:]), 0
            entry = _Entry(text.digest, text.head, text.tail, text.num_chars)
            known = self._text(namespace, text.digest) or _Text(entry, self._log(namespace, entry), [], 0)
            if doc_id is not None and text.digest not in (held := self.document_texts(namespace, doc_id)):
                self._rows.set(self._document_row(namespace, doc_id), [*held, text.digest])
                refs = 1
            keys = list(dict.fromkeys([*known.keys, key]))
            self._rows.set(self._text_row(namespace, text.digest), known._replace(keys=keys, refs=known.refs + refs))
            chunk = chunk._replace(digests=list(dict.fromkeys([*chunk.digests, text.digest])))
        self._rows.set(name, chunk)

    def _drop(self, name: str, key: ChunkKey, chunk: _Chunk) -> None:
        """Remove a chunk's row, and texts that have neither another chunk nor a document."""
        self._rows.delete(name)
        for digest in chunk.digests:
            if (text := self._text(chunk.namespace, digest)) is not None:
                self._settle(chunk.namespace, text._replace(keys=[other for other in text.keys if other != key]))
        if name[0] == "c":
            self._keep(f"i {chunk.content}", [other for other in self._strings(f"i {chunk.content}") if other != key])

    def _unrefer(self, namespace: str, doc_id: str, digests: Collection[str]) -> None:
        """Remove texts from a document, and the document with its last one; a text goes with its last document."""
        held = self.document_texts(namespace, doc_id)
        for text in filter(None, (self._text(namespace, digest) for digest in set(held) & set(digests))):
            refs = max(0, text.refs - 1)
            for name in [f"{kind} {key}" for key in text.keys for kind in "cp"] if not refs else ():
                if (chunk := self._chunk(name)) is not None:  # it stays for the sake of another text
                    digest = text.entry.digest
                    self._rows.set(name, chunk._replace(digests=[d for d in chunk.digests if d != digest]))
            self._settle(namespace, text._replace(refs=refs, keys=text.keys if refs else []))
        self._keep(self._document_row(namespace, doc_id), [digest for digest in held if digest not in digests])

    def _settle(self, namespace: str, text: _Text) -> None:
        """Write a text's row, or remove it where nothing holds on to it."""
        row = self._text_row(namespace, text.entry.digest)
        if text.keys or text.refs:
            self._rows.set(row, text)
            return
        self._rows.delete(row)
        page, slot = divmod(text.number, PAGE)
        entries = self._read(_LOG, f"l {namespace} {page}") or []
        entries[slot : slot + 1] = [None] * len(entries[slot : slot + 1])
        self._keep(f"l {namespace} {page}", entries if any(entries) else [])

    def _log(self, namespace: str, entry: _Entry) -> int:
        """Append a text to its namespace's log, and return its number."""
        first, last = self._read(_PAIR, f"n {namespace}") or (0, 0)
        # Later than any cursor of a catalog that was lost.
        number = last + 1 if last else time.time_ns() // 1000
        page, slot = divmod(number, PAGE)
        entries = (self._read(_LOG, f"l {namespace} {page}") or [])[:slot]
        self._rows.set(f"l {namespace} {page}", [*entries, *([None] * (slot - len(entries))), entry])
        self._rows.set(f"n {namespace}", [first or number, number])
        return number

    def _is_held_otherwise(self, namespace: str, key: ChunkKey, digests: Collection[str]) -> bool:
        """Whether a chunk is that of a text, too, that another document refers to."""
        chunk = self._chunk(f"c {key}") or self._chunk(f"p {key}")
        texts = ((digest, self._text(namespace, digest)) for digest in (chunk.digests if chunk else ()))
        return any(text is not None and text.refs > (digest in digests) for digest, text in texts)

    def _keep(self, name: str, values: list[T]) -> None:
        if values:
            self._rows.set(name, values)
        else:
            self._rows.delete(name)
