"""Index-time hooks for texts and for the frameworks' documents, nodes, vector stores and indexes.

LangChain and LlamaIndex are not imported here: their objects are recognised by their attributes.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field, SkipValidation

from kvrag.config import (
    IndexOptions,
    config_class,
    options_class,
    parameters_of_function,
)
from kvrag.engine import KVRagEngine
from kvrag.errors import ConfigError, InputError, KVRagError, StoreError
from kvrag.hosts import Host, RemoteHost, chosen_host, engine_of
from kvrag.precompute.documents import Item
from kvrag.precompute.library import in_collection
from kvrag.progress import tell_short
from kvrag.runtime import POOL
from kvrag.types import PrecomputeReport, SyncReport

logger = logging.getLogger(__name__)

Named = list[tuple[str | None, str]]  # texts with the ids of their documents
Content = Literal["text", "llm"]
OnError = Literal["raise", "warn"]


@options_class
class HookOptions(IndexOptions):
    """Options of :func:`precompute_kv`, which adapters of frameworks have, too."""

    content: Content = "text"
    """For LlamaIndex nodes: ``"text"`` is the text alone, ``"llm"`` the text with the metadata that
    the LLM sees."""
    on_error: OnError = "raise"
    """``"raise"``: raise errors; if single chunks can't be stored, raise after the rest is done.
    ``"warn"``: warn instead; chunks without KV are prefilled with the prompt."""


@options_class
class _Ids:
    ids: SkipValidation[Sequence[str] | None] = None
    """Document ids, one per item; default: the items' own."""


@config_class
class ItemRequest(_Ids, HookOptions):
    """Items to compute and store the KV of, with their options."""

    items: Any
    """Texts, LangChain documents, LlamaIndex nodes or documents (in any iterable), a LangChain
    vector store, or a LlamaIndex index."""


@config_class
class SyncRequest(_Ids, IndexOptions):
    """All documents that should have KV, with their options."""

    live_items: Any
    """Documents as the items of :func:`precompute_kv`; each needs an id."""
    content: Content | None = Field(default=None, kw_only=True)
    """Content as for :func:`precompute_kv`; default: the content that the documents were stored
    with, which a server does not tell."""


@options_class
class _Hosted:
    llm: Any = None
    """A :class:`~kvrag.engine.KVRagEngine`, a framework object with an engine, or a
    :class:`~kvrag.KVRagClient`."""
    server: SkipValidation[str | RemoteHost | None] = None
    """Address of the server that holds the model, instead of ``llm``; with an API key, a
    :class:`~kvrag.KVRagClient`."""


@config_class
class _HostedItems(ItemRequest, _Hosted):
    pass


@config_class
class _HostedSync(SyncRequest, _Hosted):
    pass


@parameters_of_function(_HostedItems)
def precompute_kv(items: Any, **options: Any) -> PrecomputeReport:
    """Compute and store the KV of documents.

    Parameters
    ----------
    items
        Texts, LangChain documents, LlamaIndex nodes or documents (in any iterable), a LangChain
        vector store, or a LlamaIndex index.
    llm
        A :class:`~kvrag.engine.KVRagEngine`, a framework object with an engine, or a
        :class:`~kvrag.KVRagClient`.
    server
        Address of the server that holds the model, instead of ``llm``; with an API key, a
        :class:`~kvrag.KVRagClient`.
    **options
        The fields of :class:`HookOptions`, and ``ids``: document ids, one per item; default: the
        items' own. Errors are as of :meth:`kvrag.engine.KVRagEngine.precompute`.
    """
    asked = _HostedItems(items=items, **options)
    try:
        named = _named(items, asked.ids, asked.content)
        report = _precompute(chosen_host(asked.llm, asked.server), named, asked)
        error = refused(report)
    except KVRagError as fault:
        report = PrecomputeReport(0, 0, [("", str(fault))], 0, 0.0)
        error = fault
    if error is not None:
        if asked.on_error == "raise":
            raise error
        warnings.warn(f"not all KV was precomputed: {error}", UserWarning, stacklevel=3)
    return report


def refused(report: PrecomputeReport) -> KVRagError | None:
    """Return an error that counts the chunks that could not be stored, if there are any."""
    if report.failed:
        return StoreError(
            f"{len(report.failed)} chunk(s) could not be stored, and will be computed at query "
            f"time; the first one, {': '.join(report.failed[0])}"
        )
    return None


