"""Ask a vector store which nodes it holds.

The arguments of a call are no proof, because stores interpret them differently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

logger = logging.getLogger(__name__)

AT_ONCE = 1000  # ids per query; databases limit the parameters of a statement
_DOCUMENT = "document_id"  # LlamaIndex writes it into the metadata of every stored node


def held_ids(
    store: BasePydanticVectorStore,
    node_ids: Sequence[str] | None = None,
    filters: MetadataFilters | None = None,
) -> list[str] | None:
    """Return the ids of nodes in a store: all, or among ``node_ids``, or matching the filters.

    ``None`` means that the store can't list them.
    """
    if isinstance(store, SimpleVectorStore):
        return _in_simple_store(store, node_ids, filters)
    nodes = held_nodes(store, node_ids, filters)
    if nodes is None:
        return None
    found = dict.fromkeys(node.node_id for node in nodes)
    if node_ids is None:
        return list(found)
    return [each for each in node_ids if each in found]


def held_nodes(
    store: BasePydanticVectorStore,
    node_ids: Sequence[str] | None = None,
    filters: MetadataFilters | None = None,
) -> list[BaseNode] | None:
    """Return nodes as a store holds them; takes the arguments of :func:`held_ids`."""
    if node_ids is None:
        parts: list[list[str] | None] = [None]
    else:
        parts = [
            list(node_ids[first : first + AT_ONCE]) for first in range(0, len(node_ids), AT_ONCE)
        ]
    try:
        return [node for part in parts for node in store.get_nodes(part, filters)]
    except Exception:  # not implemented, or not for these filters
        logger.debug("%s was not asked for its nodes", type(store).__name__, exc_info=True)
        return None


def ids_of_document(store: BasePydanticVectorStore, ref_doc_id: str) -> list[str] | None:
    """Return the ids of a document's nodes in a store, if the store can list them."""
    if isinstance(store, SimpleVectorStore):
        return [
            node
            for node, document in store.data.text_id_to_ref_doc_id.items()
            if document == ref_doc_id
        ]
    return held_ids(
        store, filters=MetadataFilters(filters=[MetadataFilter(key=_DOCUMENT, value=ref_doc_id)])
    )


def _in_simple_store(
    store: SimpleVectorStore, node_ids: Sequence[str] | None, filters: MetadataFilters | None
) -> list[str] | None:
    """Return ids of nodes in the default store.

    The store can't list its nodes, but it has their ids, and answers a query without nodes.
    """
    rows = store.data.embedding_dict
    chosen = list(rows) if node_ids is None else [each for each in node_ids if each in rows]
    if filters is None or not chosen:
        return chosen
    query = VectorStoreQuery(
        query_embedding=rows[chosen[0]],
        similarity_top_k=len(chosen),
        node_ids=chosen,
        filters=filters,
    )
    try:
        return list(store.query(query).ids or [])
    except ValueError:  # the store was persisted without metadata
        return None
