"""Turn a request into an answer.

::

    streams (thread of a request) ─▶ pipeline ─▶ prompt.plan ─▶ scheduler (admits: room for KV)
                                                                    │
                   text ◀─ sampling ◀─ blend.prefill ◀─────────────┘

Imports everything that runs before it: ``store``, ``model``, ``prompt``, ``blend``, ``precompute``
and the rooms that they may import.
"""
