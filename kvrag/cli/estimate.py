"""``kvrag estimate``: the size of a corpus's KV."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrag.cli.documents import read_documents, split_documents
from kvrag.cli.options import ESTIMATE, AsJson, EngineGroup, Given, Words, takes
from kvrag.cli.output import facts, show
from kvrag.config import StoreConfig
from kvrag.errors import ModelError, require
from kvrag.evaluate import estimate as arithmetic
from kvrag.evaluate.estimate import (
    ModelShape,
    human_bytes,
    preset,
    shape_from_config,
)
from kvrag.progress import Progress

_CHARS_PER_TOKEN = 4  # usual for English text; used where no tokenizer is at hand


@takes(engine=ESTIMATE)
def estimate(
    engine: EngineGroup,
    ctx: typer.Context,
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL]",
            help="Preset, hub id, directory, .gguf file; may be set by KVRAG_MODEL.",
        ),
    ] = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Load no tokenizer and no weights.")
    ] = False,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 1000,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 250,
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Count these files or folders instead of --chunks.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the size of KV per token and of a corpus."""
    engine.name_model(ctx, words)
    model = _parsed_once(ctx, engine["model"])
    shape = shape_of(model)
    kept = StoreConfig(kv_dtype=engine.get("kv_dtype", "auto")).kv_dtype
    name = shape.dtype if engine["dtype"] == "auto" else engine["dtype"]
    counted: Given = {"chunks": chunks, "tokens": chunks * chunk_tokens, "source": "as given"}
    if corpus:
        counted = _count(model, corpus, config_only, chunk_tokens)
    tokens = counted["tokens"]
    per_token = arithmetic.kept_bytes_per_token(
        shape, kept, chunk_tokens=round(tokens / counted["chunks"]), dtype=name
    )
    about = {
        "model": model,
        **asdict(shape),
        "dtype": name,
        "kv_dtype": kept,
        "corpus": counted,
        "bytes_per_token": per_token,
        "corpus_bytes": round(per_token * tokens),
    }
    sizes = facts(f"KV of {model}", _size_rows(shape, name, kept, per_token, counted))
    show(about, sizes, as_json=as_json)


# -- the corpus and the model ----------------------------------------------------------------------


def _parsed_once(ctx: typer.Context, model: str) -> str:
    """Return the model; a GGUF file is parsed once in this command, whatever is read of it."""
    if model.endswith(".gguf"):
        from kvrag.model.gguf.parsing import parsed_once

        ctx.with_resource(parsed_once(model))
    return model


def _count(model: str, paths: list[Path], config_only: bool, chunk_tokens: int) -> Given:
    """Return the number of chunks, the number of their tokens, and the source of the numbers."""
    documents = read_documents(paths)
    tokenizer: Any = None
    if not config_only and (preset(model) is None or Path(model).exists()):
        from kvrag.model.source import ModelSource

        with Progress("loading the tokenizer"):
            tokenizer = ModelSource(model).load_tokenizer()

    def count(text: str) -> int:
        if tokenizer is None:
            return -(-len(text) // _CHARS_PER_TOKEN)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = split_documents(documents, count, chunk_tokens=chunk_tokens)
    if tokenizer:
        how = "counted with the model's tokenizer"
    else:
        how = f"guessed at {_CHARS_PER_TOKEN} characters per token"
    return {
        "chunks": len(found),
        "tokens": sum(chunk.num_tokens for chunk in found),
        "source": f"{len(documents)} files, {how}",
    }


def shape_of(model: str) -> ModelShape:
    """Return the shape of a preset, directory with a ``config.json``, ``.gguf`` file or hub model.

    ``32x8x128`` is a shape itself: layers, key heads, head dim.

    Raises :class:`ModelError` if no model is found, or its config does not give the shape.
    """
    numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", model)
    if numbers:
        return ModelShape(*map(int, numbers.groups()))  # type: ignore[arg-type]
    path = Path(model)
    if (path / "config.json").is_file():
        try:
            return shape_from_config(json.loads((path / "config.json").read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{str(path)!r} holds no readable config.json ({error}); check the path"
            ) from error
    known = None if path.is_dir() else preset(model)
    if known is not None:
        return known
    if path.suffix == ".gguf":
        require("gguf", extra="gguf", purpose="reading GGUF files")
    from kvrag.model.source import ModelSource

    return shape_from_config(ModelSource(model).load_config().to_dict())


# -- tables ----------------------------------------------------------------------------------------


def _size_rows(shape: ModelShape, dtype: str, kept: str, per_token: float, corpus: Given) -> Given:
    if kept == "auto":
        formula = "layers · KV heads · (key dim + value dim) · bytes"
    else:
        formula = f"{kept} codes and their scales"
    chunks, tokens, source = corpus.values()
    slots = 2**30 // arithmetic.kv_bytes_per_token(shape, dtype)
    rows = {
        "shape": f"{shape}, {dtype}",
        "per token": f"{human_bytes(per_token)} ({formula})",
        "corpus": f"{chunks:,} chunks, {tokens:,} tokens ({source})",
        "per chunk": f"{human_bytes(per_token * tokens / chunks)} on average",
        "on disk": human_bytes(per_token * tokens),
        "on a GPU": f"{slots:,} tokens of running requests per GiB of their pool",
    }
    if dtype != "float32" and kept == "auto":
        rows["on a CPU"] = "twice as much, where kvrag runs float32 unless --dtype says otherwise"
    return rows
