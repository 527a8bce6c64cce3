"""``kvrag ask | explain | verify``: answer a prompt, show its chunks, compare with full prefill."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvrag.cli.documents import STDIN, read_documents, read_prompt, read_prompts
from kvrag.cli.options import (
    ENGINE,
    REPAIR,
    SAMPLING,
    AsJson,
    EngineGroup,
    Given,
    ModeName,
    Words,
    loading_options,
    takes,
)
from kvrag.cli.output import console, facts, grid, progress, say, show
from kvrag.config import SamplingConfig
from kvrag.errors import InputError, UnsupportedModelError
from kvrag.evaluate.estimate import human_bytes
from kvrag.progress import Progress

if TYPE_CHECKING:
    from kvrag.prompt.template import Prompt, PromptEncoder
    from kvrag.types import Chunk, ExplainedSpan, GenerationResult, VerifyReport

Context = Annotated[
    list[Path] | None,
    typer.Option("--context", "-c", help="Files or folders whose text stands before the question."),
]


@takes(engine=ENGINE, repair=REPAIR, sampling=SAMPLING)
def ask(
    engine: EngineGroup,
    repair: Given,
    sampling: Given,
    ctx: typer.Context,
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL] QUESTION", help="The model, and the question; or use --prompt-file."
        ),
    ] = None,
    context: Context = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="The whole prompt: text, or JSON messages; - is standard input."),
    ] = None,
    mode: ModeName = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer a question; precomputed chunks in its context are found automatically."""
    asked = engine.name_model(ctx, words, most=int(prompt_file is None))
    given = None
    if prompt_file is not None:
        if context:
            raise InputError(
                "--prompt-file holds the whole prompt; leave out --context, or pass a question in "
                "place of the file"
            )
        given = read_prompt(prompt_file)
    elif not asked:
        raise InputError(
            "pass a model and a question, as in: kvrag ask MODEL 'Who?'; or --prompt-file"
        )
    texts = read_documents(context) if context else {}
    SamplingConfig(**sampling)  # refused values are refused before the model loads
    with closing(engine.open(repair=repair)) as opened:
        prompt = _prompt_of(asked[0], texts, opened.encoder, engine) if given is None else given
        stream = opened.stream(prompt, **{"mode": mode, **sampling})
        for piece in stream:
            # Standard output has the answer alone.
            if not as_json:
                say(getattr(piece, "reasoning_content", ""), err=True, end="")
                say(piece, end="")
    if as_json:
        show(
            {name: value for name, value in asdict(stream.result).items() if name != "prompt_ids"},
            as_json=True,
        )
    else:
        say("")
        console(err=True).print(facts("How the answer was made", _accounting(stream.result)))


def _prompt_of(
    question: str, texts: dict[str, str], encoder: PromptEncoder, engine: EngineGroup
) -> Prompt:
    """Put the context before the question.

    The prompt is messages if the model has a chat template and no prefix is given as text.
    """
    body: list[str | Chunk] = [
        part for text in texts.values() for part in (*encoder.guarded(text), "\n\n")
    ]
    body.append(f"Question: {question}" if texts else question)
    prefix = engine.get("prefix")
    system = engine.get("system")
    if prefix is not None or not encoder.has_chat_template:
        return [prefix or "", *body]
    messages: list[dict[str, Any]] = [{"role": "user", "content": body}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _accounting(result: GenerationResult) -> dict[str, str]:
    rows = {
        "exactness": result.exactness,
        "prompt": (
            f"{result.prompt_tokens} tokens: {result.cached_tokens} reused, "
            f"{result.repaired_tokens} repaired, {result.computed_tokens} computed"
        ),
        "loaded": human_bytes(result.loaded_bytes),
        "first token": f"{result.ttft_ms:.0f} ms",
        "stages": ", ".join(f"{name} {ms:.0f} ms" for name, ms in result.timings_ms.items()),
        "answer": (
            f"{len(result.token_ids)} tokens, {result.tokens_per_s:.1f} tokens/s, ended by "
            f"{result.finish_reason}"
        ),
    }
    if result.kv_dtype != "auto":
        rows["stored KV"] = f"rounded to {result.kv_dtype}"
    if result.fallback_reason:
        rows["less reuse because"] = result.fallback_reason
    return rows


@takes(engine=ENGINE, repair=REPAIR)
def explain(
    engine: EngineGroup,
    repair: Given,
    ctx: typer.Context,
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL] [PROMPT]",
            help="The model, and a file of the prompt, text or JSON messages; - is standard input. "
            "With --context, the question.",
        ),
    ] = None,
    context: Context = None,
    mode: ModeName = "auto",
    as_json: AsJson = False,
) -> None:
    """Show the known chunks of a prompt, and why other text has no KV; nothing is computed."""
    asked = engine.name_model(ctx, words, most=1)
    if context and not asked:
        raise InputError(
            "pass the question that follows --context, as in: kvrag explain MODEL 'Who?' -c FILE"
        )
    texts = read_documents(context) if context else {}
    given = None if context else read_prompt(Path(asked[0]) if asked else STDIN)
    with closing(engine.open(repair=repair)) as opened:
        prompt = _prompt_of(asked[0], texts, opened.encoder, engine) if given is None else given
        found = opened.explain(prompt, mode=mode)  # type: ignore[arg-type]
    title = (
        f"{found.prompt_tokens} tokens, {found.hits} chunk(s) with KV, would run in mode "
        f"{found.mode!r}"
    )
    show(
        {**asdict(found), "hits": found.hits},
        grid(title, ">tokens|kind|KV|text|reason", map(_span_cells, found.spans)),
        *found.notes,
        f"repair: {found.repair}",
        as_json=as_json,
    )


