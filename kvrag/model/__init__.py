"""Causal LMs, in the only room that knows transformers' internals.

A given model is not patched, and no architecture is accepted by its name. (Linear layers of a
model that is loaded here get another class; the reader of GGUF files is patched while it reads.)
Structure gives candidates; a forward of a few tokens at load shows, layer by layer, which of them
hold; a proof compares the loaded model with transformers' own forward.

::

    source → load → plain (refused: full prefill, with the reason)
         gguf ──┤                                   files parsed once per load
               └──→ lm ← traits ← candidates, rope    findings about every layer
                    ├──→ proof                        reuse is exact on this model, or refused
    ids, Rows, KV ──┴──→ forward → attention → rows   cache, attention, limits of rows, KV in slots
                                      └─→ linear      products of a CPU's matrices
    lock (of the model) → steps                       decode steps of all requests, in a forward

May import ``types errors cache config runtime progress``, ``identity`` and ``kv``.
"""

from kvrag.model.forward import StopForward
from kvrag.model.lm import CausalLM
from kvrag.model.plain import check_supported

__all__ = ["CausalLM", "StopForward", "check_supported"]
