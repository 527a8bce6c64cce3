"""Check a store, clean it up, copy it. Nothing is ever mended: what fails its proof is erased, and computed again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store.blobs import FileBlobs
from kvrag.store.format import Blob, BlobRejected, Foreign, OtherVersion
from kvrag.store.tiers import TieredStore
from kvrag.types import ChunkIdentity, ChunkKey


@dataclass(slots=True)
class FsckReport:
    """What a check found.

    Parameters
    ----------
    checked, verified
        Chunks whose headers were checked, and chunks of which every byte was.
    rejected
        ``(key, reason)`` of what was erased.
    other_versions
        Files of another version of the format; :func:`gc` removes them.
    foreign
        Files that are encrypted with another key, or not at all where there is a key; their damage can't be seen without it.
    dormant
        Intact files that the catalog did not know, which were erased.
    unknown_rows
        Rows without a file, which were removed.
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
        """Whether nothing was damaged."""
        return not self.rejected


@dataclass(slots=True)
class GcReport:
    """What was removed: files of dead writers, of other versions and without a row, rows of dead writers, and chunks over budget.

    ``foreign`` counts files of other keys, which go only if that was asked for.
    """

    swept: int = 0
    other_versions: int = 0
    dormant: int = 0
    pending: int = 0
    evicted: int = 0
    foreign: int = 0


def sample(keys: Sequence[ChunkKey], part: int, parts: int) -> list[ChunkKey]:
    """Return the ``part``-th (from 1) of ``parts`` samples of the keys: together they are all, and never overlap."""
    if not 1 <= part <= parts:
        raise StoreError(f"the sample {part}/{parts} does not exist; give n/t with 1 <= n <= t")
    return [key for key in keys if int(key[:8], 16) % parts == part - 1]


def fsck(store: TieredStore, keys: Sequence[ChunkKey] | None = None, *, verify_data: bool = False) -> FsckReport:
    """Check the headers of all chunks, and every byte of some.

    Parameters
    ----------
    store
        Open for writing: what fails its proof is erased.
    keys
        Chunks to verify byte by byte, as of :func:`sample`.
    verify_data
        Verify all.
    """
    report, wanted = FsckReport(), set(keys or ())
    files = store.blobs.keys()
    for key in sorted(files):
        try:
            blob = _open(store, key)
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
    lost = set(store.catalog.keys()) - files - store.blobs.keys()
    report.unknown_rows = store.catalog.remove(lost) if lost else 0
    return report


def _open(store: TieredStore, key: ChunkKey) -> Blob:
    blob = Blob(partial(store.blobs.read, key), None, store.keys.cipher)
    if chunk_key(blob.header.identity) != key:
        raise BlobRejected("it belongs to another chunk")
    return blob


def gc(store: TieredStore, *, with_foreign: bool = False) -> GcReport:
    """Remove what nobody needs: files of dead writers, dormant ones and those of other versions, and what is over budget.

    Parameters
    ----------
    store
        Open for writing.
    with_foreign
        Remove what is encrypted with other keys too, or not at all: chunks and catalogs. Whether others use it can't be seen.

    Raises
    ------
    StoreError
        If the store is open for reading only.
    """
    if store.read_only:
        raise StoreError("the KV store is open for reading only; make its directory writable")
    blobs, catalog = store.blobs, store.catalog
    report = GcReport(swept=blobs.sweep() if isinstance(blobs, FileBlobs) else 0)
    report.other_versions = len(blobs.delete(set(_rejected_as(store, OtherVersion))))
    if with_foreign:
        report.foreign = len(blobs.delete(set(_rejected_as(store, Foreign))))
    pending = catalog.pending()
    blobs.delete(pending)  # a writer that lives writes it again
    catalog.remove(pending)
    report.pending, report.dormant = len(pending), store.erase_dormant()
    before = catalog.totals()[0]
    with suppress(StoreError):
        store.make_room()
    report.evicted = before - catalog.totals()[0]
    if isinstance(blobs, FileBlobs):
        own = f"catalog-{store.keys.id}" if store.keys.id else "catalog"
        for folder in blobs.root.glob("catalog*"):
            if folder.name.endswith(".damaged") or (with_foreign and folder.name != own):
                shutil.rmtree(folder, ignore_errors=True)
    catalog.scrub()
    return report


def _rejected_as(store: TieredStore, kind: type[BlobRejected]) -> Iterator[ChunkKey]:
    """Yield the keys of files that are rejected for this reason."""
    for key in store.blobs.keys():  # noqa: SIM118 - blobs are no dict
        try:
            _open(store, key)
        except BlobRejected as fault:
            if isinstance(fault, kind):
                yield key


def copy(
    source: TieredStore, target: TieredStore, keys: Sequence[ChunkKey] | None = None, *, namespaces: Sequence[str] = ()
) -> tuple[int, int, int]:
    """Copy chunks with their texts, documents and retention; every byte is proven on the way, whoever wrote the source.

    A chunk that is there already keeps the retention that it has. Hits are not copied: they are those of another store.

    Parameters
    ----------
    source, target
        Open stores.
    keys
        Chunks to copy; default: all.
    namespaces
        Names of the namespaces to copy, where the stores have different keys: their digests differ then.

    Returns
    -------
    tuple of int
        Chunks copied, chunks that were there already, and chunks that could not be read, or are of another namespace.
    """
    names = {source.names.namespace(name): target.names.namespace(name) for name in namespaces}
    is_same = source.names == target.names
    catalog = source.catalog
    holders = _holders(source)
    copied = there = failed = 0
    for key in sorted(catalog.keys() if keys is None else keys):
        identity = source.identity(key)
        kv = None if identity is None else source.get(identity)
        namespace = None if identity is None else identity.namespace if is_same else names.get(identity.namespace)
        if identity is None or kv is None or namespace is None:
            failed += 1
            continue
        other: ChunkIdentity = replace(identity, namespace=namespace)
        texts = catalog.key_texts(key)
        put = partial(target.put, other, kv, retention=catalog.usage(key).retention(), reason="import")
        written = put(text=texts[0] if texts else None)
        for text in texts:
            for doc_id in holders.get((identity.namespace, text.digest), [None]):
                put(text=text, doc_id=doc_id)
        copied, there = copied + (written > 0), there + (written == 0)
    return copied, there, failed


def _holders(store: TieredStore) -> dict[tuple[str, str], list[str | None]]:
    """Return the documents that refer to each text."""
    found: dict[tuple[str, str], list[str | None]] = {}
    for namespace in {record.namespace for record in map(store.catalog.get, store.catalog.keys()) if record}:
        for doc_id in store.catalog.documents(namespace):
            for digest in store.catalog.document_texts(namespace, doc_id):
                found.setdefault((namespace, digest), []).append(doc_id)
    return found
