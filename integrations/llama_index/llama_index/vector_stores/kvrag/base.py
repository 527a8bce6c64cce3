"""Vector store around another vector store; the KV of its nodes is added and deleted with them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

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
from pydantic import SkipValidation

from kvrag import ConfigError
from kvrag.adapters import AdapterOptions, DocumentKV, config_class, parameters_of
from llama_index.llms.kvrag.transform import (
    PrecomputeFields,
    of_class,
    resolve_kv_llm,
)
from llama_index.vector_stores.kvrag.held import held_ids, held_nodes, ids_of_document
from llama_index.vector_stores.kvrag.refs import RefTable


def _as_list(node_ids: Iterable[Any] | None) -> list[str] | None:
    """Return ids as strings; whole numbers and UUIDs become their text."""
    if node_ids is None:
        return None
    if isinstance(node_ids, (str, int, UUID)):
        return [DocumentKV.id_text(node_ids)]
    return list(map(DocumentKV.id_text, node_ids))


def _document_id(ref_doc_id: Any) -> Any:
    """Return a document's id as a string; the inner store decides the meaning of ``None``."""
    return None if ref_doc_id is None else DocumentKV.id_text(ref_doc_id)


@config_class
class _Options(AdapterOptions):
    inner: SkipValidation[BasePydanticVectorStore | None] = None
    llm: Any = Field(default=None, kw_only=True)
    stores_text: bool | None = Field(default=None, kw_only=True)
    is_embedding_query: bool | None = Field(default=None, kw_only=True)


