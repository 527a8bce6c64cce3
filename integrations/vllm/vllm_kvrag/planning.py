"""Planning for vLLM's scheduler: the stored chunks of a prompt, and what of them to reuse."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Literal

from kvrag import ConfigError, RepairConfig, StoreConfig
from kvrag.adapters import (
    MARGIN,
    ChunkKey,
    Costs,
    KnownTexts,
    Layout,
    Mode,
    Plan,
    Price,
    PromptEncoder,
    PromptPlanner,
    Segment,
    TieredStore,
    as_config,
    check_mode,
    check_namespace,
    described,
    ids_digest,
    lay_out,
    plan_ids,
)
from vllm_kvrag.steps import LATEST, StepPrices

Ids = tuple[int, ...]
# After a listing, or a failure of the store, at least 9 times its duration passes before the next,
# so all requests wait for it a tenth of the time at most.
REST = 9
FIELDS = "mode", "repair", "namespace", "precompute", "describe", "trace", "stream", "report"


@dataclass(frozen=True, slots=True)
class About:
    """Description of the worker's model, for the scheduler.

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
    """

    fingerprint: str
    refusal: str | None
    repair: RepairConfig
    costs: Costs
    depth: int
    window: int
    context: str

    def said(self) -> dict[str, Any]:
        """Return the description for a response."""
        own = {"fingerprint": self.fingerprint, "context": self.context, "refusal": self.refusal}
        return own | {"repair": described(self.repair)}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for in ``kv_transfer_params["kvrag"]``.

    ``precompute`` holds the arguments of :meth:`kvrag.KVRagEngine.precompute`. With ``trace`` the
    response names the origin of every token. A ``stream`` has an id, by which a later request asks
    for its ``report``: vLLM's streams say nothing about KV.
    """

    mode: Mode = "auto"
    repair: RepairConfig | None = None
    namespace: str | None = None
    precompute: Mapping[str, Any] | None = None
    describe: bool = False
    trace: bool = False
    stream: str = ""
    report: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Asked:
        """Read the parameters of a request; raise ``ConfigError`` if they are not valid."""
        given = (params or {}).get("kvrag")
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError("kv_transfer_params.kvrag is no object; pass {'mode': ...}")
        unknown = sorted(set(given) - set(FIELDS))
        if unknown:
            raise ConfigError(
                f"kv_transfer_params.kvrag has no {unknown[0]!r}; it has {', '.join(FIELDS)}"
            )
        mode: Mode = given.get("mode") or "auto"
        check_mode(mode)
        namespace = given.get("namespace")
        if namespace is not None:
            check_namespace(namespace)
        precompute = given.get("precompute")
        if precompute is not None and not isinstance(precompute, Mapping):
            raise ConfigError("precompute is no object; pass {'texts': [...], 'ids': [...]}")
        repair = as_config(RepairConfig, given.get("repair"), option="repair")
        return cls(
            mode,
            repair,
            namespace,
            precompute,
            describe=bool(given.get("describe")),
            trace=bool(given.get("trace")),
            stream=str(given.get("stream") or ""),
            report=str(given.get("report") or ""),
        )


