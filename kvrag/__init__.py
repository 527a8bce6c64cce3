"""kvrag: prefill each RAG chunk once, when the index is built, and reuse its KV in every prompt and any order.

::

    index time   text ──chunk text──▶ token ids ──fingerprint──▶ key ──precompute──▶ ChunkKV ──▶ store
    query time   prompt ─▶ spans ─▶ plan ─▶ layout ─▶ store (load) ─▶ stitch ─▶ selection ─▶ repair ─▶ decode ─▶ text
                                                                                       + how it was made

Start with :class:`KVRagEngine`; LangChain users with ``langchain_kvrag``, LlamaIndex users with ``llama_index.llms.kvrag``.
"""

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
from kvrag.prefix import TemplatePrefix
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
    "precompute_kv",
    "sync_kv",
]
