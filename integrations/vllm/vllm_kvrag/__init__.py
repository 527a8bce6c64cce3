"""kvrag for vLLM: prompts reuse stored chunks, and vLLM decodes.

::

    connector ─┬→ blend, the scheduler: planning, private │ the worker: weights, proof, blending
               └→ prefix, the scheduler: heads            │ the worker: exported (rotations)
    front ─→ the API before vLLM's server, for ``kvrag serve --engine vllm``
    loader ─→ borrowed (a model of transformers with vLLM's weights), linear (its layers on CPUs)
    export_model (once, in a process with kvrag's engine) ─→ the file of the prefix mode

``planning``, ``blending``, ``private``, ``heads``, ``exported`` and ``borrowed`` need no vLLM.
The connector imports ``kvrag.adapters``; the front, the server's package and the core, too.
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
