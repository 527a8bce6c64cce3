"""Exceptions raised by kvrag.

::

    KVRagError
    ├── ConfigError            (ValueError)    an option does not exist or has an invalid value
    ├── InputError             (ValueError)    a prompt, chunk or document is invalid
    │   └── ContextLengthError                 prompt and answer exceed the model's context window
    ├── ModelError             (RuntimeError)  a model can't be found or loaded
    │   └── UnsupportedModelError              the model's KV can't be reused, and is not stored
    ├── StoreError             (OSError)       the store's directory can't be used
    │   └── StoreFormatError                   the store was written by a newer version of kvrag
    ├── OutOfMemoryError       (MemoryError)   the request exceeds memory, even without reuse
    └── MissingDependencyError (ImportError)   an optional package is not installed

Messages name the cause and the remedy. A stored chunk that can't be read raises no error: it counts
as a miss, and is recomputed.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


class KVRagError(Exception):
    """Base class of all kvrag exceptions."""


class ConfigError(KVRagError, ValueError):
    """An option does not exist or has an invalid value."""


class InputError(KVRagError, ValueError):
    """A prompt, chunk or document is invalid."""


class ContextLengthError(InputError):
    """The prompt and the requested answer exceed the model's context window.

    ``room``: maximum number of tokens of an answer to this prompt; 0: no room.
    """

    room: int = 0


class ModelError(KVRagError, RuntimeError):
    """A model or tokenizer can't be found or loaded."""


class UnsupportedModelError(ModelError):
    """The model's KV can't be reused. The model still answers, by full prefill."""


class StoreError(KVRagError, OSError):
    """The directory of the KV store can't be used."""


class StoreFormatError(StoreError):
    """The KV store has a format that this version can't read."""


class OutOfMemoryError(KVRagError, MemoryError):
    """The request does not fit into memory, even without reuse."""


class MissingDependencyError(KVRagError, ImportError):
    """An optional package is needed and not installed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

    Torch has its own error type on accelerators, and raises a plain RuntimeError on the CPU.
    """
    return re.search(_MEMORY, f"{type(error).__name__}: {error}") is not None


_MEMORY = r"(?i)memoryerror|allocate memory|out of memory|alloc_failed"
# Signs of the reasons of a fault, and the reasons with their remedies. The first that fits counts.
# A sign is found in the text or type of another library's error, or is a mark of `loading_reason`.
_REASONS = (
    (_MEMORY, "memory ran out; pass dtype='bfloat16', a smaller model, or free memory"),
    ("<closed>", "its file {closed!r} can't be read by this user; give access to it"),
    ("<refused>", "the system refused ({refused}); give access to its files, or free space"),
    (
        r"trust_remote_code|custom code",
        "its code is part of its repository; read it, and pass trust_remote_code=True to run it "
        "(vLLM's --trust-remote-code is for vLLM alone: serve such a model without kvrag)",
    ),
    (
        r"does not recognize this architecture",
        "the installed transformers does not know its architecture; update transformers",
    ),
    (
        r"(?i)\bgated|\b40[13] client error|unauthorized|forbidden|authenticat",
        "the hub wants to know who asks; log in with `hf auth login`, or pass token=",
    ),
    (
        r"Safetensor|JSON|Recursion|Unicode|Unpickling|EOFError",
        "its files are damaged; fetch or write them again",
    ),
    (
        "<quantised>",
        "its quantisation ({quantised}) may need another device, or a package that is not here; "
        "check that transformers loads it here, or load it without quantisation",
    ),
    (
        r"<package>|pip install",
        "a package that it needs is not here, or does not work; install it, or leave out the "
        "option that asks for it",
    ),
    (
        r"(?i)\bcuda\b|\bnvidia\b|accelerator device|\bxpu\b|\bmps\b",
        "the device that it needs is not here; leave out device, device_map or the option that "
        "needs it, or pass device='cpu'",
    ),
    (
        "<gone>",
        "there is no such directory here, and no such model of the hub that can be reached; "
        "check the name and the connection",
    ),
    ("<options>", "its files do not go with {options}; leave out what does not fit"),
    (
        "<tokenizer>",
        "its files are damaged, not here, or need a package that is not here (sentencepiece, "
        "tiktoken, protobuf); check them",
    ),
    ("", "its files are damaged, or are no causal language model's; check them"),
)


def loading_reason(error: BaseException, path: str, part: str, options: Mapping[str, Any]) -> str:
    """Return the reason of an error of loading, with its remedy.

    ``path`` is the place of the files, ``part`` is ``"model"`` or ``"tokenizer"``, and ``options``
    are those that the files were read with. The words of a path are no sign of a reason.
    """
    known = {
        "closed": next((f.name for f in Path(path).glob("*") if not os.access(f, os.R_OK)), ""),
        "refused": getattr(error, "strerror", ""),
        "quantised": part == "model" and _quantisation(path, options),
        "package": isinstance(error, ImportError),
        "gone": not os.path.exists(path),
        "options": ", ".join(options),
        part: part,
    }
    marks = [f"<{name}>" for name in known if known[name]]
    text = f"{marks} {type(error).__name__}: {error}".replace(path, "")
    text = re.sub(r"\S*[/\\]\S*", "", text)
    return next(reason for sign, reason in _REASONS if re.search(sign, text)).format(**known)


def _quantisation(path: str, options: Mapping[str, Any]) -> Any:
    """Return the method that local weights are quantised by; empty for plain weights."""
    with suppress(OSError, ValueError, IndexError):
        text = repr(options.get("quantization_config"))
        text += Path(path, "config.json").read_text("utf-8")
        return re.findall(r"quant_method\W+(?:QuantizationMethod\W\w+\W+)?([\w-]+)", text)[0]
    return ""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import a module that an ``extra`` of the distribution installs.

    ``purpose`` ends the sentence "... is needed for". Raises ``MissingDependencyError``, which
    names the extra, if the import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the package {module!r} is needed for {purpose} and could not be imported ({error}); "
            f"install it with: pip install 'kvrag[{extra}]'"
        ) from error
