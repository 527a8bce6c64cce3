"""Documents of a run: checked and registered before anything is computed; claims of its chunks."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from pydantic import Field, SkipValidation

from kvrag.config import IndexOptions, config_class
from kvrag.errors import InputError, StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.precompute.library import escaped, in_collection
from kvrag.prompt.messages import check_chunk_text
from kvrag.prompt.spans import text_entry
from kvrag.prompt.tokenizer import check_encodable
from kvrag.store import Catalog, TieredStore
from kvrag.types import ChunkIdentity, ChunkKey, DocIds, Reasons, TextEntry

if TYPE_CHECKING:
    from kvrag.precompute.run import Precompute

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """A text to store, stripped, with its document's id, if any, and its scanner entry.

    ``entry`` is ``None`` if the text is too short for the span scanner. ``fault`` is the reason why
    UTF-8 can't encode the id or the text; such an item is reported and not stored.
    """

    doc_id: str | None
    text: str
    entry: TextEntry | None
    fault: str = ""

    @classmethod
    def of(cls, doc_id: str | None, text: str) -> Item:
        """Make an item; raises :class:`InputError` if the id is no string."""
        if not isinstance(doc_id, str | None):
            raise InputError("ids must be strings")
        try:
            if doc_id and not doc_id.isascii():
                check_encodable(doc_id)
            return cls(doc_id, text.strip(), text_entry(text))
        except InputError as error:
            return cls(doc_id and escaped(doc_id), escaped(text).strip(), None, str(error))


AT_ONCE = 1000  # documents that are registered in a transaction


class Items(list[Item]):
    """Checked texts of a run, with their documents."""

    @property
    def unreadable(self) -> list[str]:
        """Ids of documents whose new text UTF-8 can't encode: their former KV must go."""
        return [item.doc_id for item in self if item.fault and item.doc_id is not None]

    @property
    def faults(self) -> Reasons:
        """``(id, reason)`` of items that UTF-8 can't encode, as in a report."""
        return [
            (item.doc_id or f"text {number}", item.fault)
            for number, item in enumerate(self)
            if item.fault
        ]

    @classmethod
    def checked(
        cls,
        texts: Sequence[str],
        ids: DocIds | None,
        collection: str | None,
    ) -> Items:
        """Check texts and their ids; return an item per text, with its id in the collection."""
        if not isinstance(texts, Iterable) or isinstance(texts, (Mapping, bytes)):
            raise InputError(f"texts is of type {type(texts).__name__}; pass a list of strings")
        texts = [texts] if isinstance(texts, str) else list(texts)
        if ids is None:
            ids = [None] * len(texts)
        names = [ids] if isinstance(ids, str) else list(ids)
        if len(names) != len(texts):
            raise InputError(
                f"{len(texts)} texts came with {len(names)} ids; pass one id per text, or none"
            )
        found = cls()
        seen = dict[str, str]()
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            try:
                item = Item.of(name, check_chunk_text(text))
            except InputError as error:
                raise InputError(f"chunk {number} (id {name!r}): {error}") from None
            if name is not None and seen.setdefault(name, item.text) != item.text:
                raise InputError(
                    f"the id {name!r} has two different texts; give each text its own id"
                )
            found.append(item)
        if collection is None:
            return found
        stored = in_collection([item.doc_id for item in found], collection)
        return cls(item._replace(doc_id=name) for name, item in zip(stored, found, strict=True))

    def announce(self, store: TieredStore, namespace: str) -> None:
        """Register documents before their KV is computed, so that a deletion from now on wins.

        Raises ``StoreError``.
        """
        texts = [(item.doc_id, item.entry) for item in self if item.entry is not None]
        try:
            for first in range(0, len(texts), AT_ONCE):
                store.register(namespace, texts[first : first + AT_ONCE])
        except StoreError as error:
            raise StoreError(f"the documents could not be stored: {error}") from error


