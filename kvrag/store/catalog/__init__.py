"""Catalog of the store: chunks, texts and documents, and the use of chunks.

Processes share it; every change is a transaction.

::

    changes → hits → ledger → rows (diskcache) → database
                                └→ shared → journal

"""

from kvrag.store.catalog.changes import Catalog

__all__ = ["Catalog"]
