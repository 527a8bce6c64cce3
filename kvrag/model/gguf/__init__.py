"""GGUF files: parsed once per load, and on request dequantised once for all starts.

::

    file → parsing → config, tokenizer, weights → load
             kept  ←─── the model as loaded ────┘
              └──────── the next start ─────────→ load
"""
