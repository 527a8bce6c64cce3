"""Turn a prompt into planned pieces: text, token ids and stored KV.

::

    text, messages ─▶ template ─▶ plan ─▶ spans (known chunks), partial (first parts of them)
                         │         ├────▶ store
    token ids ───────────┼▶ plan_ids
                         ▼         ▼
                     tokenizer    Plan ─▶ explain

Imports ``types errors config runtime``, ``identity`` and ``store``.
"""
