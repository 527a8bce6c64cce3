"""From a plan to a prefilled prompt: integers first, then tensors.

::

    Plan ─▶ layout ─▶ reuse: decide, load ─▶ stitch ─▶ select ─▶ repair ─▶ logits
               └───────────── prefill runs them ─────────────────┘
                 cost: prices for auto · covariance: covariance of row changes
    Plan ─▶ beginnings: behind an earlier prompt's beginning, where chunks are not reused ─▶ logits

Imports ``types errors cache config runtime`` and rooms from ``identity`` to ``prompt``.
"""
