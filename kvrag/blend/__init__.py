"""From a plan to a prefilled prompt: integers first, then tensors.

::

    Plan ─▶ layout ─▶ reuse: decide, load ─▶ stitch ─▶ select ─▶ repair ─▶ logits
               └───────────── prefill runs them ─────────────────┘
                 cost: prices for auto · covariance: covariance of row changes · quantise: codes

Imports ``types errors cache config threads``, ``identity``, ``store``, ``model`` and ``prompt``.
"""
