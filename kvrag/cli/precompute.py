"""``kvrag precompute``: split text files and store the KV of their chunks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvrag.cli.documents import CountTokens, DocumentChunk, read_documents, split_documents
from kvrag.cli.options import (
    ENGINE,
    INDEX,
    LIMITS,
    AsJson,
    ChunkTokens,
    EngineGroup,
    Given,
    Words,
    takes,
)
from kvrag.cli.output import facts, show
from kvrag.cli.plugins import backend
from kvrag.config import IndexOptions, Retention
from kvrag.errors import ConfigError, InputError
from kvrag.evaluate.estimate import human_bytes

_ON_RAY = "With Ray"


@takes(index=INDEX, engine=ENGINE, limits=LIMITS)
def precompute(
    index: Given,
    engine: EngineGroup,
    limits: Given,
    ctx: typer.Context,
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL] PATHS...",
            help="The model, and text or markdown files, or folders of them.",
        ),
    ] = None,
    chunk_tokens: ChunkTokens = 250,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Share the work among the machines of the Ray cluster RAY_ADDRESS, or of one "
            "started here.",
            rich_help_panel=_ON_RAY,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes; default: one for each GPU, or core.", rich_help_panel=_ON_RAY
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Parquet file for the report: a row for each batch.", rich_help_panel=_ON_RAY
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split files into chunks and store their KV; after an interruption, run it again to go on."""
    if not ray and (workers, report) != (None, None):
        raise ConfigError(
            "--workers and --report have no effect without --ray; pass it, or leave them out"
        )
    paths = engine.name_model(ctx, words, most=None)
    if not paths:
        raise InputError(
            "no file or folder is named; pass some, as in: kvrag precompute MODEL docs/"
        )
    # Other bytes become characters that the report names; Ray's tables can't hold them.
    documents = read_documents(map(Path, paths), "strict" if ray else "surrogateescape")

    def split(count_tokens: CountTokens) -> list[DocumentChunk]:
        return split_documents(documents, count_tokens, chunk_tokens=chunk_tokens)

    if "priority" in index:
        index["retention"] = Retention(index.pop("priority"))
    IndexOptions(**index)  # raises before a model is loaded
    if ray:
        options = engine.arguments(limits=limits)
        chunks = split(_counter(options))
        on_ray = backend("ray", purpose="kvrag precompute --ray")
        done = on_ray.precompute(chunks, options, index, workers, report, is_quiet=as_json)
    else:
        with closing(engine.open(limits=limits)) as opened:
            chunks = split(opened.loaded.encoder.num_tokens)
            texts = [chunk.text for chunk in chunks]
            done = asdict(opened.precompute(texts, ids=[chunk.id for chunk in chunks], **index))
    counts = {
        "documents": len(documents),
        "chunks": len(chunks),
        "tokens": sum(chunk.num_tokens for chunk in chunks),
    }
    table = facts(f"KV in {engine['kv_dir']}", _rows(counts, done))
    show(counts | done, table, as_json=as_json, ok=not done["failed"])


def _rows(counts: Mapping[str, int], done: Given) -> Given:
    """Return the rows of the table that sums up a run."""
    return {
        "documents": counts["documents"],
        "chunks": f"{counts['chunks']} of {counts['tokens']} tokens in all",
        "stored": done["stored"],
        "skipped": f"{done['skipped']} (stored before)",
        "too short": f"{len(done['short'])} (computed with each prompt)",
        "failed": len(done["failed"]),
        "written": human_bytes(done["stored_bytes"]),
        "time": f"{done['seconds']:.1f} s",
        **{f"too short: {name}": reason for name, reason in done["short"][:10]},
        **{f"failed: {name}": reason for name, reason in done["failed"][:10]},
    }


def _counter(options: Given) -> CountTokens:
    """Return a function that counts the tokens of a text without the model's weights."""
    from kvrag.model.source import ModelSource
    from kvrag.prompt.template import PromptEncoder

    return PromptEncoder(ModelSource(options["model"]).load_tokenizer()).num_tokens
