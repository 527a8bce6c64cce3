"""``kvrag precompute``: split text files and keep the KV of their chunks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli.budgets import DiskBytes, Durability, MinFreeBytes, Priority, limits
from kvrag.cli.options import (
    DEFAULT_KV_DIR,
    AsJson,
    Device,
    Dtype,
    KVDir,
    KVDtypeName,
    Model,
    Namespace,
    PrefixText,
    System,
    open_engine,
)
from kvrag.cli.output import console, facts, print_json
from kvrag.demo.documents import read_documents, split_documents
from kvrag.estimate import human_bytes

if TYPE_CHECKING:
    from kvrag.types import PrecomputeReport

SHOWN = 10


def precompute(
    paths: Annotated[list[Path], typer.Argument(help="Text or markdown files, or folders of them.")],
    model: Model,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")] = 250,
    batch_size: Annotated[int, typer.Option(min=1, help="Chunks per forward.")] = 8,
    prefix: PrefixText = None,
    system: System = None,
    namespace: Namespace = "default",
    dtype: Dtype = "auto",
    device: Device = None,
    kv_dtype: KVDtypeName = "auto",
    disk_bytes: DiskBytes = None,
    min_free_bytes: MinFreeBytes = None,
    durability: Durability = None,
    priority: Priority = None,
    as_json: AsJson = False,
) -> None:
    """Split files into chunks and store the KV of each; run it again after a break, and it goes on."""
    from kvrag.store import Retention

    documents = read_documents(paths)
    engine = open_engine(
        model,
        kv_dir,
        prefix=prefix,
        system=system,
        namespace=namespace,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        limits=limits(disk_bytes, min_free_bytes, durability),
    )
    encoder = engine.loaded.encoder
    chunks = split_documents(documents, lambda text: len(encoder.chunk_ids(text)), chunk_tokens=chunk_tokens)
    report = engine.precompute(
        [chunk.text for chunk in chunks],
        ids=[chunk.id for chunk in chunks],
        batch_size=batch_size,
        show_progress=not as_json,
        retention=None if priority is None else Retention(priority),
    )
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    engine.close()
    if as_json:
        print_json({"documents": len(documents), "chunks": len(chunks), "tokens": num_tokens, **asdict(report)})
    else:
        _print(report, len(documents), len(chunks), num_tokens, kv_dir)
    if report.failed:
        raise typer.Exit(1)


def _print(report: PrecomputeReport, num_documents: int, num_chunks: int, num_tokens: int, kv_dir: Path) -> None:
    rows: dict[str, object] = {
        "documents": num_documents,
        "chunks": f"{num_chunks} of {num_tokens} tokens in all",
        "stored": report.stored,
        "skipped": f"{report.skipped} (stored before, or shorter than 32 tokens)",
        "failed": len(report.failed),
        "written": human_bytes(report.stored_bytes),
        "time": f"{report.seconds:.1f} s",
    }
    rows.update({f"failed: {name}": reason for name, reason in report.failed[:SHOWN]})
    console().print(facts(f"KV in {kv_dir}", rows))
