"""Check, clean up and copy a store.

Nothing is repaired: a chunk that fails verification is erased, and computed again.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.format import BlobRejected, Foreign, OtherVersion
from kvrag.store import Catalog, TieredStore
from kvrag.types import ChunkKey

Holders = dict[tuple[str, str | None], list[str | None]]
"""Ids of documents, by the namespace and digest of their texts."""


@dataclass(slots=True)
class FsckReport:
    """Result of a check.

    ``checked`` counts the chunks with a checked header, ``verified`` the chunks with every byte
    checked. ``rejected`` lists blobs as ``(key, reason)``; damaged blobs were erased.
    ``other_versions`` and ``foreign`` count files of another version of the format or another key,
    which may be damaged unseen; see :func:`gc`. Files without a row (``dormant``), intact or of
    another version, and rows without a file (``unknown_rows``) were erased.
    """

    checked: int = 0
    verified: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)
    other_versions: int = 0
    foreign: int = 0
    dormant: int = 0
    unknown_rows: int = 0

    @property
    def ok(self) -> bool:
        """Whether no blob was rejected."""
        return not self.rejected


@dataclass(slots=True)
class GcReport:
    """Numbers of files, rows and chunks that a cleanup removed.

    ``swept`` counts files of dead writers, ``other_versions`` files of other versions, ``dormant``
    files without a row, ``pending`` rows of dead writers, ``evicted`` chunks over budget, and
    ``foreign`` files of other keys, which are removed only on request.
    """

    swept: int = 0
    other_versions: int = 0
    dormant: int = 0
    pending: int = 0
    evicted: int = 0
    foreign: int = 0


def sample(keys: Sequence[ChunkKey], part: int, parts: int) -> list[ChunkKey]:
    """Return the ``part``-th (from 1) of ``parts`` disjoint samples that together hold all keys."""
    if not 1 <= part <= parts:
        raise StoreError(f"the sample {part}/{parts} does not exist; give n/t with 1 <= n <= t")
    return [key for key in keys if int(key[:8], 16) % parts == part - 1]


def fsck(
    store: TieredStore, keys: Sequence[ChunkKey] | None = None, *, verify_data: bool = False
) -> FsckReport:
    """Check the headers of all chunks, and every byte of the chunks in ``keys``.

    With ``verify_data``, every byte of all chunks is checked. Damaged chunks are erased.
    """
    report = FsckReport()
    wanted = set(keys or ())
    for key in sorted(store.listed()):
        try:
            blob = store.reader.blob(key)
            report.checked += 1
            if verify_data or key in wanted:
                blob.load()
                report.verified += 1
        except OtherVersion:
            report.other_versions += 1
        except Foreign:
            report.foreign += 1
        except BlobRejected as fault:
            report.rejected.append((key, fault.reason))
            if fault.hole == "damaged":
                store.delete([key])
    report.dormant = store.erase_dormant()
    rows = store.catalog.revisions(store.catalog.keys())
    gone = rows.keys() - store.listed()
    if gone:
        report.unknown_rows = store.catalog.remove({key: rows[key] for key in gone})
    return report


def gc(store: TieredStore, *, with_foreign: bool = False) -> GcReport:
    """Remove unused data, and evict chunks over budget.

    Unused are files of dead writers, pending rows, dormant blobs (without a row), blobs of other
    versions of the format, and damaged catalogs. With ``with_foreign``, chunks and catalogs of
    other keys, or without a key, are removed, too; their use by other stores can't be seen. Raises
    ``StoreError`` if the store is open for reading only.
    """
    if store.read_only:
        raise StoreError("the KV store is open for reading only; make its directory writable")
    catalog = store.catalog
    found = defaultdict[type[BlobRejected], set[ChunkKey]](set)
    for key in store.listed():
        try:
            store.reader.blob(key)
        except BlobRejected as fault:
            found[type(fault)].add(key)
    report = GcReport(other_versions=len(store.delete_blobs(found[OtherVersion])))
    if with_foreign:
        report.foreign = len(store.delete_blobs(found[Foreign]))
    pending = catalog.keys(pending=True)
    store.delete(pending)  # a live writer writes its chunk again
    report.pending = len(pending)
    report.dormant = store.erase_dormant()
    before = catalog.totals()[0]
    with suppress(StoreError):
        store.make_room()
    report.evicted = before - catalog.totals()[0]
    with suppress(OSError):
        report.swept = store.blobs.sweep()
    own = catalog.folder
    if own is not None:
        for folder in [*own.parent.glob("catalog"), *own.parent.glob("catalog[-.]*")]:
            if folder.name.endswith(".damaged") or (with_foreign and folder != own):
                shutil.rmtree(folder, ignore_errors=True)
    catalog.scrub()
    return report


def copy(
    source: TieredStore,
    target: TieredStore,
    keys: Collection[ChunkKey] | None = None,
    *,
    namespaces: Sequence[str] = (),
) -> tuple[int, ...]:
    """Copy chunks (default: all) with their texts, documents and retention.

    Every byte is verified, so the source need not be trusted. A chunk that the target has keeps its
    retention. Hits are not copied: they belong to the source. ``namespaces`` names the namespaces
    to copy between stores with different keys, as their digests differ; other namespaces are left
    out there. Returns the numbers of chunks that were copied, that the target had already, that
    were unreadable, and that were copied but evicted again by the target's limits.
    """
    names = {source.names.namespace(name): target.names.namespace(name) for name in namespaces}
    catalog = source.catalog
    stored = catalog.stored(catalog.present())
    if source.names == target.names:
        names |= {chunk.namespace: chunk.namespace for chunk in stored.values()}
    holders = _holders(catalog, names)
    copied = list[ChunkKey]()
    there_already = unreadable = 0
    for key in sorted(stored if keys is None else keys):
        identity = source.identity(key)
        if identity and identity.namespace not in names:
            continue
        if identity is None or (kv := source.get(identity)) is None:
            unreadable += 1
            continue
        there = replace(identity, namespace=names[identity.namespace])
        put = partial(target.put, there, kv, retention=source.retention(key), reason="import")
        written = 0
        for text in catalog.key_texts(key) or (None,):
            for doc_id in holders.get((identity.namespace, text and text.digest), [None]):
                written += put(text=text, doc_id=doc_id)
        if written:
            copied.append(chunk_key(there))
        else:
            there_already += 1
    evicted = len(target.catalog.absent(copied))
    return len(copied) - evicted, there_already, unreadable, evicted


def _holders(catalog: Catalog, namespaces: Iterable[str]) -> Holders:
    """Return the documents that refer to the texts of namespaces."""
    found = Holders()
    for namespace in namespaces:
        for doc_id in catalog.documents(namespace):
            for digest in catalog.document_texts(namespace, doc_id):
                found.setdefault((namespace, digest), []).append(doc_id)
    return found
