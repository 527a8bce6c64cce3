"""Check a store, clean it up, copy it. Nothing is ever mended: what fails its proof is erased, and computed again."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.store.blobs import FileBlobs
from kvrag.store.format import BlobRejected, Foreign, OtherVersion
from kvrag.store.tiers import TieredStore
from kvrag.types import ChunkKey, TextEntry


@dataclass(slots=True)
class FsckReport:
    """What a check found: chunks whose headers were checked, those of which every byte was, and ``(key, reason)`` of what was erased.

    Files of another version of the format, or ``foreign`` ones, with another key, may be damaged unseen; :func:`gc` removes them, if asked.
    Intact files without a row (``dormant``) and rows without a file were erased.
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


def fsck(
    store: TieredStore, keys: Sequence[ChunkKey] | None = None, *, verify_data: bool = False
) -> FsckReport:
    """Check the headers of all chunks of a store, and every byte of some (``keys``) or of all; what fails its proof is erased."""
    report, wanted = FsckReport(), set(keys or ())
    for key in sorted(store.listed()):
        try:
            blob = store.blob(key)
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
    report.unknown_rows = store.catalog.remove({key: rows[key] for key in gone}) if gone else 0
    return report


def gc(store: TieredStore, *, with_foreign: bool = False) -> GcReport:
    """Remove what nobody needs: files of dead writers, dormant ones and those of other versions, and what is over budget.

    With ``with_foreign``, also chunks and catalogs of other keys, or of none; whether others use them can't be seen. Raises ``StoreError``
    if the store is open for reading only.
    """
    if store.read_only:
        raise StoreError("the KV store is open for reading only; make its directory writable")
    blobs, catalog = store.blobs, store.catalog
    found: dict[type[BlobRejected], set[ChunkKey]] = {OtherVersion: set(), Foreign: set()}
    for key in store.listed():
        try:
            store.blob(key)
        except BlobRejected as fault:
            found.get(type(fault), set()).add(key)
    report = GcReport(other_versions=len(store.delete_blobs(found[OtherVersion])))
    report.foreign = len(store.delete_blobs(found[Foreign])) if with_foreign else 0
    pending = catalog.keys(pending=True)
    store.delete(pending)  # a writer that lives writes it again
    report.pending, report.dormant = len(pending), store.erase_dormant()
    before = catalog.totals()[0]
    with suppress(StoreError):
        store.make_room()
    report.evicted = before - catalog.totals()[0]
    if isinstance(blobs, FileBlobs):
        report.swept = blobs.sweep()
        own = f"catalog-{store.keys.id}" if store.keys.id else "catalog"
        for folder in blobs.root.glob("catalog*"):
            if folder.name.endswith(".damaged") or (with_foreign and folder.name != own):
                shutil.rmtree(folder, ignore_errors=True)
    catalog.scrub()
    return report


def copy(
    source: TieredStore,
    target: TieredStore,
    keys: Collection[ChunkKey] | None = None,
    *,
    namespaces: Sequence[str] = (),
) -> tuple[int, int, int]:
    """Copy chunks (default: all) with their texts, documents and retention; every byte is proven on the way, whoever wrote the source.

    A chunk that is there already keeps the retention that it has. Hits are not copied: they are those of another store. ``namespaces`` are
    the names of those to copy, where the stores have different keys: their digests differ then. Returns how many chunks were copied, were
    there already, and could not be read, or are of another namespace.
    """
    names = {source.names.namespace(name): target.names.namespace(name) for name in namespaces}
    catalog, holders, counts, is_same = (
        source.catalog,
        _holders(source),
        [0, 0, 0],
        source.names == target.names,
    )
    for key in sorted(catalog.keys() if keys is None else keys):
        identity = source.identity(key)
        space = (
            names.get(identity.namespace, identity.namespace if is_same else None)
            if identity
            else None
        )
        if identity is None or space is None or (kv := source.get(identity)) is None:
            counts[2] += 1
            continue
        there, kept = replace(identity, namespace=space), source.retention(key)
        put = partial(target.put, there, kv, retention=kept, reason="import")
        texts, written = list[TextEntry | None](catalog.key_texts(key)), 0
        for text in texts or [None]:
            for doc_id in (
                holders.get((identity.namespace, text.digest), [None]) if text else [None]
            ):
                written += put(text=text, doc_id=doc_id)
        counts[0 if written else 1] += 1
    return counts[0], counts[1], counts[2]


def _holders(store: TieredStore) -> dict[tuple[str, str], list[str | None]]:
    """Return the documents that refer to each text."""
    found: dict[tuple[str, str], list[str | None]] = {}
    for namespace in {
        record.namespace for record in map(store.catalog.get, store.catalog.keys()) if record
    }:
        for doc_id in store.catalog.documents(namespace):
            for digest in store.catalog.document_texts(namespace, doc_id):
                found.setdefault((namespace, digest), []).append(doc_id)
    return found
