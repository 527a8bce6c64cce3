"""Prompts planned over a store as the engine plans them, with a tokenizer and without weights.

The front before another engine, and that engine's scheduler, plan with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kvrag.blend.cost import MARGIN, Costs, Price
from kvrag.blend.layout import Layout, Segment, lay_out
from kvrag.blend.reuse import outcome_of
from kvrag.config import RepairConfig, check_template_kwargs
from kvrag.evaluate.calibrate import described, in_words
from kvrag.identity.fingerprint import ids_digest, text_digest
from kvrag.model.source import ModelSource
from kvrag.precompute.library import Library
from kvrag.prompt.explain import explain_plan, with_reason
from kvrag.prompt.plan import Lookup, Plan
from kvrag.prompt.plan_ids import plan_ids
from kvrag.prompt.planner import KnownTexts, PromptPlanner
from kvrag.prompt.prefix import Prefix, prefix_text
from kvrag.prompt.spans import SpanIndex
from kvrag.prompt.template import PLAIN, Chat, Prompt, PromptEncoder
from kvrag.prompt.tokenizer import given_ids
from kvrag.runtime import Deadline
from kvrag.store import TieredStore
from kvrag.types import ChunkKey, Explanation, Mode

Ids = tuple[int, ...]
Prefixed = tuple[str, str, Ids]
REST = 9
"""Share of rest: after a listing, at least 9 times its duration passes before the next, so that all
requests wait for it a tenth of the time at most."""


_FREE = Costs(((0.0,), (0.0,)), 1.0, 0.0, {}, "tokens")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Description of a model in another process, for planning.

    Attributes
    ----------
    fingerprint
        Model of the stored chunks.
    refusal
        Why its prompts are not blended; ``None`` if they are.
    repair, costs
        Default repair, and costs of forwards on this machine.
    depth
        Number of attention layers.
    window
        Most tokens of prompt and answer for which stored KV holds.
    context
        Digest of the context that chunks are encoded behind.
    in_words
        The repair, where only its description is known.
    only_exact
        Why its prompts get exact beginnings alone; ``None`` if they get more, or nothing.
    """

    fingerprint: str = ""
    refusal: str | None = None
    repair: RepairConfig = field(default_factory=RepairConfig)
    costs: Costs = _FREE
    depth: int = 1
    window: int = 0
    context: str = ""
    in_words: str = ""
    only_exact: str | None = None

    @property
    def fault(self) -> str | None:
        """Why nothing is blended, and nothing stored; ``None`` if prompts are blended."""
        return self.refusal or self.only_exact

    def said(self) -> dict[str, Any]:
        """Return the description for a response."""
        return {
            "fingerprint": self.fingerprint,
            "context": self.context,
            "refusal": self.fault,
            "repair": described(self.repair),
        }

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> ModelFacts:
        """Return the facts in a response; a newer process may report more."""
        return cls(
            said.get("fingerprint", ""),
            said.get("refusal"),
            context=said.get("context", ""),
            in_words=said.get("repair", ""),
        )


class Reuse(NamedTuple):
    """Possible reuse of a prompt: its plan, its layout, and the cost model of its layouts."""

    plan: Plan
    layout: Layout
    price: Price

    def reason(self, mode: Mode) -> str | None:
        """Return why less is reused than a mode allows, if all KV loads, in the engine's words."""
        return outcome_of(self.plan, mode, None)[1]

    def cost_of_rest(self, num_rows: int) -> float:
        """Return the cost of computing the rows after the first ``num_rows``."""
        head = [Segment(0, num_rows, "history", exact=True)] if num_rows else []
        return self.price.of(Layout((*head, Segment(num_rows, self.layout.num_tokens, "live"))))

    @staticmethod
    def pays(cost: float, other: float) -> bool:
        """Whether a cost is below another by the margin that reuse must have."""
        return cost < MARGIN * other