Kind = Literal["none", "exact", "blend"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is reused for a prompt.

    ``exact``: the rows before ``stop``, which equal a full prefill's. ``blend``: all rows before
    ``stop``, of which the first ``num_exact`` equal a full prefill's. ``reason`` says why less is
    reused than the prompt's chunks would allow. ``error`` is the code of a request's mistake.
    ``price`` is what kvrag's part of a blend costs by its own measurements, 0 if that is no time.
    """

    kind: Kind
    reason: str | None = None
    stop: int = 0
    num_exact: int = 0
    plan: Plan | None = None
    repair: RepairConfig | None = None
    error: str | None = None
    price: float = 0.0


class Planner:
    """Planner of prompts for a model; it needs its tokenizer, and no weights.

    Attributes
    ----------
    steps
        What vLLM's own steps take.
    """

    def __init__(
        self,
        store: TieredStore,
        config: StoreConfig,
        encoder: PromptEncoder,
        namespace: str,
    ) -> None:
        self._store = store
        self._prompts = PromptPlanner(store, config, KnownTexts(store.catalog), encoder)
        self._namespace = namespace
        self._prefixes = Prefixes(store)
        self._next = 0.0
        self.steps = StepPrices()
        # What blends took, as multiples of their prices.
        self._blends = deque[float](maxlen=LATEST)

    def learn(self, price: float, took: float) -> None:
        """Note what a blend took, in milliseconds; ``price`` is its decision's."""
        self._blends.append(took / price)

    def decide(
        self, ids: Sequence[int], asked: Asked, about: About, *, num_computed: int, num_more: int
    ) -> Decision:
        """Decide what to reuse for a prompt.

        Parameters
        ----------
        num_computed
            Number of first rows that vLLM has already.
        num_more
            Most tokens of the answer.
        """
        if about.refusal is not None:
            return Decision("none", about.refusal)
        if asked.mode == "full":
            return Decision("none")
        if len(ids) + num_more > about.window:
            return Decision(
                "none",
                f"prompt and answer ({len(ids) + num_more} tokens) exceed {about.window} tokens, "
                "up to which stored KV holds",
            )
        if time.monotonic() < self._next:
            return Decision("none", "the store failed before; it is asked again in a while")
        # The worker has an encoder of its own.
        plan = replace(self._plan(ids, asked, about), encoder=None)  # type: ignore[arg-type]
        layout = lay_out(plan)
        repair = asked.repair or about.repair
        head = layout.only_exact_head()
        num_exact = head.segments[-1].start if plan.kv_dtype == "auto" else 0
        exact = Decision("none", _why_not(layout, plan))
        if num_exact > num_computed:
            exact = replace(exact, kind="exact", stop=num_exact, num_exact=num_exact, plan=plan)
        if asked.mode == "prefix" or all(s.stop <= num_computed for s in layout.stale):
            return exact
        stored = [(self._store.name, len(identity.token_ids)) for identity in plan.identities]
        price = Price(about.costs, repair, about.depth, stored)
        if asked.mode == "auto":
            reason = self._refusal(layout, price, max(num_exact, num_computed))
            if reason is not None:
                return replace(exact, reason=reason)
        # The rows before are computed, if they are not loaded.
        first = layout.stale[0] if plan.kv_dtype == "auto" else layout.reused[0]
        rows = max(first.start, num_computed)
        ms = price.of(layout) if about.costs.unit == "ms" else 0.0
        return Decision("blend", plan.fault, len(ids) - 1, rows, plan, repair, price=ms)

    def _plan(self, ids: Sequence[int], asked: Asked, about: About) -> Plan:
        namespace = self._namespace if asked.namespace is None else asked.namespace
        space = self._store.names.namespace(namespace)
        start = time.monotonic()
        has_failed = True
        try:
            lookup = self._prompts.lookup(space, about.fingerprint, about.context)
            prefixes = lookup.deadline.ask(
                lambda: self._prefixes.of(about.fingerprint, space),
                list[Ids](),
                what="the KV store",
            )
            plan = plan_ids(ids, lookup, prefixes)
            has_failed = plan.fault is not None
        finally:
            if has_failed:  # all requests wait in the meantime
                self._next = time.monotonic() + REST * (time.monotonic() - start)
        return plan

    def _refusal(self, layout: Layout, price: Price, num_rows: int) -> str | None:
        """Return why blending would not pay beside computing the rows after ``num_rows`` in vLLM.

        vLLM's part is priced by what its steps took: the rest of the prompt, or the last token
        behind a blend.
        """
        costs = price.costs
        total = layout.num_tokens
        rest = Layout(
            (
                *((Segment(0, num_rows, "history", exact=True),) if num_rows else ()),
                Segment(num_rows, total, "live"),
            )
        )
        other = price.of(rest) * self.steps.factor(total - num_rows)
        cost = price.of(layout) * (median_low(self._blends) if self._blends else 1.0)
        cost += costs.of_forward(1, total) * self.steps.factor(1)
        if cost < MARGIN * other:
            return None
        if self._blends:  # a busy moment must not refuse all blends for ever
            self._blends.popleft()
        words = costs.in_words
        return (
            f"repaired reuse would not pay: estimated {words(cost)}, and {words(other)} to compute "
            f"the {total - num_rows} tokens that vLLM does not have"
        )


def _why_not(layout: Layout, plan: Plan) -> str | None:
    if plan.fault is not None:
        return plan.fault
    return None if layout.reused else "no stored KV for this prompt"


@dataclass(slots=True)
class Prefixes:
    """Token ids of the stored prefixes, listed again when the store has changed."""

    store: TieredStore
    _known: dict[tuple[str, str], list[Ids]] = field(default_factory=dict)
    _ids: dict[ChunkKey, Ids | None] = field(default_factory=dict)
    _state: object = None
    _next: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, model: str, namespace: str) -> list[Ids]:
        """Return the prefixes of a model's chunks in a namespace."""
        with self._lock:
            state = self.store.catalog.state()[:3]  # erasures, chunks, bytes
            if state != self._state and time.monotonic() >= self._next:
                start = time.monotonic()
                self._list()
                self._state = state
                self._next = time.monotonic() + REST * (time.monotonic() - start)
            return self._known.get((model, namespace), [])

    def _list(self) -> None:
        """Read the ids of new prefixes: chunks have a text, and stand behind no prefix as well.

        Models without BOS have an empty prefix.
        """
        catalog = self.store.catalog
        nothing = ids_digest(())
        known: dict[tuple[str, str], list[Ids]] = {}
        found: dict[ChunkKey, Ids | None] = {}
        keys = catalog.keys()
        for key in keys:
            record = catalog.get(key)
            if record is None or record.prefix != nothing:
                continue
            if key in self._ids:
                ids = self._ids[key]
            else:
                identity = None if catalog.key_texts(key) else self.store.identity(key)
                ids = None if identity is None else identity.token_ids
            found[key] = ids
            if ids is not None:
                known.setdefault((record.model, record.namespace), []).append(ids)
        self._known = known
        self._ids = found