class KVRagVectorStore(PrecomputeFields, BasePydanticVectorStore):
    """Wraps a vector store of LlamaIndex: adding nodes precomputes their KV, deletion deletes it.

    Queries, and all other methods and attributes, are the inner store's. KV refers to nodes by id.
    The table ``<kv_dir>/llama_index/refs.sqlite`` remembers the nodes of every document, so
    deletion by ``ref_doc_id`` works after a restart. Stores that share an LLM and a namespace share
    KV; give every store its own namespace or collection, or ``clear()`` deletes the KV of the other
    stores, too.

    Attributes
    ----------
    inner
        Inner store; default: a ``SimpleVectorStore``, which persists with the storage context.
    llm
        LLM whose KV is stored, or the :class:`kvrag.KVRagClient` of its server; default:
        ``Settings.llm`` when it is needed.
    **options
        As for :func:`kvrag.precompute_kv`; default: the LLM's. By default ``on_error`` is
        ``"warn"``: nodes are added and deleted even where their KV can't be. ``"raise"``: raise
        after the inner store has done its part.

    Raises
    ------
    ConfigError
        If ``inner`` is not a vector store of LlamaIndex, or ``llm`` can't use KV.
    InputError
        If ``collection`` is not a name.
    """

    stores_text: bool = False
    inner: SerializeAsAny[BasePydanticVectorStore] = Field(repr=False)
    llm: Any = Field(default=None, exclude=True, repr=False)
    prefix: Any = Field(default=None, exclude=True, repr=False)
    _refs: dict[str, RefTable] = PrivateAttr(default_factory=dict)
    _has_warned: bool = PrivateAttr(default=False)

    @parameters_of(_Options)
    def __init__(
        self,
        inner: BasePydanticVectorStore | None = None,
        class_name: object = None,
        **options: Any,
    ) -> None:
        if inner is None:
            inner = SimpleVectorStore()
        if not isinstance(inner, BasePydanticVectorStore):
            raise ConfigError(
                f"inner is of type {type(inner).__name__}; pass a vector store of LlamaIndex, or "
                "leave it out"
            )
        options.setdefault("stores_text", inner.stores_text)
        options.setdefault("is_embedding_query", inner.is_embedding_query)
        if options.get("llm") is not None:
            options["llm"] = resolve_kv_llm(options["llm"])
        asked = _Options(inner=inner, **of_class(_Options, options))
        DocumentKV(asked.llm, **asked.shared())  # checks them
        super().__init__(inner=inner, **options)

    @classmethod
    def from_persist_dir(
        cls, persist_dir: str, *, llm: Any = None, **options: Any
    ) -> KVRagVectorStore:
        """Load the persisted default inner store of a storage context."""
        return cls(SimpleVectorStore.from_persist_dir(persist_dir), llm=llm, **options)

    @classmethod
    def storage_context(
        cls, persist_dir: str, *, llm: Any = None, **options: Any
    ) -> StorageContext:
        """Load a persisted context with this store in it, for ``load_index_from_storage``.

        ``StorageContext.from_defaults(persist_dir=...)`` makes a plain store of the same file;
        deleting nodes from a plain store leaves their KV.
        """
        return StorageContext.from_defaults(
            vector_store=cls.from_persist_dir(persist_dir, llm=llm, **options),
            persist_dir=persist_dir,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in serialised form."""
        return "KVRagVectorStore"

    @property
    def client(self) -> Any:
        """Client of the inner store."""
        return self.inner.client

    # -- adding nodes ----------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, and precompute their KV."""
        self._kv()  # raises before anything changes
        ids = self.inner.add(list(nodes), **kwargs)
        self._keep(nodes)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes; the precompute does not block the event loop."""
        self._kv()
        ids = await self.inner.async_add(list(nodes), **kwargs)
        await asyncio.to_thread(self._keep, nodes)
        return ids

    def _keep(self, nodes: Sequence[BaseNode]) -> None:
        """Precompute the KV of added nodes that the inner store holds.

        Of calls that overlap, the inner store decides which nodes and texts have KV in the end.
        """
        latest = {node.node_id: node for node in nodes}
        # Entries first, so that no KV is without an entry. A node without a document counts as a
        # document of its own.
        self._table().add(
            self._kv().space, ((name, node.ref_doc_id or name) for name, node in latest.items())
        )
        written = dict[str, str]()
        while True:
            if self.inner.stores_text and latest:
                # Prompts show the texts that the store holds: Chroma keeps the first text of an id.
                held = held_nodes(self.inner, list(latest))
                latest |= {node.node_id: node for node in held or ()}
            todo = [node for node in latest.values() if written.get(node.node_id) != node.hash]
            if not todo:
                break
            self._forget(self._changed(todo), keep_refs=True)
            self.precompute(todo)
            written |= {node.node_id: node.hash for node in todo}
        self._forget_gone(list(latest), is_done=False)

    def _changed(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Return the ids of nodes that are stored with another text."""
        mode = MetadataMode.NONE if self.content == "text" else MetadataMode.LLM
        return self._kv().changed(
            (node.node_id, node.get_content(metadata_mode=mode)) for node in nodes
        )

    # -- deleting nodes --------------------------------------------------------------------------
    #
    # KV is deleted with the nodes that the inner store no longer holds. The arguments of a call
    # don't decide: stores differ in their treatment of None, of missing arguments, of filters
    # beside ids, and of nodes without a document.

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and their KV."""
        ref_doc_id = _document_id(ref_doc_id)
        self._going(
            partial(self._of_document, ref_doc_id),
            partial(self.inner.delete, ref_doc_id, **delete_kwargs),
        )

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and their KV, in an event loop."""
        ref_doc_id = _document_id(ref_doc_id)
        await self._agoing(
            partial(self._of_document, ref_doc_id),
            partial(self.inner.adelete, ref_doc_id, **delete_kwargs),
        )

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes, and their KV; a string is a single id."""
        ids = _as_list(node_ids)
        self._going(
            partial(self._matching, ids, filters),
            partial(self.inner.delete_nodes, ids, filters, **delete_kwargs),
        )

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes, and their KV, in an event loop; a string is a single id."""
        ids = _as_list(node_ids)
        await self._agoing(
            partial(self._matching, ids, filters),
            partial(self.inner.adelete_nodes, ids, filters, **delete_kwargs),
        )

    def clear(self) -> None:
        """Empty the store and delete the KV of its nodes.

        Also deletes the KV of nodes that other stores of this namespace and collection have added.
        """
        self._going(self._all, self.inner.clear)

    async def aclear(self) -> None:
        """Empty the store and delete KV in an event loop (see :meth:`clear`)."""
        await self._agoing(self._all, self.inner.aclear)

    def _going(self, which: Callable[[], list[str] | None], delete: Callable[[], None]) -> None:
        """Delete nodes, then the KV of the nodes in ``which()`` that are gone."""
        ids = which()
        is_done = False
        try:
            delete()
            is_done = True
        finally:
            self._forget_gone(ids, is_done)

    async def _agoing(
        self, which: Callable[[], list[str] | None], delete: Callable[[], Awaitable[None]]
    ) -> None:
        ids = await asyncio.to_thread(which)
        is_done = False
        try:
            await delete()
            is_done = True
        finally:
            await asyncio.to_thread(self._forget_gone, ids, is_done)

    def _of_document(self, ref_doc_id: str | None) -> list[str] | None:
        """Return the nodes of a document, by the inner store and by the table.

        The table knows them when the store can't list them.
        """
        if not ref_doc_id:
            return held_ids(self.inner)
        known = self._table().nodes(self._kv().space, ref_doc_id)
        held = ids_of_document(self.inner, ref_doc_id)
        if held is not None:
            return list(dict.fromkeys([*known, *held]))
        # A node without a document has its own id as document in the table only; no store deletes
        # it by that id.
        return [node_id for node_id in known if node_id != ref_doc_id] or None

    def _matching(
        self, node_ids: list[str] | None, filters: MetadataFilters | None
    ) -> list[str] | None:
        """Return the ids of nodes that a deletion may remove."""
        if node_ids and filters is None:
            return list(node_ids)
        return held_ids(self.inner, node_ids or None, filters)

    def _all(self) -> list[str]:
        return list(
            dict.fromkeys([*self._table().nodes(self._kv().space), *(held_ids(self.inner) or [])])
        )

    def _forget_gone(self, node_ids: list[str] | None, is_done: bool) -> None:
        """Delete the KV of nodes that are gone.

        If the inner store can't list its nodes, ``is_done`` decides: after a deletion that is done,
        all of them count as gone.
        """
        if node_ids is None:
            self._warn_of_unknown()
            return
        held = held_ids(self.inner, node_ids) if node_ids else []
        if held is None:
            held = [] if is_done else node_ids
        gone = sorted(set(node_ids) - set(held))
        self._forget(gone)
        if gone and self.inner.stores_text and (back := held_nodes(self.inner, gone)):
            self._keep(back)  # added again meanwhile

    def _warn_of_unknown(self) -> None:
        """Warn, a single time, that a deletion may have left KV."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(self.inner).__name__} can't list the nodes that the filters match, or that are "
            "meant without ids, so their KV stays; delete by node ids or documents, or run sync_kv",
            UserWarning,
            stacklevel=4,
        )

    def _forget(self, node_ids: Sequence[str], *, keep_refs: bool = False) -> None:
        """Delete KV, then the entries: if deleting KV fails, a later deletion finds them again."""
        if not node_ids:
            return
        try:
            self._kv().delete(list(node_ids))
        except Exception as error:
            if self.on_error == "raise":
                raise
            warnings.warn(
                f"the KV of deleted nodes could not be deleted: {error}; run sync_kv",
                UserWarning,
                stacklevel=5,
            )
            return
        if not keep_refs:
            self._table().remove(self._kv().space, node_ids)

    # -- delegation to the inner store -----------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner store, such as a collection.

        Python calls this only for names that this class lacks.
        """
        # Private names are pydantic's; a copy that is being made has no ``inner`` yet.
        if name.startswith("_") or "inner" not in self.__dict__:
            return super().__getattr__(name)
        return getattr(self.inner, name)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store."""
        return self.inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store in an event loop."""
        return await self.inner.aquery(query, **kwargs)

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes of the inner store."""
        return self.inner.get_nodes(_as_list(node_ids), filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes of the inner store, in an event loop."""
        return await self.inner.aget_nodes(_as_list(node_ids), filters)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the inner store; KV is on disk already."""
        self.inner.persist(persist_path, fs=fs)

    def _kv(self) -> DocumentKV:
        """Return the KV of the nodes; ``Settings.llm`` may have changed since."""
        return DocumentKV(
            resolve_kv_llm(self.llm), namespace=self.namespace, collection=self.collection
        )

    def _table(self) -> RefTable:
        """Return the table beside the LLM's KV; ``Settings.llm`` may have changed since."""
        kv_dir = getattr(resolve_kv_llm(self.llm), "kv_dir", None)
        if str(kv_dir) not in self._refs:
            self._refs[str(kv_dir)] = RefTable(kv_dir)
        return self._refs[str(kv_dir)]
