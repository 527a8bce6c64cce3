"""Check a store, and clean it up. Nothing is ever mended: what fails its proof is put away, and computed again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import blob, foreign, recovery
from kvrag.store.disk import DiskStore
from kvrag.store.draft import sweep
from kvrag.store.header import BlobRejected, Foreign, OtherVersion
from kvrag.store.objects import QUARANTINE, place_of
from kvrag.store.row_seal import RowSeal, folder_of
from kvrag.types import ChunkIdentity, ChunkKey


@dataclass(slots=True)
class FsckReport:
    """What a check found.

    Parameters
    ----------
    checked, verified
        Chunks whose headers were checked, and chunks of which every byte was.
    rejected
        ``(key, reason)`` of what was put away.
    other_versions
        Files of another version of the format; :func:`gc` removes them.
    unknown_rows
        Rows without a file, of chunks that no process has in its memory, which were dropped.
    foreign
        Chunks of other keys, or of none, which are checked for damage only: whose they are can't be proven without the keys.
    """

    checked: int = 0
    verified: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)
    other_versions: int = 0
    unknown_rows: int = 0
    foreign: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing had to be put away."""
        return not self.rejected


@dataclass(slots=True)
class GcReport:
    """What was removed: files in ``tmp/`` and in quarantine, blobs of other versions, references without meaning, chunks evicted.

    ``foreign`` counts chunks and references of other keys, which go only if that was asked for.
    """

    swept: int = 0
    quarantined: int = 0
    other_versions: int = 0
    references: int = 0
    evicted: int = 0
    foreign: int = 0


def sample(keys: Sequence[ChunkKey], part: int, parts: int) -> list[ChunkKey]:
    """Return the ``part``-th (from 1) of ``parts`` samples of the keys: together they are all, and never overlap."""
    if not 1 <= part <= parts:
        raise StoreError(f"the sample {part}/{parts} does not exist; give n/t with 1 <= n <= t")
    return [key for key in keys if int(key[:8], 16) % parts == part - 1]


def fsck(store: DiskStore, keys: Sequence[ChunkKey] | None = None, *, verify_data: bool = False) -> FsckReport:
    """Check the headers of all chunks, and every byte of some.

    Parameters
    ----------
    store
        Open for writing: what fails its proof is put away.
    keys
        Chunks to verify byte by byte, as of :func:`sample`.
    verify_data
        Verify all.
    """
    report = FsckReport()
    wanted = set(keys or ())
    for key in sorted(store.files()):
        _check(store, key, report, data=verify_data or key in wanted)
    for key in set(store.index.keys()) - store.files():
        report.unknown_rows += store.abandon(key)
    return report


def _check(store: DiskStore, key: ChunkKey, report: FsckReport, *, data: bool) -> None:
    seen = store.directory.inode(*place_of(key))
    try:
        with blob.Blob(store.directory, *place_of(key), guard=store.objects.guard) as file:
            if chunk_key(file.header.identity) != key:
                raise BlobRejected("it belongs to another chunk")
            report.checked += 1
            if data:
                place = file.place(store.objects.buffer(file.header.num_bytes))
                file.load(range(file.num_layers), place)
                report.verified += 1
    except OtherVersion:
        report.other_versions += 1
    except Foreign:
        _check_foreign(store, key, report, seen, data=data)
    except BlobRejected as fault:
        report.rejected.append((key, fault.reason))
        store.objects.put_away(key, seen, fault.reason)
    except OSError as error:
        report.rejected.append((key, f"it can't be read: {error.strerror or error}"))


def _check_foreign(
    store: DiskStore, key: ChunkKey, report: FsckReport, seen: tuple[int, int] | None, *, data: bool
) -> None:
    """Check for damage what can't be proven without its keys."""
    try:
        foreign.check(store.directory, *place_of(key), data=data)
        report.foreign += 1
    except BlobRejected as fault:
        report.rejected.append((key, fault.reason))
        store.objects.put_away(key, seen, fault.reason)
    except OSError as error:
        report.rejected.append((key, f"it can't be read: {error.strerror or error}"))


