"""Load a model once per process, identify it, and decide whether its KV is reused.

The decision is by its structure and by proof; a passed proof is kept on disk. A refused model
answers without reuse (:class:`~kvrag.model.plain.PlainLM`), and every result gives the reason.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, PreTrainedModel

import kvrag
from kvrag.cache import cache_dir, keep
from kvrag.errors import ModelError, UnsupportedModelError
from kvrag.identity.adapters import check_adapters
from kvrag.identity.describe import quantisation_text
from kvrag.identity.fingerprint import digest
from kvrag.identity.model import UNKNOWN, LiveIdentity, describe, weights_digest
from kvrag.identity.weights import keep_name, source_identity
from kvrag.model.forward import evaluating, own_attention
from kvrag.model.gguf.parsing import is_gguf, parsed_once
from kvrag.model.linear import WEIGHTS_VARIABLE, use_own_products
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.lock import lock_of
from kvrag.model.plain import Pieces, PlainLM, auto_class, check_generates, check_placement
from kvrag.model.proof import Proof, prove
from kvrag.model.source import (
    ModelSource,
    loading_options,
    resolve_device,
    trying,
)
from kvrag.progress import Progress
from kvrag.runtime import own_modes

logger = logging.getLogger(__name__)

PROOF_VERSION = 5  # version of the checks; a change invalidates every kept proof


LOADED = weakref.WeakValueDictionary[tuple[object, ...], LoadedModel]()
"""Models in use, by source; a model is freed with the last engine that uses it."""
_load_lock = threading.Lock()


@own_modes
def load(
    source: ModelSource,
    make_encoder: Callable[[Any, Any], Any] | None = None,
) -> LoadedModel:
    """Load a model, or return it if this process still uses it from the same source.

    A model object is examined at every call. ``make_encoder`` makes :attr:`LoadedModel.encoder`
    from the tokenizer and the model; by default it is the tokenizer itself. Raises ``ModelError``
    if no causal LM can be found or loaded, ``ConfigError`` for a dtype or device that is not
    available.
    """
    if isinstance(source.model, PreTrainedModel):
        found = _load(source, make_encoder)
    else:
        with _load_lock:
            key = (*source.key, make_encoder)
            kept = LOADED.get(key)
            found = _load(source, make_encoder) if kept is None else kept
            LOADED[key] = found
    if not source.extra_keys:
        return found
    return replace(found, identity=found.identity.with_extra_keys(source.extra_keys), shares=found)


def _load(source: ModelSource, make_encoder: Callable[[Any, Any], Any] | None) -> LoadedModel:
    source.check()
    is_given = isinstance(source.model, PreTrainedModel)
    model, tokenizer = _load_parts(source)
    lm = accept(model)
    _keep_freed_memory(lm.device.type)
    # Identified after a first forward, in which quantised layers may repack their weights and
    # adapters unmerge.
    with Progress(f"identifying the weights of {_label(source)}"):
        if not is_given:
            use_own_products(model)  # may pack them, for seconds
        try:
            weights = (not is_given and origin_of(source, model)) or weights_digest(model)
        except UnsupportedModelError as error:
            lm = refuse(model, str(error))
            lm.pieces = Pieces("weights that can't be read can change without a sign")
            weights = UNKNOWN + uuid.uuid4().hex
    regime = ""
    if isinstance(lm, CausalLM) and lm.reuse_window < lm.context_window:  # longrope
        regime = f"up to {lm.reuse_window} tokens"
    identity = LiveIdentity(model, describe(model, tokenizer, weights, regime=regime))
    keep_name(identity.fingerprint, source.name)
    if source.prove == "auto" and isinstance(lm, CausalLM):
        lm = proven(lm, identity.fingerprint)
    encoder = tokenizer if make_encoder is None else make_encoder(tokenizer, lm)
    return LoadedModel(lm, encoder, identity)


def _label(source: ModelSource) -> str:
    """Return the name for a line of progress: of a local model, without its folders."""
    if os.path.exists(source.name):
        return os.path.basename(os.path.normpath(source.name))
    return source.name


def _load_parts(source: ModelSource) -> tuple[PreTrainedModel, Any]:
    """Return the given model, or load it, with its tokenizer."""
    if isinstance(source.model, PreTrainedModel):
        return source.model, source.load_tokenizer()
    with parsed_once(source.model):
        tokenizer = None
        if is_gguf(source.model):  # the tokenizer needs all that is parsed, and the weights more
            with Progress(f"parsing {_label(source)}"):
                tokenizer = source.load_tokenizer()
        with Progress(f"loading {_label(source)}"):
            model = _load_weights(source)
        return model, tokenizer or source.load_tokenizer()


def _load_weights(source: ModelSource) -> PreTrainedModel:
    """Load a model onto the source's device, if it can run there."""
    # A GGUF file is of a causal LM, and its config takes seconds to parse.
    auto: Any = AutoModelForCausalLM if is_gguf(source.model) else auto_class(source.load_config())
    options = {**loading_options(source), "output_loading_info": True}
    model, report = trying(source, lambda: auto.from_pretrained(source.directory, **options))
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the files of {source.name!r} lack weights, such as {missing[0]}; "
            "pass a folder with all of them (parts of a split GGUF file must be merged first)"
        )
    check_generates(model)
    check_placement(model)
    device = resolve_device(source)
    if "device_map" in source.hf_kwargs or (
        device.type == model.device.type and device.index in (None, model.device.index)
    ):
        return model
    return trying(source, lambda: model.to(device))


