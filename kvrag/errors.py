"""Every exception that kvrag raises on purpose.

::

    KVRagError
    ├── ConfigError            (ValueError)    an option has a value that it can't have, or doesn't exist
    ├── InputError             (ValueError)    a prompt, chunk or document can't be used
    │   └── ContextLengthError                 prompt and answer don't fit the model's context window
    ├── ModelError             (RuntimeError)  a model can't be found or loaded
    │   └── UnsupportedModelError              its KV can't be reused, so nothing can be stored for it
    ├── StoreError             (OSError)       the store's directory can't be used at all
    │   └── StoreFormatError                   it was written by a newer kvrag
    ├── OutOfMemoryError       (MemoryError)   the request doesn't fit, even without reuse
    └── MissingDependencyError (ImportError)   an optional package isn't installed

A message names the thing, the fault and the remedy. A fault of a *stored chunk* is none of these:
it is a miss, and the chunk is computed again.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class KVRagError(Exception):
    """Base of all kvrag exceptions."""


class ConfigError(KVRagError, ValueError):
    """An option does not exist or has a value outside its range."""


class InputError(KVRagError, ValueError):
    """A prompt, a chunk or a document can't be used as given."""


class ContextLengthError(InputError):
    """Prompt and requested answer together exceed the model's context window."""


class ModelError(KVRagError, RuntimeError):
    """A model or tokenizer can't be found or loaded."""


class UnsupportedModelError(ModelError):
    """The model's KV can't be reused: what would be stored could not be moved exactly. It answers all the same, by full prefill."""


class StoreError(KVRagError, OSError):
    """The directory of the KV store can't be used."""


class StoreFormatError(StoreError):
    """The KV store was written in a format that this version can't read."""


class OutOfMemoryError(KVRagError, MemoryError):
    """The request did not fit into memory, with and without reuse."""


class MissingDependencyError(KVRagError, ImportError):
    """An optional package is needed and not installed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: torch has a type for it on accelerators, and a plain RuntimeError on the CPU."""
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)
    )


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

    Parameters
    ----------
    module
        Dotted name to import.
    extra
        The extra of the ``kvrag`` distribution that installs it.
    purpose
        What it is needed for, as the end of the sentence "... is needed for".

    Raises
    ------
    MissingDependencyError
        If the import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the package {module!r} is needed for {purpose} and could not be imported ({error}); "
            f"install it with: pip install 'kvrag[{extra}]'"
        ) from error
