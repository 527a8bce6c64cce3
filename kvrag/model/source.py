"""Model source: files, device, dtype and options, checked before the weights are loaded."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from kvrag.config import check_prove
from kvrag.config.address import answers, local, shown
from kvrag.errors import (
    ConfigError,
    KVRagError,
    ModelError,
    loading_reason,
    require,
)
from kvrag.identity.adapters import unwrap
from kvrag.model.gguf.parsing import is_gguf, parsed_once
from kvrag.model.plain import check_generates, check_placement, context_window
from kvrag.types import Prove, StrPath

T = TypeVar("T")

HUB_WAIT_S = 5.0  # longest wait for a connection to the hub
_HOLDS_S = 30.0  # time for which the outcome holds


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model to load, with its options.

    ``model`` is a hub id, a local directory (of a model or of an adapter), a ``.gguf`` file, a
    loaded ``PreTrainedModel`` or a ``PeftModel``. ``tokenizer`` is a tokenizer, its id or its
    directory, or a processor; by default, the model's own. ``dtype`` is a ``torch.dtype``, its
    name, or ``"auto"``: float32 on CPU (bfloat16 is slow on CPUs without native support), else the
    checkpoint's.
    ``device`` is by default CUDA if there is a CUDA device, else CPU. ``hf_kwargs`` go to
    ``from_pretrained``. ``extra_keys`` are part of the fingerprint: KV is shared only where they
    are equal. ``prove`` says whether reuse is proven on the loaded model.
    """

    model: StrPath | PreTrainedModel
    tokenizer: Any = None
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    # Not in the repr: it may hold tokens, and proxies with passwords.
    hf_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    extra_keys: Mapping[str, str] = field(default_factory=dict)
    prove: Prove = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", unwrap(local(self.model)))
        object.__setattr__(self, "tokenizer", local(self.tokenizer))
        # transformers' old name for ``dtype``, which it ignores beside the new name.
        if "torch_dtype" in self.hf_kwargs:
            if self.dtype != "auto":
                raise ConfigError(
                    f"dtype is {self.dtype!r}, and torch_dtype was given too; pass dtype alone"
                )
            options = dict(self.hf_kwargs)
            object.__setattr__(self, "dtype", options.pop("torch_dtype"))
            object.__setattr__(self, "hf_kwargs", options)
        keys = self.extra_keys
        if not isinstance(keys, Mapping) or not all(
            isinstance(part, str) for part in [*keys, *keys.values()]
        ):
            raise ConfigError(
                f"extra_keys is {keys!r}; pass a dict of names and values, all of them strings"
            )

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the loaded weights in this process.

        ``extra_keys`` are not part of it: they separate KV, not weights.
        """
        return (
            _spelling(self.model),
            _spelling(self.tokenizer),
            self.revision,
            str(resolve_dtype(self)),
            str(resolve_device(self)),
            tuple(sorted((name, _option(value)) for name, value in self.hf_kwargs.items())),
            self.prove,
        )

    @property
    def name(self) -> str:
        """Short name for messages and results."""
        if isinstance(self.model, PreTrainedModel):
            return str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)
        return os.fspath(self.model)

    @property
    def directory(self) -> str:
        """Directory of the model's files, or its hub id."""
        path = os.fspath(self.model)
        if path.endswith(".gguf"):
            return os.path.dirname(path) or "."
        return path

    @property
    def base_directory(self) -> str:
        """Directory or hub id of the model's config.

        For a directory with an adapter alone, it is the base model that the adapter names.
        """
        path = self.directory
        adapter = Path(path, "adapter_config.json")
        if not adapter.is_file() or Path(path, "config.json").exists():
            return path
        return str(trying(self, lambda: json.loads(adapter.read_text())["base_model_name_or_path"]))

    def hub_options(self, path: str = ".", *, own_files: bool = True) -> dict[str, Any]:
        """Return the user's options that locate files.

        With ``own_files``, they include the revision and the GGUF file of the model. If ``path`` is
        a hub id and the hub can't be reached, its files are looked for here alone.
        """
        options = {name: value for name, value in self.hf_kwargs.items() if name in _HUB_OPTIONS}
        if not (
            os.path.exists(path)
            or {"local_files_only", "proxies"} & set(options)
            or _hub_answers(int(time.monotonic() / _HOLDS_S))
        ):
            options["local_files_only"] = True
        if own_files and self.revision is not None:
            options["revision"] = self.revision
        if own_files and is_gguf(self.model):
            options["gguf_file"] = os.path.basename(self.name)
        return options

    def load_tokenizer(self) -> Any:
        """Return the given tokenizer, or load the tokenizer of the given directory or the model."""
        is_named = isinstance(self.tokenizer, (str, os.PathLike))
        if self.tokenizer is not None and not is_named:
            return getattr(self.tokenizer, "tokenizer", self.tokenizer)  # it may be a processor
        home = os.fspath(self.tokenizer) if is_named else self.directory
        if not is_named and not os.path.exists(os.path.join(home, "tokenizer_config.json")):
            home = self.base_directory
        options = self.hub_options(home, own_files=not is_named)
        # The tokenizer of a GGUF file is read from that file.
        read = (self.name, "model") if "gguf_file" in options else (home, "tokenizer")
        with parsed_once(self.model):
            return trying(self, lambda: AutoTokenizer.from_pretrained(home, **options), *read)

    def window(self) -> int:
        """Return the context window as local files have it, 0 if unknown.

        Nothing is downloaded, and a ``.gguf`` file is not opened, because that takes seconds.
        """
        model: Any = self.model
        with suppress(OSError, ValueError, KeyError, AttributeError):
            if not isinstance(model, PreTrainedModel) and not is_gguf(model):
                options = {**self.hub_options(), "local_files_only": True}
                config = AutoConfig.from_pretrained(self.base_directory, **options)
            else:
                config = model.config
            return context_window(config.get_text_config(), 0)
        return 0

    def load_config(self) -> Any:
        """Read the config of the model; raises as :func:`trying`."""
        base = self.base_directory
        options = self.hub_options(base)
        named = self.name if "gguf_file" in options else base  # its config is in the file
        with parsed_once(self.model):
            return trying(self, lambda: AutoConfig.from_pretrained(base, **options), named)

    def check(self) -> None:
        """Check the source without loading the weights.

        Raises ``ModelError`` or ``ConfigError`` if the model or the device is missing, or the model
        is no causal LM.
        """
        if not isinstance(self.model, (str, os.PathLike, PreTrainedModel)):
            remedy = "a hub id, a directory, a .gguf file, a loaded PreTrainedModel or a PeftModel"
            if inside := _inside(self.model):
                remedy = f"the model inside it, {inside}, in its place"
            raise ConfigError(f"model is of type {type(self.model).__name__}; pass {remedy}")
        check_prove(self.prove)
        resolve_device(self)
        resolve_dtype(self)
        if isinstance(self.model, PreTrainedModel):
            check_given(self, self.model)
            check_generates(self.model)
            check_placement(self.model)
            return
        path = os.fspath(self.model)
        check_path(path, "model")
        if isinstance(self.tokenizer, (str, os.PathLike)):
            check_path(os.fspath(self.tokenizer), "tokenizer")
        if is_gguf(path):
            for module in ("gguf", "accelerate"):
                require(module, extra="gguf", purpose="reading GGUF files")
            return  # parsing a GGUF header takes seconds: its kind is checked at load
        folder = os.path.join(path, self.hf_kwargs.get("subfolder") or "")
        trying(self, lambda: _check_directory(folder))
        if self.base_directory != path:
            require("peft", extra="adapters", purpose="loading adapters")
        check_generates(self.load_config())


