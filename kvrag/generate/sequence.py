"""Query time of one engine: plan a prompt, prefill it by reuse, decode the answer, and account for how it was made."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from kvrag.blend.cost import CostModel
from kvrag.blend.prefill import Clock, Prefilled, outcome_of, prefill, refusal_of
from kvrag.config import MODES, RepairConfig, SamplingConfig, StoreConfig, as_config, check_mode
from kvrag.errors import ContextLengthError, OutOfMemoryError, is_out_of_memory
from kvrag.generate.audit import Audit
from kvrag.generate.sampling import Sampler, TextStream, decode, eos_token_ids
from kvrag.generate.streams import Emit
from kvrag.identity.fingerprint import context_digest, text_digest
from kvrag.model.lm import LoadedModel
from kvrag.model.plain import PlainLM
from kvrag.precompute.on_miss import WriteBack
from kvrag.prompt.explain import Watch, explain_plan
from kvrag.prompt.plan import Lookup, Plan, plan_prompt
from kvrag.prompt.spans import SpanIndex
from kvrag.prompt.template import Prompt, chunks_in_messages
from kvrag.store import TieredStore
from kvrag.threads import Deadline, Turns, fork_lock
from kvrag.types import Accounting, Explanation, GenerationResult, KVDtype, Missed, MissedChunk, Mode, TextEntry

logger = logging.getLogger(__name__)

MAX_RUNNING = 8  # requests of this process that hold the KV of their prompts at once; the others wait for their turn

TURNS = Turns(MAX_RUNNING)

Counted = TypeVar("Counted", bound=Accounting)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to treat it: mode, repair, namespace (its digest), and the prefixes that its head may start with."""

    prompt: Prompt
    mode: Mode
    repair: RepairConfig
    namespace: str
    prefixes: tuple[str, ...]


def check_options(mode: Mode, repair: object) -> RepairConfig | None:
    """Raise ``ConfigError`` for a wrong mode, and return the repair as a config."""
    if mode not in MODES:
        check_mode(mode)
    return None if repair is None else as_config(RepairConfig, repair, option="repair")