def delete_kv(
    items: Any,
    *,
    llm: Any = None,
    server: str | RemoteHost | None = None,
    namespace: str | None = None,
    collection: str | None = None,
) -> int:
    """Delete documents and erase KV that no other document refers to.

    ``items`` are ids, LangChain documents, LlamaIndex nodes, a vector store or an index; the other
    arguments are as for :func:`precompute_kv`. ``KVRagEngine.delete(collection=...)`` deletes a
    whole collection. Return the number of chunks erased.
    """
    host = chosen_host(llm, server)
    names = [item if isinstance(item, str) else _pair(item, "text")[0] for item in _listed(items)]
    ids = [name for name in names if name is not None]
    if None in names:
        raise InputError(
            f"{names.count(None)} of {len(names)} items have no id; pass ids, or items "
            "that have one"
        )
    return host.delete(ids, collection=collection, namespace=namespace)


@parameters_of_function(_HostedSync)
def sync_kv(live_items: Any, **options: Any) -> SyncReport:
    """Synchronise the store with a set of documents.

    Precompute missing documents, and delete all other documents from the store.

    Parameters
    ----------
    live_items
        All documents that should have KV in this namespace, or in this collection of the namespace.
        Every document needs an id.
    content
        As for :func:`precompute_kv`; default: the content that the documents were stored with,
        which a server does not tell.
    **options
        As for :func:`precompute_kv`, without ``on_error``.
    """
    asked = _HostedSync(live_items=live_items, **options)
    host = chosen_host(asked.llm, asked.server)
    live_items = _listed(live_items)
    named = _named(live_items, asked.ids, asked.content or "text")
    live = in_collection((name for name, _ in named), asked.collection)
    shown = named if asked.content else _named(live_items, asked.ids, "llm")
    if shown != named:
        if isinstance(host, RemoteHost):
            raise ConfigError(
                "a server does not tell with which content the nodes were stored; pass "
                "content='text', or content='llm' for the text with the metadata that the LLM sees"
            )
        if _is_stored(host, live, shown, asked.namespace):
            named = shown
    report = _precompute(host, named, asked)
    gone = set(
        host.document_ids(collection=asked.collection, namespace=asked.namespace)
    ).difference(live)
    host.delete(sorted(gone), namespace=asked.namespace)
    return SyncReport(added=report.stored, removed=len(gone), precompute=report)


MAX_PREFETCHES = 4  # prefetches planned at the same time; more are dropped

_prefetches = threading.BoundedSemaphore(MAX_PREFETCHES)


def prefetch_kv(
    items: Any, *, llm: Any, namespace: str | None = None, content: Content = "text"
) -> None:
    """Start reading the KV of retrieved documents in the background.

    Return at once, and never raise.
    """

    def run() -> None:
        try:
            texts = [text for _, text in _pairs(items, content) if text.strip()]
            if texts:
                engine_of(llm).prefetch(texts, namespace=namespace)
        except Exception:  # a prefetch only saves time
            logger.warning(
                "the KV of %d retrieved documents could not be prefetched",
                len(items),
                exc_info=True,
            )
        finally:
            _prefetches.release()

    if items and _prefetches.acquire(blocking=False):
        try:
            POOL.submit(run)
        except RuntimeError as error:  # too many threads, or the interpreter is about to exit
            _prefetches.release()
            logger.warning("a prefetch could not be started: %s", error)


def _is_stored(engine: KVRagEngine, ids: list[str], named: Named, namespace: str | None) -> bool:
    """Whether any of these texts is stored for its document."""
    space = engine.space_of(namespace)
    for name, (_, text) in zip(ids, named, strict=True):
        entry = Item.of(name, text).entry
        if entry and entry.digest in engine.store.catalog.document_texts(space, name):
            return True
    return False


def _named(items: Any, ids: Sequence[str] | None, content: Content) -> Named:
    """Return ``(id, text)`` pairs of items, with the given ids, or with their own, if any."""
    pairs = _pairs(items, content)
    if ids is None:
        return pairs
    names = [ids] if isinstance(ids, str) else list(ids)
    if len(names) != len(pairs):
        raise InputError(
            f"{len(pairs)} items came with {len(names)} ids; pass one id per item, or none"
        )
    return [(name, text) for name, (_, text) in zip(names, pairs, strict=True)]


def _precompute(host: Host, named: Named, asked: _HostedItems | _HostedSync) -> PrecomputeReport:
    """Precompute documents; report empty documents as too short, and delete their old KV."""
    # A text of another type is refused where it is stored.
    blank = [name for name, text in named if not str(text).strip()]
    full = [pair for pair in named if str(pair[1]).strip()]
    options = asked.shared()
    if hasattr(asked.llm, "own_prefix"):  # a framework's model: its messages and templates
        options["prefix"] = asked.llm.own_prefix(asked.prefix)
    report = host.precompute([text for _, text in full], ids=[name for name, _ in full], **options)
    gone = set(in_collection(filter(None, blank), asked.collection))
    if gone:
        gone &= set(host.document_ids(namespace=asked.namespace))
        host.delete(sorted(gone), namespace=asked.namespace)
    empty = [(name or "", "no text") for name in blank]
    tell_short(host if isinstance(host, RemoteHost) else host.store, empty)
    return replace(report, short=[*report.short, *empty])


