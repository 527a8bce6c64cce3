"""A vector store around another one, where KV comes and goes with the nodes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

from llama_index.core import StorageContext
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SerializeAsAny
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from kvrag import ConfigError, KVRagEngine
from kvrag.hooks import engine_of
from kvrag.identity.fingerprint import text_digest
from kvrag.precompute.documents import in_collection
from llama_index.llms.kvrag.transform import PrecomputeFields, refuse_unknown, resolve_kv_llm
from llama_index.vector_stores.kvrag.refs import RefTable


class KVRagVectorStore(PrecomputeFields, BasePydanticVectorStore):
    """Wraps a vector store of LlamaIndex: adding nodes precomputes their KV, deleting them deletes it.

    Queries and everything else, also attributes of its own, are the inner store's. KV is referred to by node id; the nodes of each
    document are remembered in ``<kv_dir>/llama_index/refs.sqlite``, so deletion by ``ref_doc_id`` works after a restart. Stores that share
    an LLM and a namespace share KV; give each its own namespace or collection to keep ``clear()`` of one from costing the other its KV.

    Attributes
    ----------
    inner
        The store; default: a ``SimpleVectorStore``, which persists with the storage context.
    llm
        The LLM whose KV is stored; default: ``Settings.llm`` when it is needed.
    namespace, prefix, batch_size, show_progress, retention, collection
        As for :func:`kvrag.precompute_kv`; default: the LLM's.
    content
        ``"text"``: KV of the node's text. ``"llm"``: of the text with the metadata that the LLM is shown.
    on_error
        ``"warn"``: nodes are added and deleted even where their KV can't be. ``"raise"``: raise after the inner store has
        done its part.

    Raises
    ------
    ConfigError
        If ``inner`` is not a vector store of LlamaIndex, or ``llm`` can't use KV.
    InputError
        If ``collection`` is not a name.
    """

    stores_text: bool = False
    inner: SerializeAsAny[BasePydanticVectorStore] = Field(repr=False)
    prefix: Any = Field(default=None, exclude=True, repr=False)
    _refs: dict[str, RefTable] = PrivateAttr(default_factory=dict)

    def __init__(self, inner: BasePydanticVectorStore | None = None, *, llm: Any = None, **options: Any) -> None:
        inner = SimpleVectorStore() if inner is None else inner
        if not isinstance(inner, BasePydanticVectorStore):
            raise ConfigError(
                f"inner is of type {type(inner).__name__}; pass a vector store of LlamaIndex, or leave it out"
            )
        options.setdefault("stores_text", inner.stores_text)
        options.setdefault("is_embedding_query", inner.is_embedding_query)
        refuse_unknown(options, type(self))
        in_collection((), options.get("collection"))  # raises if it is not a name
        super().__init__(**{"inner": inner, "llm": None if llm is None else resolve_kv_llm(llm), **options})

    @classmethod
    def from_persist_dir(cls, persist_dir: str, *, llm: Any = None, **options: Any) -> KVRagVectorStore:
        """Load what a storage context has persisted of the default inner store."""
        return cls(SimpleVectorStore.from_persist_dir(persist_dir), llm=llm, **options)

    @classmethod
    def storage_context(cls, persist_dir: str, *, llm: Any = None, **options: Any) -> StorageContext:
        """Load a persisted context with this store in it, for ``load_index_from_storage``.

        ``StorageContext.from_defaults(persist_dir=...)`` makes a plain store of the same file: what is deleted from that leaves its KV.
        """
        store = cls.from_persist_dir(persist_dir, llm=llm, **options)
        return StorageContext.from_defaults(vector_store=store, persist_dir=persist_dir)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised form."""
        return "KVRagVectorStore"

    @property
    def client(self) -> Any:
        """The inner store's client."""
        return self.inner.client

    # -- nodes come ------------------------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, and precompute their KV."""
        ids = self.inner.add(list(nodes), **kwargs)
        self._keep(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """As :meth:`add`; the event loop is not blocked by the precompute."""
        ids = await self.inner.async_add(list(nodes), **kwargs)
        await asyncio.to_thread(self._keep, nodes)
        return ids

    def _keep(self, nodes: Sequence[BaseNode]) -> None:
        # First, so that KV without an entry can't arise. Nodes without a document are one of their own.
        self._table().add(self._space(), ((node.node_id, node.ref_doc_id or node.node_id) for node in nodes))
        self._forget([node.node_id for node in self._changed(nodes)], keep_refs=True)
        self.precompute(nodes)

    def _changed(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        """Return the nodes whose ids were used before, with another text."""
        mode = MetadataMode.NONE if self.content == "text" else MetadataMode.LLM
        index, names = self._engine().store.catalog, self._engine().store.names
        space = names.namespace(self._space())
        digests = {node.node_id: text_digest(node.get_content(metadata_mode=mode).strip()) for node in nodes}
        stored = in_collection((n.node_id for n in nodes), self.collection)
        found = zip(nodes, stored, strict=True)
        return [n for n, name in found if set(index.document_texts(space, name)) - {digests[n.node_id]}]

    # -- nodes go --------------------------------------------------------------------------------------------------

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and their KV."""
        ids = self._ids_of(ref_doc_id)
        self.inner.delete(ref_doc_id, **delete_kwargs)
        self._forget(ids)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """As :meth:`delete`."""
        ids = await asyncio.to_thread(self._ids_of, ref_doc_id)
        await self.inner.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._forget, ids)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes, and their KV."""
        ids = self._matching(node_ids, filters)
        self.inner.delete_nodes(node_ids, filters, **delete_kwargs)
        self._forget(ids)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """As :meth:`delete_nodes`."""
        ids = await asyncio.to_thread(self._matching, node_ids, filters)
        await self.inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(self._forget, ids)

    def clear(self) -> None:
        """Empty the store, and delete the KV of all nodes that were added through a store of this namespace and collection."""
        self.inner.clear()
        self._forget(self._table().nodes(self._space()))

    async def aclear(self) -> None:
        """As :meth:`clear`."""
        await self.inner.aclear()
        await asyncio.to_thread(lambda: self._forget(self._table().nodes(self._space())))

    def _ids_of(self, ref_doc_id: str) -> list[str]:
        """Return a document's nodes, from the table, or from an inner store that is older than its wrapping."""
        known = self._table().nodes(self._space(), ref_doc_id)
        if not known and isinstance(self.inner, SimpleVectorStore):
            return [node for node, ref in self.inner.data.text_id_to_ref_doc_id.items() if ref == ref_doc_id]
        return known

    def _matching(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[str]:
        """Return the nodes that a deletion will remove."""
        if filters is None:
            return list(node_ids or [])
        if isinstance(self.inner, SimpleVectorStore):  # keeps no nodes that it could list, but a query needs none
            rows = self.inner.data.embedding_dict
            chosen = list(rows) if node_ids is None else [i for i in node_ids if i in rows]
            if not chosen:
                return []
            query = VectorStoreQuery(
                query_embedding=rows[chosen[0]], similarity_top_k=len(chosen), node_ids=chosen, filters=filters
            )
            return list(self.inner.query(query).ids or [])
        try:
            return [node.node_id for node in self.inner.get_nodes(node_ids, filters)]
        except NotImplementedError:
            warnings.warn(
                f"{type(self.inner).__name__} can't list the nodes that the filters match, so their KV stays; run sync_kv",
                UserWarning,
                stacklevel=3,
            )
            return []

    def _forget(self, node_ids: Sequence[str], *, keep_refs: bool = False) -> None:
        """Delete KV, and then the entries: if the first fails, a later deletion finds them again."""
        if not node_ids:
            return
        try:
            self._engine().delete(list(node_ids), collection=self.collection, namespace=self.namespace)
        except Exception as error:
            if self.on_error == "raise":
                raise
            warnings.warn(
                f"the KV of deleted nodes could not be deleted: {error}; run sync_kv", UserWarning, stacklevel=3
            )
            return
        if not keep_refs:
            self._table().remove(self._space(), node_ids)

    # -- everything else is the inner store's ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Find what is the inner store's own, such as a collection; only what is not found here comes to this."""
        if name.startswith("_") or "inner" not in self.__dict__:  # pydantic's, or a copy that is being made
            return super().__getattr__(name)  # type: ignore[misc]
        return getattr(self.inner, name)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store."""
        return self.inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store."""
        return await self.inner.aquery(query, **kwargs)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Ask the inner store."""
        return self.inner.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Ask the inner store."""
        return await self.inner.aget_nodes(node_ids, filters)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the inner store; KV is on disk already."""
        self.inner.persist(persist_path, fs=fs)

    def _engine(self) -> KVRagEngine:
        return engine_of(resolve_kv_llm(self.llm))

    def _space(self) -> str:
        return self._engine().namespace if self.namespace is None else self.namespace

    def _table(self) -> RefTable:
        """Return the table beside the LLM's KV; ``Settings.llm`` may be another one than a moment ago."""
        kv_dir = getattr(resolve_kv_llm(self.llm), "kv_dir", None)
        if str(kv_dir) not in self._refs:
            self._refs[str(kv_dir)] = RefTable(kv_dir, self.collection)
        return self._refs[str(kv_dir)]
