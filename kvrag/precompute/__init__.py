"""Precompute: turn texts into stored KV, when an index is built or after a prompt missed them.

::

    texts, ids ─▶ documents (check) ─▶ run ─▶ encode (a forward per batch) ─▶ store
    library: the documents of a store, without a model
    missed chunks ─▶ on_miss (in the background, between requests) ─▶ run
    kv_dtype ─▶ quantise_check (once per model, before any KV is quantised)

May import ``types errors config runtime metrics cache`` and rooms from ``identity`` to ``blend``.
"""
