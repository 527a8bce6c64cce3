"""kvrag for vLLM: prompts with a stored beginning start with its KV from a kvrag store.

::

    export_model (once, in a process with kvrag's engine) ──→ file with fingerprint and rotations
    vllm, scheduler ─→ connector ─→ heads (stored beginnings of prompts) ─→ kvrag.store
    vllm, worker ────→ connector ─→ exported (rotations) ─→ kvrag.store, vLLM's cache

``KVRagConnector`` is in :mod:`vllm_kvrag.connector`, the only module here that needs vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvrag.exported import export_model

__all__ = ["export_model"]


def __getattr__(name: str) -> Any:
    if name != "export_model":
        raise AttributeError(f"module 'vllm_kvrag' has no attribute {name!r}")
    # At first use: every process of a vLLM imports this package for its plugin.
    from vllm_kvrag.exported import export_model

    return export_model
