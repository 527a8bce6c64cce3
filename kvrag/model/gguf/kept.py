"""Dequantised weights of GGUF files, kept on request (``cache_weights``) for the next start.

::

    cache_dir()/weights/<key>/   config.json  model.safetensors  tokenizer.json  …   kept.json
                         │                                                              │
    digest of the file, dtype, options, versions            digests of the other files, and a
                                                            description of model and tokenizer

A directory is written whole or not at all, and only if the model read back from it is the model
that was written. Its files are checked before use. Whatever is missing, damaged or different is
dequantised again: that takes time and changes nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvrag.cache import cache_dir, make_private
from kvrag.errors import ModelError, is_out_of_memory
from kvrag.identity.describe import (
    attention_text,
    config_text,
    quantisation_text,
    rope_text,
    tokenizer_digest,
)
from kvrag.identity.fingerprint import key_digest
from kvrag.identity.weights import file_digest, files_digest, is_packed, remember
from kvrag.model.source import ModelSource, directory, own_options, resolve_dtype
from kvrag.progress import Progress

logger = logging.getLogger(__name__)

_ABOUT = "kept.json"
_PART = "kvrag-part-"
_STALE_S = 86_400  # age of a half-written directory that no process can be writing any more


@dataclass(frozen=True, slots=True)
class Kept:
    """Model and tokenizer as they were kept; the digest of the tokenizer is known.

    There is no tokenizer if the source names another one.
    """

    model: PreTrainedModel
    tokenizer: Any
    vocabulary: str


def read_kept(source: ModelSource) -> Kept | None:
    """Load the weights that an earlier start kept for a source; ``None`` if there are none.

    What can't be used is deleted, and a line in the log says why.
    """
    name = os.path.basename(os.fspath(source.model))
    try:
        folder = _folder(source)
    except OSError as error:
        logger.warning("the kept weights of %s can't be looked for (%s)", name, error)
        return None
    if folder is None or not (folder / _ABOUT).is_file():
        return None
    try:
        with Progress(f"loading the kept weights of {name}"):
            return _read(folder, source)
    except Exception as error:  # a damaged file may raise anything
        if is_out_of_memory(error):
            raise
        logger.warning(
            "the kept weights of %s can't be used (%s: %s) and are deleted; the file is "
            "dequantised again",
            name,
            type(error).__name__,
            str(error)[:200],
        )
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep_weights(source: ModelSource, model: PreTrainedModel, tokenizer: Any) -> None:
    """Keep a loaded model's weights for the next start from the same source.

    They replace what was kept of an earlier content of the file. If they can't be kept, a line in
    the log says why.
    """
    name = os.path.basename(os.fspath(source.model))
    try:
        folder = _folder(source)
        if folder is None:
            raise ModelError("an option for loading is an object, which has no lasting name")
        with Progress(f"writing the dequantised weights of {name}"):
            size = _write(folder, source, model, None if source.tokenizer else tokenizer)
    except Exception as error:  # no room, no permission, or a model that can't be read back
        logger.warning(
            "the dequantised weights of %s are not kept (%s: %s); the next start dequantises the "
            "file again",
            name,
            type(error).__name__,
            str(error)[:200],
        )
        return
    logger.info(
        "kept the dequantised weights of %s: %.2f GB in %s; delete that directory to free them",
        name,
        size / 1e9,
        folder,
    )


def _folder(source: ModelSource) -> Path | None:
    """Return the directory of a source's kept weights; ``None`` if an option can't be written."""
    path = Path(source.model)
    try:
        variant = _variant(source)
    except TypeError:
        return None
    found = (file for ending in ("*.json", "*.jinja") for file in path.parent.glob(ending))
    beside = [file for file in found if file.is_file()]
    parts = {"file": files_digest([path]), "beside": files_digest(beside), "variant": variant}
    for module in ("transformers", "tokenizers", "torch", "gguf"):
        parts[module] = importlib.metadata.version(module)
    name = key_digest("kept weights", {key: value.encode() for key, value in parts.items()})
    return cache_dir() / "weights" / name


def _variant(source: ModelSource) -> str:
    """Return what tells apart the weights of the same file, as JSON."""
    return json.dumps(
        [str(resolve_dtype(source)), source.tokenizer is None, own_options(source)], sort_keys=True
    )


def _about(model: PreTrainedModel) -> dict[str, str]:
    """Describe a model by what its fingerprint holds besides weights and tokenizer."""
    config = model.config
    return {
        "config": config_text(config),
        "rope": rope_text(config),
        "attention": attention_text(model),
        "quantisation": quantisation_text(config),
        "dtype": str(model.dtype),
    }


def _vocabulary(tokenizer: Any) -> dict[str, Any]:
    """Describe a tokenizer by its digest, and by what it holds besides its file."""
    names = ("chat_template", "model_max_length", "padding_side", "clean_up_tokenization_spaces")
    settings = {name: getattr(tokenizer, name, None) for name in names}
    return {
        "digest": tokenizer_digest(tokenizer),
        "settings": settings | tokenizer.special_tokens_map,
    }


def _read(folder: Path, source: ModelSource) -> Kept:
    known = json.loads((folder / _ABOUT).read_text("utf-8"))
    for name, content in known["files"].items():
        if file_digest(folder / name)[0] != content:
            raise ModelError(f"{name} is not as it was written")
    model = _model_in(folder, source)
    if _about(model) != known["model"]:
        raise ModelError("they describe another model")
    vocabulary = known["tokenizer"]
    if vocabulary is None:
        return Kept(model, None, "")
    return Kept(model, _tokenizer_in(folder, vocabulary), vocabulary["digest"])


def _model_in(folder: Path, source: ModelSource) -> PreTrainedModel:
    """Load a kept model; its files are mapped, so that a page is read when it is first used."""
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=resolve_dtype(source), output_loading_info=True, **own_options(source)
    )
    faults = [name for name, entries in found.items() if entries]
    if faults:
        raise ModelError(f"their names don't fit the model: {', '.join(faults)}")
    model.config.name_or_path = directory(source)
    return model


def _tokenizer_in(folder: Path, vocabulary: dict[str, Any]) -> Any:
    # Not by the model's own class, which may build its parts anew in place of the file's, and not
    # by from_pretrained, which reads the file twice.
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, **vocabulary["settings"])


def _write(folder: Path, source: ModelSource, model: PreTrainedModel, tokenizer: Any) -> int:
    """Write a directory, check it, and put it in its place; return its size in bytes."""
    if any(is_packed(each) or not each.is_floating_point() for each in model.parameters()):
        raise ModelError("its weights stay packed after loading")
    make_private(cache_dir(), folder.parent)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_PART))
    try:
        model.config.to_json_file(part / "config.json", use_diff=False)
        weights = str(part / "model.safetensors")
        safetensors.torch.save_model(model, weights, metadata={"format": "pt"})
        vocabulary = None
        if tokenizer is not None:
            tokenizer.backend_tokenizer.save(str(part / "tokenizer.json"))
            vocabulary = _vocabulary(tokenizer)
        files = {file.name: file_digest(file)[0] for file in part.iterdir()}
        _check(part, source, model, vocabulary)
        about: dict[str, Any] = {
            "source": _path(source),
            "variant": _variant(source),
            "files": files,
        }
        about |= {"model": _about(model), "tokenizer": vocabulary}
        (part / _ABOUT).write_text(json.dumps(about), "utf-8")
        size = sum(file.stat().st_size for file in part.iterdir())
        _delete_older(folder, about)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, else it would have been read
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for name, content in files.items():
        remember(folder / name, content)
    return size


def _check(
    part: Path, source: ModelSource, model: PreTrainedModel, vocabulary: dict[str, Any] | None
) -> None:
    """Raise ``ModelError`` unless the model read back is the model that was written."""
    again = _model_in(part, source)
    if _about(again) != _about(model):
        raise ModelError("its config changes when it is written and read")
    wanted, found = ({**dict(each.named_buffers()), **each.state_dict()} for each in (model, again))
    if wanted.keys() != found.keys() or not all(
        torch.equal(tensor.cpu(), found[name].cpu()) for name, tensor in wanted.items()
    ):
        raise ModelError("its weights change when they are written and read")
    if vocabulary is not None and _vocabulary(_tokenizer_in(part, vocabulary)) != vocabulary:
        raise ModelError("its tokenizer changes when it is written and read")


def _path(source: ModelSource) -> str:
    return os.path.realpath(os.fspath(source.model))


def _delete_older(folder: Path, about: dict[str, Any]) -> None:
    """Delete what was kept of the same file earlier, and what killed processes left behind."""
    for other in folder.parent.iterdir():
        if other.name.startswith(_PART):
            is_old = time.time() - other.stat().st_mtime > _STALE_S
        else:
            is_old = _is_older(other, about)
        if is_old:
            shutil.rmtree(other, ignore_errors=True)


def _is_older(other: Path, about: dict[str, Any]) -> bool:
    """Whether a directory holds what was kept of the same file; other directories are not ours."""
    try:
        known = json.loads((other / _ABOUT).read_text("utf-8"))
        return bool(all(known[name] == about[name] for name in ("source", "variant")))
    except (OSError, ValueError, LookupError, TypeError):
        return False
