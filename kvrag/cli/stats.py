"""``kvrag stats``: what a store holds, without loading a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvrag.cli.keys import key_options
from kvrag.cli.maintenance import check_is_store
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir
from kvrag.cli.output import console, grid, print_json
from kvrag.estimate import human_bytes

if TYPE_CHECKING:
    from kvrag.store import Catalog

_TIERS = {"tier": False, "chunks": True, "size": True}
_GROUPS = {"model": False, "namespace": False, "prefix": False, "chunks": True, "tokens": True, "size": True}
_SHORT = 12


def stats(kv_dir: KVDir = DEFAULT_KV_DIR, as_json: AsJson = False) -> None:
    """Show the size of each tier, and what is stored for which model, namespace and prefix (by their digests)."""
    check_is_store(kv_dir)
    from kvrag.config import StoreConfig
    from kvrag.store import open_store

    store = open_store(kv_dir, StoreConfig(ram_bytes=0, **key_options()))
    try:
        tiers, groups = store.stats(), _groups(store.catalog)
    finally:
        store.close()
    if as_json:
        print_json(
            {
                "tiers": {name: asdict(tier) for name, tier in tiers.items()},
                "groups": [asdict(group) for group in groups],
            }
        )
        return
    out = console()
    sizes = [(name, tier.chunks, human_bytes(tier.num_bytes)) for name, tier in tiers.items()]
    out.print(grid(f"Tiers of {kv_dir}", _TIERS, sizes))
    out.print(grid("By digest", _GROUPS, [group.cells() for group in groups]))


@dataclass(slots=True)
class Group:
    """Chunks of one model, namespace and prefix."""

    model: str
    namespace: str
    prefix: str
    chunks: int = 0
    tokens: int = 0
    num_bytes: int = 0

    def cells(self) -> tuple[object, ...]:
        """One row of the table, digests cut short."""
        digests = (self.model[:_SHORT], self.namespace[:_SHORT], self.prefix[:_SHORT])
        return (*digests, self.chunks, self.tokens, human_bytes(self.num_bytes))


def _groups(index: Catalog) -> list[Group]:
    groups: dict[tuple[str, str, str], Group] = {}
    for key in index.keys():  # noqa: SIM118 - an index is no dict
        record = index.get(key)
        if record is None:  # erased meanwhile by another process
            continue
        names = (record.model, record.namespace, record.prefix)
        group = groups.setdefault(names, Group(*names))
        group.chunks += 1
        group.tokens += record.num_tokens
        group.num_bytes += record.num_bytes
    return [groups[names] for names in sorted(groups)]
