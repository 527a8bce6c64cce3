"""Transformation that precomputes KV as the last step of an ingestion."""

from __future__ import annotations

import asyncio
import logging
import uuid
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from llama_index.core import Settings
from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseComponent, BaseNode, TransformComponent

from kvrag import ConfigError, KVRagEngine, precompute_kv
from kvrag.adapters import (
    AdapterOptions,
    DocumentKV,
    RemoteHost,
    parameters_of,
)
from llama_index.llms.kvrag.base import KVRagLLM

logger = logging.getLogger(__name__)


def resolve_kv_llm(llm: Any) -> KVRagLLM | KVRagEngine | RemoteHost:
    """Return the LLM to store KV for; by default ``Settings.llm``.

    Raises
    ------
    ConfigError
        If the LLM can't use KV.
    """
    if llm is None:
        try:
            llm = Settings.llm
        except (ImportError, ValueError) as error:  # LlamaIndex's default LLM is another package
            raise ConfigError(
                "no LLM to precompute KV for; set Settings.llm = KVRagLLM(...), or pass llm="
            ) from error
    if not isinstance(llm, (KVRagLLM, KVRagEngine, RemoteHost)):
        raise ConfigError(
            f"the LLM is of type {type(llm).__name__}, which can't use KV; set Settings.llm = "
            "KVRagLLM(...), or pass one, or pass llm=kvrag.KVRagClient('http://...') if a kvrag "
            "server holds the model"
        )
    return llm


def of_class(declared: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a class declares; a subclass of a component may have more."""
    return {name: options[name] for name in options if name in declared.__pydantic_fields__}


# mypy takes a pydantic model for a dataclass that isn't frozen, which may not inherit a frozen one.
_Fields: Any = AdapterOptions


class PrecomputeFields(BaseComponent, _Fields):  # type: ignore[misc]
    """Component with the options of :func:`kvrag.precompute_kv` as fields; default: the LLM's."""

    def precompute(self, nodes: Sequence[BaseNode]) -> None:
        """Precompute the KV of nodes; with ``on_error="warn"``, failures raise no error.

        LlamaIndex marks documents as done before transformations run: an exception here would lose
        them, whereas a missing chunk only costs time.
        """
        llm = resolve_kv_llm(self.llm)
        try:
            report = precompute_kv(nodes, llm=llm, content=self.content, **self.shared())
        except Exception as error:
            if self.on_error == "raise":
                raise
            warnings.warn(
                f"KV of nodes was not precomputed and will be computed at query time: {error}",
                UserWarning,
                stacklevel=2,
            )
        else:
            logger.info(
                "KV of %d node(s): %d stored, %d skipped", len(nodes), report.stored, report.skipped
            )


class KVPrecompute(PrecomputeFields, TransformComponent):
    """Precomputes the KV of nodes that pass through and returns them unchanged.

    Put it last in ``transformations``. It sees additions only. A pipeline with a cache skips it for
    nodes that went through before, until KV is erased; with a client, all nodes are sent, and the
    server skips stored nodes. It does not learn of deletions:
    ``llama_index.vector_stores.kvrag.KVRagVectorStore`` sees both.

    Attributes
    ----------
    llm
        LLM to store KV for, or the :class:`kvrag.KVRagClient` of its server; default:
        ``Settings.llm`` at the time of the run.
    **options
        As for :func:`kvrag.precompute_kv`; default: the LLM's. By default ``on_error`` is
        ``"warn"``: ingestion goes on without KV.
    """

    llm: Any = Field(default=None, exclude=True, repr=False)

    @parameters_of(AdapterOptions)
    def __init__(self, llm: Any = None, class_name: object = None, **options: Any) -> None:
        llm = None if llm is None else resolve_kv_llm(llm)
        DocumentKV(llm, **of_class(AdapterOptions, options))  # checks them
        super().__init__(llm=llm, **options)

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in serialised form."""
        return "KVPrecompute"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Describe the transformation and everything that decides which KV is stored.

        Pipelines cache by this description. Loads the model: a changed model needs new KV.
        """
        described = {**super().to_dict(**kwargs), "prefix": None}
        try:
            return described | {"kv_of": self._target()}
        except Exception:
            if self.on_error == "raise":
                raise
            # Not cached; the run itself warns.
            return described | {"kv_of": {"run": uuid.uuid4().hex}}

    def _target(self) -> dict[str, str | None]:
        llm = resolve_kv_llm(self.llm)
        engine = DocumentKV(llm).host
        if isinstance(engine, RemoteHost):
            # A server does not tell when KV was erased. It skips the nodes that it has.
            return {"server": engine.base_url, "run": uuid.uuid4().hex}
        prefix = self.prefix
        if isinstance(llm, KVRagLLM):
            prefix = llm.own_prefix(prefix)
        return {
            "model": engine.loaded.fingerprint,
            "prefix": engine.text_of(prefix),
            "context": engine.context_digest,
            "namespace": engine.namespace,
            "kv_dir": str(engine.kv_dir),
            "kept": str(engine.store_config.kv_dtype),
            # Erasing KV starts another generation, so nodes that went through before pass again.
            "generation": str(engine.store.catalog.state().generation),
        }

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute the KV of the nodes; return them unchanged."""
        self.precompute(nodes)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Precompute the KV of the nodes in another thread; return them unchanged."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise ConfigError(
            "KVPrecompute can't be sent to worker processes, where each would load the model; run "
            "the pipeline without "
            "num_workers, or leave KVPrecompute out and call precompute_kv(nodes, llm=...) on what "
            "the pipeline returns"
        )
