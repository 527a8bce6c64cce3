"""What the commands share that look after a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvrag.cli.keys import key_options
from kvrag.cli.output import console, facts, print_json
from kvrag.errors import StoreError

if TYPE_CHECKING:
    from kvrag.store import TieredStore


def check_is_store(kv_dir: Path) -> None:
    """Refuse what is no store before opening it, which would make one there.

    Raises
    ------
    StoreError
        If it is none.
    """
    if not kv_dir.exists():
        raise StoreError(f"there is no KV store {str(kv_dir)!r}; check --kv-dir, or run kvrag precompute first")
    if not kv_dir.is_dir():
        raise StoreError(f"{str(kv_dir)!r} is a file; --kv-dir must name the directory of a KV store")
    if not (kv_dir / "format.json").is_file():
        raise StoreError(f"{str(kv_dir)!r} is no KV store; check --kv-dir, or run kvrag precompute first")


@contextmanager
def existing_store(kv_dir: Path, *, disk_bytes: int | None = None, read_only: bool = False) -> Iterator[TieredStore]:
    """Open a store that is there, and close it afterwards."""
    check_is_store(kv_dir)
    from kvrag.config import StoreConfig
    from kvrag.store import open_store

    config = StoreConfig(
        ram_bytes=0,
        disk_bytes=disk_bytes,
        min_free_bytes=0,
        high_watermark=1.0,
        low_watermark=1.0,
        read_only=read_only,
        **key_options(),
    )
    store = open_store(kv_dir, config)
    try:
        yield store
    finally:
        store.close()


def report_copy(title: str, counts: tuple[int, int, int], *, as_json: bool, unknown: list[str] | None = None) -> None:
    """Print what was copied, and which of the documents asked for are unknown; exit status 1 if something could not be read."""
    named = dict(zip(("copied", "there already", "unreadable"), counts, strict=True))
    if as_json:
        asked = {} if unknown is None else {"unknown": unknown}
        print_json({name.replace(" ", "_"): count for name, count in named.items()} | asked)
    else:
        console().print(facts(title, named))
    if named["unreadable"]:
        raise typer.Exit(1)
