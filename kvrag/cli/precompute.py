"""``kvrag precompute``: split text files and store the KV of their chunks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli.documents import read_documents, split_documents
from kvrag.cli.options import ENGINE, LIMITS, AsJson, Given, open_engine, takes
from kvrag.cli.output import console, facts, print_json
from kvrag.estimate import human_bytes

if TYPE_CHECKING:
    from kvrag.types import PrecomputeReport


@takes(ENGINE, LIMITS)
def precompute(
    engine: Given,
    limits: Given,
    paths: Annotated[list[Path], typer.Argument(help="Text or markdown files, or folders of them.")],
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")] = 250,
    batch_size: Annotated[int, typer.Option(min=1, help="Chunks per forward.")] = 8,
    priority: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100,
            help="What the chunks are worth when room is short, 0 to 100, stored ones too. Default: 35, or what they have.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split files into chunks and store the KV of each; run it again after a break, and it goes on."""
    from kvrag import Retention

    documents = read_documents(paths)
    with closing(open_engine(engine, limits=limits)) as opened:
        encoder = opened.loaded.encoder
        chunks = split_documents(documents, lambda text: len(encoder.chunk_ids(text)), chunk_tokens=chunk_tokens)
        report = opened.precompute(
            [chunk.text for chunk in chunks],
            ids=[chunk.id for chunk in chunks],
            batch_size=batch_size,
            show_progress=not as_json,
            retention=None if priority is None else Retention(priority),
        )
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    if as_json:
        print_json({"documents": len(documents), "chunks": len(chunks), "tokens": num_tokens, **asdict(report)})
    else:
        made = f"{len(chunks)} of {num_tokens} tokens in all"
        console().print(facts(f"KV in {engine['kv_dir']}", _rows(report, len(documents), made)))
    if report.failed:
        raise typer.Exit(1)


def _rows(report: PrecomputeReport, documents: int, chunks: str) -> dict[str, object]:
    rows: dict[str, object] = {
        "documents": documents,
        "chunks": chunks,
        "stored": report.stored,
        "skipped": f"{report.skipped} (stored before, or shorter than 32 tokens)",
        "failed": len(report.failed),
        "written": human_bytes(report.stored_bytes),
        "time": f"{report.seconds:.1f} s",
    }
    return rows | {f"failed: {name}": reason for name, reason in report.failed[:10]}
