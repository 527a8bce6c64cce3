"""Groups of options that several commands share.

Options of configs are made from the configs' fields, which declare type and help.

::

    @takes(engine=ENGINE, repair=REPAIR)        --model --kv-dir … --strategy --recompute-ratio
    def ask(engine: Given, repair: Given, …)  ◀──  {"model": …, …}, {"recompute_ratio": …}
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

import typer

from kvrag.cli.documents import SUFFIXES
from kvrag.cli.output import progress
from kvrag.config import (
    IndexOptions,
    RepairConfig,
    Retention,
    SamplingConfig,
    StoreConfig,
    as_config,
    check_mode,
    check_template_kwargs,
    option_field,
    spelling,
)
from kvrag.config.address import address
from kvrag.errors import ConfigError, InputError

if TYPE_CHECKING:
    from kvrag.engine import KVRagEngine

Given = dict[str, Any]
"""Options of a group that were given, or have a default."""

Words = list[str] | None
"""Arguments of a command, or repeated values of an option."""

Group = tuple[inspect.Parameter, ...]
"""Options that a command takes together, as a single argument."""

KEY_VARIABLE = "KVRAG_ENCRYPTION_KEY"
"""Variable that holds the store's key.

The key has no option, because other users can see the arguments of a process.
"""

_ENGINE = "Model and store"
_REPAIR = "Reuse and repair"
_INDEX = "Indexing"
_STORE = "Limits of the store (those of your application)"

_of_engine = functools.partial(typer.Option, rich_help_panel=_ENGINE)
_CONTEXT = _of_engine(
    help=(
        "Text that chunks are encoded behind: default (250 tokens of passages), default:1000, "
        "none, or a text of your own."
    ),
)


def _checked_mode(mode: str) -> str:
    """Return a mode; refuse another word before a model is loaded."""
    check_mode(mode)
    return mode


KVDir = Annotated[
    str,
    _of_engine(
        envvar="KVRAG_KV_DIR",
        parser=address,
        metavar="PATH",
        help="Directory of the KV store, or a shared one's address.",
    ),
]
Namespace = Annotated[str, _of_engine(help="Chunks of one namespace are never found from another.")]
ModeName = Annotated[
    str,
    typer.Option(
        callback=_checked_mode,
        help="auto, full (no reuse), prefix (exact reuse only) or stitch.",
        rich_help_panel=_REPAIR,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]

ChunkTokens = Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")]

DEFAULT_KV_DIR = ".kvrag"


class EngineGroup(Given):
    """Options of an engine that were given, with what commands make of them."""

    def name_model(self, ctx: typer.Context, words: Words, *, most: int | None = 0) -> list[str]:
        """Move MODEL, the first argument, into these options; return the other arguments.

        MODEL may be left out where ``--model`` or ``KVRAG_MODEL`` names it. With ``--model``, no
        argument is the model. With ``KVRAG_MODEL``, the first argument is the model if more than
        ``most`` arguments are given. Where any number may follow (``most`` is ``None``), it is the
        model if it is a model's directory, a ``.gguf`` file, or ``owner/name`` with no such path.

        Raises :class:`InputError` if no model is named, or too many arguments are given.
        """
        words = list(words or ())
        is_named = self.get("model") is not None
        if not is_named and words and _is_text_file(words[0]):
            raise InputError(
                f"{words[0]!r} is no model; pass MODEL before it, name it by --model, or set "
                "KVRAG_MODEL"
            )
        if is_on_command_line(ctx, "model"):
            is_first = False
        elif not is_named:
            is_first = True
        elif most is None:
            is_first = bool(words) and _is_model(words[0])
        else:
            is_first = len(words) > most
        if is_first:
            if not words:
                raise InputError(
                    f"pass a model, as in: kvrag {ctx.info_name} MODEL ...; or set KVRAG_MODEL"
                )
            self["model"] = words.pop(0)
        if most is not None and len(words) > most:
            raise InputError(
                f"{words[most]!r} is one argument too many; text of several words needs quotation "
                "marks"
            )
        return words

    def arguments(self, *, repair: Given | None = None, limits: Given | None = None) -> Given:
        """Return the arguments of :meth:`KVRagEngine.from_pretrained` for these options."""
        options = dict(self)
        prefix, system, context = (
            options.pop(name, None) for name in ("prefix", "system", "chunk_context")
        )
        if prefix is not None and system is not None:
            raise ConfigError(
                "--prefix and --system both set the text before the first chunk; pass one of them"
            )
        kept = {name: options.pop(name) for name in ("kv_dtype", "catalog") if name in options}
        config = StoreConfig(**kept, **key_options(), **(limits or {}))
        if context is not None:
            options["context"] = None if context == "none" else context
        if "chat_template_kwargs" in options:
            options["chat_template_kwargs"] = _variables(options["chat_template_kwargs"])
        options["prefix"] = prefix
        if system is not None:
            options["prefix"] = [{"role": "system", "content": system}]
        return {**options, "repair": repair_of(repair or {}), "store_config": config}

    def open(self, **groups: Given) -> KVRagEngine:
        """Open an engine and load its model, showing progress.

        Takes the groups of :meth:`arguments`.
        """
        options = self.arguments(**groups)
        with progress("starting ..."):
            from kvrag.engine import KVRagEngine
        opened = KVRagEngine.from_pretrained(**options)
        opened.loaded  # noqa: B018 - loads it here, with progress of its own
        return opened


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add groups of options to a command, which gets every group as a dict of its set values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**options: Any) -> None:
            for group, parameters in groups.items():
                options[group] = EngineGroup(
                    {
                        p.name: value
                        for p in parameters
                        if (value := options.pop(p.name)) is not None
                    }
                )
            command(**options)

        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name not in groups
        ]
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in (*own, *(p for group in groups.values() for p in group))
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def parse_bytes(text: str) -> int:
    """Read a number of bytes, with or without a unit; raise typer's error for other text."""
    try:
        return cast(int, spelling.parse_bytes(str(text)))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


