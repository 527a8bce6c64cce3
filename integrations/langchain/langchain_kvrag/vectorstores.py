"""Vector store that keeps the KV of its documents in step with additions and deletions."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore
from pydantic import Field, SkipValidation

from kvrag import ConfigError, InputError, KVRagError
from kvrag.adapters import AdapterOptions, DocumentKV, config_class, parameters_of
from langchain_kvrag._faiss import FaissStore, Metric
from langchain_kvrag._held import as_ids, as_list, held_by_id, held_documents, held_ids, listed_id

_CHANGES = re.compile("a?(add|clear|delete|drop|remove|reset|update|upsert)(_|$)")
"""Pattern of the names of methods that change documents."""


def _checked_texts(
    store: VectorStore, texts: Iterable[str], ids: Iterable[Any] | None
) -> tuple[list[str], list[Any] | None]:
    """Return texts and ids as lists of equal length.

    Raises :class:`InputError` if the lengths differ; LangChain would drop the rest.
    """
    listed = as_list(texts) or []
    names = as_ids(store, ids, may_lack=True)
    if names is not None and len(names) != len(listed):
        raise InputError(
            f"{len(listed)} texts came with {len(names)} ids; pass one id per text, or none"
        )
    return listed, names


def _list_ids(store: VectorStore, documents: list[Document], options: dict[str, Any]) -> None:
    """Turn ``ids`` among options into a list: some stores would split a string into many ids.

    Ids of the documents are passed on in the form in which the store takes them.
    """
    own = [document.id for document in documents]
    if "ids" in options:
        options["ids"] = as_ids(store, options["ids"], may_lack=True)
    elif None not in own and as_ids(store, own) != own:
        options["ids"] = as_ids(store, own)


def _of_inner(name: str) -> Any:
    """Return a method that delegates to the inner store, with its signature and documentation.

    Works for coroutine functions, too.
    """

    @functools.wraps(getattr(VectorStore, name))
    def method(self: KVRagVectorStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    # Copied from the abstract class.
    method.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return method


@config_class
class _Options(AdapterOptions):
    inner: SkipValidation[VectorStore | None] = None
    embedding: SkipValidation[Embeddings | None] = Field(default=None, kw_only=True)
    llm: Any = Field(default=None, kw_only=True)
    metric: Metric | None = Field(default=None, kw_only=True)


class KVRagVectorStore(VectorStore):
    """Vector store, wrapped or an own FAISS index, that keeps KV for exactly its documents.

    Adding documents precomputes their KV. Replacing a document deletes the KV of its old text.
    Deleting a document deletes its KV unless another document has the same text. Searches go to the
    inner store. KV refers to documents by id: stores that share a namespace must not use the same
    id for two texts. Ids are strings; a whole number or a UUID stands for its text, so ``1`` and
    ``"1"`` are the same document. Of calls that overlap, the inner store decides: KV is kept of the
    documents and texts that it holds in the end.

    Parameters
    ----------
    inner
        Store to keep in step; default: an own FAISS index (exact search, needs ``faiss-cpu``).
    embedding
        Embedding model of the own index.
    llm
        The :class:`~langchain_kvrag.ChatKVRag`, :class:`~langchain_kvrag.KVRagLLM` or
        :class:`kvrag.KVRagEngine` that will answer, or the :class:`kvrag.KVRagClient` of the server
        that will; ``None`` keeps no KV.
    metric
        Metric of a new own index: ``"l2"``, the default, or ``"ip"``.
    **options
        As for :func:`kvrag.precompute_kv`, of all added documents. By default ``on_error`` is
        ``"warn"``: documents are added even if their KV can't be computed. A ``collection``
        separates stores that share a namespace.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model, an option has an invalid value, neither or both of
        ``inner`` and ``embedding`` are given, or ``metric`` is given for a store that exists.
    MissingDependencyError
        If the own index is wanted and FAISS is not installed.
    InputError
        If ``collection`` is not a name.

    Examples
    --------
    >>> store = KVRagVectorStore.from_documents(splits, embeddings, llm=llm)  # doctest: +SKIP
    >>> store = KVRagVectorStore(existing_store, llm=llm)  # doctest: +SKIP
    >>> llm.precompute_kv(store, collection=store.collection)  # older ones  # doctest: +SKIP
    """

    @parameters_of(_Options)
    def __init__(self, inner: VectorStore | None = None, **options: Any) -> None:
        asked = _Options(inner=inner, **options)
        if (inner is None) == (asked.embedding is None):
            raise ConfigError(
                "pass either a vector store to wrap, or embedding=... for an own FAISS index"
            )
        if inner is not None and not isinstance(inner, VectorStore):
            raise ConfigError(
                f"inner is of type {type(inner).__name__}; pass a LangChain VectorStore, or "
                "embedding=..."
            )
        self._kv = DocumentKV(asked.llm, on_error=asked.on_error, **asked.shared())
        if asked.llm is not None:
            self._kv.host  # noqa: B018 - raises
        if asked.embedding is not None:
            inner = FaissStore(asked.embedding, metric=asked.metric or "l2")
        elif asked.metric:
            raise ConfigError(
                "metric can't be chosen for a store that exists; leave it out, or pass "
                "embedding=... for a new FAISS index"
            )
        assert inner is not None
        self.inner = inner
        self.llm = asked.llm
        self.namespace = asked.namespace
        self.collection = asked.collection
        self.retention = asked.retention
        self._on_error = asked.on_error
        self._has_warned = False

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build an own FAISS index and the KV of its texts.

        Takes the options of the constructor, too (``llm=...``).
        """
        store = cls(embedding=embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    # -- changes that KV follows -----------------------------------------------------------------

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add or replace texts, and precompute their KV; a string is a single text or id."""
        texts, ids = _checked_texts(self.inner, texts, ids)
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add or replace texts without blocking the event loop (see :meth:`add_texts`)."""
        texts, ids = _checked_texts(self.inner, texts, ids)
        return await super().aadd_texts(texts, metadatas, ids=ids, **kwargs)

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add or replace documents, and precompute their KV.

        Takes the options of the inner store. A string as ``ids`` is a single id.
        """
        documents = list(documents)
        _list_ids(self.inner, documents, kwargs)
        names = self.inner.add_documents(documents, **kwargs)
        self._add(documents, names)
        return names

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add or replace documents without blocking the event loop (see :meth:`add_documents`)."""
        documents = list(documents)
        _list_ids(self.inner, documents, kwargs)
        names = await self.inner.aadd_documents(documents, **kwargs)
        await run_in_executor(None, self._add, documents, names)
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, and erase the KV of documents that the inner store no longer holds.

        A string is a single id. The inner store decides the meaning of ``None`` and ``kwargs``; the
        own index refuses ``None``.
        """
        given = as_ids(self.inner, ids)
        concerned = self._concerned(given)
        done: bool | None = False
        try:
            done = self.inner.delete(given, **kwargs)
        finally:
            self._forget(concerned, is_done=done is not False)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents without blocking the event loop (see :meth:`delete`)."""
        given = as_ids(self.inner, ids)
        concerned = await run_in_executor(None, self._concerned, given)
        done: bool | None = False
        try:
            done = await self.inner.adelete(given, **kwargs)
        finally:
            await run_in_executor(None, lambda: self._forget(concerned, is_done=done is not False))
        return done

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Get documents by their ids; a string is a single id."""
        return self.inner.get_by_ids(as_ids(self.inner, ids) or [])

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Get documents by their ids in an event loop; a string is a single id."""
        return await self.inner.aget_by_ids(as_ids(self.inner, ids) or [])

    def kv_documents(self) -> list[Document]:
        """List the documents, for :func:`kvrag.precompute_kv` and :func:`kvrag.sync_kv`.

        Raises
        ------
        InputError
            If the inner store can't list them.
        """
        return held_documents(self.inner)

    def _add(self, documents: Sequence[Document], names: Sequence[Any]) -> None:
        if self.llm is None or not documents:
            return
        # Of documents with equal ids, the store keeps the last.
        latest = {
            listed_id(self.inner, name): document.page_content
            for name, document in zip(names, documents, strict=False)
        }
        self._precompute(latest)
        self._follow(latest)

    def _precompute(self, texts: dict[str, str]) -> None:
        """Precompute the KV of documents, given by id."""
        self._erase(self._kv.changed(texts.items()))
        self._kv.precompute(list(texts.values()), ids=list(texts))

    def _follow(self, written: Mapping[str, str | None]) -> None:
        """Bring KV in step with documents that other calls have changed meanwhile.

        ``written`` are the texts whose KV this call has stored, ``None`` where it was erased. The
        inner store decides; a call ends once it holds just what the call has written last.
        """
        written = dict(written)
        while written:
            found = held_by_id(self.inner, list(written))
            if found is None:
                return
            held = {name: document.page_content for name, document in found.items()}
            gone = [name for name, text in written.items() if text is not None and name not in held]
            changed = {name: text for name, text in held.items() if text != written.get(name, text)}
            if not gone and not changed:
                return
            self._erase(gone)
            written |= dict.fromkeys(gone)
            if changed:
                self._precompute(changed)
                written |= changed

    def _concerned(self, ids: list[str] | None) -> list[str] | None:
        """Return the ids of documents that a deletion may remove.

        ``None`` means that the inner store can't list them.
        """
        if self.llm is None:
            return []
        if ids:
            return [listed_id(self.inner, name) for name in ids]
        held = held_ids(self.inner)
        if held is None:
            return None
        return sorted(held)

    def _forget(self, ids: list[str] | None, *, is_done: bool) -> None:
        """Erase the KV of documents that are gone.

        If the inner store can't list its documents, ``is_done`` decides: after a deletion that is
        done, all of them count as gone.
        """
        if ids is None:
            self._warn_of_unknown()
            return
        held = held_ids(self.inner, ids) if ids else set()
        if held is None:
            held = set() if is_done else set(ids)
        gone = [name for name in ids if name not in held]
        self._erase(gone)
        self._follow(dict.fromkeys(gone))

    def _erase(self, ids: list[str]) -> None:
        """Erase the KV of documents."""
        if not ids:
            return
        try:
            self._kv.delete(ids)
        except KVRagError as error:
            if self._on_error == "raise":
                raise
            warnings.warn(
                f"the KV of {len(ids)} deleted or replaced document(s) could not be erased: "
                f"{error}; run sync_kv",
                UserWarning,
                stacklevel=4,
            )

    def _warn_of_unknown(self) -> None:
        """Warn, a single time, that a deletion may have left KV."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(self.inner).__name__} can't list its documents, so the KV of those that were "
            "deleted stays; delete by ids, or run sync_kv with the documents that are left",
            UserWarning,
            stacklevel=4,
        )

    # -- files of the own index --------------------------------------------------------------------

    def save_local(self, folder: str | os.PathLike[str]) -> None:
        """Write the own index to a folder: a FAISS file and JSON, no pickles.

        KV stays in the model's ``kv_dir``.
        """
        if not isinstance(self.inner, FaissStore):
            raise ConfigError(
                f"the documents are in a {type(self.inner).__name__}; save them with its own "
                "methods"
            )
        self.inner.save(folder)

    @classmethod
    def load_local(
        cls, folder: str | os.PathLike[str], embeddings: Embeddings, **kwargs: Any
    ) -> Self:
        """Read the files of :meth:`save_local`; takes the options of the constructor (``llm=...``).

        Precomputes no KV; ``llm.precompute_kv(store)`` computes the KV that is missing in the
        model's ``kv_dir``.

        Raises
        ------
        StoreError
            If the files are missing or damaged.
        """
        return cls(FaissStore.load(folder, embeddings), **kwargs)

    # -- delegation to the inner store -----------------------------------------------------------

    @property
    def embeddings(self) -> Embeddings | None:
        """Embedding model of the inner store."""
        return self.inner.embeddings

    # Defined here as well, because the method is abstract in the base class.
    similarity_search = _of_inner("similarity_search")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner store beyond LangChain's interface.

        Raises ``AttributeError`` for methods that would change documents without their KV.
        """
        # While an instance is copied, dunder names are looked up before it has ``inner``.
        if name.startswith("__") or "inner" not in vars(self):
            raise AttributeError(name)
        found = getattr(self.inner, name)
        if _CHANGES.match(name) and callable(found):
            raise AttributeError(
                f"{name} of {type(self.inner).__name__} would change documents, and not their KV; "
                "use add_documents and delete, or store.inner's method and then llm.sync_kv(store)"
            )
        return found


for _name in vars(VectorStore):  # all methods that read
    if "search" in _name or _name == "_select_relevance_score_fn":
        setattr(KVRagVectorStore, _name, _of_inner(_name))
