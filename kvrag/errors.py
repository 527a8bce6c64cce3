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
import re
from types import ModuleType


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
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "allocate memory" in str(error)
    )


_REASONS = (
    (
        r"trust_remote_code|custom code",
        "its code is part of its repository; read it, and pass trust_remote_code=True to run it",
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
        r"(?i)\bcuda\b|accelerator device|\bxpu\b|\bmps\b",
        "the device that it is to be loaded on is not here; leave device and device_map out, or "
        "pass device='cpu'",
    ),
)
"""Texts of other libraries' errors, and the reasons with their remedies."""


def loading_fault(error: BaseException) -> str:
    """Return the reason and the remedy of an error that is not the files'; ``""`` if it may be."""
    if isinstance(error, ImportError):
        return (
            "a package that it needs is not here, or does not work; install it, or leave out the "
            "option that asks for it"
        )
    if is_out_of_memory(error):
        return "memory ran out; pass dtype='bfloat16', a smaller model, or free memory"
    if isinstance(error, OSError) and error.errno:
        return f"the system refused ({error.strerror}); give access to its files, or free space"
    found = (reason for sign, reason in _REASONS if re.search(sign, str(error)))
    return next(found, "")


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
