"""Causal LMs, in the only room that knows transformers' internals.

Nothing is patched (but the reader of GGUF files, for the length of a load), and no architecture is
accepted by its name. Structure gives candidates; a forward of a few tokens at load shows, layer by
layer, which of them hold; a proof compares the loaded model with transformers' own forward.

::

    source → load → plain (refused: full prefill, with the reason)
         gguf ──┤                                   parsed once, or dequantised by an earlier start
               └──→ lm ← traits ← candidates, rope    findings about every layer
                    ├──→ proof                        reuse is exact on this model, or refused
    ids, Rows, KV ──┴──→ forward → attention → rows   cache, attention, limits of rows, KV in slots
    lock (of the model) → steps                       decode steps of all requests, in a forward
    flash                                             the attention under transformers' generate

May import ``types errors cache config runtime progress``, ``identity`` and ``kv``.
"""

from kvrag.model.forward import StopForward
from kvrag.model.lm import CausalLM
from kvrag.model.plain import check_supported

__all__ = ["CausalLM", "StopForward", "check_supported"]
