"""Identity: a digest per model, and a key per chunk, of everything that changes KV.

::

    config, tokenizer, attention ─▶ describe ─┐
    files, hub commit, tensors ──▶ weights ───┼─▶ model (LiveIdentity) ─▶ fingerprint ─▶ chunk_key
    state that modules hide ─────▶ beside ────┤   checked again at every request
    layers of peft ──────────────▶ adapters ──┘

May import ``types``, ``errors``, ``config``, ``cache`` and ``runtime``. Never imports transformers
or peft.
"""
