"""Find and load a model, once per process, and say exactly which one it is."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvrag.acceptance import accept, proven
from kvrag.config import check_prove
from kvrag.errors import ConfigError, KVRagError, ModelError, UnsupportedModelError, require
from kvrag.fingerprint import digest
from kvrag.models import CausalLM
from kvrag.plain import PlainLM, check_generates
from kvrag.prompt import PromptEncoder
from kvrag.types import Prove

logger = logging.getLogger(__name__)
T = TypeVar("T")

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "use_cache", "_attn_implementation")
"""Config entries that don't change KV."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which model to load, and how.

    Parameters
    ----------
    model
        Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel``.
    tokenizer
        Tokenizer, its id or directory; ``None`` takes the model's own.
    revision
        Hub revision.
    dtype
        ``"auto"``: float32 on CPU (bfloat16 matmuls are up to 95 times slower on CPUs without native support), the checkpoint's dtype
        elsewhere. Or a ``torch.dtype`` or its name.
    device
        ``None``: CUDA if there is one, else CPU.
    hf_kwargs
        Passed on to ``from_pretrained``.
    prove
        Whether reuse is proven on the loaded model (:mod:`kvrag.proof`).
    """

    model: str | os.PathLike[str] | PreTrainedModel
    tokenizer: Any = None
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | None = None
    hf_kwargs: dict[str, Any] = field(default_factory=dict)
    prove: Prove = "auto"

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the loaded model in this process."""
        device, dtype = str(resolve_device(self)), str(resolve_dtype(self))
        options = tuple(sorted((name, repr(value)) for name, value in self.hf_kwargs.items()))
        return (_spelling(self.model), _spelling(self.tokenizer), self.revision, dtype, device, options, self.prove)

    @property
    def name(self) -> str:
        """A short name for messages and results."""
        if isinstance(self.model, PreTrainedModel):
            return str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)
        return os.fspath(self.model)


