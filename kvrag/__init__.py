"""kvrag: prefill RAG chunks once, when the index is built, and reuse their KV in any prompt.

::

    index time   text ──chunk text──▶ token ids ──fingerprint──▶ key ──precompute──▶ KV ──▶ store
    query time   prompt ─▶ spans ─▶ plan ─▶ layout ─▶ store (load)
                        ─▶ stitch ─▶ selection ─▶ repair ─▶ decode ─▶ text

Chunks may come in any order. Start with :class:`KVRagEngine`, or with ``langchain_kvrag`` for
LangChain and ``llama_index.llms.kvrag`` for LlamaIndex.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvrag.errors import (
    ConfigError,
    ContextLengthError,
    InputError,
    KVRagError,
    MissingDependencyError,
    ModelError,
    OutOfMemoryError,
    StoreError,
    StoreFormatError,
    UnsupportedModelError,
    require,
)
from kvrag.types import (
    Chunk,
    Explanation,
    GenerationResult,
    MaxContext,
    Mode,
    PrecomputeReport,
    PrefillResult,
    ScoreResult,
    SyncReport,
    TokenLogprob,
    ToolCall,
    VerifyReport,
)

if TYPE_CHECKING:
    from kvrag.config import RepairConfig, Retention, SamplingConfig, StoreConfig
    from kvrag.engine import KVRagEngine
    from kvrag.flash import (
        flash_attention_tier,
        install_flash_attention,
        uninstall_flash_attention,
    )
    from kvrag.generate.streams import AsyncTokenStream, TokenStream
    from kvrag.hooks import delete_kv, precompute_kv, sync_kv
    from kvrag.precompute.library import Library
    from kvrag.prompt.prefix import TemplatePrefix
    from kvrag_ray.dataset import precompute_dataset as precompute_dataset
    from kvrag_server.client import KVRagClient as KVRagClient

__version__ = "0.3.0"
__all__ = [
    "AsyncTokenStream",
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "Explanation",
    "GenerationResult",
    "InputError",
    "KVRagEngine",
    "KVRagError",
    "Library",
    "MaxContext",
    "MissingDependencyError",
    "Mode",
    "ModelError",
    "OutOfMemoryError",
    "PrecomputeReport",
    "PrefillResult",
    "RepairConfig",
    "Retention",
    "SamplingConfig",
    "ScoreResult",
    "StoreConfig",
    "StoreError",
    "StoreFormatError",
    "SyncReport",
    "TemplatePrefix",
    "TokenLogprob",
    "TokenStream",
    "ToolCall",
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "delete_kv",
    "flash_attention_tier",
    "install_flash_attention",
    "precompute_kv",
    "require",
    "sync_kv",
    "uninstall_flash_attention",
]

# Modules imported at first use of their names. ``import kvrag`` imports neither torch nor
# transformers.
_LAZY = {
    "kvrag.config": ("RepairConfig", "Retention", "SamplingConfig", "StoreConfig"),
    "kvrag.engine": ("KVRagEngine",),
    "kvrag.generate.streams": ("AsyncTokenStream", "TokenStream"),
    "kvrag.hooks": ("delete_kv", "precompute_kv", "sync_kv"),
    "kvrag.flash": (
        "flash_attention_tier",
        "install_flash_attention",
        "uninstall_flash_attention",
    ),
    "kvrag.precompute.library": ("Library",),
    "kvrag.prompt.prefix": ("TemplatePrefix",),
}
# Names of packages built on this one, and the extras that install these packages.
_OF_EXTRAS = {
    "KVRagClient": ("kvrag_server", "server"),
    "precompute_dataset": ("kvrag_ray", "ray"),
}
__all__ += [name for name, (package, _) in _OF_EXTRAS.items() if find_spec(package)]


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(module), name)
            return globals()[name]
    if name in _OF_EXTRAS:
        module, extra = _OF_EXTRAS[name]
        return getattr(require(module, extra=extra, purpose=f"kvrag.{name}"), name)
    raise AttributeError(f"module 'kvrag' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
