"""Identity: everything that changes KV, in one digest per model and one key per chunk.

::

    config, tokenizer, attention ─▶ describe ─┐
    files, hub commit, tensors ──▶ weights ───┼─▶ model (LiveIdentity) ─▶ fingerprint ─▶ chunk_key
    layers of peft ──────────────▶ adapters ──┘   asks again per request

May import ``types``, ``errors``, ``config`` and ``threads``. Never imports transformers or peft.
"""
