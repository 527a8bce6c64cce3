"""kvrag for vLLM: prompts with a stored beginning start with its KV from a kvrag store.

::

    export_model (once, in a process with kvrag's engine) ──→ file with fingerprint and rotations
    vllm, scheduler ─→ connector ─→ heads (stored beginnings of prompts) ─→ kvrag.store
    vllm, worker ────→ connector ─→ exported (rotations) ─→ kvrag.store, vLLM's cache

``KVRagConnector`` is in :mod:`vllm_kvrag.connector`, the only module here that needs vLLM.
"""

from vllm_kvrag.exported import export_model

__all__ = ["export_model"]
