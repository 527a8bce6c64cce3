"""Decide whether a loaded model's KV is reused: by its structure and by proof, never by its name; a passed proof is kept on disk.

A model that is refused answers all the same (:class:`~kvrag.model.plain.PlainLM`), and says why in every result.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvrag
from kvrag.errors import UnsupportedModelError
from kvrag.identity.adapters import check_adapters
from kvrag.identity.describe import quantisation_text
from kvrag.identity.fingerprint import digest
from kvrag.identity.weights import cache_dir
from kvrag.model import CausalLM
from kvrag.model.plain import PlainLM
from kvrag.model.proof import Proof, prove

logger = logging.getLogger(__name__)

PROOF_VERSION = 1
"""Version of what is proven; a change makes every kept proof void."""


def accept(model: PreTrainedModel) -> CausalLM | PlainLM:
    """Look at a model's structure: one that reuse can be built on, or one that answers without.

    Parameters
    ----------
    model
        A loaded causal LM.

    Raises
    ------
    UnsupportedModelError
        If its quantised layers can't run on its device: such layers are often written for some devices and sizes only.
    """
    try:
        check_adapters(model)
        return CausalLM(model)
    except UnsupportedModelError as error:
        method = json.loads(quantisation_text(model.config) or "{}").get("quant_method")
        if method and error.__cause__ is not None:  # it ran into something: these weights can't answer in any way
            raise UnsupportedModelError(
                f"{type(model).__name__} quantised by {method} fails in its first forward on {model.device.type} ({error.__cause__}); "
                "check that it runs without kvrag there, or load it without quantisation"
            ) from error
        return refuse(model, str(error))
    except Exception as error:  # custom code may do anything when it is probed; what it can't do, it is not asked to
        logger.debug("probing %s failed", type(model).__name__, exc_info=True)
        return refuse(model, f"its layers could not be probed ({type(error).__name__}: {str(error)[:200]})")


def refuse(model: PreTrainedModel, reason: str) -> PlainLM:
    """Wrap a model that answers without reuse, and log why."""
    lm = PlainLM(model, f"KV of this model is not reused: {reason}")
    logger.warning("%s; prompts are prefilled in full", lm.refusal)
    return lm


def proven(lm: CausalLM, fingerprint: str) -> CausalLM | PlainLM:
    """Return the model if reuse is proven for it, now or in an earlier process, else the one that answers without.

    Parameters
    ----------
    lm
        A model whose structure is accepted.
    fingerprint
        Its fingerprint: weights, config, dtype, tokenizer.
    """
    file = proof_file(lm, fingerprint)
    if kept_proof(file) is not None:
        return lm
    try:
        proof = prove(lm)
    except Exception as error:  # out of memory, or code that fails where the structure looked right
        logger.debug("the proof failed to run", exc_info=True)
        return refuse(lm.model, f"its proof could not run ({type(error).__name__}: {str(error)[:200]})")
    if proof.failure is not None:
        return refuse(lm.model, proof.failure)
    if not proof.is_conclusive:
        logger.warning(
            "in %s this model amplifies roundings so much that its proof could miss a mistake; prove it in float32 as well: kvrag verify "
            "MODEL --dtype float32",
            lm.dtype,
        )
    logger.info("reuse is proven for this model in %.2f s (largest difference %.1e)", proof.seconds, proof.max_error)
    keep_proof(file, proof)
    return lm


def proof_file(lm: CausalLM, fingerprint: str) -> Path:
    """Return where the proof of a model is kept."""
    return kept_file("proof", lm, fingerprint, proof=str(PROOF_VERSION))


def kept_file(kind: str, lm: CausalLM, fingerprint: str, **versions: str) -> Path:
    """Return where something found out about a model is kept: the name holds everything that it depends on.

    Parameters
    ----------
    kind
        What it is; the folder is named after it.
    lm, fingerprint
        The model.
    **versions
        What it depends on beside the model, the device and the versions of the packages.
    """
    device = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else lm.device.type
    fields = {
        "fingerprint": fingerprint,
        **versions,
        "kvrag": kvrag.__version__,
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "dtype": str(lm.dtype),
        "device": device,
        "attention": str(lm.model.config._attn_implementation),
    }
    name = digest(kind, {key: value.encode() for key, value in fields.items()})
    return cache_dir() / f"{kind}s" / f"{name}.json"


def kept_proof(file: Path) -> Proof | None:
    """Read a proof that passed; anything else in its place, damaged or failed, is none."""
    try:
        proof = Proof.from_dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return proof if proof.passed else None


def keep_proof(file: Path, proof: Proof) -> None:
    """Write a proof; see :func:`keep_json`."""
    keep_json(file, proof.to_dict())


def keep_json(file: Path, values: dict[str, Any]) -> None:
    """Write a file as a whole or not at all; where the directory can't be written, its content is found out again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as part:
            json.dump(values, part)
        os.replace(part.name, file)
    except OSError as error:
        logger.debug("%s could not be kept: %s", file, error)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
