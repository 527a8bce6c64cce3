"""``kvrag estimate``: what the KV of a corpus takes, and when loading it beats computing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrag.cli.options import DEFAULT_KV_DIR, AsJson, Device, Dtype, KVDir, KVDtypeName, Model
from kvrag.cli.output import console, facts, print_json, progress
from kvrag.cli.shapes import shape_of
from kvrag.config import StoreConfig
from kvrag.demo.documents import read_documents, split_documents
from kvrag.errors import ConfigError, ModelError, require
from kvrag.estimate import (
    ModelShape,
    break_even_bandwidth,
    human_bandwidth,
    human_bytes,
    kept_bytes_per_token,
    preset,
    reuse_speedup,
)

_CHARS_PER_TOKEN = 4
"""Usual for English text; used where no tokenizer is at hand."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Number of chunks and of all their tokens, and where the numbers come from."""

    chunks: int
    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Speeds:
    """Prefill tokens per second and disk bytes per second, ``None`` where neither given nor measured."""

    prefill: float | None
    disk: float | None


def estimate(
    model: Model,
    config_only: Annotated[bool, typer.Option("--config-only", help="Load no tokenizer and no weights.")] = False,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 1000,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 250,
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", help="Count these files or folders instead of --chunks.")
    ] = None,
    disk_gbps: Annotated[float | None, typer.Option(help="Read bandwidth of the disk, GB/s (10^9 bytes).")] = None,
    prefill_tps: Annotated[float | None, typer.Option(help="Prefill speed of the model, tokens/s.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what isn't given: loads the model, writes to --kv-dir.")
    ] = False,
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of the rows to repair.")] = 0.10,
    kv_dir: KVDir = DEFAULT_KV_DIR,
    dtype: Dtype = "auto",
    device: Device = None,
    kv_dtype: KVDtypeName = "auto",
    as_json: AsJson = False,
) -> None:
    """Print the size of KV per token and of a corpus, and the disk bandwidth from which loading beats prefilling."""
    if config_only and measure:
        raise ConfigError("--config-only loads nothing and --measure loads the model; pass one of them")
    _check_positive("--disk-gbps", disk_gbps)
    _check_positive("--prefill-tps", prefill_tps)
    shape = shape_of(model)
    name = shape.dtype if dtype == "auto" else dtype
    kept = StoreConfig(kv_dtype=kv_dtype).kv_dtype  # type: ignore[arg-type]  # it refuses what is none
    counted = _corpus(model, corpus, chunks, chunk_tokens, config_only)
    mean_tokens = max(1, round(counted.tokens / counted.chunks)) if counted.chunks else chunk_tokens
    per_token = kept_bytes_per_token(shape, kept, chunk_tokens=mean_tokens, dtype=name)
    speeds = Speeds(prefill_tps, None if disk_gbps is None else disk_gbps * 1e9)
    if measure:
        speeds = _measured(speeds, model, kv_dir, dtype, device)
    values = _values(per_token, counted, speeds, ratio)
    if as_json:
        print_json(
            {"model": model, **asdict(shape), "dtype": name, "kv_dtype": kept, "corpus": asdict(counted), **values}
        )
        return
    out = console()
    out.print(facts(f"KV of {model}", _sizes(shape, name, kept, per_token, counted)))
    out.print(facts("When loading beats computing", _speed_rows(values, ratio)))


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value}; it must be a number above 0")


def _corpus(model: str, paths: list[Path] | None, chunks: int, chunk_tokens: int, config_only: bool) -> Corpus:
    if not paths:
        return Corpus(chunks, chunks * chunk_tokens, "as given")
    documents = read_documents(paths)
    if config_only or (preset(model) is not None and not Path(model).exists()):
        found = split_documents(documents, lambda text: -(-len(text) // _CHARS_PER_TOKEN), chunk_tokens=chunk_tokens)
        source = f"{len(documents)} files, guessed at {_CHARS_PER_TOKEN} characters per token"
    else:
        tokenizer = _tokenizer(model)
        found = split_documents(
            documents,
            lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]),
            chunk_tokens=chunk_tokens,
        )
        source = f"{len(documents)} files, counted with the model's tokenizer"
    return Corpus(len(found), sum(chunk.num_tokens for chunk in found), source)


