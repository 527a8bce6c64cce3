"""From a prompt to planned pieces: text, token ids, and what the store has for them.

::

    text, messages ─▶ template ─▶ plan ─▶ spans (known chunks), partial (first parts of them)
                         │         ├────▶ store
                         ▼         ▼
                     tokenizer    Plan ─▶ explain

Imports ``types errors config threads``, ``identity`` and ``store``.
"""
