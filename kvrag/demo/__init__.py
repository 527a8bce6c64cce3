"""The demo: real documents, a real small model, a real retriever, and every answer made twice, with reuse and without.

::

    documents ──splitting──▶ chunks ──▶ pipeline (a framework's normal parts) ──▶ run ──▶ report
                                         parts: model and embeddings out of packages, so that nothing is downloaded

:mod:`~kvrag.demo.splitting` and :mod:`~kvrag.demo.documents` also serve ``kvrag precompute``, as a convenience:
applications have their own splitter.
"""