@cache
def _keep_freed_memory(device: str) -> None:
    """Make glibc keep freed memory for the next forward on a CPU.

    Page faults of fresh memory are a visible part of a prefill on a CPU. A server returns what is
    free from time to time (:mod:`kvrag_server.app`). Other allocators are left alone, and so is a
    process that sets glibc's own variables.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if device == "cpu" and platform.libc_ver()[0] == "glibc" and not is_set:
        # malloc.h: trim threshold, top pad, mmap threshold.
        for option, value in ((-1, 2**31 - 1), (-2, 2**28), (-3, 2**25)):
            ctypes.CDLL(None).mallopt(option, value)


def origin_of(source: ModelSource, model: PreTrainedModel) -> str | None:
    """Return the identity of the weights' origin; ``None`` if it does not identify them."""
    # Quantised here: a library of another version, or another device, may round otherwise.
    if not getattr(getattr(model, "hf_quantizer", None), "pre_quantized", True):
        return None
    path = os.fspath(source.model)
    base = source.base_directory
    commit = getattr(model.config, "_commit_hash", None)
    if getattr(model, "peft_config", None):
        biases = {getattr(config, "bias", "none") for config in model.peft_config.values()}
        # An adapter's biases replace the model's own.
        if biases != {"none"} or not os.path.exists(path):
            return None
    return source_identity(
        base if base != source.directory else path,
        commit=commit,
        options=source.hf_kwargs | {WEIGHTS_VARIABLE: os.environ.get(WEIGHTS_VARIABLE) or None},
    )


def accept(model: PreTrainedModel) -> CausalLM | PlainLM:
    """Return a loaded causal LM for reuse, or for answers without reuse if it is not supported.

    Raises ``UnsupportedModelError`` if its quantised layers can't run on its device.
    """
    method = json.loads(quantisation_text(model.config) or "{}").get("quant_method")
    try:
        check_adapters(model)
        if method:
            _settle(model)
        return CausalLM(model)
    except UnsupportedModelError as error:
        # A cause means that the forward itself failed: these weights can't answer in any way.
        if method and error.__cause__ is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} quantised by {method} fails in its first forward "
                f"on {model.device.type} ({error.__cause__}); "
                "check that it runs without kvrag there, or load it without quantisation"
            ) from error
        return refuse(model, str(error))
    except Exception as error:  # custom code may raise anything when it is probed
        logger.debug("probing %s failed", type(model).__name__, exc_info=True)
        return refuse(
            model, f"its layers could not be probed ({type(error).__name__}: {str(error)[:200]})"
        )


@torch.inference_mode()
def _settle(model: PreTrainedModel) -> None:
    """Run a token through the whole model: compressed-tensors unpacks its weights in the first run.

    Raises :class:`UnsupportedModelError` if the model does not run.
    """
    try:
        with lock_of(model), evaluating(model):
            model(torch.zeros((1, 1), dtype=torch.int64, device=model.device))
    except Exception as error:
        raise UnsupportedModelError("its forward fails") from error


def refuse(model: PreTrainedModel, reason: str) -> PlainLM:
    """Wrap a model that answers without reuse, and log the reason."""
    lm = PlainLM(model, f"KV of this model is not reused: {reason}")
    logger.warning("%s; prompts are prefilled in full", lm.refusal)
    return lm


def proven(lm: CausalLM, fingerprint: str) -> CausalLM | PlainLM:
    """Return an accepted model if reuse is proven for it, else wrap it to answer without reuse.

    A proof that an earlier process kept counts, too.
    """
    file = proof_file(lm, fingerprint)
    if has_passed(Proof, file):
        return lm
    try:
        with Progress("proving that reuse is exact on this model, once"):
            proof = prove(lm)
    except Exception as error:  # out of memory, or code that fails where the structure looked right
        logger.debug("the proof failed to run", exc_info=True)
        return refuse(
            lm.model, f"its proof could not run ({type(error).__name__}: {str(error)[:200]})"
        )
    if proof.failure is not None:
        return refuse(lm.model, proof.failure)
    if not proof.is_conclusive:
        logger.warning(
            "in %s this model amplifies roundings so much that its proof could miss a mistake; "
            "prove it in float32 as well: kvrag verify MODEL --dtype float32",
            lm.dtype,
        )
    logger.info(
        "reuse is proven for this model in %.2f s (largest difference %.1e)",
        proof.seconds,
        proof.max_error,
    )
    keep(file, json.dumps(proof.to_dict()))  # if it can't be written, it is proven again next time
    return lm


def proof_file(lm: CausalLM, fingerprint: str) -> Path:
    """Return the file of a model's proof."""
    return kept_file("proof", lm, fingerprint, proof=str(PROOF_VERSION))


def kept_file(kind: str, lm: CausalLM, fingerprint: str, **versions: str) -> Path:
    """Return the file of a finding of this kind about a model.

    Its name is a digest of everything that the finding depends on.
    """
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else lm.device.type
    fields = versions | {
        "kvrag": kvrag.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fingerprint": fingerprint,
        "dtype": str(lm.dtype),
        "device": device,
        "attention": own_attention(lm.config),
    }
    return cache_dir() / f"{kind}s" / f"{digest(kind, fields)}.json"


def has_passed(kind: Any, file: Path) -> bool:
    """Whether a file keeps a finding of this kind that passed; not if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return bool(TypeAdapter(kind).validate_json(file.read_bytes(), strict=True).passed)
    return False