def _spelling(thing: Any) -> object:
    """Return a hashable name: the real path of a file, a hub id as it is, else the ``id``."""
    if isinstance(thing, (str, os.PathLike)):
        return os.path.realpath(thing) if os.path.exists(thing) else os.fspath(thing)
    return id(thing)


def _option(value: Any) -> str:
    """Return an option of ``from_pretrained`` as text.

    Config objects are written by ``to_dict()``, because their repr may leave out entries.
    """
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return f"{type(value).__name__}{to_dict()!r}"
    return repr(value)


def resolve_device(source: ModelSource) -> torch.device:
    """Return the device to load to; raise ``ConfigError`` if torch can't use it here."""
    if isinstance(source.model, PreTrainedModel):
        return torch.device(source.model.device)
    if source.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(source.device)
        if device.type != "cuda":
            torch.empty(1, device=device).cpu()  # torch may know a device that is not here
        elif (device.index or 0) >= (
            count := torch.cuda.is_available() * torch.cuda.device_count()
        ):
            raise RuntimeError(f"torch finds {count} CUDA device(s)")
    except Exception as error:  # every backend has types of its own
        raise ConfigError(
            f"device is {source.device!r}, which torch can't use here ({str(error)[:200]}); "
            "pass 'cpu', 'cuda' or the index of a device that is here"
        ) from error
    return device


