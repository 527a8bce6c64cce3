"""Every store of ours keeps the contract, in every dtype; and so does one over blobs that are made in a few lines."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from catalog_contract import CatalogContract

from kvrag.config import StoreConfig
from kvrag.kv.format import Bytes
from kvrag.store import (
    Blobs,
    Catalog,
    FileBlobs,
    Keys,
    MemoryBlobs,
    MemoryTier,
    TieredStore,
    open_store,
)
from kvrag.testing.store import BlobsContract
from kvrag.types import ChunkKey

KEY = StoreConfig(encryption_key=lambda: b"k" * 32)


class ToyServer(dict[ChunkKey, bytes]):
    """What stands for Redis or an object store."""


SERVERS: dict[Path, ToyServer] = defaultdict(ToyServer)


class ToyBlobs(Blobs):
    """A tier on another machine, as short as it can be: every answer is a copy, and read-only."""

    def __init__(self, directory: Path) -> None:
        self._server = SERVERS[directory]

    def read(self, key: ChunkKey, start: int = 0, length: int | None = None) -> Bytes | None:
        blob = self._server.get(key)
        return None if blob is None else blob[start : None if length is None else start + length]

    def write(self, key: ChunkKey, parts: Sequence[Bytes]) -> int:
        blob = b"".join(parts)
        return len(blob) if self._server.setdefault(key, blob) is blob else 0

    def delete(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        return {key for key in keys if self._server.pop(key, None) is not None}

    def keys(self) -> set[ChunkKey]:
        return set(self._server)

    def close(self) -> None:
        pass


class TestFileBlobs(BlobsContract):
    def make_blobs(self, directory: Path) -> Blobs:
        return FileBlobs(directory)


class TestMemoryBlobs(BlobsContract):
    has_other = False

    def make_blobs(self, directory: Path) -> Blobs:
        return MemoryBlobs()


class TestToyBlobs(BlobsContract):
    def make_blobs(self, directory: Path) -> Blobs:
        return ToyBlobs(directory)


class TestFiles(CatalogContract):
    def make_store(self, directory: Path) -> TieredStore:
        return TieredStore([], FileBlobs(directory), Catalog(directory / "catalog"))


class TestMemoryAlone(CatalogContract):
    has_other = False

    def make_store(self, directory: Path) -> TieredStore:
        return open_store(None, StoreConfig(ram_bytes=2**22))


class TestHostAboveFilesInBfloat16(CatalogContract):
    dtype = torch.bfloat16

    def make_store(self, directory: Path) -> TieredStore:
        return TieredStore(
            [MemoryTier(2**22)], FileBlobs(directory), Catalog(directory / "catalog")
        )


class TestOpenedTwice(CatalogContract):
    dtype = torch.float16

    def make_store(self, directory: Path) -> TieredStore:
        return open_store(directory, StoreConfig(ram_bytes=2**22))


class TestAcceleratorAboveHostAboveFiles(CatalogContract):
    def make_store(self, directory: Path) -> TieredStore:
        tiers = [MemoryTier(2**22, name="gpu"), MemoryTier(2**22)]
        return TieredStore(tiers, FileBlobs(directory), Catalog(directory / "catalog"))


class TestTiersWithoutRoom(CatalogContract):
    def make_store(self, directory: Path) -> TieredStore:
        tiers = [MemoryTier(1, name="gpu"), MemoryTier(0)]
        return TieredStore(
            tiers, FileBlobs(directory, durable=False), Catalog(directory / "catalog")
        )


class TestHostAboveAToyServer(CatalogContract):
    def make_store(self, directory: Path) -> TieredStore:
        return TieredStore([MemoryTier(2**22)], ToyBlobs(directory), Catalog(directory / "catalog"))


class TestEncrypted(CatalogContract):
    def make_store(self, directory: Path) -> TieredStore:
        keys = Keys.of(KEY)
        return TieredStore(
            [MemoryTier(2**22)],
            FileBlobs(directory),
            Catalog(directory / "catalog", keys),
            keys=keys,
        )
