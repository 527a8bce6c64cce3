"""Turn a prompt into planned pieces: text, token ids and stored KV.

::

    text, messages ─▶ planner ─▶ plan ─▶ template (marks: what it shows) ─▶ tokenizer
    token ids ───────────┴▶ plan_ids ─▶ spans (known chunks), partial (first parts of them)
                                │
                             look-up ─▶ store
                                └─────▶ Plan ─▶ explain

Imports ``types errors config runtime``, ``identity`` and ``store``.
"""
