"""Catalog of the store: chunks, texts and documents, and the use of chunks.

Processes and machines share it; every change is a transaction.

::

    changes → hits → ledger → rows (diskcache) → database
                                ├→ redis, or another store that has a catalog
                                └→ bucket (blobs without a catalog)

"""

from kvrag.store.catalog.changes import Catalog

__all__ = ["Catalog"]