def _pairs(items: Any, content: Content) -> Named:
    """Return ``(id, text)`` pairs of items; an id may be missing."""
    return [_pair(item, content) for item in _listed(items)]


def _listed(items: Any) -> list[Any]:
    """List items: one, many, or those of a vector store or an index."""
    if isinstance(items, str) or any(hasattr(items, mark) for mark in _ITEM_MARKS):
        return [items]
    if isinstance(items, Mapping):
        raise InputError("items is a mapping; pass a list of texts with ids=[...], or of ids")
    if isinstance(items, Iterable) and not any(hasattr(items, mark) for mark in _HOLDER_MARKS):
        return list(items)
    return documents_in(items)


# Attributes of a LangChain document, a LlamaIndex node, a scored node.
_ITEM_MARKS = ("page_content", "node_id", "node")
# Attributes of vector stores and indexes. LlamaIndex's stores are pydantic models, which are
# iterable, so iterability alone is no test.
_HOLDER_MARKS = ("similarity_search", "docstore", "get_nodes")


def _pair(item: Any, content: Content) -> tuple[str | None, str]:
    if isinstance(item, str):
        return None, item
    item = getattr(item, "node", item)  # NodeWithScore
    if hasattr(item, "page_content"):  # LangChain
        return item.id, item.page_content
    if hasattr(item, "node_id") and hasattr(item, "get_content"):  # LlamaIndex
        return item.node_id, item.get_content(metadata_mode="none" if content == "text" else "llm")
    raise InputError(
        f"an item is of type {type(item).__name__}; pass texts, LangChain documents or LlamaIndex "
        "nodes"
    )


def documents_in(holder: Any) -> list[Any]:
    """List the documents of a vector store or index.

    Raises :class:`InputError` if it can't list them.
    """
    if hasattr(holder, "kv_documents"):  # kvrag's own vector stores
        return list(holder.kv_documents())
    for read in (_langchain_documents, _llama_index_nodes):
        documents = read(holder)
        if documents is not None:
            return documents
    raise InputError(
        f"{type(holder).__name__} can't list its documents; pass the documents or nodes "
        "themselves, with their ids in it"
    )


def _langchain_documents(holder: Any) -> list[Any] | None:
    """Read the documents of a LangChain vector store.

    ``InMemoryVectorStore`` (``store``), Chroma (``get``), Qdrant, and the community FAISS class
    (``docstore``).
    """
    rows = getattr(holder, "store", None)
    if isinstance(rows, dict) and hasattr(holder, "similarity_search"):
        return list(holder.get_by_ids(list(rows)))
    if hasattr(holder, "content_payload_key"):
        return list(_qdrant_documents(holder))
    if hasattr(holder, "similarity_search") and hasattr(holder, "get"):
        found = holder.get(include=["documents"])
        return [
            SimpleNamespace(id=name, page_content=text)
            for name, text in zip(found["ids"], found["documents"], strict=True)
        ]
    stored = getattr(getattr(holder, "docstore", None), "_dict", None)
    return None if stored is None else list(stored.values())


def _qdrant_documents(holder: Any) -> Iterator[Any]:
    offset = None
    while True:
        page, offset = holder.client.scroll(
            holder.collection_name, limit=1000, offset=offset, with_payload=True
        )
        for point in page:
            yield SimpleNamespace(
                id=str(point.id), page_content=point.payload.get(holder.content_payload_key, "")
            )
        if offset is None:
            return


def _llama_index_nodes(holder: Any) -> list[Any] | None:
    """Read the nodes of a LlamaIndex index: its document store, and a vector store with text.

    A document store also has documents that the index deleted, those of other indexes, and whole
    documents of a pipeline. Beside a vector store with text it has parents of that store's nodes.
    """
    documents = getattr(getattr(holder, "docstore", None), "docs", None)
    nodes = list((documents or {}).values())
    own = None
    with suppress(AttributeError, NotImplementedError, ValueError):
        sources = {None, *holder.ref_doc_info}
        own = nodes = [node for node in nodes if node.ref_doc_id in sources]
    store = getattr(holder, "vector_store", holder)
    if not hasattr(store, "get_nodes") or (documents and not store.stores_text):
        return None if documents is None else nodes
    try:
        held = store.get_nodes(node_ids=None, filters=None)
    except Exception:  # not implemented, or not for all nodes
        return own or None  # a part of the nodes would cost the others their KV
    sources = {node.ref_doc_id for node in held} - {None}
    return list(
        {
            node.node_id: node
            for node in (*(each for each in nodes if each.ref_doc_id in sources), *held)
        }.values()
    )
