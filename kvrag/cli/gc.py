"""``kvrag gc``: remove what nobody needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvrag.cli.maintenance import existing_store
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir
from kvrag.cli.output import console, facts, print_json
from kvrag.errors import StoreError


def gc(
    kv_dir: KVDir = DEFAULT_KV_DIR,
    disk_bytes: Annotated[
        int | None,
        typer.Option("--disk-bytes", min=0, help="Evict what is worth least until this many bytes are left."),
    ] = None,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Also what other keys than those of the environment protect, or none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove leftovers of killed writers, the quarantine, chunks of other versions, and what is over a budget.

    Exit status 1 where nothing can be removed.
    """
    from kvrag.store import check as checks

    with existing_store(kv_dir, disk_bytes=disk_bytes) as store:
        try:
            report = asdict(checks.gc(store, with_foreign=foreign))
        except StoreError as error:
            typer.echo(f"kvrag: nothing was removed: {error}", err=True)
            raise typer.Exit(1) from None
    if as_json:
        print_json(report)
    else:
        console().print(facts(f"Removed from {kv_dir}", {name.replace("_", " "): n for name, n in report.items()}))