@dataclass(slots=True)
class Answering:
    """What the requests of one engine share: the model, the store, and the texts that are known to it.

    ``write_back`` takes what answered prompts missed; ``None`` where that is computed each time. ``context_ids`` are the token ids that
    chunks are encoded behind besides the prefix. ``stats`` are the engine's.
    """

    loaded: LoadedModel
    store: TieredStore
    store_config: StoreConfig
    write_back: WriteBack | None = None
    context_ids: Sequence[int] = ()
    stats: EngineStats = field(default_factory=lambda: EngineStats())
    costs: CostModel = field(init=False)
    _lock: threading.RLock = field(default_factory=fork_lock)
    _spans: dict[str, tuple[SpanIndex, int]] = field(default_factory=dict)
    _read_dtype: KVDtype = field(init=False)
    _context: str = field(init=False)

    def __post_init__(self) -> None:
        self._read_dtype, self._context = self.store_config.read_dtype, context_digest(self.context_ids)
        self.costs = CostModel(self.loaded)

    def close(self) -> None:
        """Do nothing more in the background."""
        self.stats.audit.close()
        if self.write_back:
            self.write_back.close()

    def scanner(self, namespace: str, deadline: Deadline) -> SpanIndex:
        """Return the namespace's span index, brought up to date with what any process has stored."""
        with self._lock:
            if namespace not in self._spans:
                self._spans[namespace] = SpanIndex(text_digest), 0
            spans, cursor = self._spans[namespace]
        nothing: tuple[list[TextEntry], int] = ([], cursor)
        new, cursor = deadline.ask(
            lambda: self.store.catalog.texts(namespace, cursor), nothing, what="the KV store's catalog"
        )
        if new:
            spans.add(new)
        with self._lock:  # a request that read less does no harm: texts that are known are skipped
            self._spans[namespace] = (spans, cursor)
        return spans

    def plan(self, request: Request, deadline: Deadline | None = None) -> Plan:
        """Plan a prompt within a time budget for the store."""
        config, loaded = self.store_config, self.loaded
        deadline = deadline or Deadline(config.load_timeout_s)
        plan = plan_prompt(
            request.prompt,
            loaded.encoder,
            scanner=self.scanner(request.namespace, deadline),
            lookup=Lookup(
                self.store, loaded.identity.fingerprint, request.namespace, deadline, config.kv_dtype, self._context
            ),
            prefixes=request.prefixes,
            min_chunk_tokens=config.min_chunk_tokens,
            read_dtype=self._read_dtype,
        )
        if isinstance(loaded.lm, PlainLM):
            return plan.without_reuse(loaded.lm.refusal)
        return plan

    def explain(self, request: Request) -> Explanation:
        """Describe what a prompt would find and how it would be prefilled, without loading anything."""
        plan = self.plan(request)
        plan = self._checked(plan, request.mode, len(plan.token_ids) + 1)
        outcome = outcome_of(plan, request.mode, request.repair, self.store, self.costs)
        return explain_plan(plan, *outcome, self._spans[request.namespace][0], self.store_config.min_chunk_tokens)

    def _checked(self, plan: Plan, mode: Mode, total: int) -> Plan:
        """Return the plan, without reuse where prompt and answer of ``total`` tokens can't have any."""
        refusal = None if mode == "full" else refusal_of(self.loaded.lm, total)
        return plan if refusal is None else plan.without_reuse(refusal)

    @contextmanager
    def prefilled(
        self, request: Request, *, max_new_tokens: int, cancel: threading.Event | None = None
    ) -> Iterator[tuple[Prefilled, Clock]]:
        """Plan a prompt, wait for its turn, and prefill, with room for the answer; when memory runs out, once more without reuse.

        Raises what :meth:`kvrag.engine.KVRagEngine.generate` does, and ``CancelledError`` if ``cancel`` is set before the turn comes.
        """
        clock, deadline = Clock(), Deadline(self.store_config.load_timeout_s)
        erasures = self.write_back.erasures.count(request.namespace) if self.write_back else 0
        with clock.stage("plan"):
            plan = self.plan(request, deadline)
            if request.mode in ("auto", "stitch"):
                about = self._spans[request.namespace][0], self.store_config.min_chunk_tokens
                self.stats.watch.notice(plan, *about, is_stored_later=self.write_back is not None)
        total = self._check_length(len(plan.token_ids), max_new_tokens)
        missed = _missed(request, plan, erasures) if self.write_back else None
        plan = self._checked(plan, request.mode, total)
        attempt = partial(
            prefill,
            self.loaded.lm,
            self.store,
            plan,
            config=request.repair,
            costs=self.costs,
            max_new_tokens=max_new_tokens,
            load_timeout_s=deadline.left_s,
            clock=clock,
        )
        with TURNS.turn(cancel):
            done = _retry_without_reuse(attempt, "full" if plan.refusal else request.mode, self.store.release)
            try:
                yield replace(done, missed=missed) if missed else done, clock
            finally:
                done.release()

    def _check_length(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return the tokens of prompt and answer together; raise if the model's context window is smaller."""
        total, window = num_tokens + max_new_tokens, self.loaded.lm.context_window
        if total > window:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and the answer may take {max_new_tokens}, which exceeds the model's context window of "
                f"{window}; retrieve fewer chunks or lower max_new_tokens"
            )
        return total

    def answer(
        self, request: Request, config: SamplingConfig, start: float, emit: Emit, cancel: threading.Event
    ) -> GenerationResult:
        """Prefill and decode; ``emit`` takes text as it comes, and ``cancel`` ends decoding before its next forward.

        ``start`` is when the caller asked, on ``time.perf_counter``'s clock.
        """
        encoder, defaults = self.loaded.encoder, self.loaded.lm.model.generation_config
        penalty, limit = getattr(defaults, "repetition_penalty", None) or 1.0, config.max_new_tokens
        with self.prefilled(request, max_new_tokens=limit, cancel=cancel) as (done, clock), clock.stage("decode"):
            answer = decode(
                done.extend,
                done.logits,
                Sampler(config, done.token_ids, repetition_penalty=penalty),
                TextStream(encoder.decode, config.stop),
                max_new_tokens=limit,
                eos_ids=eos_token_ids(defaults, encoder.tokenizer),
                emit=emit,
                cancel=cancel,
            )
            end, first, more = time.perf_counter(), answer.first_s, len(answer.ids) - 1
        if self.write_back and done.missed:
            self.write_back.offer(done.missed)
        if request.repair.audit:
            self.stats.audit.offer(self.loaded, done, request.repair.audit, TURNS)
        return GenerationResult(
            **done.accounting(clock),
            text=answer.text,
            token_ids=answer.ids,
            finish_reason=answer.finish_reason,
            ttft_ms=(first - start) * 1e3,
            total_ms=(end - start) * 1e3,
            tokens_per_s=more / (end - first) if more else 0.0,
        )


