"""Find and load a model, once per process, and say exactly which one it is."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvrag.config import check_prove
from kvrag.errors import ConfigError, ModelError, UnsupportedModelError, require
from kvrag.identity.model import LiveIdentity, describe, weights_digest
from kvrag.identity.weights import source_identity
from kvrag.model import CausalLM
from kvrag.model.acceptance import accept, proven
from kvrag.model.plain import PlainLM, check_generates
from kvrag.model.source import (
    ModelSource,
    base_directory,
    check_given,
    directory,
    gguf_options,
    hub_options,
    resolve_device,
    resolve_dtype,
    trying,
)
from kvrag.prompt.template import PromptEncoder


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A model ready for use: forwards, prompts, and its identity. ``shares`` is the loaded model whose weights these are, if another."""

    lm: CausalLM | PlainLM
    encoder: PromptEncoder
    identity: LiveIdentity
    shares: LoadedModel | None = None

    @property
    def fingerprint(self) -> str:
        """What every key of its KV holds, looked up anew each time: adapters may have been switched, or weights changed in place."""
        return self.identity.fingerprint

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

    A model that was handed in is looked at anew each time.

    Raises
    ------
    ModelError
        If it can't be found or loaded, or is no causal LM.
    ConfigError
        If the dtype or the device does not exist here.
    """
    if isinstance(source.model, PreTrainedModel):
        found = _load(source)
    else:
        with _load_lock:
            kept = _loaded.get(source.key)
            found = _load(source) if kept is None else kept
            _loaded[source.key] = found
    if not source.extra_keys:
        return found
    return replace(found, identity=found.identity.with_extra_keys(source.extra_keys), shares=found)


def check_source(source: ModelSource) -> None:
    """Find the faults that can be found without loading weights: no such model, no such device, no causal LM.

    Raises
    ------
    ModelError, ConfigError
        As :func:`load`.
    """
    if not isinstance(source.model, (str, os.PathLike, PreTrainedModel)):
        raise ConfigError(
            f"model is of type {type(source.model).__name__}; pass a hub id, a directory, a .gguf file, a loaded PreTrainedModel or a "
            "PeftModel"
        )
    check_prove(source.prove)
    resolve_device(source)
    resolve_dtype(source)
    if isinstance(source.model, PreTrainedModel):
        check_given(source, source.model)
        check_generates(source.model)
        check_placement(source.model)
        return
    path = Path(os.fspath(source.model))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no GGUF file {str(path)!r}; check the path")
        for module in ("gguf", "accelerate"):
            require(module, extra="gguf", purpose="reading GGUF files")
        return  # parsing a GGUF header takes seconds: its kind is checked when it is loaded
    if base_directory(source) != os.fspath(source.model):
        require("peft", extra="adapters", purpose="loading adapters")
    check_generates(trying(source, lambda: AutoConfig.from_pretrained(base_directory(source), **hub_options(source))))


def check_placement(model: PreTrainedModel) -> None:
    """Raise :class:`UnsupportedModelError` unless all of a model's weights are on one device: KV is kept in one buffer there.

    Parameters
    ----------
    model
        Loaded, with or without a ``device_map``.
    """
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {str(parameter.device) for parameter in model.parameters()}
    is_sharded = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if len(places) > 1 or "disk" in places or len(devices) > 1 or "meta" in devices or is_sharded:
        where = ", ".join(sorted(places or devices))
        raise UnsupportedModelError(
            f"the weights of {type(model).__name__} are spread over several places ({where}), and kvrag keeps KV on one device; load the "
            'whole model onto one with device="cuda" or device_map={"": 0}, in a smaller dtype or quantised if it does not fit'
        )


def _load(source: ModelSource) -> LoadedModel:
    check_source(source)
    given = source.model if isinstance(source.model, PreTrainedModel) else None
    model = _load_weights(source) if given is None else given
    tokenizer = _load_tokenizer(source)
    lm = accept(model)
    if lm.device.type == "cpu":
        _keep_freed_memory()
    # Identified after a first forward: quantised layers may pack their weights anew in it, and adapters unmerge.
    weights = (_origin(source, model) if given is None else None) or weights_digest(model)
    identity = LiveIdentity(model, describe(model, tokenizer, weights, regime=_regime(lm)))
    if source.prove == "auto" and isinstance(lm, CausalLM):
        lm = proven(lm, identity.fingerprint)
    return LoadedModel(lm, PromptEncoder(tokenizer), identity)


def _regime(lm: CausalLM | PlainLM) -> str:
    """Name the regime of a RoPE whose angles change where a prompt grows long: KV is stored for prompts up to that length."""
    if isinstance(lm, CausalLM) and lm.reuse_window < lm.context_window:
        return f"up to {lm.reuse_window} tokens"
    return ""


def _load_weights(source: ModelSource) -> PreTrainedModel:
    options = {"dtype": resolve_dtype(source), **hub_options(source), **gguf_options(source), **source.hf_kwargs}
    model = trying(source, lambda: AutoModelForCausalLM.from_pretrained(directory(source), **options))
    check_generates(model)
    check_placement(model)
    device = resolve_device(source)
    if "device_map" in source.hf_kwargs or model.device == device:
        return model
    return trying(source, lambda: model.to(device))


def _load_tokenizer(source: ModelSource) -> Any:
    if source.tokenizer is not None and not isinstance(source.tokenizer, (str, os.PathLike)):
        return source.tokenizer
    if source.tokenizer is not None:
        home, options = os.fspath(source.tokenizer), hub_options(source, revision=False)
    else:
        home, options = directory(source), hub_options(source) | gguf_options(source)
        if not os.path.exists(os.path.join(home, "tokenizer_config.json")):
            home = base_directory(source)
    return trying(source, lambda: AutoTokenizer.from_pretrained(home, **options))


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


def _origin(source: ModelSource, model: PreTrainedModel) -> str | None:
    """Say where the weights are from; ``None`` where that does not tell what they are."""
    path, base = os.fspath(source.model), base_directory(source)
    commit = getattr(model.config, "_commit_hash", None)
    if getattr(model, "peft_config", None):
        biases = {getattr(config, "bias", "none") for config in model.peft_config.values()}
        if biases != {"none"} or not os.path.exists(path):  # an adapter's biases replace the model's own
            return None
    return source_identity(base if base != directory(source) else path, commit=commit, options=source.hf_kwargs)
