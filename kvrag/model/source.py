"""Model source: files, device, dtype and options, checked before the weights are loaded."""

from __future__ import annotations

import json
import os
import re
import struct
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
    is_out_of_memory,
    loading_fault,
    require,
)
from kvrag.identity.adapters import unwrap
from kvrag.model.gguf.parsing import is_gguf, parsed_once
from kvrag.model.plain import check_generates, check_placement
from kvrag.types import Prove

T = TypeVar("T")

HUB_WAIT_S = 5.0  # longest wait for a connection to the hub, and how long the outcome holds


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

    model: str | os.PathLike[str] | PreTrainedModel
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
            object.__setattr__(self, "dtype", self.hf_kwargs["torch_dtype"])
            object.__setattr__(
                self, "hf_kwargs", {k: v for k, v in self.hf_kwargs.items() if k != "torch_dtype"}
            )
        if not isinstance(self.extra_keys, Mapping):
            raise ConfigError(
                f"extra_keys is {self.extra_keys!r}; pass a dict of names and values, both strings"
            )
        for item in self.extra_keys.items():
            if not all(isinstance(part, str) for part in item):
                raise ConfigError(
                    f"extra_keys holds {item[0]!r}: {item[1]!r}; names and values must be strings"
                )

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the loaded weights in this process.

        ``extra_keys`` are not part of it: they separate KV, not weights.
        """
        device = str(resolve_device(self))
        dtype = str(resolve_dtype(self))
        options = tuple(sorted((name, _option(value)) for name, value in self.hf_kwargs.items()))
        return (
            _spelling(self.model),
            _spelling(self.tokenizer),
            self.revision,
            dtype,
            device,
            options,
            self.prove,
        )

    @property
    def name(self) -> str:
        """Short name for messages and results."""
        if isinstance(self.model, PreTrainedModel):
            return str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)
        return os.fspath(self.model)


def _spelling(thing: Any) -> object:
    """Return a hashable name: the real path of a file, a hub id as it is, else the ``id``."""
    if isinstance(thing, (str, os.PathLike)):
        path = os.fspath(thing)
        if os.path.exists(path):
            return os.path.realpath(path)
        return path
    if thing is None:
        return None
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
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device is {source.device!r}, which torch can't use here; use 'cpu' or 'cuda'"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was requested, but torch finds no CUDA device here; pass device='cpu'"
        )
    return device


def resolve_dtype(source: ModelSource) -> str | torch.dtype:
    """Return the dtype to load in: a ``torch.dtype`` or ``"auto"``."""
    if source.dtype == "auto":
        if resolve_device(source).type == "cpu":
            return torch.float32
        return "auto"
    dtype = getattr(torch, source.dtype, None) if isinstance(source.dtype, str) else source.dtype
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
        what = f"{idle[0]!r} is given with a model that is loaded already, and would have no effect"
        raise ConfigError(f"{what}: leave it out, or pass it to the function that loads the model")
    if source.dtype != "auto" and resolve_dtype(source) != model.dtype:
        raise ConfigError(
            f"dtype is {source.dtype!r}, and the loaded model is {model.dtype}: "
            "leave it out, or load the model with it"
        )
    if source.device is not None:
        wanted = resolve_device(replace(source, model=""))
        if wanted.type != model.device.type or wanted.index not in (None, model.device.index):
            where = f"device is {source.device!r}, and the loaded model is on {model.device}"
            raise ConfigError(f"{where}: leave it out, or move the model first")


def directory(source: ModelSource) -> str:
    """Return the directory of the model's files, or its hub id."""
    path = os.fspath(source.model)
    if path.endswith(".gguf"):
        return os.path.dirname(path) or "."
    return path


def base_directory(source: ModelSource) -> str:
    """Return the directory or hub id of the model's config.

    For a directory with an adapter alone, it is the base model that the adapter names.
    """
    path = directory(source)
    adapter = Path(path, "adapter_config.json")
    if not adapter.is_file() or Path(path, "config.json").exists():
        return path
    return str(trying(source, lambda: json.loads(adapter.read_text())["base_model_name_or_path"]))


_HUB_OPTIONS = {
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "subfolder",
    "token",
}
_HUB_OPTIONS |= {"trust_remote_code"}
"""Options of ``from_pretrained`` that locate files: config and tokenizer as well as weights."""


def hub_options(source: ModelSource, *, own_files: bool = True) -> dict[str, Any]:
    """Return the user's options that locate files.

    With ``own_files``, they include the revision and the GGUF file of the model.
    """
    options = {name: value for name, value in source.hf_kwargs.items() if name in _HUB_OPTIONS}
    names = [n for n in (source.model, source.tokenizer) if isinstance(n, (str, os.PathLike))]
    if not all(map(os.path.exists, names)) and not _hub_answers(int(time.monotonic() / HUB_WAIT_S)):
        options.setdefault("local_files_only", True)
    if own_files and source.revision is not None:
        options["revision"] = source.revision
    if own_files and (path := os.fspath(source.model)).endswith(".gguf"):
        options["gguf_file"] = os.path.basename(path)
    return options


