"""``kvrag import``: take over the chunks of another store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrag.cli.budgets import DiskBytes, Durability, MinFreeBytes, limits
from kvrag.cli.keys import key_options
from kvrag.cli.maintenance import check_is_store, report_copy
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir, Namespace


def import_(
    source: Annotated[
        Path, typer.Argument(help="Directory of a store, such as kvrag export makes; it is not changed.")
    ],
    kv_dir: KVDir = DEFAULT_KV_DIR,
    namespace: Namespace = "default",
    plain: Annotated[
        bool, typer.Option("--plain", help="The source was written without keys; takes --namespace alone over.")
    ] = False,
    disk_bytes: DiskBytes = None,
    min_free_bytes: MinFreeBytes = None,
    durability: Durability = None,
    as_json: AsJson = False,
) -> None:
    """Take over what proves itself byte by byte; whoever wrote the source, nothing in it is run or trusted."""
    check_is_store(source)
    from kvrag.config import StoreConfig
    from kvrag.store import check as checks
    from kvrag.store import open_store

    options = {} if plain else key_options()
    other = open_store(source, StoreConfig(ram_bytes=0, read_only=True, **options))
    budgets = limits(disk_bytes, min_free_bytes, durability)
    store = open_store(kv_dir, StoreConfig(ram_bytes=0, **key_options(), **budgets))
    try:
        counts = checks.copy(other, store, namespaces=[namespace])
    finally:
        store.close()
        other.close()
    report_copy(f"Imported into {kv_dir}", counts, as_json=as_json)
