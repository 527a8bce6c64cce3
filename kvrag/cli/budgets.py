"""The limits of a store, for commands that write to it: the application's own are not in its directory."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_STORE = "Limits of the store (those of your application)"

DiskBytes = Annotated[
    int | None,
    typer.Option(
        "--disk-bytes",
        min=0,
        envvar="KVRAG_DISK_BYTES",
        help="Most bytes of KV on the disk; what is worth least leaves. Default: no limit.",
        rich_help_panel=_STORE,
    ),
]
MinFreeBytes = Annotated[
    int | None,
    typer.Option(
        "--min-free-bytes",
        min=0,
        envvar="KVRAG_MIN_FREE_BYTES",
        help="Bytes of the file system left to others. Default: 256 MiB.",
        rich_help_panel=_STORE,
    ),
]
Durability = Annotated[
    str | None,
    typer.Option(
        "--durability",
        envvar="KVRAG_DURABILITY",
        help="durable (what was stored survives a power cut; default) or cache (the latest chunks may not).",
        rich_help_panel=_STORE,
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        "--priority",
        min=0,
        max=100,
        help="What the chunks are worth when room is short, 0 to 100, also those that are stored already. Default: 35, or what they have.",
        rich_help_panel=_STORE,
    ),
]


def limits(disk_bytes: int | None, min_free_bytes: int | None, durability: str | None) -> dict[str, Any]:
    """Return the options of :class:`kvrag.StoreConfig` that were given."""
    given = {"disk_bytes": disk_bytes, "min_free_bytes": min_free_bytes, "durability": durability}
    return {name: value for name, value in given.items() if value is not None}
