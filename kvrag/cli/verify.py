"""``kvrag verify``: whether reuse is exact on a model, and how far answers with reuse are from full prefill on your own prompts."""

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
    MaybeModel,
    ModeName,
    Namespace,
    PrefixText,
    Ratio,
    Strategy,
    System,
    open_engine,
    repair_of,
)
from kvrag.cli.output import console, facts, grid, print_json, progress
from kvrag.cli.prompts import read_prompts
from kvrag.cli.prove import prove_model
from kvrag.errors import InputError

if TYPE_CHECKING:
    from kvrag.types import VerifyReport

_COLUMNS = {"#": True, "KL (nats)": True, "first token": False, "answer": False, "exactness": False, "reused": True}


def verify(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL | PROMPTS...]",
            help="A model to prove reuse on; or, with --model, a .jsonl file with one JSON prompt per line, or text files.",
        ),
    ] = None,
    model: MaybeModel = None,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the greedy answers compared.")] = 16,
    max_kl: Annotated[float, typer.Option(help="Pass up to this mean KL at the first token, in nats.")] = 0.1,
    min_top1: Annotated[float, typer.Option(help="Pass from this share of equal first tokens.")] = 0.8,
    prefix: PrefixText = None,
    system: System = None,
    namespace: Namespace = "default",
    dtype: Dtype = "auto",
    device: Device = None,
    kv_dtype: KVDtypeName = "auto",
    ratio: Ratio = None,
    strategy: Strategy = None,
    mode: ModeName = "stitch",
    max_error: Annotated[
        float | None,
        typer.Option(help="Of a model's proof: pass up to this difference of logits; default: the proof's own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that reuse is exact on a model (kvrag verify MODEL); or answer prompts with reuse and by full prefill, and compare.

    Exit status 1 if the proof fails, if the model is refused, or if the answers differ too much.
    """
    source = context.get_parameter_source("model")
    is_named = source is not None and source.name == "COMMANDLINE"  # not the environment's
    to_prove, prompts = _split(what or [], model, is_named=is_named)
    if to_prove is not None:
        prove_model(to_prove, dtype=dtype, device=device, max_error=max_error, as_json=as_json)
        return
    assert model is not None, "there are prompts only where a model was named"
    todo, repair = read_prompts(prompts), repair_of(strategy, ratio)
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
    with progress(f"verifying {len(todo)} prompt(s), each by full prefill and with reuse ..."):
        report = engine.verify(todo, mode=mode, max_new_tokens=max_new_tokens, max_mean_kl=max_kl, min_top1=min_top1)
    engine.close()
    if as_json:
        print_json(asdict(report))
    else:
        _print(report, max_kl, min_top1)
    if not report.passed:
        raise typer.Exit(1)


def _split(what: list[str], model: str | None, *, is_named: bool) -> tuple[str | None, list[Path]]:
    """Tell a model to prove from prompts to compare on.

    Parameters
    ----------
    what
        The arguments.
    model
        Of ``--model`` or the environment.
    is_named
        Whether it is ``--model``'s: then every argument is a prompt file.
    """
    if not what:
        if model is None:
            raise InputError("pass a model to prove reuse on, or prompt files and --model")
        return model, []
    if len(what) == 1 and not is_named and (model is None or _looks_like_a_model(Path(what[0]))):
        return what[0], []
    if model is None:
        raise InputError(
            "which model are the prompts for? pass --model; to prove reuse on a model, pass the model alone"
        )
    return None, [Path(name) for name in what]


def _looks_like_a_model(path: Path) -> bool:
    """Whether an argument beside ``KVRAG_MODEL`` is a model: a directory with a config, a GGUF file, or a name of the hub."""
    is_hub_id = not path.suffix and not path.is_absolute() and len(path.parts) == 2 and not path.exists()
    return (path / "config.json").is_file() or path.suffix == ".gguf" or is_hub_id


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
