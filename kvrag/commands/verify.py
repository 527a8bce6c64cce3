"""``kvrag verify``: how far answers with reuse are from full prefill, on your own prompts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.commands.options import (
    DEFAULT_KV_DIR,
    AsJson,
    Device,
    Dtype,
    KVDir,
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
from kvrag.commands.output import console, facts, grid, print_json, progress
from kvrag.commands.prompts import read_prompts

if TYPE_CHECKING:
    from kvrag.types import VerifyReport

_COLUMNS = {"#": True, "KL (nats)": True, "first token": False, "answer": False, "exactness": False, "reused": True}


def verify(
    prompts: Annotated[list[Path], typer.Argument(help="A .jsonl file with one JSON prompt per line, or text files.")],
    model: Model,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the greedy answers compared.")] = 16,
    max_kl: Annotated[float, typer.Option(help="Pass up to this mean KL at the first token, in nats.")] = 0.1,
    min_top1: Annotated[float, typer.Option(help="Pass from this share of equal first tokens.")] = 0.8,
    prefix: PrefixText = None,
    system: System = None,
    namespace: Namespace = "default",
    dtype: Dtype = "auto",
    device: Device = None,
    ratio: Ratio = None,
    strategy: Strategy = None,
    mode: ModeName = "stitch",
    as_json: AsJson = False,
) -> None:
    """Answer prompts with reuse and by full prefill of the same tokens, and compare; exit status 1 if they differ too much."""
    todo, repair = read_prompts(prompts), repair_of(strategy, ratio)
    engine = open_engine(
        model, kv_dir, prefix=prefix, system=system, namespace=namespace, dtype=dtype, device=device, repair=repair
    )
    with progress(f"verifying {len(todo)} prompt(s), each by full prefill and with reuse ..."):
        report = engine.verify(todo, mode=mode, max_new_tokens=max_new_tokens, max_mean_kl=max_kl, min_top1=min_top1)
    engine.close()
    if as_json:
        print_json(asdict(report))
    else:
        _print(report, max_kl, min_top1)
    if not report.passed:
        raise typer.Exit(1)


def _print(report: VerifyReport, max_kl: float, min_top1: float) -> None:
    rows = [
        (n, f"{r.kl:.4f}", _same(r.top1), _same(r.greedy), r.exactness, f"{r.kv_reuse_ratio:.0%}")
        for n, r in enumerate(report.rows, start=1)
    ]
    totals = {
        "mean KL": f"{report.mean_kl:.4f} nats (at most {max_kl:g})",
        "same first token": f"{report.top1_agreement:.0%} (at least {min_top1:.0%})",
        "same greedy answer": f"{report.greedy_agreement:.0%}",
        "other ids than the whole text": f"{report.changed_tokens} of {report.prompt_tokens} tokens, "
        f"at {report.changed_seams} of {report.seams} seams",
        "result": "passed" if report.passed else "FAILED",
    }
    out = console()
    out.print(grid("Reuse against full prefill", _COLUMNS, rows))
    out.print(facts("All prompts", totals))


def _same(is_same: bool) -> str:
    return "same" if is_same else "differs"