class StorePlanner:
    """Planner of prompts for a model in another process, once its ``facts`` are known.

    Parameters
    ----------
    library
        Documents of the store.
    source
        Model, whose tokenizer is loaded.
    prefix, chat_template_kwargs
        As for :meth:`kvrag.KVRagEngine.from_pretrained`.
    checks_ids
        Whether the model's config is read, to refuse token ids that it has not.
    """

    def __init__(
        self,
        library: Library,
        source: ModelSource,
        prefix: Prefix | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        checks_ids: bool = True,
    ) -> None:
        encoder = PromptEncoder(source.load_tokenizer())
        sizes = []
        if checks_ids:
            encoder.config = source.load_config().get_text_config()
            sizes = [int(encoder.config.vocab_size)]
        self.library = library
        self.encoder = encoder.with_variables(check_template_kwargs(chat_template_kwargs))
        store = library.store
        self.prompts = PromptPlanner(
            store, library.store_config, KnownTexts(store.catalog), self.encoder, *sizes
        )
        self.prefixes = Prefixes(store)
        self.facts = ModelFacts()
        self._prefix = prefix

    @cached_property
    def prefix(self) -> str:
        """Text that chunks are encoded behind."""
        return prefix_text(self._prefix, self.encoder)

    def check_ids(self, prompt: object) -> None:
        """Raise :class:`InputError` for token ids that the model can't read."""
        given_ids(prompt, self.prompts.vocab_size)

    def plan(self, prompt: Prompt, namespace: str, chat: Chat = PLAIN) -> Plan:
        """Plan a prompt, so that its ids are those of the stored chunks.

        Raises ``InputError`` if the prompt is empty or malformed.
        """
        lookup = self._lookup(namespace, self.facts)
        return self.prompts.plan(prompt, lookup, (self.prefix,), chat)

    def explain(
        self,
        prompt: Prompt,
        namespace: str,
        mode: Mode,
        repair: RepairConfig | None,
        chat: Chat = PLAIN,
    ) -> Explanation:
        """Describe a prompt's hits; in mode ``auto``, the model may reuse less than it says."""
        facts = self.facts
        lookup = self._lookup(namespace, facts)
        plan = self.prompts.plan(prompt, lookup, (self.prefix,), chat)
        if facts.refusal is not None:
            plan = plan.without_reuse(facts.refusal)
        explained = explain_plan(plan, *outcome_of(plan, mode, None), lookup)
        words = facts.in_words if repair is None else in_words(repair, "given")
        return replace(explained, repair=words)

    def reuse(
        self, ids: Sequence[int], namespace: str | None, facts: ModelFacts, repair: RepairConfig
    ) -> Reuse:
        """Plan a prompt that is given by its ids, in a namespace; ``None``: the library's own."""
        lookup = self._lookup(namespace, facts)
        prefixes = lookup.deadline.ask(
            lambda: self.prefixes.of(facts.fingerprint, lookup.namespace),
            list[Ids](),
            what="the KV store",
        )
        plan = with_reason(plan_ids(ids, lookup, prefixes), lookup.scanner)
        stored = [(self.library.store.name, len(each.token_ids)) for each in plan.identities]
        return Reuse(
            # The process of the model has an encoder of its own.
            replace(plan, encoder=None),  # type: ignore[arg-type]
            lay_out(plan),
            Price(facts.costs, repair, facts.depth, stored),
        )

    def _lookup(self, namespace: str | None, facts: ModelFacts) -> Lookup:
        return self.prompts.lookup(
            self.library.space_of(namespace), facts.fingerprint, facts.context
        )


class ChunkFinder(KnownTexts):
    """Finds the stored chunks in texts, without a tokenizer."""

    digest_of = staticmethod(text_digest)

    def scanner(self, library: Library, namespace: str) -> SpanIndex:
        """Return the index of a namespace's texts, updated within the store's time budget."""
        return self.of(library.space_of(namespace), Deadline(library.store_config.load_timeout_s))


@dataclass(slots=True)
class Prefixes:
    """Token ids of the stored prefixes, listed again when the store has changed."""

    store: TieredStore
    _known: list[Prefixed] = field(default_factory=list)
    _seen: dict[ChunkKey, Prefixed | None] = field(default_factory=dict)
    _state: object = None
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, model: str, namespace: str) -> list[Ids]:
        """Return the prefixes of a model's chunks in a namespace."""
        catalog = self.store.catalog
        with self._lock:
            state = catalog.state()[:3]  # erasures, chunks, bytes
            if state != self._state and time.monotonic() >= self._next:
                start = time.monotonic()
                keys = catalog.keys()
                seen = self._seen
                self._seen = {
                    key: seen[key] if key in seen else self._read(key)
                    for key in keys
                    if key in seen or catalog.get(key) is not None
                }
                self._known = list(filter(None, self._seen.values()))
                self._state = state
                self._next = time.monotonic() + REST * (time.monotonic() - start)
            return [ids for *where, ids in self._known if where == [model, namespace]]

    def _read(self, key: ChunkKey) -> Prefixed | None:
        """Return model, namespace and ids of a prefix; ``None`` for a chunk.

        Chunks have a text, and stand behind no prefix as well where models have no BOS.
        """
        catalog = self.store.catalog
        record = catalog.get(key)
        if record is None or record.prefix != ids_digest(()) or catalog.key_texts(key):
            return None
        identity = self.store.identity(key)
        if identity is None:
            return None
        return record.model, record.namespace, identity.token_ids