@config_class
class IndexRequest(IndexOptions):
    """Texts to compute and store the KV of, with their options."""

    # Chunk texts; leading and trailing white space is ignored.
    texts: SkipValidation[Sequence[str]]
    # Document ids, one per text.
    ids: SkipValidation[DocIds | None] = Field(default=None, kw_only=True)
    # Whether a server has registered the documents when the request came.
    announced: bool = Field(default=False, kw_only=True)

    def items(self) -> Items:
        """Check texts and ids; return an item per text, with its id in the collection."""
        return Items.checked(self.texts, self.ids, self.collection)


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to store, and the documents that refer to it.

    ``entry`` is ``None`` if the text is too short for the span scanner.
    """

    doc_ids: tuple[str | None, ...]
    entry: TextEntry | None
    identity: ChunkIdentity

    @property
    def label(self) -> str:
        """Name in reports: the first document id, else the beginning of the chunk key."""
        return next((i for i in self.doc_ids if i is not None), chunk_key(self.identity)[:12])

    def because(self, reason: str) -> Reasons:
        """Return the reason with each document's name, as in a report."""
        return [(doc_id or self.label, reason) for doc_id in self.doc_ids]


class Guard:
    """Hooks that may delay or end a background run; the defaults do neither."""

    def before_forward(self) -> None:
        """Block until the next forward may run; an exception ends the run."""

    def storing(self) -> AbstractContextManager[object]:
        """Return the context manager to write chunks in; an exception ends the run."""
        return nullcontext()

    def is_registered(self, entry: TextEntry | None) -> bool:
        """Whether a text was registered, and must not be stored if it was deleted since."""
        return entry is not None


def replaced_ids(store: TieredStore, items: Sequence[Item], namespace: str) -> list[str]:
    """Return the ids of texts that changed since they were stored.

    The KV of the old texts must be erased.
    """
    return [
        item.doc_id
        for item in items
        if item.doc_id is not None
        and store.catalog.document_texts(namespace, item.doc_id)
        not in ([], [item.entry.digest if item.entry else None])
    ]


def evicted(store: TieredStore) -> str:
    """Return the reason why later chunks evicted a chunk, with the remedy."""
    remedy = "disk_bytes or disk_fraction, lower min_free_bytes, or free space there"
    if "disk" not in store.stats():
        remedy = "ram_bytes or ram_fraction, or pass kv_dir"
    return f"evicted by later chunks, because the store is too small; raise StoreConfig.{remedy}"


def is_current(catalog: Catalog, namespace: str, text: TextEntry, doc_id: str | None) -> bool:
    """Whether a text is registered, as the last text of its document."""
    return catalog.knows_text(namespace, text.digest) and (
        doc_id is None or catalog.document_texts(namespace, doc_id)[-1:] == [text.digest]
    )


def note_deleted(run: Precompute, chunks: Iterable[NewChunk]) -> None:
    """Note documents that were deleted, or got another text, since the run began."""
    if run.has_erased():
        found = {
            (chunk, name): None
            for chunk in chunks
            if chunk.entry is not None and run.guard.is_registered(chunk.entry)
            for name in chunk.doc_ids
            if not is_current(run.store.catalog, chunk.identity.namespace, chunk.entry, name)
        }
        if run.has_erased():  # else a look has failed meanwhile
            run.deleted |= found


def withdraw(store: TieredStore, chunks: Iterable[NewChunk]) -> None:
    """Unregister documents whose text has no KV, unless they have another text by now."""
    catalog = store.catalog
    for chunk in chunks:
        space = chunk.identity.namespace
        text = chunk.entry
        with suppress(StoreError):
            # A text may have KV behind another prefix, or of another model.
            if text is not None and not catalog.text_keys(space, text.digest):
                for doc_id in chunk.doc_ids:
                    if doc_id is not None and is_current(catalog, space, text, doc_id):
                        store.forget(space, doc_id)


def replace(
    store: TieredStore,
    namespace: str,
    items: Items,
    erasing: Callable[[str], AbstractContextManager[None]],
    *,
    is_announced: bool,
) -> None:
    """Announce documents, and erase their earlier texts inside the context ``erasing``."""
    if not is_announced:
        items.announce(store, namespace)
    for name, _, entry, _ in items:
        if name is None:
            continue
        held = store.catalog.document_texts(namespace, name)
        if entry is not None:
            held = held[: held.index(entry.digest)] if entry.digest in held else []
        if held:
            with erasing(namespace):
                store.forget(namespace, name, held)


