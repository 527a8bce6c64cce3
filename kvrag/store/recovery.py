"""Bring an index in step with the files of its store: after a kill, a power cut, a restored backup, or its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

from kvrag.errors import StoreError
from kvrag.store.base import Record
from kvrag.store.header import Header
from kvrag.store.index import DiskIndex
from kvrag.store.objects import Objects
from kvrag.store.references import ReferenceFile, References, name_of
from kvrag.store.store_index import StoreIndex
from kvrag.types import ChunkKey

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 500


def finish_erasures(index: StoreIndex, objects: Objects, references: References) -> int:
    """Erase what was unlinked from the index by a process that did not live to erase it; return how many chunks."""
    erased = 0
    for key in index.gone():
        erased += index.settle((key,), partial(objects.erase, key))
    drop_references(index, references)
    return erased


def drop_references(index: StoreIndex, references: References) -> None:
    """Erase the files of references that the index has dropped."""
    for reference in index.gone_references():
        index.settle(reference, partial(references.remove, reference))


def reconcile(
    index: DiskIndex, objects: Objects, references: References, is_alive: Callable[[str | None], bool] = lambda _: False
) -> None:
    """Add rows for files that have none, and remove rows whose files are gone.

    Others may put and erase meanwhile, so each step looks again, in the transaction that makes it.

    Parameters
    ----------
    index, objects, references
        The store's.
    is_alive
        Whether the process that has made a claim lives: what it has in its memory keeps its row.
    """
    files, rows = objects.keys(), set(index.keys())
    # Rows of an index that was not finished, or whose values are gone, may be names alone.
    unknown = sorted(files if index.stale else files - rows, key=objects.age)
    if unknown:
        log.info("adding %s chunks to the index", len(unknown))
    for batch in batches(headers(objects, unknown)):
        with index.batch():
            for header in batch:
                record = header.record()
                index.restore(record, partial(objects.contains, record.key))
    for key in rows - files:
        with suppress(StoreError):
            _abandon(index, objects, key, is_alive)
    _reconcile_references(index, references)
    if index.stale:
        index.complete()
    if index.erasure_mark() is None:
        index.mark_erasure()


def _abandon(index: DiskIndex, objects: Objects, key: ChunkKey, is_alive: Callable[[str | None], bool]) -> None:
    index.abandon(key, lambda holder: not objects.contains(key) and not is_alive(holder))


def headers(objects: Objects, keys: Iterable[ChunkKey]) -> Iterator[Header]:
    """Yield the headers of blobs that have one; what is damaged is put away."""
    for key in keys:
        with suppress(OSError):
            header = objects.header(key)
            if header is not None:
                yield header


def _reconcile_references(index: DiskIndex, references: References) -> None:
    rows = {name_of(reference): reference for reference in index.references()}
    names = references.names()
    for batch in batches(names if index.stale else names - rows.keys()):
        with index.batch():
            going = set(index.gone_references())
            for file in filter(None, map(references.read, batch)):
                if file.reference not in going:
                    add_reference(index, file)
    for name in rows.keys() - names:
        with suppress(StoreError), index.batch():
            if index.refers(rows[name]):
                _write_again(index, references, rows[name])


def add_reference(index: StoreIndex, file: ReferenceFile) -> None:
    """Add what a file says to an index."""
    record = index.get(file.key)
    if record is not None and record.namespace == file.namespace:
        index.add(_with_text(record, file), doc_id=file.doc_id)
    else:
        index.refer(*file.reference)


def _with_text(record: Record, file: ReferenceFile) -> Record:
    return Record(**{name: getattr(record, name) for name in Record.__slots__ if name != "text"}, text=file.text)


def _write_again(index: StoreIndex, references: References, reference: tuple[str, str, str]) -> None:
    """Write the file of a reference that lost it, because its document would lose its chunks with the index."""
    namespace, digest, doc_id = reference
    for key in index.text_keys(namespace, digest):
        if index.holder(key) is not None:  # who has it in memory writes both
            continue
        record = index.get(key)
        text = None if record is None else index.text(namespace, digest)
        if text is not None:
            with suppress(OSError):
                references.add(ReferenceFile(namespace, doc_id, text, key))
            return


def batches(items: Iterable[T]) -> Iterator[Sequence[T]]:
    """Cut items into lists of at most :data:`BATCH`."""
    left = iter(items)
    while batch := list(islice(left, BATCH)):
        yield batch
