"""From a request to an answer.

::

    streams (thread of a request) ─▶ sequence ─▶ prompt.plan ─▶ scheduler (room) ─▶ blend.prefill ─▶ sampling ─▶ text ─▶ (audit)

Imports everything that runs before it: ``store``, ``model``, ``prompt``, ``blend``, ``precompute`` and what they may import.
"""
