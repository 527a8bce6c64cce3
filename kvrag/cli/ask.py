"""``kvrag ask``: answer one prompt, and say how the answer was made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

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
from kvrag.cli.output import console, facts, print_json
from kvrag.cli.prompts import read_prompt
from kvrag.demo.documents import read_documents
from kvrag.errors import InputError
from kvrag.estimate import human_bytes

if TYPE_CHECKING:
    from kvrag.engine import KVRagEngine
    from kvrag.generate.streams import TokenStream
    from kvrag.prompt.template import Prompt
    from kvrag.types import GenerationResult


def ask(
    model: Model,
    question: Annotated[str | None, typer.Argument(help="The question; or use --prompt-file.")] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option("--context", "-c", help="Files or folders whose text stands before the question."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help="The whole prompt: text, or JSON messages; - is standard input."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Upper bound of answer tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
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
    """Answer a question; chunks that were precomputed are found in its context by themselves."""
    if (question is None) == (prompt_file is None):
        raise InputError("pass either a question or --prompt-file")
    given = None if prompt_file is None else read_prompt(prompt_file)
    texts = list(read_documents(context).values()) if context else []
    repair = repair_of(strategy, ratio)
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
    prompt = given if question is None or given is not None else _prompt(engine, question, texts, prefix, system)
    assert prompt is not None, "one of the two was given"
    result = _show(engine.stream(prompt, max_new_tokens=max_new_tokens, temperature=temperature, mode=mode), as_json)
    engine.close()
    if not as_json:
        console(err=True).print(made(result))  # the answer alone stands on standard output


def _show(stream: TokenStream, as_json: bool) -> GenerationResult:
    """Print an answer as it comes, or all about it when it is complete."""
    for piece in stream:
        if not as_json:
            typer.echo(piece, nl=False)
    result = stream.result
    if as_json:
        print_json({name: value for name, value in asdict(result).items() if name != "prompt_ids"})
    else:
        typer.echo()
    return result


def made(result: GenerationResult) -> Table:
    """Make the table that says how an answer was made."""
    rows: dict[str, object] = {
        "exactness": result.exactness,
        "prompt": f"{result.prompt_tokens} tokens: {result.cached_tokens} reused, {result.repaired_tokens} repaired, "
        f"{result.computed_tokens} computed",
        "loaded": human_bytes(result.loaded_bytes),
        "first token": f"{result.ttft_ms:.0f} ms",
        "stages": ", ".join(f"{name} {ms:.0f} ms" for name, ms in result.timings_ms.items()),
        "answer": f"{len(result.token_ids)} tokens, {result.tokens_per_s:.1f} tokens/s, ended by {result.finish_reason}",
    }
    if result.kv_dtype != "auto":
        rows["stored KV"] = f"rounded to {result.kv_dtype}"
    if result.fallback_reason:
        rows["less reuse because"] = result.fallback_reason
    return facts("How the answer was made", rows)


def _prompt(engine: KVRagEngine, question: str, texts: list[str], prefix: str | None, system: str | None) -> Prompt:
    """Put the context before the question: as chat messages where the model has a template and no prefix is given as text."""
    body = "\n\n".join([*texts, f"Question: {question}" if texts else question])
    if prefix is not None or not getattr(engine.tokenizer, "chat_template", None):
        return (prefix or "") + body
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": body}]
