"""Who has what: chunks, texts, documents, and what chunks are worth. Shared by processes; one transaction per change; no blob is touched.

::

    c <key>              a stored chunk: content, model, namespace, prefix, context, tokens, bytes, digests of its texts, usage
    i <content>          keys of the chunk's variants, oldest first
    l <namespace> <page> entries of texts in the order in which they came
    n <namespace>        numbers of the first and of the last text
    p <key>              a chunk that is being written, as c
    s                    generation, chunks, bytes, accesses, whether there may be dormant blobs
    t <namespace> <digest>  a text: entry, its number, keys of its chunks, how many documents refer to it
    z <namespace> <document>  digests of a document's texts

Chunks come first and documents last because diskcache lists names from either end. A writer that is killed leaves a row ``p`` at most,
which counts as absent. A row that is not of its form counts as absent, too: anyone who can write to the directory may have made it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from kvrag.store.base import Record
from kvrag.store.crypto import Keys, Seal
from kvrag.store.rows import Rows
from kvrag.store.worth import Retention, Usage
from kvrag.threads import POOL
from kvrag.types import ChunkKey, TextEntry

PAGE = 64
"""Texts per row of the log."""

MAX_TOUCHED = 128
"""Chunks whose hits are collected before they are written down, in the background."""

LIMIT = 2**62


@dataclass(slots=True)
class _Chunk:
    """Value of a row ``c`` or ``p``."""

    record: Record
    digests: list[str]
    usage: Usage

    @classmethod
    def of(cls, key: str, value: Any) -> _Chunk | None:
        match value:
            case [str(), str(), str(), str(), str(), int(tokens), int(size), list(digests), usage] if (
                0 <= tokens < LIMIT and 0 <= size < LIMIT
            ):
                return cls(Record(ChunkKey(key), *value[:7]), _strings(digests), Usage.of(usage))
        return None

    def row(self) -> list[object]:
        r = self.record
        own = [r.content, r.model, r.namespace, r.prefix, r.context, r.num_tokens, r.num_bytes]
        return [*own, self.digests, self.usage.row()]


@dataclass(slots=True)
class _Text:
    """Value of a row ``t``."""

    entry: TextEntry
    number: int
    keys: list[str]
    refs: int

    @classmethod
    def of(cls, digest: str, value: Any) -> _Text | None:
        match value:
            case [fields, int(number), list(keys), int(refs)] if 0 <= number < LIMIT and 0 <= refs < LIMIT:
                entry = _entry([digest, *fields] if isinstance(fields, list) else None)
                return None if entry is None else cls(entry, number, _strings(keys), refs)
        return None

    def row(self) -> list[object]:
        return [[self.entry.head, self.entry.tail, self.entry.num_chars], self.number, self.keys, self.refs]


@dataclass(slots=True)
class _State:
    """Value of the row ``s``."""

    generation: int = 0
    chunks: int = 0
    num_bytes: int = 0
    accesses: int = 0
    dormant: int = 0

    @classmethod
    def of(cls, value: Any) -> _State:
        is_state = isinstance(value, list) and len(value) == 5 and all(type(v) is int and abs(v) < LIMIT for v in value)
        return cls(*value) if is_state else cls(generation=time.time_ns(), dormant=1)


class Catalog:
    """The rows of one store.

    Parameters
    ----------
    folder
        Of the database; ``None``: in a private temporary folder, for as long as the store is open.
    keys
        With a key, names of documents and all values are encrypted.
    read_only
        Change nothing in the folder.
    may_have_blobs
        Whether a catalog that is begun anew may find blobs of an earlier one.

    Raises
    ------
    StoreError
        If the folder can't be used.
    """

    def __init__(
        self, folder: Path | None, keys: Keys | None = None, *, read_only: bool = False, may_have_blobs: bool = False
    ) -> None:
        cipher = None if keys is None else keys.cipher
        self._seal = None if cipher is None else Seal(cipher)
        self._may_have_blobs = may_have_blobs
        self._touched: Counter[ChunkKey] = Counter()
        self._rows = Rows(folder, self._seal, read_only=read_only, begin=self._begin)
        self.read_only = read_only

    # -- questions -------------------------------------------------------------------------------------------------------

    def get(self, key: ChunkKey) -> Record | None:
        """Return what is known of a stored chunk."""
        chunk = _Chunk.of(key, self._rows.get(f"c {key}"))
        return None if chunk is None else chunk.record

    def known(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Return those keys whose chunks are stored."""
        return {key for key in keys if self._rows.has(f"c {key}")}

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all stored chunks."""
        return [ChunkKey(key) for key in self._rows.names("c ")]

    def pending(self) -> list[ChunkKey]:
        """Return the keys of chunks that are being written, or whose writers were killed."""
        return [ChunkKey(key) for key in self._rows.names("p ")]

    def variants(self, content: str) -> list[Record]:
        """Return the stored chunks with this content key (behind any prefix and context), oldest first."""
        found = (self.get(ChunkKey(key)) for key in _strings(self._rows.get(f"i {content}")))
        return [record for record in found if record is not None]

    def texts(self, namespace: str, after: int) -> tuple[list[TextEntry], int]:
        """Return the texts of a namespace that came after cursor ``after`` (0: all), and the new cursor.

        A text that was erased meanwhile may be missing from the list or still be in it; its chunks are unknown then.
        """
        first, last = _pair(self._rows.get(f"n {namespace}"))
        if last in (0, after):
            return [], after
        # A cursor beyond the end is that of a catalog that was lost since: begin again.
        start = max(first, after + 1 if after < last else 0)
        found = []
        for page in range(start // PAGE, last // PAGE + 1):
            entries = self._rows.get(f"l {namespace} {page}")
            low, high = max(0, start - page * PAGE), last - page * PAGE + 1
            found += [_entry(value) for value in (entries[low:high] if isinstance(entries, list) else ())]
        return [entry for entry in found if entry is not None], last

    def knows_text(self, namespace: str, digest: str) -> bool:
        """Whether a text is registered, with or without KV; not after its last document was erased."""
        return self._text(namespace, digest, self._rows.get) is not None

    def text_keys(self, namespace: str, digest: str) -> list[ChunkKey]:
        """Return the keys of the stored chunks of a text."""
        text = self._text(namespace, digest, self._rows.get)
        return [] if text is None else [ChunkKey(key) for key in text.keys if self._rows.has(f"c {key}")]

    def key_texts(self, key: ChunkKey) -> list[TextEntry]:
        """Return the texts that a stored chunk is the KV of."""
        chunk = _Chunk.of(key, self._rows.get(f"c {key}"))
        if chunk is None:
            return []
        texts = (self._text(chunk.record.namespace, digest, self._rows.get) for digest in chunk.digests)
        return [text.entry for text in texts if text is not None]

    def documents(self, namespace: str) -> list[str]:
        """Return the ids of all documents of a namespace, whether or not their chunks are stored now."""
        below = f"z {namespace} "
        found = (self._document(name) for name in self._rows.names("z ") if f"z {name}".startswith(below))
        return [doc_id for doc_id in found if doc_id is not None]

    def namespaces(self) -> list[str]:
        """Return the digests of all namespaces that have documents."""
        return list(dict.fromkeys(name.partition(" ")[0] for name in self._rows.names("z ")))

    def document_texts(self, namespace: str, doc_id: str) -> list[str]:
        """Return the digests of a document's texts."""
        return _strings(self._rows.get(self._document_row(namespace, doc_id)))

    def document_keys(self, namespace: str, doc_id: str) -> list[ChunkKey]:
        """Return the keys of all stored chunks of a document's texts."""
        found = (key for digest in self.document_texts(namespace, doc_id) for key in self.text_keys(namespace, digest))
        return list(dict.fromkeys(found))

    def generation(self) -> int:
        """Return a number that changes with each erasure or eviction by any process."""
        return self._state().generation

    def totals(self) -> tuple[int, int]:
        """Return how many chunks are stored, and their bytes."""
        state = self._state()
        return state.chunks, state.num_bytes

    def may_have_dormant(self) -> bool:
        """Whether there may be blobs of an earlier catalog that was lost."""
        return bool(self._state().dormant)

    def retention(self, key: ChunkKey) -> Retention | None:
        """Return a chunk's retention, with what is left of its duration; ``None`` if it was given none."""
        chunk = _Chunk.of(key, self._rows.get(f"c {key}"))
        retention = None if chunk is None else chunk.usage.retention()
        return None if retention == Retention() else retention

    def usage(self, key: ChunkKey) -> Usage:
        """Return what eviction must know of a chunk."""
        chunk = _Chunk.of(key, self._rows.get(f"c {key}"))
        return Usage() if chunk is None else chunk.usage

    def usages(self) -> tuple[int, list[tuple[Record, Usage]]]:
        """Return the number of accesses so far, and every stored chunk with its usage."""
        self.flush()
        chunks = (_Chunk.of(key, self._rows.get(f"c {key}")) for key in self.keys())
        return self._state().accesses, [(chunk.record, chunk.usage) for chunk in chunks if chunk is not None]

    # -- changes ---------------------------------------------------------------------------------------------------------

    def link(self, key: ChunkKey, text: TextEntry | None, doc_id: str | None) -> bool:
        """Add text and document to a stored chunk; whether it is stored. Raises ``StoreError``."""
        chunk = _Chunk.of(key, self._rows.get(f"c {key}"))
        if chunk is None or self._has(chunk, text, doc_id, self._rows.get):
            return chunk is not None
        with self._rows.change():
            if (chunk := self._read(f"c {key}")) is None:
                return False
            self._attach(f"c {key}", chunk, text, doc_id)
        return True

    def begin(self, record: Record, text: TextEntry | None, doc_id: str | None, retention: Retention | None) -> bool:
        """Note that a chunk is about to be written; ``False`` if it is stored already. Raises ``StoreError``.

        Another writer's note is taken over: both write the same bytes.
        """
        with self._rows.change():
            if (chunk := self._read(f"c {record.key}")) is not None:
                self._attach(f"c {record.key}", chunk, text, doc_id)
                return False
            known = self._read(f"p {record.key}")
            usage = Usage() if known is None else known.usage
            usage = usage if retention is None else usage.retained(retention)
            chunk = _Chunk(record, [] if known is None else known.digests, usage)
            self._attach(f"p {record.key}", chunk, text, doc_id)
        return True

    def confirm(self, key: ChunkKey) -> bool:
        """Note that a chunk's blob is there; ``False`` if the chunk was erased meanwhile. Raises ``StoreError``."""
        with self._rows.change():
            chunk = self._read(f"p {key}")
            if chunk is None:
                return self._rows.read(f"c {key}") is not None
            state = self._read_state()
            chunk.usage = replace(chunk.usage, last=state.accesses)
            self._rows.delete(f"p {key}")
            self._rows.set(f"c {key}", chunk.row())
            variants = _strings(self._rows.read(f"i {chunk.record.content}"))
            self._rows.set(f"i {chunk.record.content}", [*(k for k in variants if k != key), key])
            self._count(state, 1, chunk.record.num_bytes)
        return True

    def cancel(self, key: ChunkKey, text: TextEntry | None, doc_id: str | None) -> None:
        """Take back :meth:`begin`, unless another writer has confirmed it. Raises ``StoreError``."""
        with self._rows.change():
            chunk = self._read(f"p {key}")
            if chunk is None:
                return
            if text is not None and doc_id is not None:
                self._unrefer(chunk.record.namespace, doc_id, {text.digest})
            self._drop(f"p {key}", chunk)

    def remove(self, keys: Iterable[ChunkKey]) -> int:
        """Remove chunks whose blobs were erased, and return how many there were. Documents stay. Raises ``StoreError``."""
        count = 0
        with self._rows.change():
            state = self._read_state()
            for key in keys:
                for name in (f"c {key}", f"p {key}"):
                    if (chunk := self._read(name)) is not None:
                        self._drop(name, chunk)
                        if name[0] == "c":
                            count += 1
                            state.chunks, state.num_bytes = state.chunks - 1, state.num_bytes - chunk.record.num_bytes
            state.generation += 1
            self._rows.set("s", astuple(state))
        return count

    def only_held_by(self, namespace: str, doc_id: str) -> set[ChunkKey]:
        """Return the keys, stored or being written, of texts that no other document refers to."""
        return self._only_held_by(namespace, doc_id, self._rows.get)

    def unlink(self, namespace: str, doc_id: str, erased: Collection[ChunkKey]) -> bool:
        """Remove a document, and the chunks that only it held on to, whose blobs were erased.

        Returns
        -------
        bool
            ``False`` if there are more of them than ``erased`` by now: nothing was changed then.

        Raises
        ------
        StoreError
            If it can't be changed.
        """
        with self._rows.change():
            if not self._only_held_by(namespace, doc_id, self._rows.read) <= set(erased):
                return False
            digests = set(_strings(self._rows.read(self._document_row(namespace, doc_id))))
            self.remove(erased)
            self._unrefer(namespace, doc_id, digests)
        return True

    def clear(self, namespace: str | None = None) -> int:
        """Remove all rows, or those of a namespace, and return how many stored chunks that were. Raises ``StoreError``."""
        with self._rows.change():
            state = self._read_state()
            if namespace is None:
                self._rows.clear()
                self._rows.set("s", astuple(_State(state.generation + 1, accesses=state.accesses)))
                return state.chunks
            keys = self.of_namespace(namespace)
            count = self.remove(keys)
            for doc_id in self.documents(namespace):
                digests = set(_strings(self._rows.read(self._document_row(namespace, doc_id))))
                self._unrefer(namespace, doc_id, digests)
            return count

    def of_namespace(self, namespace: str) -> set[ChunkKey]:
        """Return the keys of a namespace's chunks, stored or being written."""
        found = set()
        for kind in "cp":
            for key in self._rows.names(f"{kind} "):
                chunk = _Chunk.of(key, self._rows.get(f"{kind} {key}"))
                if chunk is not None and chunk.record.namespace == namespace:
                    found.add(ChunkKey(key))
        return found

    def retain(self, keys: Iterable[ChunkKey], retention: Retention) -> int:
        """Set the retention of stored chunks, and return how many there are. Raises ``StoreError``."""
        count = 0
        with self._rows.change():
            for key in dict.fromkeys(keys):
                if (chunk := self._read(f"c {key}")) is not None:
                    chunk.usage = chunk.usage.retained(retention)
                    self._rows.set(f"c {key}", chunk.row())
                    count += 1
        return count

    def no_dormant(self) -> None:
        """Note that blobs of an earlier catalog have been erased. Raises ``StoreError``."""
        with self._rows.change():
            self._rows.set("s", astuple(replace(self._read_state(), dormant=0)))

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
            state = self._read_state()
            state.accesses += sum(touched.values())
            for key, hits in touched.items():
                if (chunk := self._read(f"c {key}")) is not None:
                    chunk.usage = chunk.usage.touched(hits, state.accesses)
                    self._rows.set(f"c {key}", chunk.row())
            self._rows.set("s", astuple(state))

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
        self._rows.reset_after_fork()

    # -- inside a transaction --------------------------------------------------------------------------------------------

    def _begin(self, rows: Rows) -> None:
        rows.set("s", astuple(_State(generation=time.time_ns(), dormant=int(self._may_have_blobs))))

    def _state(self) -> _State:
        return _State.of(self._rows.get("s"))

    def _read_state(self) -> _State:
        return _State.of(self._rows.read("s"))

    def _count(self, state: _State, chunks: int, num_bytes: int) -> None:
        state.chunks, state.num_bytes = state.chunks + chunks, state.num_bytes + num_bytes
        self._rows.set("s", astuple(state))

    def _read(self, name: str) -> _Chunk | None:
        return _Chunk.of(name[2:], self._rows.read(name))

    def _text(self, namespace: str, digest: str, read: Any) -> _Text | None:
        return _Text.of(digest, read(self._text_row(namespace, digest)))

    def _text_row(self, namespace: str, digest: str) -> str:
        return f"t {namespace} {digest if self._seal is None else self._seal.seal(digest, 'text')}"

    def _document_row(self, namespace: str, doc_id: str) -> str:
        name = json.dumps(doc_id)
        return f"z {namespace} {name if self._seal is None else self._seal.seal(name, 'document')}"

    def _document(self, name: str) -> str | None:
        sealed = name.partition(" ")[2]
        text = sealed if self._seal is None else self._seal.open(sealed, "document")
        try:
            doc_id = None if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return None
        return doc_id if isinstance(doc_id, str) else None

    def _has(self, chunk: _Chunk, text: TextEntry | None, doc_id: str | None, read: Any) -> bool:
        """Whether :meth:`_attach` would change nothing."""
        namespace = chunk.record.namespace
        if text is None:
            return True
        is_known = text.digest in chunk.digests and self._text(namespace, text.digest, read) is not None
        return is_known and (doc_id is None or text.digest in _strings(read(self._document_row(namespace, doc_id))))

    def _attach(self, name: str, chunk: _Chunk, text: TextEntry | None, doc_id: str | None) -> None:
        """Write a chunk's row, and let its text and its document know each other."""
        namespace, key = chunk.record.namespace, str(chunk.record.key)
        if text is not None:
            known = self._text(namespace, text.digest, self._rows.read)
            entry = known or _Text(text, self._log(namespace, text), [], 0)
            if key not in entry.keys:
                entry.keys.append(key)
            if text.digest not in chunk.digests:
                chunk.digests.append(text.digest)
            if doc_id is not None:
                row = self._document_row(namespace, doc_id)
                held = _strings(self._rows.read(row))
                if text.digest not in held:
                    self._rows.set(row, [*held, text.digest])
                    entry.refs += 1
            self._rows.set(self._text_row(namespace, text.digest), entry.row())
        self._rows.set(name, chunk.row())

    def _drop(self, name: str, chunk: _Chunk) -> None:
        """Remove a chunk's row, and texts that have neither another chunk nor a document."""
        key, record = str(chunk.record.key), chunk.record
        self._rows.delete(name)
        for digest in chunk.digests:
            text = self._text(record.namespace, digest, self._rows.read)
            if text is not None and key in text.keys:
                text.keys.remove(key)
                self._settle(record.namespace, text)
        variants = _strings(self._rows.read(f"i {record.content}"))
        if key in variants and name[0] == "c":
            self._set_or_delete(f"i {record.content}", [k for k in variants if k != key])

    def _unrefer(self, namespace: str, doc_id: str, digests: Collection[str]) -> None:
        """Remove texts from a document, and the document with its last one; a text goes with its last document."""
        row = self._document_row(namespace, doc_id)
        held = _strings(self._rows.read(row))
        for digest in set(held) & set(digests):
            text = self._text(namespace, digest, self._rows.read)
            if text is not None:
                text.refs = max(0, text.refs - 1)
                for key in text.keys if not text.refs else ():
                    self._detach(key, digest)
                text.keys = text.keys if text.refs else []
                self._settle(namespace, text)
        self._set_or_delete(row, [digest for digest in held if digest not in digests])

    def _detach(self, key: str, digest: str) -> None:
        """Take a text from a chunk, which stays for the sake of another text."""
        for name in (f"c {key}", f"p {key}"):
            if (chunk := self._read(name)) is not None:
                chunk.digests = [other for other in chunk.digests if other != digest]
                self._rows.set(name, chunk.row())

    def _settle(self, namespace: str, text: _Text) -> None:
        """Write a text's row, or remove it where nothing holds on to it."""
        row = self._text_row(namespace, text.entry.digest)
        if text.keys or text.refs:
            self._rows.set(row, text.row())
            return
        self._rows.delete(row)
        page, slot = divmod(text.number, PAGE)
        entries = self._rows.read(f"l {namespace} {page}")
        if isinstance(entries, list) and slot < len(entries):
            entries[slot] = None
            self._set_or_delete(f"l {namespace} {page}", entries if any(entries) else [])

    def _log(self, namespace: str, text: TextEntry) -> int:
        """Append a text to its namespace's log, and return its number."""
        first, last = _pair(self._rows.read(f"n {namespace}"))
        # Later than any cursor of a catalog that was lost.
        number = last + 1 if last else time.time_ns() // 1000
        page, slot = divmod(number, PAGE)
        entries = self._rows.read(f"l {namespace} {page}")
        entries = entries if isinstance(entries, list) else []
        entries = [*entries, *([None] * (slot - len(entries)))][:slot]
        self._rows.set(f"l {namespace} {page}", [*entries, [text.digest, text.head, text.tail, text.num_chars]])
        self._rows.set(f"n {namespace}", [first or number, number])
        return number

    def _only_held_by(self, namespace: str, doc_id: str, read: Any) -> set[ChunkKey]:
        digests = _strings(read(self._document_row(namespace, doc_id)))
        texts = (self._text(namespace, digest, read) for digest in digests)
        keys = {key for text in texts if text is not None and text.refs <= 1 for key in text.keys}
        return {ChunkKey(key) for key in keys if not self._held_otherwise(namespace, key, digests, read)}

    def _held_otherwise(self, namespace: str, key: str, digests: Collection[str], read: Any) -> bool:
        """Whether a chunk is that of a text, too, that another document refers to."""
        chunk = _Chunk.of(key, read(f"c {key}")) or _Chunk.of(key, read(f"p {key}"))
        for digest in () if chunk is None else chunk.digests:
            text = self._text(namespace, digest, read)
            if text is not None and text.refs > (digest in digests):
                return True
        return False

    def _set_or_delete(self, name: str, values: list[Any]) -> None:
        if values:
            self._rows.set(name, values)
        else:
            self._rows.delete(name)


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _pair(value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(v) is int and 0 < v < LIMIT for v in value)
    return (value[0], value[1]) if is_pair else (0, 0)


def _entry(value: Any) -> TextEntry | None:
    match value:
        case [str(digest), int(head), int(tail), int(chars)] if digest.isascii():
            if 0 <= head < 2**64 and 0 <= tail < 2**64 and 0 <= chars < 2**48:
                return TextEntry(digest, head, tail, chars)
    return None
