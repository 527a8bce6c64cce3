"""Front before vLLM's OpenAI server, for ``kvrag serve --engine vllm``; needs ``server``.

::

    client ─▶ gate (id, key, size) ─▶ prompts (render, tokenise) ─▶ upstream ─▶ vLLM
                                   ─▶ documents (precompute in vLLM's worker; the rest here)

``start`` assembles it for ``command``, and ``child`` runs vLLM as a child process. ``prompts`` has
the tokenizer and the store, but no model. All other requests pass unchanged, and so do all answers;
``upstream`` adds the record of reuse. Imports the core, ``cli`` and the server's package.
"""
