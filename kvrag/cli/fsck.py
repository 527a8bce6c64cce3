"""``kvrag fsck``: prove what a store holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvrag.cli.maintenance import existing_store
from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, KVDir
from kvrag.cli.output import console, facts, grid, print_json
from kvrag.errors import ConfigError


def fsck(
    kv_dir: KVDir = DEFAULT_KV_DIR,
    verify_data: Annotated[bool, typer.Option("--verify-data", help="Read and prove every byte.")] = False,
    sample: Annotated[
        str, typer.Option("--sample", metavar="N/T", help="Prove every byte of the n-th of t parts.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check every chunk's header, and its data if asked to; what fails is erased and computed again. Exit status 1 then."""
    from kvrag.store import check as checks

    part = _part(sample)
    with existing_store(kv_dir) as store:
        keys = None if part is None else checks.sample(sorted(store.blobs.keys()), *part)
        report = checks.fsck(store, keys, verify_data=verify_data)
    if as_json:
        print_json({**asdict(report), "ok": report.ok})
    else:
        counts = {name: value for name, value in asdict(report).items() if isinstance(value, int)}
        console().print(facts(f"Check of {kv_dir}", {name.replace("_", " "): count for name, count in counts.items()}))
        if report.rejected:
            console().print(grid("Rejected", {"chunk": False, "because": False}, report.rejected))
    if not report.ok:
        raise typer.Exit(1)


def _part(sample: str) -> tuple[int, int] | None:
    if not sample:
        return None
    n, slash, t = sample.partition("/")
    if not (slash and n.isdecimal() and t.isdecimal()):
        raise ConfigError(f"--sample is {sample!r}; give n/t, for instance 1/10, then 2/10 the next day")
    return int(n), int(t)
