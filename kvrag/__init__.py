"""kvrag: prefill each RAG chunk once, when the index is built, and reuse its KV in every prompt and any order.

::

    index time   text ──chunk text──▶ token ids ──fingerprint──▶ key ──precompute──▶ ChunkKV ──▶ store
    query time   prompt ─▶ spans ─▶ plan ─▶ layout ─▶ store (load) ─▶ stitch ─▶ selection ─▶ repair ─▶ decode ─▶ text
                                                                                       + how it was made

Start with :class:`KVRagEngine`; LangChain users with ``langchain_kvrag``, LlamaIndex users with ``llama_index.llms.kvrag``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrag.config import RepairConfig, SamplingConfig, StoreConfig
    from kvrag.engine import KVRagEngine
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
    )
    from kvrag.hooks import delete_kv, precompute_kv, sync_kv
    from kvrag.model.flash import flash_attention_tier, install_flash_attention, uninstall_flash_attention
    from kvrag.prompt.template import TemplatePrefix
    from kvrag.store import Retention
    from kvrag.types import (
        Chunk,
        Explanation,
        GenerationResult,
        PrecomputeReport,
        PrefillResult,
        ScoreResult,
        SyncReport,
        VerifyReport,
    )

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "Explanation",
    "GenerationResult",
    "InputError",
    "KVRagEngine",
    "KVRagError",
    "MissingDependencyError",
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
    "UnsupportedModelError",
    "VerifyReport",
    "__version__",
    "delete_kv",
    "flash_attention_tier",
    "install_flash_attention",
    "precompute_kv",
    "sync_kv",
    "uninstall_flash_attention",
]

_HOME = {
    "Chunk": "kvrag.types",
    "ConfigError": "kvrag.errors",
    "ContextLengthError": "kvrag.errors",
    "Explanation": "kvrag.types",
    "GenerationResult": "kvrag.types",
    "InputError": "kvrag.errors",
    "KVRagEngine": "kvrag.engine",
    "KVRagError": "kvrag.errors",
    "MissingDependencyError": "kvrag.errors",
    "ModelError": "kvrag.errors",
    "OutOfMemoryError": "kvrag.errors",
    "PrecomputeReport": "kvrag.types",
    "PrefillResult": "kvrag.types",
    "RepairConfig": "kvrag.config",
    "Retention": "kvrag.store",
    "SamplingConfig": "kvrag.config",
    "ScoreResult": "kvrag.types",
    "StoreConfig": "kvrag.config",
    "StoreError": "kvrag.errors",
    "StoreFormatError": "kvrag.errors",
    "SyncReport": "kvrag.types",
    "TemplatePrefix": "kvrag.prompt.template",
    "UnsupportedModelError": "kvrag.errors",
    "VerifyReport": "kvrag.types",
    "delete_kv": "kvrag.hooks",
    "flash_attention_tier": "kvrag.model.flash",
    "install_flash_attention": "kvrag.model.flash",
    "precompute_kv": "kvrag.hooks",
    "sync_kv": "kvrag.hooks",
    "uninstall_flash_attention": "kvrag.model.flash",
}
"""Where each public name lives. Modules are imported at first use: ``import kvrag`` costs no torch and no transformers."""


def __getattr__(name: str) -> Any:
    """Import a public name at first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'kvrag' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List public names, imported yet or not."""
    return sorted({*globals(), *__all__})