ALIASES = {"recompute_ratio": ("ratio",), "max_new_tokens": ("max_tokens",)}
"""Other names of options."""


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _option(
    name: str,
    kind: Any,
    default: object = None,
    *,
    flags: Iterable[str] = (),
    panel: str = _ENGINE,
    **form: Any,
) -> inspect.Parameter:
    """Make an option; without ``flags``, its flag is its name."""
    option = typer.Option(*flags, rich_help_panel=panel, **form)
    return _parameter(name, Annotated[kind, option], default)


def _field(config: type, name: str, panel: str, *, env: bool = False) -> inspect.Parameter:
    """Make an option from a config's field; if it is not given, the config's default holds."""
    hint, field = option_field(config, name)
    kind = hint
    if NoneType in get_args(hint):
        kind = get_args(hint)[0]
    summary = (
        " ".join(str(field.description).replace("``", "").split()).partition(". ")[0].rstrip(".")
    )
    form = Given()
    if env:
        form["envvar"] = f"KVRAG_{name.upper()}"
    if name.endswith("_bytes"):
        form |= {"parser": parse_bytes, "metavar": "SIZE"}
    elif kind is int:
        form["min"] = 0
        form["max"] = next((each.le for each in field.metadata if hasattr(each, "le")), None)
    if get_origin(kind) is Literal:
        kind = str
    return _option(
        name,
        kind | None,
        flags=[f"--{each.replace('_', '-')}" for each in (name, *ALIASES.get(name, ()))],
        panel=panel,
        help=f"{summary}.",
        show_default=str(field.default) if field.default is not None else False,
        **form,
    )


