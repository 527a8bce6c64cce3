"""kvrag for vLLM: prompts that begin with a stored prefix and chunk start with their KV, read from a kvrag store.

::

    export_model (once, in a process with kvrag's engine) ──→ a file with the model's fingerprint and rotations
    vllm, scheduler ─→ connector ─→ heads (what prompts may begin with) ─→ kvrag.store
    vllm, worker ────→ connector ─→ exported (rotations) ─→ kvrag.store, vLLM's cache

``KVRagConnector`` is in :mod:`vllm_kvrag.connector`, which needs vLLM; nothing else here does.
"""

from vllm_kvrag.exported import export_model

__all__ = ["export_model"]
