"""Load the KV of retrieved nodes while the prompt is still being built."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from kvrag.adapters import Content, DocumentKV, RemoteHost
from llama_index.llms.kvrag.transform import resolve_kv_llm


class KVPrefetchHandler(BaseEventHandler):
    """Loads the KV of retrieved nodes from disk into memory, in the background.

    This pays if something slow (a reranker, a rewritten question, a network) runs between retrieval
    and the answer. It does nothing for a store without ``kv_dir``, which is in memory anyway. A
    request waits for unfinished reads until ``load_timeout_s`` of :class:`kvrag.StoreConfig`.

    Parameters
    ----------
    llm
        Model that will answer, or its :class:`kvrag.KVRagEngine`.
    namespace
        Namespace of the KV; default: the engine's.
    content
        As for :class:`~llama_index.llms.kvrag.KVPrecompute`: ``"text"``, or ``"llm"``, the text
        with the metadata that the LLM is shown.

    Raises
    ------
    ConfigError
        If ``llm`` is another kind of model.

    Examples
    --------
    >>> get_dispatcher().add_event_handler(KVPrefetchHandler(llm=llm))  # doctest: +SKIP
    """

    llm: Any = Field(exclude=True, repr=False)
    namespace: str | None = None
    content: Content = "text"

    def __init__(
        self, llm: Any = None, *, namespace: str | None = None, content: Content = "text"
    ) -> None:
        llm = resolve_kv_llm(llm)
        if isinstance(llm, RemoteHost):
            DocumentKV(llm).engine  # noqa: B018 - raises
        fields = {"llm": llm, "namespace": namespace, "content": content}
        super().__init__(**fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in traces."""
        return "KVPrefetchHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Start loading when a retrieval has ended, and return at once."""
        if isinstance(event, RetrievalEndEvent):
            kv = DocumentKV(self.llm, namespace=self.namespace)
            kv.prefetch(event.nodes, content=self.content)