@lru_cache(maxsize=1)
def _hub_answers(_moment: int) -> bool:
    """Whether the hub can be reached; without this look, its client retries for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    if any(urllib.request.getproxies().get(name) for name in ("https", "all")):
        return True  # the proxy may reach it
    return answers(huggingface_hub.constants.ENDPOINT, HUB_WAIT_S)


def loading_options(source: ModelSource) -> dict[str, Any]:
    """Return the options to load the weights with."""
    return {"dtype": resolve_dtype(source), **hub_options(source), **source.hf_kwargs}


def load_tokenizer(source: ModelSource) -> Any:
    """Return the given tokenizer, or load the tokenizer of the given directory or the model."""
    is_named = isinstance(source.tokenizer, (str, os.PathLike))
    if source.tokenizer is not None and not is_named:
        return getattr(source.tokenizer, "tokenizer", source.tokenizer)  # it may be a processor
    home = os.fspath(source.tokenizer) if is_named else directory(source)
    if not is_named and not os.path.exists(os.path.join(home, "tokenizer_config.json")):
        home = base_directory(source)
    options = hub_options(source, own_files=not is_named)
    with parsed_once(source.model):
        return trying(source, lambda: AutoTokenizer.from_pretrained(home, **options))


def check_path(path: str, what: str) -> None:
    """Raise ``ModelError`` for the path of a missing model or tokenizer.

    A missing path in the form of a hub id is left to the hub.
    """
    is_there = os.path.exists(path)
    named = shown(path)
    if path.endswith(".gguf"):
        if not os.path.isfile(path):
            if is_there:
                fault = "is a directory; name the file in it"
            else:
                fault = "does not exist; check the path"
            raise ModelError(f"the GGUF file {named} of the {what} {fault}")
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
    if not os.path.isdir(path) or any(
        os.path.isfile(os.path.join(path, name)) for name in _CONFIGS
    ):
        return
    held = sorted(os.listdir(path))
    ggufs = [name for name in held if name.endswith(".gguf")]
    remedy = f"name the file: {os.path.join(path, ggufs[0])!r}" if ggufs else "check the path"
    raise ModelError(
        f"the directory {path!r} holds no config.json, so it is no model; "
        f"it holds {', '.join(held[:3]) or 'nothing'}; {remedy}"
    )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_CONFIGS = ("config.json", "adapter_config.json")


def trying(source: ModelSource, action: Callable[[], T]) -> T:
    """Run a transformers call and translate its errors into kvrag's."""
    try:
        return action()
    except KVRagError:
        raise
    except TypeError as error:
        raise ConfigError(f"transformers refuses an option for {source.name!r}: {error}") from error
    except (
        OSError,
        ValueError,
        LookupError,
        RuntimeError,
        ImportError,
        AttributeError,
        AssertionError,
        MemoryError,
        struct.error,
    ) as error:
        is_here = not isinstance(source.model, PreTrainedModel) and os.path.exists(source.model)
        fault = (
            "the files of this directory are damaged, or are no causal language model's; check them"
        )
        method = _quantisation_of(source) if is_here else ""
        own = loading_fault(error)
        if own and (not method or is_out_of_memory(error)):
            fault = own
        elif not is_here:
            fault = (
                "there is no such directory here, and no such model of the hub that can be "
                "reached; check the name and the connection"
            )
        elif method:
            fault = (
                f"its quantisation ({method}) may need another device, or a package that is not "
                "here; check that transformers loads it here, or load it without quantisation"
            )
        raise ModelError(
            f"could not load {source.name!r}: {fault} ({type(error).__name__}: {str(error)[:300]})"
        ) from error


def _quantisation_of(source: ModelSource) -> str:
    """Return the method that a local source's weights are quantised by; empty for plain weights."""
    found = source.hf_kwargs.get("quantization_config")
    with suppress(OSError, ValueError):
        file = Path(base_directory(source), "config.json")
        found = found or json.loads(file.read_text("utf-8")).get("quantization_config")
    entries = found if isinstance(found, dict) else getattr(found, "__dict__", {})
    method = entries.get("quant_method", "")
    return str(getattr(method, "value", method))


_WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # of torch.compile
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}
"""Types of modules that stand around a model, and the attribute that holds it."""


def check_source(source: ModelSource) -> None:
    """Check a source without loading its weights.

    Raises ``ModelError`` or ``ConfigError`` if the model or the device is missing, or the model is
    no causal LM.
    """
    if not isinstance(source.model, (str, os.PathLike, PreTrainedModel)):
        kind = type(source.model).__name__
        remedy = "a hub id, a directory, a .gguf file, a loaded PreTrainedModel or a PeftModel"
        if kind in _WRAPPERS:
            remedy = f"the model inside it, model.{_WRAPPERS[kind]}, in its place"
        raise ConfigError(f"model is of type {kind}; pass {remedy}")
    check_prove(source.prove)
    resolve_device(source)
    resolve_dtype(source)
    if isinstance(source.model, PreTrainedModel):
        check_given(source, source.model)
        check_generates(source.model)
        check_placement(source.model)
        return
    path = os.fspath(source.model)
    check_path(path, "model")
    if isinstance(source.tokenizer, (str, os.PathLike)):
        check_path(os.fspath(source.tokenizer), "tokenizer")
    if is_gguf(path):
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", purpose="reading GGUF files")
        return  # parsing a GGUF header takes seconds: its kind is checked at load
    _check_directory(os.path.join(path, source.hf_kwargs.get("subfolder") or ""))
    if base_directory(source) != path:
        require("peft", extra="adapters", purpose="loading adapters")
    check_generates(config_of(source))


def config_of(source: ModelSource) -> Any:
    """Read the config of a source's model; raises as :func:`trying`."""
    with parsed_once(source.model):
        return trying(
            source,
            lambda: AutoConfig.from_pretrained(base_directory(source), **hub_options(source)),
        )
