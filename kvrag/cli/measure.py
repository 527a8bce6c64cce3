"""``kvrag evaluate | calibrate``: measure reuse on a model and on your documents.

``evaluate`` reports the facts that reuse keeps, and the time that it saves. ``calibrate`` finds the
cheapest repair that reaches a target behind every given context, and keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvrag.cli.documents import example, read_documents, read_questions, split_documents
from kvrag.cli.options import (
    CALIBRATE,
    EVALUATE,
    REPAIR,
    AsJson,
    ChunkTokens,
    Contexts,
    EngineGroup,
    Given,
    Words,
    takes,
)
from kvrag.cli.output import facts, grid, say, show, write_page

if TYPE_CHECKING:
    from kvrag.engine import KVRagEngine
    from kvrag.evaluate.answers import Compared, Evaluation
    from kvrag.evaluate.calibrate import Profile, Trial

_ANSWERS = "question|right answer|full prefill|reuse|>KL|result"
# Numbers of rows are shares of the prompt's rows.
_CANDIDATES = "candidate|>repaired|>mean KL (nats)|>top-1|>lost|>computed"
Model = Annotated[
    Words,
    typer.Argument(
        metavar="[MODEL]", help="Hub id, directory, or .gguf file; may be set by KVRAG_MODEL."
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(help="Text files or folders; default: the example documents of a checkout."),
]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks per prompt: as many as you retrieve.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the prompts.")]
_QUESTIONS = typer.Option(
    help=(
        'JSON lines: {"question": ..., "answers": [...]}, and "chunks": [...] if you have '
        "retrieved them."
    ),
)
_COUNT = typer.Option(
    min=2, help="Facts to plant in chunks and to ask for, where there are no --questions."
)
_KEEP = "Keep the result as the default; --no-keep: only measure. Keeping takes 12 prompts or more."
_MISSED = "the target was MISSED; this setting has the least KL"


@takes(engine=EVALUATE, repair=REPAIR)
def evaluate(
    engine: EngineGroup,
    repair: Given,
    ctx: typer.Context,
    words: Model = None,
    corpus: Corpus = None,
    questions: Annotated[Path | None, _QUESTIONS] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with the figures and all answers to this file, too."),
    ] = None,
    count: Annotated[int, _COUNT] = 30,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 250,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Upper bound of an answer's tokens.")
    ] = 32,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Answer questions about your documents by full prefill and with reuse, and compare.

    Shows facts kept, lost and won, time, and disk. Without --questions, facts are planted in your
    chunks and asked for. Takes minutes.
    """
    engine.name_model(ctx, words)
    documents = read_documents(corpus or [example("corpus", otherwise="pass --corpus")])
    asked = None if questions is None else read_questions(questions)
    if html is not None:
        html.touch()  # a path that can't be written to fails now, not after minutes
    with closing(engine.open(repair=repair)) as opened:
        encoder = opened.loaded.encoder
        split = split_documents(documents, encoder.num_tokens, chunk_tokens=chunk_tokens)
        found = opened.evaluate(
            [chunk.text for chunk in split],
            asked,
            count=count,
            chunks_per_prompt=chunks,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
    title = f"{engine['model']} on {', '.join(map(str, corpus or ('the example documents',)))}"
    totals = _totals(found, len(split))
    if html is not None:
        write_page(html, facts(title, totals), _all_answers(found.rows))
        say(f"wrote {html}", err=True)
    changed = [row for row in found.rows if row.is_lost or row.is_won]
    what = "Answers that are right on one side only"
    tables = [grid(what, _ANSWERS, map(_answer_cells, changed))] if changed else []
    show({**asdict(found), **_figures(found)}, *tables, facts(title, totals), as_json=as_json)


def _figures(found: Evaluation) -> dict[str, float | None]:
    """Return the figures of an evaluation, with ``None`` for NaN, which JSON lacks."""
    names = (
        "full_score",
        "reuse_score",
        "retention",
        "lost",
        "num_right",
        "num_lost",
        "mean_kl",
        "same",
        "speedup",
    )
    values = {name: getattr(found, name) for name in names}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _all_answers(rows: Iterable[Compared]) -> Table:
    """Make a table of answers, lost ones first, then by their KL."""
    ordered = sorted(rows, key=lambda row: (not row.is_lost, -row.kl))
    return grid("All answers", _ANSWERS, map(_answer_cells, ordered))


def _answer_cells(row: Compared) -> tuple[str, ...]:
    if row.is_lost or row.is_won:
        result = "lost" if row.is_lost else "won"
    else:
        result = "same answer" if row.is_same else "other words"
    answers = " / ".join(row.answers)
    return row.question, answers, row.full, row.reuse, f"{row.kl:.4f}", result


def _totals(found: Evaluation, num_chunks: int) -> Given:
    """Return the figures of an evaluation for people."""
    rows, (low, high) = found.rows, found.lost_interval
    full = fmean(row.full_ttft_ms for row in rows)
    reuse = fmean(row.reuse_ttft_ms for row in rows)
    per_chunk = found.chunk_bytes / max(1, found.num_chunks)
    share = num_chunks / max(1, found.num_chunks)
    return {
        "questions": len(rows),
        "score": (
            f"{found.full_score:.3f} by full prefill, {found.reuse_score:.3f} with reuse "
            f"(retention {_share(found.retention)})"
        ),
        "lost": f"{found.num_lost} of {found.num_right} that full prefill has right: "
        f"{_share(found.lost)} (95% interval {low:.1%} to {high:.1%})",
        "won": sum(row.is_won for row in rows),
        "same answer": f"{found.same:.0%}, word for word",
        "mean KL": f"{found.mean_kl:.4f} nats per answer token",
        "first token": (
            f"{reuse:,.0f} ms with reuse, {full:,.0f} ms by full prefill: {found.speedup:.1f} "
            "times sooner (median)"
        ),
        "index": (
            f"{found.num_chunks} chunks in {found.chunk_seconds:.1f} s, {per_chunk / 2**20:.2f} "
            f"MiB each; all {num_chunks} of the corpus: about "
            f"{found.chunk_seconds * share:.1f} s, {per_chunk * num_chunks / 2**20:.1f} MiB"
        ),
        "repair": found.repair,
    }


def _share(value: float) -> str:
    return "can't be said" if math.isnan(value) else f"{value:.1%}"


@takes(engine=CALIBRATE)
def calibrate(
    engine: EngineGroup,
    ctx: typer.Context,
    words: Model = None,
    corpus: Corpus = None,
    chunk_context: Contexts = None,
    target_kl: Annotated[
        float, typer.Option(min=0, help="Largest mean KL per answer token, in nats.")
    ] = 0.02,
    min_top1: Annotated[
        float, typer.Option(min=0, max=1, help="Smallest share of equal most likely tokens.")
    ] = 0.97,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts to make of the corpus.")] = 24,
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 250,
    seed: Seed = 0,
    keep: Annotated[bool, typer.Option(help=_KEEP)] = True,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest repair that reaches a target on this model and your texts.

    Keeps it as the default of this model, context and --kv-dtype, for every later use. Deleting
    the printed file undoes that, and --no-keep only measures. Takes minutes for every
    --chunk-context, which may be repeated. Exit status 1 if all of them miss the target.
    """
    from kvrag.evaluate.calibrate import check_sample

    engine.name_model(ctx, words)
    check_sample(prompts, keep=keep)
    documents = read_documents(corpus or [example("corpus", otherwise="pass --corpus")])
    options: Given = {
        "max_mean_kl": target_kl,
        "min_top1": min_top1,
        "prompts": prompts,
        "chunks_per_prompt": chunks,
        "seed": seed,
        "keep": keep,
    }
    found: dict[str, Found] = {}
    with ExitStack() as opened:
        for context in chunk_context or ["default"]:
            behind = EngineGroup(engine, chunk_context=context).open()
            found[context] = _calibrated(
                opened.enter_context(closing(behind)), documents, chunk_tokens, options
            )
    tables = [
        grid(f"Chunks behind the context {name[:40]!r}", _CANDIDATES, map(_cells, f.trials))
        for name, f in found.items()
    ]
    best = _cheapest(found)
    kept = {f"behind {name[:40]!r}": _kept(f, is_kept=keep) for name, f in found.items()}
    kept["least cost"] = f"behind {best[:40]!r}" if best else _MISSED
    values = {name: {**asdict(f), "reached": f.profile.is_reached} for name, f in found.items()}
    show(
        {"contexts": values, "best": best},
        *tables,
        facts("What was kept", kept),
        as_json=as_json,
        ok=bool(best),
    )


def _cheapest(found: dict[str, Found]) -> str | None:
    """Return the context whose repair reached the target at the least cost."""
    reached = {name: f.profile.kept.cost for name, f in found.items() if f.profile.is_reached}
    return min(reached, key=lambda name: reached[name], default=None)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a calibration behind a context, and the file that keeps it."""

    profile: Profile
    trials: list[Trial]
    file: Path


def _calibrated(
    engine: KVRagEngine, documents: dict[str, str], chunk_tokens: int, options: Given
) -> Found:
    from kvrag.evaluate.calibrate import profile_file

    encoder = engine.loaded.encoder
    trials: list[Trial] = []
    split = split_documents(documents, encoder.num_tokens, chunk_tokens=chunk_tokens)

    def note(trial: Trial) -> None:
        trials.append(trial)
        say(f"{len(trials)}. {', '.join(_cells(trial))}", err=True)

    profile = engine.calibrate([chunk.text for chunk in split], **options, on_trial=note)
    return Found(profile, trials, profile_file(engine))


def _kept(found: Found, *, is_kept: bool) -> str:
    result = "reached" if found.profile.is_reached else "missed"
    where = f"kept in {found.file}; delete this file to undo it"
    if not is_kept:
        where = "not kept, as --no-keep says; nothing has changed"
    elif not found.file.is_file():
        where = f"kept nowhere: {found.file} can't be written"
    return f"{_cells(found.profile.kept)[0]}: target {result}; {where}"


def _cells(trial: Trial) -> tuple[str, ...]:
    from kvrag.evaluate.calibrate import described

    return (
        described(trial.repair),
        f"{trial.rows:.1%}",
        f"{trial.mean_kl:.4f} ± {trial.kl_error:.4f}",
        f"{trial.top1:.1%} ± {trial.top1_error:.1%}",
        f"{trial.lost:.0%}",
        f"{trial.cost:.1%}",
    )
