"""``kvrag precompute``: split text files and store the KV of their chunks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvrag.cli.documents import read_documents, split_documents
from kvrag.cli.options import ENGINE, LIMITS, AsJson, Given, open_engine, takes
from kvrag.cli.output import facts, show
from kvrag.estimate import human_bytes

_PRIORITY = typer.Option(
    min=0,
    max=100,
    help="Eviction priority, of chunks stored before too; the lowest leave first. Default: 35, or theirs.",
)


@takes(engine=ENGINE, limits=LIMITS)
def precompute(
    engine: Given,
    limits: Given,
    paths: Annotated[list[Path], typer.Argument(help="Text or markdown files, or folders of them.")],
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")] = 250,
    batch_size: Annotated[int, typer.Option(min=1, help="Chunks per forward.")] = 8,
    priority: Annotated[int | None, _PRIORITY] = None,
    as_json: AsJson = False,
) -> None:
    """Split files into chunks and store the KV of each; run it again after a break, and it goes on."""
    from kvrag import Retention

    documents = read_documents(paths)
    with closing(open_engine(engine, limits=limits)) as opened:
        encoder = opened.loaded.encoder
        chunks = split_documents(documents, lambda text: len(encoder.chunk_ids(text)), chunk_tokens=chunk_tokens)
        texts, ids = [chunk.text for chunk in chunks], [chunk.id for chunk in chunks]
        retention = None if priority is None else Retention(priority)
        report = opened.precompute(
            texts, ids=ids, batch_size=batch_size, show_progress=not as_json, retention=retention
        )
    counts = {"documents": len(documents), "chunks": len(chunks), "tokens": sum(chunk.num_tokens for chunk in chunks)}
    rows = {
        "documents": len(documents),
        "chunks": f"{len(chunks)} of {counts['tokens']} tokens in all",
        "stored": report.stored,
        "skipped": f"{report.skipped} (stored before)",
        "too short": f"{len(report.short)} (they stay live text)",
        "failed": len(report.failed),
        "written": human_bytes(report.stored_bytes),
        "time": f"{report.seconds:.1f} s",
        **{f"failed: {name}": reason for name, reason in report.failed[:10]},
    }
    show(counts | asdict(report), facts(f"KV in {engine['kv_dir']}", rows), as_json=as_json, ok=not report.failed)
