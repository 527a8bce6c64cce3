"""``kvrag estimate``: what the KV of a corpus takes, and when loading it beats computing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrag.cli.documents import read_documents, split_documents
from kvrag.cli.options import ESTIMATE, AsJson, Given, takes
from kvrag.cli.output import console, facts, print_json, progress
from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, ModelError, require
from kvrag.estimate import (
    PRESETS,
    ModelShape,
    break_even_bandwidth,
    human_bandwidth,
    human_bytes,
    kept_bytes_per_token,
    preset,
    reuse_speedup,
    shape_from_config,
)

_CHARS_PER_TOKEN = 4
"""Usual for English text; used where no tokenizer is at hand."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Number of chunks and of all their tokens, and where the numbers come from."""

    chunks: int
    tokens: int
    source: str


@takes(ESTIMATE)
def estimate(
    engine: Given,
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
    as_json: AsJson = False,
) -> None:
    """Print the size of KV per token and of a corpus, and the disk bandwidth from which loading beats prefilling."""
    if config_only and measure:
        raise ConfigError("--config-only loads nothing and --measure loads the model; pass one of them")
    _check_positive(**{"--disk-gbps": disk_gbps, "--prefill-tps": prefill_tps})
    model, shape, kept = (
        engine["model"],
        shape_of(engine["model"]),
        StoreConfig(kv_dtype=engine.get("kv_dtype", "auto")).kv_dtype,
    )
    name = shape.dtype if engine["dtype"] == "auto" else engine["dtype"]
    counted = (
        _count(model, corpus, config_only, chunk_tokens)
        if corpus
        else Corpus(chunks, chunks * chunk_tokens, "as given")
    )
    mean_tokens = round(counted.tokens / counted.chunks)  # no chunk is empty
    per_token = kept_bytes_per_token(shape, kept, chunk_tokens=mean_tokens, dtype=name)
    disk = disk_gbps and disk_gbps * 1e9
    if measure:
        prefill_tps, disk = _measured(engine, prefill_tps, disk)
    values: dict[str, float | None] = {"bytes_per_token": per_token, "corpus_bytes": round(per_token * counted.tokens)}
    values |= _speeds(per_token, prefill_tps, disk, ratio)
    if as_json:
        about = {"model": model, **asdict(shape), "dtype": name, "kv_dtype": kept, "corpus": asdict(counted)}
        print_json(about | values)
        return
    sizes = facts(f"KV of {model}", _size_rows(shape, name, kept, per_token, counted))
    console().print(sizes, facts("When loading beats computing", _speed_rows(values, ratio)))


def _check_positive(**options: float | None) -> None:
    for flag, value in options.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} is {value}; it must be a number above 0")


def _count(model: str, paths: list[Path], config_only: bool, chunk_tokens: int) -> Corpus:
    documents = read_documents(paths)
    if config_only or (preset(model) is not None and not Path(model).exists()):
        found = split_documents(documents, lambda text: -(-len(text) // _CHARS_PER_TOKEN), chunk_tokens=chunk_tokens)
        source = f"guessed at {_CHARS_PER_TOKEN} characters per token"
    else:
        ids = _tokenizer(model)
        found = split_documents(
            documents, lambda text: len(ids(text, add_special_tokens=False)["input_ids"]), chunk_tokens=chunk_tokens
        )
        source = "counted with the model's tokenizer"
    return Corpus(len(found), sum(chunk.num_tokens for chunk in found), f"{len(documents)} files, {source}")


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


def _measured(engine: Given, prefill: float | None, disk: float | None) -> tuple[float, float]:
    """Measure what is not given: prefilled tokens and read bytes per second."""
    from kvrag.cli.measure import prefill_tokens_per_s, read_bandwidth

    if disk is None:
        with progress(f"writing and reading a file in {engine['kv_dir']} ..."):
            disk = read_bandwidth(engine["kv_dir"])
    if prefill is None:
        with progress(f"loading {engine['model']} and prefilling ..."):
            from kvrag.model.load import load
            from kvrag.model.source import ModelSource

            source = ModelSource(engine["model"], dtype=engine["dtype"], device=engine.get("device"))
            prefill = prefill_tokens_per_s(load(source).lm.model)
    return prefill, disk


def _speeds(per_token: float, prefill: float | None, disk: float | None, ratio: float) -> dict[str, float | None]:
    even = None if prefill is None else break_even_bandwidth(per_token, prefill)
    speedup = None if prefill is None or disk is None else reuse_speedup(per_token, prefill, disk, ratio)
    return {
        "prefill_tokens_per_s": prefill,
        "disk_bytes_per_s": disk,
        "break_even_bytes_per_s": even,
        "speedup": speedup,
    }


def _size_rows(shape: ModelShape, dtype: str, kept: str, per_token: float, corpus: Corpus) -> dict[str, object]:
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


def _speed_rows(values: Mapping[str, Any], ratio: float) -> dict[str, object]:
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


# -- the model's shape, by the cheapest way; never its weights -----------------------------------------------------------


def shape_of(model: str) -> ModelShape:
    """Return the shape of a preset, a directory with a ``config.json``, a ``.gguf`` file, or a model of the hub.

    Raises
    ------
    ModelError
        If none of these is found, or its config does not tell.
    """
    path = Path(model)
    if path.suffix == ".gguf":
        return shape_from_config(_gguf_config(path))
    if not path.is_dir():
        return preset(model) or shape_from_config(_hub_config(model))
    try:
        return shape_from_config(json.loads((path / "config.json").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} holds no readable config.json ({error}); check the path") from error


def _gguf_config(path: Path) -> dict[str, Any]:
    """Read a GGUF header, its keys renamed to those of a ``config.json``."""
    names = {
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "embedding_length": "hidden_size",
    }
    if not path.is_file():
        raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
    gguf = require("gguf", extra="gguf", purpose="reading GGUF files")
    try:
        fields = gguf.GGUFReader(path).fields
        of = fields["general.architecture"].contents()
        return {new: fields[f"{of}.{old}"].contents() for old, new in names.items() if f"{of}.{old}" in fields}
    except Exception as error:  # the reader's errors for damaged files share no base class
        raise ModelError(f"{str(path)!r} is not a readable GGUF file ({type(error).__name__}: {error})") from error


def _hub_config(model: str) -> dict[str, Any]:
    transformers = require("transformers", extra="cli", purpose="reading configs of the hub")
    try:
        config: dict[str, Any] = transformers.AutoConfig.from_pretrained(model).to_dict()
    except Exception as error:  # no such name, no connection, gated: all the same here
        raise ModelError(
            f"{model!r} is neither a preset ({', '.join(PRESETS)}), a directory nor a .gguf file, and its config can't be read from "
            f"the hub; check the name and the connection ({type(error).__name__})"
        ) from error
    return config
