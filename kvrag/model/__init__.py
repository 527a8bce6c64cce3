"""The only room that knows transformers' internals: a causal LM as kvrag's stages see it.

Nothing is patched, and no architecture is accepted by its name. Structure gives candidates; one forward of a few tokens at load shows,
layer by layer, which of them hold; a proof compares the loaded model with transformers' own forward.

::

    source → load → plain (refused: full prefill, and why)
               └──→ lm ← traits ← candidates, rope        what was found out about each layer
                    ├──→ proof                            reuse is exact on this model, or refused
    ids, Rows, KV ──┴──→ forward → attention → rows       one forward: cache, attention, limits of each row, KV in slots
    turns (whose forward it is) → steps                   decode steps of all requests, one forward
    flash                                                 the attention alone, under transformers' own generate

May import ``types errors config threads`` and ``identity``.
"""

from kvrag.model.forward import StopForward
from kvrag.model.lm import CausalLM
from kvrag.model.plain import check_supported

__all__ = ["CausalLM", "StopForward", "check_supported"]
