"""Holders of KV: an engine in this process, or a remote host in the place of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvrag.config import parameters_of
from kvrag.engine import KVRagEngine
from kvrag.errors import ConfigError, require
from kvrag.precompute.documents import IndexRequest
from kvrag.precompute.library import in_collection
from kvrag.types import PrecomputeReport


class RemoteHost(ABC):
    """Holder of KV in another process, such as the server of a :class:`kvrag.KVRagClient`.

    Hooks and vector stores take it in place of an engine. Its methods are as those of
    :class:`kvrag.KVRagEngine`; they raise :class:`ConfigError` for options that it does not have.
    """

    base_url: str
    """Address of the host."""

    @abstractmethod
    @parameters_of(IndexRequest)
    def precompute(self, texts: Sequence[str], **options: Any) -> PrecomputeReport:
        """Have the KV of chunks computed and stored."""

    # The ids that documents are stored by, in a collection or outside.
    stored_ids = staticmethod(in_collection)

    @abstractmethod
    def delete(
        self,
        ids: Sequence[str] | None = None,
        *,
        collection: str | None = None,
        namespace: str | None = None,
    ) -> int:
        """Delete documents, or a collection; return the number of chunks erased."""

    @abstractmethod
    def document_ids(
        self, *, collection: str | None = None, namespace: str | None = None
    ) -> list[str]:
        """Return the ids of all documents, or of a collection's."""

    @abstractmethod
    def check_options(self, **options: object) -> None:
        """Raise :class:`ConfigError` for options of engines that this host does not have."""


Host = KVRagEngine | RemoteHost


def engine_of(llm: Any) -> KVRagEngine:
    """Return the engine itself, or the engine of a framework object."""
    engine = llm if isinstance(llm, KVRagEngine) else getattr(llm, "engine", None)
    if isinstance(llm, RemoteHost):
        raise ConfigError(
            f"llm is a {type(llm).__name__}, and a server reads KV when the prompt arrives; "
            "prefetch in the process of the model only"
        )
    if not isinstance(engine, KVRagEngine):
        raise ConfigError(
            f"llm is of type {type(llm).__name__}; pass a KVRagEngine, ChatKVRag or KVRagLLM "
            "(other models can't use KV), or KVRagClient('http://...') if a kvrag server holds the "
            "model"
        )
    return engine


def host_of(llm: Any, **options: Any) -> Host:
    """Return the remote host itself, or the engine as :func:`engine_of`.

    Raises :class:`ConfigError` for options that a remote host does not have.
    """
    if not isinstance(llm, RemoteHost):
        return engine_of(llm)
    llm.check_options(**options)
    return llm


def chosen_host(llm: Any, server: str | RemoteHost | None) -> Host:
    """Return the host of an ``llm`` or of a ``server``; exactly one of them must be given.

    Raises ``MissingDependencyError`` for an address if the server's package is not installed.
    """
    if (llm is None) == (server is None):
        raise ConfigError("pass either llm=..., or server=... if a kvrag server holds the model")
    if isinstance(server, str):
        package = require("kvrag_server", extra="server", purpose="the client of a server")
        server = package.KVRagClient(server)
    return host_of(server or llm)