_STORED = (
    _parameter("kv_dir", KVDir, DEFAULT_KV_DIR),
    _field(StoreConfig, "kv_dtype", _ENGINE, env=True),
)
_RUN = (
    _option("dtype", str, "auto", help="auto (float32 on a CPU), float32, bfloat16 or float16."),
    _option("device", str | None, help="cpu or cuda; default: CUDA if there is one."),
)
_PROMPTS = (
    _option("prefix", str | None, help="Text before the first chunk of your prompts, as rendered."),
    _option("system", str | None, help="System message of your chat prompts; instead of --prefix."),
    _option(
        "chat_template_kwargs",
        str | None,
        metavar="JSON",
        help='Variables for the chat template, as {"enable_thinking": false}.',
    ),
    _parameter("chunk_context", Annotated[str, _CONTEXT], "default"),
    _parameter("namespace", Namespace, "default"),
)
_MODEL = _option(
    "model",
    str | None,
    flags=("--model", "-m"),
    envvar="KVRAG_MODEL",
    help="Hub id, directory, or .gguf file, where the first argument is none.",
)
ESTIMATE = (_MODEL, _STORED[1], _RUN[0])
_CATALOG = _field(StoreConfig, "catalog", _ENGINE, env=True)
ENGINE = (_MODEL, *_STORED, *_RUN, _CATALOG, *_PROMPTS)
DEMO = (_PROMPTS[-1], *_RUN)
CALIBRATE = (*ESTIMATE, _RUN[1], *_PROMPTS[:3])
EVALUATE = (*CALIBRATE, _PROMPTS[3])
Contexts = Annotated[Words, _CONTEXT]
REPAIR = (
    _option(
        "named",
        Literal["auto", "fast", "careful"] | None,
        flags=("--repair",),
        help=(
            "auto (as calibrated for the model, else the default), fast (loses many facts) or "
            "careful."
        ),
        envvar="KVRAG_REPAIR",
        panel=_REPAIR,
    ),
    *(_field(RepairConfig, name, _REPAIR) for name in ("strategy", "recompute_ratio")),
)
LIMITS = tuple(
    _field(StoreConfig, name, _STORE, env=True)
    for name in ("shared", "disk_bytes", "min_free_bytes", "durability")
)
INDEX = (
    _field(IndexOptions, "batch_size", _INDEX),
    _field(Retention, "priority", _INDEX),
)
SERVED = (
    *LIMITS,
    _option(
        "history_bytes",
        int,
        "1GiB",
        parser=parse_bytes,
        metavar="SIZE",
        envvar="KVRAG_HISTORY_BYTES",
        help="Budget for finished requests' KV, from which a chat's next turn continues; 0: none.",
        panel=_STORE,
    ),
)
# A decorator of commands that serve an engine.
serving = takes(engine=ENGINE, repair=REPAIR, limits=SERVED)
SAMPLING = tuple(
    _field(SamplingConfig, name, "Answer") for name in ("max_new_tokens", "temperature")
)


def _is_model(word: str) -> bool:
    path = Path(word)
    if path.exists():
        return path.suffix == ".gguf" or any(
            (path / f"{name}config.json").is_file() for name in ("", "adapter_")
        )
    return re.fullmatch(r"(?!\.)[\w.-]+/[\w.-]+", word) is not None and not _is_text_file(word)


def _is_text_file(word: str) -> bool:
    path = Path(word)
    return path.suffix in (*SUFFIXES, ".json", ".jsonl") and not path.is_dir()


def is_on_command_line(context: typer.Context, name: str) -> bool:
    """Whether a parameter comes from the command line, not from the environment or a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def key_options() -> Given:
    """Return the option of :class:`kvrag.StoreConfig` for the key in the environment, if any."""
    if os.environ.get(KEY_VARIABLE):
        return {"encryption_key": f"env:{KEY_VARIABLE}"}
    return {}


def store_options(kv_dir: str, *, plain: bool = False) -> Given:
    """Return the options of :class:`kvrag.StoreConfig` for key and catalog in the environment.

    A directory has its catalog in it, whatever the environment names. ``plain``: without a key.
    """
    catalog = os.environ.get("KVRAG_CATALOG") if "://" in kv_dir else None
    return {"catalog": catalog or None} | ({} if plain else key_options())


def loading_options(engine: Given) -> Given:
    """Return the options of an engine that say how its model is loaded."""
    return {each.name: engine[each.name] for each in _RUN if each.name in engine}


def repair_of(given: Given) -> RepairConfig | None:
    """Return the named repair, changed by the other options."""
    changes = dict(given)
    named = as_config(RepairConfig, changes.pop("named", None), option="--repair")
    if changes:
        return replace(named or RepairConfig(), **changes)
    return named


def _variables(text: str) -> Given:
    """Read variables for the chat template from JSON."""
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'--chat-template-kwargs is no JSON ({error}); pass an object, as {{"enable_thinking": '
            f"false}}"
        ) from None
    return check_template_kwargs(variables)
