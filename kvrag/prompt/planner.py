"""Plan prompts over a store: with its texts, its KV and a tokenizer, and without weights.

The engine, the front before vLLM and vLLM's scheduler plan with it; the router of Ray replicas uses
its index of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrag.config import StoreConfig
from kvrag.prompt.explain import with_reason
from kvrag.prompt.plan import Lookup, Plan, plan_prompt
from kvrag.prompt.plan_ids import plan_ids
from kvrag.prompt.spans import SpanIndex
from kvrag.prompt.template import PLAIN, Chat, Prompt, PromptEncoder, check_plain
from kvrag.prompt.tokenizer import given_ids
from kvrag.runtime import Deadline
from kvrag.store import Catalog, TieredStore
from kvrag.types import TextEntry


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """Span indexes of a store's namespaces, with the texts that any process has stored."""

    catalog: Catalog
    _indexes: dict[str, tuple[SpanIndex, int]] = field(default_factory=dict)

    def of(self, namespace: str, deadline: Deadline) -> SpanIndex:
        """Return the index of a namespace (a digest), updated within a time budget.

        Namespaces without texts are not remembered: a request may name any namespace.
        """
        index, cursor = self._indexes.get(namespace) or (SpanIndex(), 0)
        new, cursor = deadline.ask(
            lambda: self.catalog.texts(namespace, cursor),
            (list[TextEntry](), cursor),
            what="the KV store's catalog",
        )
        if new:
            index, _ = self._indexes.setdefault(namespace, (index, 0))
            index.add(new)
            # Another thread may have come further: add() skips known texts.
            self._indexes[namespace] = index, cursor
        return index


@dataclass(frozen=True, slots=True)
class PromptPlanner:
    """Planner of prompts over a store, without weights.

    Parameters
    ----------
    store, config, texts
        The store, its limits, and its known texts.
    encoder, vocab_size
        Encoder of the prompts; ids of tokens must be below ``vocab_size``.
    """

    store: TieredStore
    config: StoreConfig
    texts: KnownTexts
    encoder: PromptEncoder
    vocab_size: int = 2**31

    def lookup(
        self, namespace: str, model: str, context: str, deadline: Deadline | None = None
    ) -> Lookup:
        """Return the look-up of a prompt's chunks in a namespace, with the store's time budget.

        ``model`` is the fingerprint of the chunks' model, and ``context`` the digest of the context
        that they are encoded behind.
        """
        config = self.config
        deadline = deadline or Deadline(config.load_timeout_s)
        return Lookup(
            self.store,
            self.texts.of(namespace, deadline),
            self.encoder,
            model,
            namespace,
            deadline,
            config.kv_dtype,
            context,
            config.min_chunk_tokens,
        )

    def plan(
        self, prompt: Prompt, lookup: Lookup, prefixes: Sequence[str], chat: Chat = PLAIN
    ) -> Plan:
        """Plan a prompt of any kind; ``prefixes`` are texts that chunks were encoded behind.

        Raises ``InputError`` if the prompt is empty or malformed.
        """
        ids = given_ids(prompt, self.vocab_size)
        if ids is None:
            plan = plan_prompt(prompt, lookup, prefixes, chat)
        else:
            check_plain(prompt, chat)
            plan = plan_ids(ids, lookup, map(self.encoder.head_ids, prefixes))
        return with_reason(plan, lookup.scanner)
