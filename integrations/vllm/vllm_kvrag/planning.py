"""Planning for vLLM's scheduler: the stored chunks of a prompt, and what of them to reuse."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvrag import ConfigError, Library, Mode, RepairConfig
from kvrag.adapters import ModelFacts, ModelSource, Reuse, ReuseOptions, StorePlanner

# After a failure of the store, at least 9 times its duration passes before the next request asks
# it, so all requests wait for it a tenth of the time at most.
REST = 9
FIELDS = "mode", "repair", "namespace", "precompute", "describe", "trace", "stream", "report"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for in ``kv_transfer_params["kvrag"]``.

    ``precompute`` holds the arguments of :meth:`kvrag.KVRagEngine.precompute`. With ``trace`` the
    response names the origin of every token. ``stream`` is an id by which a later request asks for
    the ``report``: vLLM says nothing about the KV of streams and of answers that a stop string
    ends.
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
        reuse = ReuseOptions(
            mode=given.get("mode") or "auto",
            repair=given.get("repair"),
            namespace=given.get("namespace"),
        )
        precompute = given.get("precompute")
        if precompute is not None and not isinstance(precompute, Mapping):
            raise ConfigError("precompute is no object; pass {'texts': [...], 'ids': [...]}")
        return cls(
            reuse.mode,
            reuse.repair_config,
            reuse.namespace,
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
    """

    kind: Kind
    reason: str | None = None
    stop: int = 0
    num_exact: int = 0
    plan: Any = None
    repair: RepairConfig | None = None
    error: str | None = None


class Planner:
    """Planner of prompts for a model; it needs its tokenizer, and no weights."""

    def __init__(self, library: Library, source: ModelSource) -> None:
        self._prompts = StorePlanner(library, source, checks_ids=False)
        self._next = 0.0

    def decide(
        self,
        ids: Sequence[int],
        asked: Asked,
        about: ModelFacts,
        *,
        num_computed: int,
        num_more: int,
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
        repair = asked.repair or about.repair
        reuse = self._reuse(ids, asked.namespace, about, repair)
        plan = reuse.plan
        layout = reuse.layout
        # Rounded rows equal no full prefill's.
        num_exact = 0
        rows = layout.reused
        if plan.kv_dtype == "auto":
            # An exact head ends where the live segment behind it begins.
            num_exact = layout.only_exact_head().segments[-1].start
            rows = layout.stale
        reason = about.only_exact or reuse.reason(asked.mode)
        exact = Decision("none", reason)
        if num_exact > num_computed:
            exact = Decision("exact", reason, num_exact, num_exact, plan)
        # A rounded prefix alone is left to vLLM, which shares its own among all requests.
        if asked.mode == "prefix" or all(
            s.kind == "prefix" or s.stop <= num_computed for s in rows
        ):
            return exact
        if asked.mode == "auto":
            refusal = self._refusal(reuse, max(num_exact, num_computed))
            if refusal is not None:
                return replace(exact, reason="; ".join(filter(None, (reason, refusal))))
        # The rows before are computed, if they are not loaded.
        return Decision(
            "blend", reason, len(ids) - 1, max(rows[0].start, num_computed), plan, repair
        )

    def _reuse(self, *asked: Any) -> Reuse:
        start = time.monotonic()
        has_failed = True
        try:
            reuse = self._prompts.reuse(*asked)
            has_failed = reuse.plan.fault is not None
        finally:
            if has_failed:  # all requests wait in the meantime
                self._next = time.monotonic() + REST * (time.monotonic() - start)
        return reuse

    def _refusal(self, reuse: Reuse, num_rows: int) -> str | None:
        """Return why blending would not pay beside computing the rows after ``num_rows`` in vLLM.

        The same model computes both, so both are priced by its measured forwards.
        """
        costs = reuse.price.costs
        total = reuse.layout.num_tokens
        other = reuse.cost_of_rest(num_rows)
        # Behind a blend, vLLM computes the last token.
        cost = reuse.price.of(reuse.layout) + costs.of_forward(1, total)
        if reuse.pays(cost, other):
            return None
        words = costs.in_words
        return (
            f"repaired reuse would not pay: estimated {words(cost)}, and {words(other)} to compute "
            f"the {total - num_rows} tokens that vLLM does not have"
        )
