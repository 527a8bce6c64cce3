"""Every store of ours keeps the contract, in every dtype."""

from pathlib import Path

import torch

from kvrag.config import StoreConfig
from kvrag.store import DiskStore, KVStore, MemoryStore, TieredStore, WriteBehind
from kvrag.testing.store import StoreContract


class TestMemoryStore(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return MemoryStore(2**22)


class TestDiskStore(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return DiskStore(directory)


class TestDiskStoreOnSqliteAlone(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return DiskStore(directory, StoreConfig(index="sqlite", durability="cache"))


class TestTieredStore(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return TieredStore(MemoryStore(2**22), DiskStore(directory))


class TestTieredStoreInBfloat16(TestTieredStore):
    dtype = torch.bfloat16


class TestDiskStoreInFloat16(TestDiskStore):
    dtype = torch.float16


class TestWriteBehind(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return WriteBehind(DiskStore(directory))


class TestWriteBehindThatWritesThrough(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return WriteBehind(DiskStore(directory), max_bytes=0)


class TestHostAboveWriteBehind(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return TieredStore(MemoryStore(2**22), WriteBehind(DiskStore(directory)))


class TestAcceleratorAboveHostAboveDisk(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return accelerated(TieredStore(MemoryStore(2**22), DiskStore(directory)))


class TestAcceleratorAboveHostAboveWriteBehind(TestAcceleratorAboveHostAboveDisk):
    dtype = torch.bfloat16

    def make_store(self, directory: Path) -> KVStore:
        return accelerated(TieredStore(MemoryStore(2**22), WriteBehind(DiskStore(directory))))


class TestAcceleratorAboveHost(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return accelerated(MemoryStore(2**22))


class TestTiersWithoutRoom(StoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return accelerated(TieredStore(MemoryStore(1), DiskStore(directory)), max_bytes=1)


def accelerated(store: KVStore, max_bytes: int = 2**22) -> KVStore:
    """The tier of an accelerator, for which the host's memory stands in."""
    return TieredStore(MemoryStore(max_bytes, name="gpu"), store, keeps_puts=False)