def _spelling(thing: Any) -> object:
    """One name for one thing: files by their real path, objects by identity."""
    if isinstance(thing, (str, os.PathLike)):
        path = os.fspath(thing)
        return os.path.realpath(path) if os.path.exists(path) else path
    return None if thing is None else id(thing)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A model ready for use: forwards, prompts, and the fingerprint that every key of its KV holds."""

    lm: CausalLM | PlainLM
    encoder: PromptEncoder
    fingerprint: str

    @property
    def reusable(self) -> CausalLM:
        """The model, if its KV is reused.

        Raises
        ------
        UnsupportedModelError
            If it is not; says why.
        """
        if isinstance(self.lm, PlainLM):
            raise UnsupportedModelError(f"{self.lm.refusal}; it answers by full prefill, and nothing can be stored")
        return self.lm


_loaded: weakref.WeakValueDictionary[tuple[object, ...], LoadedModel] = weakref.WeakValueDictionary()
"""What is in use, by source; the last engine that lets go of a model frees it."""
_load_lock = threading.Lock()


def load(source: ModelSource) -> LoadedModel:
    """Load a model, or return the one that this process has loaded from the same source and still uses.

    A model that was handed in is looked at anew each time: its weights may have changed since.

    Raises
    ------
    ModelError
        If it can't be found or loaded, or is no causal LM.
    ConfigError
        If the dtype or the device does not exist here.
    """
    if isinstance(source.model, PreTrainedModel):
        return _load(source)
    with _load_lock:
        found = _loaded.get(source.key)
        if found is None:
            found = _loaded[source.key] = _load(source)
        return found


def check_source(source: ModelSource) -> None:
    """Find the faults that can be found without loading weights: no such model, no such device, no causal LM.

    Raises
    ------
    ModelError, ConfigError
        As :func:`load`.
    """
    if not isinstance(source.model, (str, os.PathLike, PreTrainedModel)):
        raise ConfigError(
            f"model is of type {type(source.model).__name__}; pass a hub id, a directory, a .gguf file or a loaded PreTrainedModel"
        )
    check_prove(source.prove)
    resolve_device(source)
    resolve_dtype(source)
    if isinstance(source.model, PreTrainedModel):
        if source.tokenizer is None:
            raise ConfigError("a loaded model needs its tokenizer: pass tokenizer=...")
        check_generates(source.model)
        return
    path = Path(os.fspath(source.model))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", purpose="reading GGUF files")
        return  # parsing a GGUF header takes seconds: its kind is checked when it is loaded
    check_generates(_trying(source, lambda: AutoConfig.from_pretrained(source.model, **_hub_options(source))))


def resolve_device(source: ModelSource) -> torch.device:
    """Return the device to load to."""
    if isinstance(source.model, PreTrainedModel):
        return torch.device(source.model.device)
    if source.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(source.device)
        if device.type != "cuda":
            torch.empty(1, device=device).cpu()  # a device that torch knows may still not be here
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device is {source.device!r}, which torch can't use here; use 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was requested, but torch finds no CUDA device here; pass device='cpu'")
    return device


def resolve_dtype(source: ModelSource) -> str | torch.dtype:
    """Return the dtype to load in: a ``torch.dtype`` or ``"auto"``."""
    if source.dtype == "auto":
        return torch.float32 if resolve_device(source).type == "cpu" else "auto"
    dtype = getattr(torch, source.dtype, None) if isinstance(source.dtype, str) else source.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {source.dtype!r}; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return dtype


def _load(source: ModelSource) -> LoadedModel:
    check_source(source)
    if isinstance(source.model, PreTrainedModel):
        model, weights = source.model, _tensor_digest(source.model)
    else:
        options = _hub_options(source) | _gguf_options(source)
        where = _directory(source)
        dtype = resolve_dtype(source)
        model = _trying(
            source,
            lambda: AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **{**options, **source.hf_kwargs}),
        )
        check_generates(model)
        if "device_map" not in source.hf_kwargs:
            model = model.to(resolve_device(source))
        weights = _weights_identity(source, model)
    tokenizer = source.tokenizer
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        home = _directory(source) if tokenizer is None else os.fspath(tokenizer)
        options = (
            (_hub_options(source) | _gguf_options(source))
            if tokenizer is None
            else _hub_options(source, revision=False)
        )
        tokenizer = _trying(source, lambda: AutoTokenizer.from_pretrained(home, **options))
    lm = accept(model)
    if lm.device.type == "cpu":
        _keep_freed_memory()
    fingerprint = model_fingerprint(lm, tokenizer, weights)
    if source.prove == "auto" and isinstance(lm, CausalLM):
        lm = proven(lm, fingerprint)
    return LoadedModel(lm, PromptEncoder(tokenizer), fingerprint)


@cache
def _keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next forward instead of returning it to the kernel.

    A repair forward allocates its buffers in pieces of a few MB; taken from the kernel anew each time, their page faults cost a visible
    part of a stitched request on a CPU. Other allocators are left alone, and so is a process that sets glibc's own variables.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)
    mallopt(mmap_threshold, 2**25)


def _directory(source: ModelSource) -> str:
    path = os.fspath(source.model)
    return os.path.dirname(path) or "." if path.endswith(".gguf") else path


def _gguf_options(source: ModelSource) -> dict[str, Any]:
    path = os.fspath(source.model)
    return {"gguf_file": os.path.basename(path)} if path.endswith(".gguf") else {}


_HUB_OPTIONS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "subfolder",
    "token",
    "trust_remote_code",
)
"""Options of ``from_pretrained`` that say where to look, for config and tokenizer as well as for weights."""


def _hub_options(source: ModelSource, *, revision: bool = True) -> dict[str, Any]:
    options = {name: source.hf_kwargs[name] for name in _HUB_OPTIONS if name in source.hf_kwargs}
    return options if source.revision is None or not revision else {**options, "revision": source.revision}


def _trying(source: ModelSource, action: Callable[[], T]) -> T:
    """Run a transformers call and turn its faults into ours."""
    try:
        return action()
    except KVRagError:
        raise
    except TypeError as error:
        raise ConfigError(f"transformers refuses an option for {source.name!r}: {error}") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"could not load {source.name!r}: it is neither a usable local directory nor a model of the hub that can be reached, or its "
            f"files are damaged; check the name and the connection ({type(error).__name__}: {str(error)[:300]})"
        ) from error


def model_fingerprint(lm: CausalLM | PlainLM, tokenizer: Any, weights: str) -> str:
    """Return the digest of everything about a model that changes KV: weights, config, RoPE, dtype, tokenizer.

    Parameters
    ----------
    lm, tokenizer
        The loaded pair.
    weights
        Identity of the weights: a hub commit or a content hash.
    """
    config = {k: v for k, v in lm.model.config.to_dict().items() if k not in _VOLATILE}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return digest(
        "model",
        {
            "weights": weights.encode(),
            "config": json.dumps(config, sort_keys=True, default=str).encode(),
            "dtype": str(lm.dtype).encode(),
            "tokenizer": hashlib.sha256(vocabulary.encode()).digest(),
        },
    )


def _weights_identity(source: ModelSource, model: PreTrainedModel) -> str:
    """Return the hub commit, or the content hash of the local weight files."""
    commit = getattr(model.config, "_commit_hash", None)
    path = Path(os.fspath(source.model))
    if path.is_file():
        return _files_digest([path])
    if path.is_dir():
        folder = path / source.hf_kwargs.get("subfolder", "")
        files = sorted({f for pattern in _WEIGHT_FILES for f in folder.glob(pattern)})
        return _files_digest(files) if files else _tensor_digest(model)
    return f"commit:{commit}" if commit else _tensor_digest(model)


def _files_digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return f"files:{total.hexdigest()}"


def _tensor_digest(model: PreTrainedModel) -> str:
    """Hash the weights of a model in memory: its name says nothing about what was done to it since."""
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return f"tensors:{total.hexdigest()}"