def gc(store: DiskStore, *, with_foreign: bool = False) -> GcReport:
    """Remove what nobody needs: leftovers, quarantine, other versions, references of nothing, and what is over budget.

    Parameters
    ----------
    store
        Open for writing.
    with_foreign
        Remove what is of other keys too, or of none: chunks, references and indices. Whether others use it can't be seen.

    Raises
    ------
    StoreError
        If the store is open for reading only.
    """
    if store.read_only:
        raise StoreError(f"the store {store.directory.root} is open for reading only; make its directory writable")
    report = GcReport(swept=sweep(store.directory))
    report.quarantined = _empty_quarantine(store)
    for key in _rejected_as(store, OtherVersion):
        report.other_versions += store.directory.unlink(*place_of(key))
    for key in _rejected_as(store, Foreign) if with_foreign else ():
        report.foreign += store.directory.unlink(*place_of(key))
    for name in store.references.names():
        if store.references.is_foreign(name):
            report.foreign += with_foreign and store.references.discard(name)
        else:
            report.references += store.references.read(name) is None and store.references.discard(name)
    recovery.finish_erasures(store.rows, store.objects, store.references)
    before = store.stats()["disk"].chunks
    with suppress(StoreError):
        store.make_room()
    report.evicted = before - store.stats()["disk"].chunks
    own = folder_of(RowSeal.of(store.keys))
    for folder in store.directory.root.glob("index*"):
        if folder.name.endswith(".damaged") or (with_foreign and folder.name != own):
            shutil.rmtree(folder, ignore_errors=True)
    store.rows.scrub()
    return report


def _empty_quarantine(store: DiskStore) -> int:
    count = 0
    for name in store.directory.names(QUARANTINE):
        with suppress(OSError), store.directory.folder(QUARANTINE) as folder:
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                shutil.rmtree(name, dir_fd=folder)
            count += 1
    return count


def _rejected_as(store: DiskStore, kind: type[BlobRejected]) -> Iterator[ChunkKey]:
    """Yield the keys of files that are rejected for this reason."""
    for key in store.files():
        try:
            blob.Blob(store.directory, *place_of(key), guard=store.objects.guard).close()
        except BlobRejected as fault:
            if isinstance(fault, kind):
                yield key
        except OSError:
            continue


def copy(
    source: DiskStore, target: DiskStore, keys: Sequence[ChunkKey] | None = None, *, namespaces: Sequence[str] = ()
) -> tuple[int, int, int]:
    """Copy chunks with their texts, references and retention; every byte is proven on the way, whoever wrote the source.

    A chunk that is there already keeps the retention that it has. Hits are not copied: they are those of another store.

    Parameters
    ----------
    source, target
        Open stores.
    keys
        Chunks to copy; default: all.
    namespaces
        Names of the namespaces to copy, where the stores have different keys: chunks are called otherwise there.

    Returns
    -------
    tuple of int
        Chunks copied, chunks that were there already, and chunks that could not be read, or called otherwise.

    Raises
    ------
    StoreError
        If the stores have different namespace secrets: only the texts themselves could be given their names under the other one.
    """
    rename = _renaming(source, target, namespaces)
    copied = there = failed = 0
    by_text: dict[tuple[str, str], list[str]] = {}
    for namespace, digest, doc_id in source.rows.references():
        by_text.setdefault((namespace, digest), []).append(doc_id)
    for key in sorted(source.files()) if keys is None else keys:
        header = source.header(key)
        kv = None if header is None else source.get(header.identity)
        identity = None if header is None else rename(header.identity)
        if header is None or kv is None or identity is None:
            failed += 1
            continue
        put = partial(target.put, identity, kv, retention=source.rows.retention(key), reason="import")
        written = put(text=header.text)
        for text in source.rows.key_texts(key):
            for doc_id in by_text.get((header.identity.namespace, text.digest), []):
                put(text=text, doc_id=doc_id)
        copied, there = copied + (written > 0), there + (written == 0)
    return copied, there, failed


def _renaming(
    source: DiskStore, target: DiskStore, namespaces: Sequence[str]
) -> Callable[[ChunkIdentity], ChunkIdentity | None]:
    """Say how identities of one store are called in another one."""
    old, new = source.keys.names, target.keys.names
    if old == new:
        return lambda identity: identity
    if old.text != new.text:
        raise StoreError(
            f"the stores {source.directory.root} and {target.directory.root} have different namespace secrets, and digests of texts can't "
            "be translated; open both with the same one, or precompute again"
        )
    names = {old.namespace(name): new.namespace(name) for name in namespaces}

    def rename(identity: ChunkIdentity) -> ChunkIdentity | None:
        namespace = names.get(identity.namespace)
        return None if namespace is None else replace(identity, namespace=namespace)

    return rename