def _span_cells(span: ExplainedSpan) -> tuple[str, ...]:
    return (
        f"{span.start}-{span.stop}",
        span.kind,
        span.state,
        " ".join(span.text.split())[:48],
        span.reason or "",
    )


@takes(engine=ENGINE, repair=REPAIR)
def verify(
    ctx: typer.Context,
    engine: EngineGroup,
    repair: Given,
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL] [PROMPTS...]",
            help="The model, which is proven; or text or .jsonl files of prompts, too.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the greedy answers compared.")
    ] = 16,
    max_kl: Annotated[
        float, typer.Option(help="Largest mean KL at the first token, in nats.")
    ] = 0.1,
    min_top1: Annotated[float, typer.Option(help="Smallest share of equal first tokens.")] = 0.8,
    mode: ModeName = "stitch",
    as_json: AsJson = False,
) -> None:
    """Prove that reuse is exact on a model, or compare reuse with full prefill on prompts.

    Exit status 1 if the proof fails, if the model is refused, or if the answers differ too much.
    """
    files = engine.name_model(ctx, words, most=None)
    if not files:
        _prove(engine["model"], engine, as_json=as_json)
        return
    prompts = read_prompts([Path(name) for name in files])
    with closing(engine.open(repair=repair)) as opened:
        report = opened.verify(
            prompts,
            mode=mode,  # type: ignore[arg-type]
            max_new_tokens=max_new_tokens,
            max_mean_kl=max_kl,
            min_top1=min_top1,
        )
    show(asdict(report), *_tables(report, max_kl, min_top1), as_json=as_json, ok=report.passed)


def _tables(report: VerifyReport, max_kl: float, min_top1: float) -> tuple[Table, Table]:
    same = ("differs", "same")
    rows = [
        (n, f"{r.kl:.4f}", same[r.top1], same[r.greedy], r.exactness, f"{r.kv_reuse_ratio:.0%}")
        for n, r in enumerate(report.rows, start=1)
    ]
    totals = {
        "mean KL": f"{report.mean_kl:.4f} nats (at most {max_kl:g})",
        "same first token": f"{report.top1_agreement:.0%} (at least {min_top1:.0%})",
        "same greedy answer": f"{report.greedy_agreement:.0%} (for information)",
        "repair": report.repair,
        "result": f"{'passed' if report.passed else 'FAILED'}, by the mean KL and the first tokens",
    }
    return (
        grid(
            "Reuse against full prefill",
            ">#|>KL (nats)|first token|answer|exactness|>reused",
            rows,
        ),
        facts("All prompts", totals),
    )


def _prove(model: str, engine: EngineGroup, *, as_json: bool) -> None:
    """Load a model, prove reuse on it again, and print the proof."""
    with progress(f"starting with {model} ..."):
        from kvrag.model.load import load
        from kvrag.model.proof import prove
        from kvrag.model.source import ModelSource
    loaded = load(ModelSource(model, prove="off", **loading_options(engine)))
    about = {
        "model": model,
        "architecture": loaded.lm.model.config.get_text_config().model_type,
        "dtype": str(loaded.lm.dtype).removeprefix("torch."),
        "device": str(loaded.lm.device),
        "versions": ", ".join(
            f"{name} {version(name)}" for name in ("kvrag", "torch", "transformers")
        ),
    }
    try:
        reusable = loaded.reusable
    except UnsupportedModelError as error:
        about["result"] = f"REFUSED: {error}"
        show({**about, "passed": False}, facts("The proof", about), as_json=as_json, ok=False)
        return
    with Progress("proving that reuse is exact on this model"):
        proof = prove(reusable)
    about |= {
        "prompt": f"{proof.tokens} random tokens",
        "cost": f"{proof.seconds:.2f} s",
        "a planted mistake would differ by": f"{proof.fault:.2g} in logits",
    }
    if not proof.is_conclusive:
        about["caution"] = (
            "roundings hide a planted mistake in this dtype; prove the model in float32 as well"
        )
    about |= {f"note {number}": note for number, note in enumerate(proof.notes, start=1)}
    about["result"] = "passed" if proof.passed else "FAILED"
    verdict = ("FAILED", "ok")
    rows = [
        (c.promise, c.claim, c.unit, f"{c.error:.1e}", f"{c.limit:.1e}", verdict[c.passed])
        for c in proof.checks
    ]
    checks = grid(
        "Reuse on this model against transformers' own forward",
        "promise|claim|unit|>largest difference|>allowed|",
        rows,
    )
    found = {**about, "passed": proof.passed, "proof": proof.to_dict()}
    show(found, checks, facts("The proof", about), as_json=as_json, ok=proof.passed)
