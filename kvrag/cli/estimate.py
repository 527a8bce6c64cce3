"""``kvrag estimate``: the size of a corpus's KV, and when loading it beats computing it."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli.documents import read_documents, split_documents
from kvrag.cli.options import ESTIMATE, AsJson, Given, loading_options, name_model, takes
from kvrag.cli.output import facts, show
from kvrag.config import StoreConfig
from kvrag.errors import ConfigError, ModelError, StoreError, require
from kvrag.evaluate import estimate as arithmetic
from kvrag.evaluate.estimate import (
    ModelShape,
    human_bandwidth,
    human_bytes,
    preset,
    shape_from_config,
)
from kvrag.progress import Progress

if TYPE_CHECKING:
    from kvrag.model.lm import LoadedModel

_CHARS_PER_TOKEN = 4  # usual for English text; used where no tokenizer is at hand

# The file that measures a disk.
_BLOCK = 2**20  # bytes of a block
_NUM_BLOCKS = 128

_MODEL = typer.Argument(
    metavar="[MODEL]", help="Preset, hub id, directory, .gguf file; may be set by KVRAG_MODEL."
)
_CONFIG_ONLY = typer.Option("--config-only", help="Load no tokenizer and no weights.")
_CORPUS = typer.Option("--corpus", help="Count these files or folders instead of --chunks.")
_RATIO = typer.Option(min=0, max=1, help="Share of the rows to repair.")
_MEASURE = typer.Option(
    "--measure", help="Measure what isn't given: loads the model, writes to --kv-dir."
)


@takes(engine=ESTIMATE)
def estimate(
    engine: Given,
    ctx: typer.Context,
    words: Annotated[list[str] | None, _MODEL] = None,
    config_only: Annotated[bool, _CONFIG_ONLY] = False,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 1000,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 250,
    corpus: Annotated[list[Path] | None, _CORPUS] = None,
    disk_gbps: Annotated[
        float | None, typer.Option(help="Read bandwidth of the disk, GB/s (10^9 bytes).")
    ] = None,
    prefill_tps: Annotated[
        float | None, typer.Option(help="Prefill speed of the model, tokens/s.")
    ] = None,
    measure: Annotated[bool, _MEASURE] = False,
    recompute_ratio: Annotated[float, _RATIO] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Print the size of KV per token and of a corpus, and the break-even bandwidth.

    From that disk bandwidth on, loading KV beats prefilling.
    """
    name_model(ctx, engine, words)
    if config_only and measure:
        raise ConfigError(
            "--config-only loads nothing and --measure loads the model; pass one of them"
        )
    for flag, given in (("--disk-gbps", disk_gbps), ("--prefill-tps", prefill_tps)):
        if given is not None and not 0 < given < float("inf"):
            raise ConfigError(f"{flag} is {given}; it must be a number above 0")
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
    speeds = _speeds(
        engine,
        per_token,
        (prefill_tps, disk_gbps and disk_gbps * 1e9),
        recompute_ratio,
        measure=measure,
    )
    about = {"model": model, **asdict(shape), "dtype": name, "kv_dtype": kept, "corpus": counted}
    about |= {"bytes_per_token": per_token, "corpus_bytes": round(per_token * tokens), **speeds}
    sizes = facts(f"KV of {model}", _size_rows(shape, name, kept, per_token, counted))
    times = facts("When loading beats computing", _speed_rows(speeds, recompute_ratio))
    show(about, sizes, times, as_json=as_json)


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
        from kvrag.model.source import ModelSource, load_tokenizer

        with Progress("loading the tokenizer"):
            tokenizer = load_tokenizer(ModelSource(model))

    def count(text: str) -> int:
        if tokenizer is None:
            return -(-len(text) // _CHARS_PER_TOKEN)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = split_documents(documents, count, chunk_tokens=chunk_tokens)
    if tokenizer:
        how = "counted with the model's tokenizer"
    else:
        how = f"guessed at {_CHARS_PER_TOKEN} characters per token"
    tokens = sum(chunk.num_tokens for chunk in found)
    return {"chunks": len(found), "tokens": tokens, "source": f"{len(documents)} files, {how}"}


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
    known = None if path.is_dir() or path.suffix == ".gguf" else preset(model)
    if known is not None:
        return known
    if path.suffix == ".gguf":
        require("gguf", extra="gguf", purpose="reading GGUF files")
    from kvrag.model.source import ModelSource, config_of

    return shape_from_config(config_of(ModelSource(model)).to_dict())


# -- tables ----------------------------------------------------------------------------------------


def _size_rows(shape: ModelShape, dtype: str, kept: str, per_token: float, corpus: Given) -> Given:
    if kept == "auto":
        formula = "layers · KV heads · (key dim + value dim) · bytes"
    else:
        formula = f"{kept} codes and their scales"
    chunks, tokens, source = corpus.values()
    rows = {
        "shape": f"{shape}, {dtype}",
        "per token": f"{human_bytes(per_token)} ({formula})",
        "corpus": f"{chunks:,} chunks, {tokens:,} tokens ({source})",
        "per chunk": f"{human_bytes(per_token * tokens / chunks)} on average",
        "on disk": human_bytes(per_token * tokens),
    }
    if dtype != "float32" and kept == "auto":
        rows["on a CPU"] = "twice as much, where kvrag runs float32 unless --dtype says otherwise"
    return rows


def _speed_rows(speeds: Given, ratio: float) -> Given:
    prefill, disk, even, speedup = speeds.values()
    if prefill is None:
        return {
            "prefill": (
                "unknown: pass --prefill-tps, or --measure; break-even = bytes per token · tokens/s"
            )
        }
    rows = {
        "prefill": f"{prefill:,.0f} tokens/s",
        "break-even": (
            f"{human_bandwidth(even)} (bytes per token · tokens/s): a faster disk beats prefilling"
        ),
    }
    if disk is None:
        return {**rows, "disk": "unknown: pass --disk-gbps, or --measure"}
    so = "prefilling is as fast: use a memory tier or a faster disk, or no reuse"
    if speedup > 1:
        so = "reuse pays"
    return {
        **rows,
        "disk": f"{human_bandwidth(disk)}, {disk / even:.3g} × break-even",
        "bound": (
            f"{speedup:.2g} × faster to the first token at best: load, then repair {ratio:.0%} of "
            "the rows"
        ),
        "so": so,
    }


# -- measurements ----------------------------------------------------------------------------------


def _speeds(
    engine: Given,
    per_token: float,
    given: tuple[float | None, float | None],
    ratio: float,
    *,
    measure: bool,
) -> dict[str, float | None]:
    """Return tokens/s, bytes/s, and the figures that follow from them.

    ``given`` holds the first two; missing values are measured if ``measure`` is set.
    """
    prefill, disk = given
    if measure and disk is None and "://" not in engine["kv_dir"]:
        with Progress(f"writing and reading a file in {engine['kv_dir']}"):
            disk = read_bandwidth(Path(engine["kv_dir"]).expanduser())
    if measure and prefill is None:
        from kvrag.model.load import load
        from kvrag.model.source import ModelSource

        source = ModelSource(engine["model"], **loading_options(engine))
        prefill = prefill_tokens_per_s(load(source))
    return {
        "prefill_tokens_per_s": prefill,
        "disk_bytes_per_s": disk,
        "break_even_bytes_per_s": prefill and arithmetic.break_even_bandwidth(per_token, prefill),
        "speedup": prefill and disk and arithmetic.reuse_speedup(per_token, prefill, disk, ratio),
    }


def prefill_tokens_per_s(loaded: LoadedModel) -> float:
    """Return the speed of prefilling 1,024 tokens, or the context window if that is shorter.

    It follows from the costs that mode ``auto`` goes by: they are measured once and kept.

    Raises
    ------
    UnsupportedModelError
        If the model's KV can't be reused.
    ModelError
        If the model can't be measured.
    """
    from kvrag.blend.cost import IN_ROWS, CostModel

    costs = CostModel(loaded).known()
    if costs is IN_ROWS:
        raise ModelError("the model's speed can't be measured on this machine; pass --prefill-tps")
    length = min(1024, loaded.reusable.reuse_window)
    return 1e3 * length / costs.of_forward(length, length**2 / 2)


def read_bandwidth(directory: Path) -> float:
    """Write a file, read it back and return the bytes read per second.

    Reads past the page cache where the system allows that. The directory is made if it is absent.
    Raises :class:`StoreError` if the directory can't be written to.
    """
    block = os.urandom(_BLOCK)  # not zeros, because some file systems don't store zeros
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.writelines([block] * _NUM_BLOCKS)
            os.fsync(file.fileno())
            # Not on macOS. Drops the page cache, so that the reads come from the disk.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(_BLOCK):
                pass
            return _NUM_BLOCKS * _BLOCK / (time.perf_counter() - begin)
    except OSError as error:
        why = error.strerror or error
        raise StoreError(
            f"{str(directory)!r} can't be written to: {why}; choose another --kv-dir"
        ) from error
