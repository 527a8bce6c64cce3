"""Who has what: chunks, texts, documents, and what chunks are worth. Processes share it; each change is one transaction.

::

    changes → hits → ledger → rows (diskcache) → database
                                └→ shared → journal

"""

from kvrag.store.catalog.changes import Catalog

__all__ = ["Catalog"]
