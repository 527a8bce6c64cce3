"""Front before vLLM's OpenAI server, for ``kvrag serve --engine vllm``; needs ``server``.

::

    client ─▶ gate (id, key, size) ─▶ prompts (render, tokenise) ─▶ upstream ─▶ vLLM
                                   ─▶ documents (precompute in vLLM's worker; the rest here)

``start`` assembles it, and ``child`` runs vLLM as a child process. ``prompts`` has the tokenizer
and the store, but no model. All other requests pass unchanged, and so do all answers; ``upstream``
adds the record of reuse. Imports ``server``, ``prompt``, ``precompute``,
and ``blend.reuse``, which lays a plan out.
"""

from kvrag.front.start import started

__all__ = ["started"]
