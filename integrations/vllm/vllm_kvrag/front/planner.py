"""Plan prompts without a model: render, cut at stored chunks, tokenise, explain."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from fastapi import Request

from kvrag import Explanation, KVRagEngine
from kvrag.blend.reuse import decide_plan
from kvrag.evaluate.calibrate import in_words
from kvrag.identity.fingerprint import text_digest
from kvrag.model.source import config_of, load_tokenizer
from kvrag.prompt.explain import Known, explain_plan
from kvrag.prompt.partial import text_of
from kvrag.prompt.plan import Lookup, Plan, plan_prompt
from kvrag.prompt.plan_ids import plan_ids
from kvrag.prompt.prefix import fixed_head, prefix_text
from kvrag.prompt.spans import SpanIndex
from kvrag.prompt.template import PLAIN, Chat, Prompt, PromptEncoder
from kvrag.prompt.tokenizer import given_ids
from kvrag.runtime import Deadline
from kvrag.types import Mode, TextEntry
from kvrag_server.schema import Reuse


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that vLLM's worker reports.

    They are its model's fingerprint, the digest of the context that it encodes chunks behind, its
    repair in words, and the reason if it reuses no KV.
    """

    fingerprint: str = ""
    context: str = ""
    repair: str = ""
    refusal: str | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> WorkerFacts:
        """Return the facts in a worker's report; a newer worker may report more."""
        known = [field.name for field in fields(cls)]
        return cls(**{name: value for name, value in told.items() if name in known})


class Planner:
    """Plans prompts as the engine does, so that their ids are those of the stored chunks.

    ``engine`` gives the store, the tokenizer's source and the prefix; its model is never loaded.
    ``worker`` is set once vLLM answers.
    """

    def __init__(self, engine: KVRagEngine) -> None:
        encoder = PromptEncoder(load_tokenizer(engine.source))
        encoder.config = config_of(engine.source).get_text_config()
        self.vocab_size = int(encoder.config.vocab_size)
        self.encoder = encoder.with_variables(engine.chat_template_kwargs)
        self.prefix = prefix_text(engine.prefix, self.encoder)
        self.worker = WorkerFacts()
        self._store = engine.store
        self._config = engine.store_config
        self._lock = threading.RLock()
        self._spans = dict[str, tuple[SpanIndex, int]]()

    def plan(self, prompt: Prompt, namespace: str, chat: Chat = PLAIN) -> Plan:
        """Plan a prompt in a namespace, which is given by name.

        Raises ``InputError`` if the prompt is empty or malformed.
        """
        space = self._store.names.namespace(namespace)
        deadline = Deadline(self._config.load_timeout_s)
        worker = self.worker
        dtype = self._config.kv_dtype
        known: dict[str, Any] = {
            "scanner": self._scanner(space, deadline),
            "lookup": Lookup(
                self._store, worker.fingerprint, space, deadline, dtype, worker.context
            ),
            "min_chunk_tokens": self._config.min_chunk_tokens,
        }
        ids = given_ids(prompt, self.vocab_size)
        if ids is not None:
            prefixes = [self.encoder.head_ids(self.prefix)]
            return plan_ids(ids, self.encoder, prefixes=prefixes, **known)
        return plan_prompt(prompt, self.encoder, chat=chat, prefixes=(self.prefix,), **known)

    def explain(
        self, prompt: Prompt, namespace: str, options: Reuse, chat: Chat = PLAIN
    ) -> Explanation:
        """Describe a prompt's hits; in mode ``auto``, vLLM's worker may reuse less than it says."""
        plan = self.plan(prompt, namespace, chat)
        if self.worker.refusal is not None:
            plan = plan.without_reuse(self.worker.refusal)
        layout, reason = decide_plan(plan, options.mode, None)
        outcome: Mode = "stitch"
        if not layout.reused:
            outcome = "full"
        elif layout.is_exact and plan.kv_dtype == "auto":
            outcome = "prefix"
        space = self._store.names.namespace(namespace)
        read = partial(text_of, self._store, self.encoder, self.worker.fingerprint, space)
        known = Known(
            self._scanner(space, Deadline(0)),
            read,
            self._config,
            partial(fixed_head, prompt, chat, self.encoder),
        )
        given = options.config
        repair = self.worker.repair if given is None else in_words(given, "given")
        return replace(explain_plan(plan, outcome, reason, known), repair=repair)

    def _scanner(self, namespace: str, deadline: Deadline) -> SpanIndex:
        """Return the index of a namespace's texts, with the texts that are stored by now."""
        with self._lock:
            spans, cursor = self._spans.setdefault(namespace, (SpanIndex(text_digest), 0))
        nothing: tuple[list[TextEntry], int] = ([], cursor)
        new, cursor = deadline.ask(
            lambda: self._store.catalog.texts(namespace, cursor),
            nothing,
            what="the KV store's catalog",
        )
        spans.add(new)
        with self._lock:  # an older cursor does no harm: add() skips known texts
            self._spans[namespace] = spans, cursor
        return spans


def planner_of(request: Request) -> Planner:
    """Return the planner of a request's application."""
    return cast(Planner, request.app.state.planner)