def _missed(request: Request, plan: Plan, erasures: int) -> Missed | None:
    """Return what may be stored of a prompt: registered and explicit chunks behind a prefix of the application's, no live text."""
    given = [MissedChunk(text, is_given=True) for text in chunks_in_messages(request.prompt)]
    chunks = tuple(dict.fromkeys([*plan.missed, *given]))
    if request.mode == "full" or not chunks:
        return None
    head = plan.pieces[0].piece.text  # no known prefix may hold a question: nothing is encoded behind that
    prefix = head if head in request.prefixes else request.prefixes[0]
    return Missed(chunks, prefix, request.namespace, erasures)


def _retry_without_reuse(attempt: Callable[..., Prefilled], mode: Mode, release: Callable[[], int]) -> Prefilled:
    """Run a prefill; when memory runs out, once more without reuse, where ``release`` has freed the store's memory."""
    done, reason = _attempt(attempt, mode)
    if done is not None:
        return done
    if release() or mode != "full":
        logger.warning("out of memory with reuse (%s); trying once more without", reason)
        gc.collect()  # the failed attempt's buffers go before the next one allocates
        torch.cuda.empty_cache()
        done, reason = _attempt(attempt, "full")
    if done is None:
        raise OutOfMemoryError(
            "the prompt's KV and activations don't fit into memory, with or without reuse; retrieve fewer chunks, lower max_new_tokens, "
            f"or use a smaller model or dtype ({reason})"
        )
    return done if mode == "full" else replace(done, fallback_reason="memory ran out with reuse")


def _attempt(attempt: Callable[..., Prefilled], mode: Mode) -> tuple[Prefilled | None, str]:
    """Return the result, or ``None`` and the message: an exception that is kept would keep the attempt's tensors alive."""
    try:
        return attempt(mode=mode), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


SUMMED = ("prompt_tokens", "cached_tokens", "repaired_tokens", "computed_tokens", "loaded_bytes")


class EngineStats:
    """How answers were made since an engine was opened: totals over requests, thread-safe."""

    def __init__(self) -> None:
        self._lock = fork_lock()
        self._totals: Counter[str] = Counter()
        self.audit, self.watch = Audit(), Watch()

    def count(self, result: Counted) -> Counted:
        """Add one request, and return it."""
        with self._lock:
            self._totals.update(["requests", f"requests_{result.exactness}"])
            self._totals.update({name: getattr(result, name) for name in SUMMED})
            self._totals["fallbacks"] += result.fallback_reason is not None
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the totals, the overall reuse ratio, and what the audit counted."""
        with self._lock:
            totals = self._totals.copy()
        ratio = totals["cached_tokens"] / max(totals["prompt_tokens"], 1)
        own = {"kv_reuse_ratio": ratio, "requests_without_hits": self.watch.num_without_hits}
        return {**totals, **own, "audit": self.audit.stats()}
