"""Every store of ours keeps the contract, in every dtype."""

from pathlib import Path

import torch

from kvrag.config import StoreConfig
from kvrag.store import DiskStore, KVStore, MemoryStore, TieredStore
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