def resolve_dtype(source: ModelSource) -> str | torch.dtype:
    """Return the dtype to load in: a ``torch.dtype`` or ``"auto"``."""
    if source.dtype == "auto":
        if resolve_device(source).type == "cpu":
            return torch.float32
        return "auto"
    dtype = getattr(torch, str(source.dtype).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype is {source.dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'"
        )
    return dtype


def check_given(source: ModelSource, model: PreTrainedModel) -> None:
    """Raise ``ConfigError`` for a loaded model without a tokenizer or with options for loading.

    A ``dtype`` or ``device`` that contradicts the model is an error, too.
    """
    if source.tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer: pass tokenizer=...")
    # Options that locate files are of use for a tokenizer that is given by its path.
    usable = _HUB_OPTIONS if isinstance(source.tokenizer, (str, os.PathLike)) else ()
    idle = [name for name in source.hf_kwargs if name not in usable] + ["revision"] * (
        source.revision is not None
    )
    if idle:
        raise ConfigError(
            f"{idle[0]!r} is given with a model that is loaded already, and would have no effect: "
            "leave it out, or pass it to the function that loads the model"
        )
    if source.dtype != "auto" and resolve_dtype(source) != model.dtype:
        raise ConfigError(
            f"dtype is {source.dtype!r}, and the loaded model is {model.dtype}: "
            "leave it out, or load the model with it"
        )
    if source.device is not None:
        wanted = resolve_device(replace(source, model=""))
        if wanted.type != model.device.type or wanted.index not in (None, model.device.index):
            raise ConfigError(
                f"device is {source.device!r}, and the loaded model is on {model.device}: "
                "leave it out, or move the model first"
            )


# Options of ``from_pretrained`` that locate files: config and tokenizer as well as weights.
_HUB_OPTIONS = {
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "subfolder",
    "token",
    "trust_remote_code",
}


@lru_cache(maxsize=1)
def _hub_answers(_moment: int) -> bool:
    """Whether the hub can be reached; without this look, its client retries for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    if set(urllib.request.getproxies()) - {"no"}:
        return True  # the proxy may reach it
    return answers(huggingface_hub.constants.ENDPOINT, HUB_WAIT_S)


def loading_options(source: ModelSource) -> dict[str, Any]:
    """Return the options to load the weights with."""
    return {
        "dtype": resolve_dtype(source),
        **source.hub_options(source.base_directory),
        **source.hf_kwargs,
    }


def check_path(path: str, what: str) -> None:
    """Raise ``ModelError`` for the path of a missing model or tokenizer.

    A missing path in the form of a hub id is left to the hub.
    """
    is_there = os.path.exists(path)
    named = shown(path)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            reason = (
                "is a directory; name the file in it" if is_there else "does not exist; check it"
            )
            raise ModelError(f"the GGUF file {named} of the {what} {reason}")
    elif is_there and not os.path.isdir(path):
        raise ModelError(
            f"the {what} {named} is a file; "
            "pass the directory that holds config.json, or a .gguf file"
        )
    elif not is_there and _HUB_NAME.fullmatch(path) is None:
        raise ModelError(
            f"the directory {named} of the {what} does not exist; check the path, "
            "or pass a hub id such as 'owner/name'"
        )


def _check_directory(path: str) -> None:
    """Raise ``ModelError`` for a directory without a model's or adapter's config."""
    held = sorted(os.listdir(path)) if os.path.isdir(path) else _CONFIGS
    if set(held) & set(_CONFIGS):
        return
    ggufs = [name for name in held if name.endswith(".gguf")]
    remedy = f"name the file: {os.path.join(path, ggufs[0])!r}" if ggufs else "check the path"
    raise ModelError(
        f"the directory {path!r} holds no config.json, so it is no model; "
        f"it holds {', '.join(held[:3]) or 'nothing'}; {remedy}"
    )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_CONFIGS = ["config.json", "adapter_config.json"]


def trying(
    source: ModelSource, action: Callable[[], T], path: str | None = None, part: str = "model"
) -> T:
    """Run a transformers call and translate its errors into kvrag's.

    ``path`` is the path or hub id of the files that it reads, by default the model's; ``part`` is
    ``"model"`` or ``"tokenizer"``.
    """
    try:
        return action()
    except KVRagError:
        raise
    except Exception as error:  # the readers of files have types of errors of their own
        if isinstance(error, TypeError) and source.hf_kwargs:
            raise ConfigError(
                f"transformers refuses an option for {source.name!r}: {error}"
            ) from error
        named = path or source.name
        reason = loading_reason(error, named, part, source.hf_kwargs)
        raise ModelError(
            f"could not load the {part} {named!r}: {reason} "
            f"({type(error).__name__}: {str(error)[:300]})"
        ) from error


def _inside(thing: Any) -> str:
    """Return where a pipeline, or a module around a model, holds the model; ``""``: nowhere."""
    held = getattr(thing, "named_modules", getattr(thing, "__dict__", {}).items)
    return next((f"model.{name}" for name, part in held() if isinstance(part, PreTrainedModel)), "")
