"""Values of KV: the tensors of a layer, their codes, and the bytes of a chunk's blob.

::

    format (a blob, proven at every read) → layers (tensors of a layer) ← quantise (codes, scales)
       └→ crypto (a blob under a key)     → buffers (the host's memory for KV)
    snapshot (a copy of the state in a cache of transformers)

Imports ``types errors config runtime`` and ``identity``.
"""