def _tokenizer(model: str) -> Any:
    path = Path(model)
    is_gguf = path.suffix == ".gguf"
    where, options = (str(path.parent), {"gguf_file": path.name}) if is_gguf else (model, {})
    with progress("loading the tokenizer ..."):
        transformers = require("transformers", extra="cli", purpose="counting tokens")
        try:
            return transformers.AutoTokenizer.from_pretrained(where, **options)
        except Exception as error:  # no such name, no connection, damaged: all the same here
            raise ModelError(
                f"the tokenizer of {model!r} can't be loaded ({type(error).__name__}); check the name, or pass --config-only to "
                "guess the number of tokens"
            ) from error


def _measured(speeds: Speeds, model: str, kv_dir: Path, dtype: str, device: str | None) -> Speeds:
    """Measure what is not given."""
    from kvrag.cli.measure import disk_bandwidth, prefill_tokens_per_s

    prefill, disk = speeds.prefill, speeds.disk
    if disk is None:
        with progress(f"writing and reading a file in {kv_dir} ..."):
            disk = disk_bandwidth(kv_dir)[1]
    if prefill is None:
        with progress(f"loading {model} and prefilling ..."):
            from kvrag.model.load import load
            from kvrag.model.source import ModelSource

            prefill = prefill_tokens_per_s(load(ModelSource(model, dtype=dtype, device=device)).lm.model)
    return Speeds(prefill, disk)


def _values(per_token: float, corpus: Corpus, speeds: Speeds, ratio: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "bytes_per_token": per_token,
        "corpus_bytes": round(per_token * corpus.tokens),
        "prefill_tokens_per_s": speeds.prefill,
        "disk_bytes_per_s": speeds.disk,
        "break_even_bytes_per_s": None,
        "speedup": None,
    }
    if speeds.prefill is not None:
        values["break_even_bytes_per_s"] = break_even_bandwidth(per_token, speeds.prefill)
        if speeds.disk is not None:
            values["speedup"] = reuse_speedup(per_token, speeds.prefill, speeds.disk, ratio)
    return values


def _sizes(shape: ModelShape, dtype: str, kept: str, per_token: float, corpus: Corpus) -> dict[str, object]:
    formula = "2 · layers · KV heads · head dim · bytes" if kept == "auto" else f"{kept} codes and their scales"
    rows: dict[str, object] = {
        "shape": f"{shape.num_layers} layers × {shape.num_kv_heads} KV heads × {shape.head_dim}, {dtype}",
        "per token": f"{human_bytes(per_token)} ({formula})",
        "corpus": f"{corpus.chunks:,} chunks, {corpus.tokens:,} tokens ({corpus.source})",
        "per chunk": f"{human_bytes(per_token * corpus.tokens / corpus.chunks)} on average",
        "on disk": human_bytes(per_token * corpus.tokens),
    }
    if dtype != "float32" and kept == "auto":
        rows["on a CPU"] = "twice as much, where kvrag runs float32 unless --dtype says otherwise"
    return rows


def _speed_rows(values: dict[str, Any], ratio: float) -> dict[str, object]:
    prefill, disk, even = (values[k] for k in ("prefill_tokens_per_s", "disk_bytes_per_s", "break_even_bytes_per_s"))
    if prefill is None:
        return {
            "prefill": "unknown: pass --prefill-tps, or --measure",
            "formula": "break-even bandwidth = bytes per token · tokens/s",
        }
    rows: dict[str, object] = {
        "prefill": f"{prefill:,.0f} tokens/s",
        "break-even": f"{human_bandwidth(even)} (bytes per token · tokens/s): a faster disk beats prefilling",
    }
    if disk is None:
        return {**rows, "disk": "unknown: pass --disk-gbps, or --measure"}
    speedup = values["speedup"]
    return {
        **rows,
        "disk": f"{human_bandwidth(disk)}, {disk / even:.3g} × break-even",
        "bound": f"{speedup:.2g} × faster to the first token at best: load, then repair {ratio:.0%} of the rows",
        "so": "reuse pays" if speedup > 1 else "prefilling is as fast: use a memory tier or a faster disk, or no reuse",
    }
