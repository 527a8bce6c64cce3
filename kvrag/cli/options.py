"""Options that several commands share, in groups. Those of configs are made from the configs' fields, which declare type and help.

::

    @takes(ENGINE, REPAIR)                                     --model --kv-dir … --strategy --ratio
    def ask(engine: Given, repair: Given, question: …)   ◀──   {"model": …, "kv_dir": …}, {"recompute_ratio": …}
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from kvrag.cli.output import progress
from kvrag.config import RepairConfig, SamplingConfig, StoreConfig, option_fields
from kvrag.errors import ConfigError

if TYPE_CHECKING:
    from kvrag.engine import KVRagEngine

Given = dict[str, Any]
"""Options of a group that were given, or have a default."""

KEY_VARIABLE = "KVRAG_ENCRYPTION_KEY"
"""Holds the store's key; it has no option, because the arguments of a process can be seen by others."""

_ENGINE, _REPAIR, _STORE = "Model and store", "Reuse and repair", "Limits of the store (those of your application)"

_MODEL = typer.Option(
    "--model", "-m", envvar="KVRAG_MODEL", help="Hub id, directory, or .gguf file.", rich_help_panel=_ENGINE
)
Model = Annotated[str, _MODEL]
MaybeModel = Annotated[str | None, _MODEL]
KVDir = Annotated[
    Path, typer.Option("--kv-dir", envvar="KVRAG_KV_DIR", help="Directory of the KV store.", rich_help_panel=_ENGINE)
]
PrefixText = Annotated[
    str | None,
    typer.Option("--prefix", help="Text before the first chunk of your prompts, as rendered.", rich_help_panel=_ENGINE),
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
ModeName = Annotated[
    str,
    typer.Option("--mode", help="auto, full (no reuse), prefix (exact reuse only) or stitch.", rich_help_panel=_REPAIR),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]

DEFAULT_KV_DIR = Path(".kvrag")


class Group:
    """Options that a command takes together, as one argument of this name."""

    def __init__(self, name: str, *parameters: inspect.Parameter) -> None:
        self.name, self.parameters = name, parameters

    def pop(self, options: Given) -> Given:
        """Take the group's options out of all; those that were not given and have no default are left out."""
        found = {p.name: options.pop(p.name) for p in self.parameters}
        return {name: value for name, value in found.items() if value is not None}


def takes(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of groups; it gets each group's as a dict, by the group's name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**options: Any) -> None:
            command(**{group.name: group.pop(options) for group in groups}, **options)

        names = {group.name for group in groups}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in names]
        shared = [parameter for group in groups for parameter in group.parameters]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _option(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _field(config: type, name: str, panel: str, *, flag: str = "", env: bool = False) -> inspect.Parameter:
    """Make an option of a config's field; not given, it leaves the config's default."""
    hint, field = option_fields(config, name)[name]
    kind = next((part for part in get_args(hint) if part is not NoneType), hint) if NoneType in get_args(hint) else hint
    summary = " ".join(field.description.replace("``", "").split()).partition(". ")[0].rstrip(".")
    option = typer.Option(
        flag or f"--{name.replace('_', '-')}",
        envvar=f"KVRAG_{name.upper()}" if env else None,
        help=f"{summary}.",
        min=0 if kind is int else None,
        show_default=str(field.default) if field.default is not None else False,
        rich_help_panel=panel,
    )
    return _option(name, Annotated[(str if get_origin(kind) is Literal else kind) | None, option], None)


ENGINE = Group(
    "engine",
    _option("model", Model),
    _option("kv_dir", KVDir, DEFAULT_KV_DIR),
    _option("prefix", PrefixText, None),
    _option("system", System, None),
    _option("namespace", Namespace, "default"),
    _option("dtype", Dtype, "auto"),
    _option("device", Device, None),
    _field(StoreConfig, "kv_dtype", _ENGINE, env=True),
)
MAYBE_ENGINE = Group("engine", _option("model", MaybeModel, None), *ENGINE.parameters[1:])
ESTIMATE = Group(
    "engine", *(p for p in ENGINE.parameters if p.name in ("model", "kv_dir", "dtype", "device", "kv_dtype"))
)
DEMO = Group("engine", *(p for p in ENGINE.parameters if p.name in ("namespace", "dtype", "device")))
REPAIR = Group(
    "repair",
    _field(RepairConfig, "strategy", _REPAIR),
    _field(RepairConfig, "recompute_ratio", _REPAIR, flag="--ratio"),
)
LIMITS = Group(
    "limits", *(_field(StoreConfig, name, _STORE, env=True) for name in ("disk_bytes", "min_free_bytes", "durability"))
)
SAMPLING = Group("sampling", *(_field(SamplingConfig, name, "Answer") for name in ("max_new_tokens", "temperature")))


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given on the command line, not by the environment or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def key_options() -> Given:
    """Return the option of :class:`kvrag.StoreConfig` for the key that the environment has."""
    return {"encryption_key": f"env:{KEY_VARIABLE}"} if os.environ.get(KEY_VARIABLE) else {}


def open_engine(engine: Given, *, repair: Given | None = None, limits: Given | None = None) -> KVRagEngine:
    """Open an engine and load its model, with a sign of life.

    Parameters
    ----------
    engine, repair, limits
        What was given of the groups of these names.
    """
    options = dict(engine)
    prefix, system = options.pop("prefix", None), options.pop("system", None)
    if prefix is not None and system is not None:
        raise ConfigError("--prefix and --system both say what stands before the first chunk; pass one of them")
    kept = {"kv_dtype": options.pop("kv_dtype")} if "kv_dtype" in options else {}
    config = StoreConfig(**kept, **key_options(), **(limits or {}))
    repaired = RepairConfig(**repair) if repair else None
    with progress(f"loading {options['model']} ..."):
        from kvrag.engine import KVRagEngine

        before = prefix if system is None else [{"role": "system", "content": system}]
        opened = KVRagEngine.from_pretrained(**options, prefix=before, repair=repaired, store_config=config)
        opened.loaded  # noqa: B018 - loads it here, where it is announced
    return opened
