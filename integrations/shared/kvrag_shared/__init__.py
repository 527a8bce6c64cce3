"""Stores that several machines share, by the scheme of their address.

::

    kvrag.store.opening ─▶ entry point ─┬→ redis (Redis, Valkey: blobs and catalog rows)
                                        └→ object_store (S3, Google Cloud Storage, Azure)

Imports the core.
"""
