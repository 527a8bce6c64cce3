"""KV of the documents of frameworks' vector stores and pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any
from uuid import UUID

from pydantic import Field

from kvrag.config import config_class, parameters_of
from kvrag.engine import KVRagEngine
from kvrag.errors import InputError, KVRagError
from kvrag.hooks import (
    Content,
    HookOptions,
    OnError,
    documents_in,
    precompute_kv,
    prefetch_kv,
)
from kvrag.hosts import RemoteHost, engine_of, host_of
from kvrag.identity.fingerprint import namespace_digest
from kvrag.precompute.documents import Item, replaced_ids
from kvrag.precompute.library import below_collection, in_collection
from kvrag.types import PrecomputeReport


@config_class
class AdapterOptions(HookOptions):
    """Options of a framework's component that computes KV."""

    llm: Any = None
    """Model that will answer, or the client of its server."""
    on_error: OnError = Field(default="warn", kw_only=True)
    """``"warn"`` and go on without KV, or ``"raise"``."""


class DocumentKV:
    """KV of the documents of a vector store or a pipeline, where an LLM keeps it.

    Parameters
    ----------
    llm
        The LLM, its engine, or a :class:`RemoteHost`; ``None``: only the options are checked.
    **options
        The options of :class:`AdapterOptions`.

    Raises
    ------
    ConfigError
        If an option is invalid, or if the remote host does not have it. If ``llm`` can't use KV,
        the first use raises it: engines open when they are needed.
    InputError
        If ``collection`` is not a name.
    """

    @parameters_of(AdapterOptions)
    def __init__(self, llm: Any = None, **options: Any) -> None:
        self.llm = llm
        self.options = AdapterOptions(llm=llm, **options)
        self._where = {
            "namespace": self.options.namespace,
            "collection": self.options.collection,
        }
        if isinstance(llm, RemoteHost):  # an engine opens when it is needed
            llm.check_options(**self.options.shared())
        in_collection((), self.options.collection)  # raises if it is not a name

    @property
    def host(self) -> KVRagEngine | RemoteHost:
        """Engine of the LLM, or the remote host in its place."""
        return host_of(self.llm)

    @property
    def engine(self) -> KVRagEngine:
        """Engine of the LLM; raises ``ConfigError`` if the KV is at a remote host."""
        return engine_of(self.llm)

    @property
    def space(self) -> str:
        """Key of the namespace and the collection, for tables that are kept beside the KV."""
        namespace, collection = self._where.values()
        if namespace is None:
            namespace = getattr(self.llm, "namespace", "")  # of a server: its key's, unknown here
        below = "" if collection is None else f" {below_collection(collection)}"
        return namespace_digest(namespace) + below

    def precompute(self, items: Any, **options: Any) -> PrecomputeReport:
        """Store the KV of documents; takes the options of :func:`kvrag.precompute_kv`."""
        return precompute_kv(items, **{**vars(self.options), **options})

    def delete(self, ids: Sequence[str]) -> int:
        """Delete the KV of documents."""
        return self.host.delete(ids, **self._where)

    def changed(self, named: Iterable[tuple[str, str]]) -> list[str]:
        """Return the ids of documents, given as ``(id, text)``, with the stored KV of other texts.

        That KV must be deleted even if storing the new text fails. A server erases it when it gets
        the new text. What fails here fails again in :meth:`precompute`, which raises it or warns.
        """
        with suppress(KVRagError):
            host = self.engine
            texts = dict(named)
            stored_as = in_collection(texts, self._where["collection"])
            items = list(map(Item.of, stored_as, texts.values()))
            changed = set(replaced_ids(host.store, items, host.space_of(self._where["namespace"])))
            return [name for name, item in zip(texts, items, strict=True) if item.doc_id in changed]
        return []

    def prefetch(self, items: Any, *, content: Content = "text") -> None:
        """Start reading the KV of retrieved documents; return at once, and never raise."""
        prefetch_kv(items, llm=self.llm, namespace=self._where["namespace"], content=content)

    listed = staticmethod(documents_in)

    @staticmethod
    def id_text(name: object) -> str:
        """Return an id as a string: a whole number and a UUID become their text.

        Raises :class:`InputError` for other types.
        """
        if isinstance(name, str):
            return str.__str__(name)  # the value of a member of an enumeration, not its name
        if isinstance(name, bool) or not isinstance(name, (Integral, UUID)):
            raise InputError(
                f"the id {name!r} is of type {type(name).__name__}; pass a string, a whole number "
                "or a UUID"
            )
        return str(name)