POLL_S = 0.05  # between looks at the chunks that another writer computes
TELL_EVERY = 200
MOST_WAITS = 2_400  # looks without progress; the chunks are then computed twice


class Claims:
    """Claims of a writer on the chunks that it computes, seen by all threads and processes.

    A claim is a lock of the operating system on a byte of ``path``, so it ends with its process.
    Without ``path``, or where the system has no such locks (it is not Linux, or the file system
    refuses them), every claim succeeds, and chunks may be computed twice.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        if self._path is not None and hasattr(fcntl, "F_OFD_SETLK"):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with suppress(OSError):
                self._fd = os.open(self._path, flags, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def take(self, key: ChunkKey) -> bool:
        """Claim a chunk; return ``False`` if another writer has claimed it."""
        try:
            self._lock(fcntl.F_WRLCK, int(key[:15], 16), 1)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # the file system has no locks
            pass
        return True

    def release(self) -> None:
        """Release all claims."""
        with suppress(OSError):
            self._lock(fcntl.F_UNLCK, 0, 0)

    def _lock(self, kind: int, first: int, count: int) -> None:
        """Lock or unlock bytes of the file, for this open file alone (``struct flock``)."""
        if self._fd is not None:
            asked = struct.pack("hhqqi0q", kind, os.SEEK_SET, first, count, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, asked)


def batches(
    run: Precompute, todo: list[NewChunk], batch_size: int, claims: Claims
) -> Iterator[list[NewChunk]]:
    """Yield batches to compute, last the chunks that another writer has claimed.

    These are linked once it has stored them, and computed if it ends without that, or stores
    nothing for :data:`MOST_WAITS`.
    """
    waits = 0
    writer = run.store.writer
    while todo:
        left = list[NewChunk]()
        for first in range(0, len(todo), batch_size):
            if run.is_refused or writer.read_only or writer.is_closed:
                _give_up(run, [*left, *todo[first:]])
                return
            batch = _to_compute(run, todo[first : first + batch_size], claims, left)
            if batch:
                yield batch
        run.finish_write()
        claims.release()
        if not left or not run.is_asked_for:  # a later prompt finds them
            run.skipped += len(left)
            return
        waits = waits + 1 if len(left) == len(todo) else 0
        if waits % TELL_EVERY == 1:
            logger.warning("waiting for %d chunks that another writer computes", len(left))
        if waits > MOST_WAITS:
            claims = Claims(None)
        time.sleep(POLL_S)
        todo = left


def _give_up(run: Precompute, rest: list[NewChunk]) -> None:
    """Report chunks that are not computed because the store refuses chunks, and their size."""
    size = run.token_bytes * sum(len(chunk.identity.token_ids) for chunk in rest)
    reason = str(
        run.store.writer.refusal()
        or f"not computed: the store refuses chunks, and the {len(rest)} that are left take "
        f"{size / 2**20:.1f} MiB"
    )
    logger.warning("precompute ends early: %s", reason)
    for chunk in rest:
        run.failed += chunk.because(reason)
    run.unstored += rest


def _to_compute(
    run: Precompute, batch: list[NewChunk], claims: Claims, left: list[NewChunk]
) -> list[NewChunk]:
    """Return the chunks of a batch to compute; add those that another computes to ``left``."""
    note_deleted(run, batch)
    kept = [
        chunk for chunk in batch if any((chunk, name) not in run.deleted for name in chunk.doc_ids)
    ]
    wanted = {chunk_key(chunk.identity): chunk for chunk in kept}
    # Texts with the same token ids share a chunk; the next round links the others.
    left += [chunk for chunk in kept if chunk not in wanted.values()]
    mine = [key for key in wanted if claims.take(key)]
    known = run.store.known(wanted)  # also chunks that were stored just before they were claimed
    missing = [key for key, chunk in wanted.items() if key not in known or run.is_missing(chunk)]
    left += [wanted[key] for key in missing if key not in mine]
    return [wanted[key] for key in missing if key in mine]
