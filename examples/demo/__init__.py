"""The demo: real documents, a real small model, a real retriever, and every answer made twice, with reuse and without.

::

    documents ──splitting──▶ chunks ──▶ pipeline (a framework's normal parts) ──▶ run ──▶ report
                                         parts: model and embeddings from packages, so that nothing is downloaded

Run it with ``kvrag demo`` in a checkout.
"""
