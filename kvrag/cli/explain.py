"""``kvrag explain``: which parts of a prompt are known chunks, and why the others are computed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli.options import (
    DEFAULT_KV_DIR,
    AsJson,
    Device,
    Dtype,
    KVDir,
    KVDtypeName,
    Model,
    ModeName,
    Namespace,
    PrefixText,
    Ratio,
    Strategy,
    System,
    open_engine,
    repair_of,
)
from kvrag.cli.output import console, grid, print_json
from kvrag.cli.prompts import STDIN, read_prompt

if TYPE_CHECKING:
    from kvrag.types import ExplainedSpan

_COLUMNS = {"tokens": True, "kind": False, "KV": False, "text": False, "reason": False}
_HEAD = 48


def explain(
    model: Model,
    prompt_file: Annotated[
        Path, typer.Argument(help="The prompt: text, or JSON messages; - is standard input.")
    ] = STDIN,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    prefix: PrefixText = None,
    system: System = None,
    namespace: Namespace = "default",
    dtype: Dtype = "auto",
    device: Device = None,
    kv_dtype: KVDtypeName = "auto",
    ratio: Ratio = None,
    strategy: Strategy = None,
    mode: ModeName = "auto",
    as_json: AsJson = False,
) -> None:
    """Show the known chunks of a prompt, which have KV, and why the others don't; nothing is computed."""
    prompt, repair = read_prompt(prompt_file), repair_of(strategy, ratio)
    engine = open_engine(
        model,
        kv_dir,
        prefix=prefix,
        system=system,
        namespace=namespace,
        dtype=dtype,
        device=device,
        repair=repair,
        kv_dtype=kv_dtype,
    )
    found = engine.explain(prompt, mode=mode)  # type: ignore[arg-type]  # the engine refuses what is no mode
    engine.close()
    if as_json:
        print_json({**asdict(found), "hits": found.hits})
        return
    title = f"{found.prompt_tokens} tokens, {found.hits} chunk(s) with KV, would run in mode {found.mode!r}"
    out = console()
    out.print(grid(title, _COLUMNS, map(_cells, found.spans)))
    for note in found.notes:
        out.print(note, markup=False)


def _cells(span: ExplainedSpan) -> tuple[str, ...]:
    state = ("exact" if span.exact else "hit") if span.hit else "computed"
    head = " ".join(span.text.split())[:_HEAD]
    return f"{span.start}-{span.stop}", span.kind, state, head, span.reason or ""
