"""Options that several commands share, and the engine that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrag.cli.keys import key_options
from kvrag.cli.output import progress
from kvrag.errors import ConfigError

if TYPE_CHECKING:
    from kvrag.config import RepairConfig
    from kvrag.engine import KVRagEngine

_ENGINE, _REPAIR = "Model and store", "Reuse and repair"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", envvar="KVRAG_MODEL", help="Hub id, directory, or .gguf file.", rich_help_panel=_ENGINE
    ),
]
MaybeModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", envvar="KVRAG_MODEL", help="Hub id, directory, or .gguf file.", rich_help_panel=_ENGINE
    ),
]
KVDir = Annotated[
    Path, typer.Option("--kv-dir", envvar="KVRAG_KV_DIR", help="Directory of the KV store.", rich_help_panel=_ENGINE)
]
PrefixText = Annotated[
    str | None,
    typer.Option(
        "--prefix", help="Text before the first chunk of your prompts, as it is rendered.", rich_help_panel=_ENGINE
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", help="System message of your chat prompts; instead of --prefix.", rich_help_panel=_ENGINE),
]
Namespace = Annotated[
    str,
    typer.Option("--namespace", help="Chunks of one namespace are never found from another.", rich_help_panel=_ENGINE),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto (float32 on a CPU), float32, bfloat16 or float16.", rich_help_panel=_ENGINE),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu or cuda; default: CUDA if there is one.", rich_help_panel=_ENGINE)
]
KVDtypeName = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        envvar="KVRAG_KV_DTYPE",
        help="How KV is kept: auto (as computed), int8, fp8 or int4 (rounded); the same in every command on a store.",
        rich_help_panel=_ENGINE,
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option("--ratio", help="Share of the rows that are not exact to recompute, 0 to 1.", rich_help_panel=_REPAIR),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        help="Which rows: query, hkvd, query_hkvd, first_k, boundary, random, none or all.",
        rich_help_panel=_REPAIR,
    ),
]
ModeName = Annotated[
    str,
    typer.Option("--mode", help="auto, full (no reuse), prefix (exact reuse only) or stitch.", rich_help_panel=_REPAIR),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]

DEFAULT_KV_DIR = Path(".kvrag")


def repair_of(strategy: str | None, ratio: float | None) -> RepairConfig | None:
    """Return the repair that the options ask for; ``None`` for the default."""
    from kvrag.config import RepairConfig

    given = {"strategy": strategy, "recompute_ratio": ratio}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return RepairConfig(**chosen) if chosen else None


def open_engine(
    model: str,
    kv_dir: Path,
    *,
    prefix: str | None,
    system: str | None,
    namespace: str,
    dtype: str,
    device: str | None,
    repair: RepairConfig | None = None,
    kv_dtype: str = "auto",
    limits: Mapping[str, Any] | None = None,
) -> KVRagEngine:
    """Open an engine and load its model, with a sign of life.

    Parameters
    ----------
    model, kv_dir, prefix, namespace, dtype, device, repair
        As for :meth:`kvrag.KVRagEngine.from_pretrained`.
    system
        A system message, for models with a chat template.
    kv_dtype
        How KV is kept: :class:`kvrag.StoreConfig`.
    limits
        Other options of it.
    """
    if prefix is not None and system is not None:
        raise ConfigError("--prefix and --system both say what stands before the first chunk; pass one of them")
    with progress(f"loading {model} ..."):
        from kvrag.config import StoreConfig
        from kvrag.engine import KVRagEngine

        config = StoreConfig(kv_dtype=kv_dtype, **key_options(), **(limits or {}))  # type: ignore[arg-type]  # it refuses what is none
        before = prefix if system is None else [{"role": "system", "content": system}]
        engine = KVRagEngine.from_pretrained(
            model,
            kv_dir=kv_dir,
            prefix=before,
            namespace=namespace,
            dtype=dtype,
            device=device,
            repair=repair,
            store_config=config,
        )
        engine.loaded  # noqa: B018 - loads it here, where it is announced
    return engine
