"""Precompute: texts become stored KV, when an index is built or after a prompt missed them.

::

    texts, ids ─▶ run (checked; documents knows collections) ─▶ encode (one forward per batch) ─▶ store
    missed chunks ─▶ on_miss (in the background, between requests) ─▶ run
    kv_dtype ─▶ quantise_check (once per model, before anything is rounded)

May import ``prompt``, ``blend``, ``model``, ``store``, ``identity``, ``config``, ``types``, ``errors`` and ``threads``.
"""
