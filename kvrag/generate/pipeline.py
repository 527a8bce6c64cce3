"""Answer requests: plan a prompt, prefill it with reused KV, decode, and report how it was made."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kvrag.blend.beginnings import in_words, prefill_refused, reason_against_history
from kvrag.blend.cost import CostModel
from kvrag.blend.prefill import Prefilled, prefill
from kvrag.blend.reuse import outcome_of
from kvrag.config import SamplingConfig, StoreConfig
from kvrag.errors import OutOfMemoryError, is_out_of_memory
from kvrag.generate.defaults import end_ids
from kvrag.generate.grammar import constraint_of
from kvrag.generate.logprobs import read_on
from kvrag.generate.radix_cache import RadixCache
from kvrag.generate.request import EngineStats, Request
from kvrag.generate.sampling import decode, parts_of
from kvrag.generate.scheduler import Admitted, fitted, length_of, missed_of, room_for
from kvrag.generate.streams import Emit
from kvrag.identity.fingerprint import context_digest
from kvrag.model.lm import LoadedModel
from kvrag.model.lock import NOTABLE_S, Clock
from kvrag.precompute.on_miss import WriteBack
from kvrag.prompt.explain import explain_plan
from kvrag.prompt.plan import Lookup, Plan
from kvrag.prompt.planner import KnownTexts, PromptPlanner
from kvrag.prompt.template import PLAIN
from kvrag.prompt.tools import TEXT
from kvrag.runtime import Cancel, Deadline
from kvrag.store import TieredStore
from kvrag.store.tiers import ERASURES
from kvrag.types import Explanation, GenerationResult, Mode

logger = logging.getLogger(__name__)

# Whether requests of this thread neither find nor keep KV of earlier requests.
WITHOUT_HISTORIES = ContextVar("WITHOUT_HISTORIES", default=False)


@dataclass(slots=True)
class QueryPipeline:
    """State that the requests of an engine share: the model, the planner and the store.

    ``write_back`` stores the chunks that answered prompts missed; without it, every prompt computes
    them again. ``context_ids`` are the token ids that chunks are encoded behind besides the prefix.
    ``stats`` belongs to the engine.
    """

    loaded: LoadedModel
    store: TieredStore
    store_config: StoreConfig
    write_back: WriteBack | None = None
    context_ids: Sequence[int] = ()
    stats: EngineStats = field(default_factory=EngineStats)
    histories: RadixCache = field(init=False)
    costs: CostModel = field(init=False)
    planner: PromptPlanner = field(init=False)
    _context: str = field(init=False)

    def __post_init__(self) -> None:
        loaded = self.loaded
        self.planner = PromptPlanner(
            self.store,
            self.store_config,
            KnownTexts(self.store.catalog),
            loaded.encoder,
            loaded.lm.vocab_size,
        )
        self._context = context_digest(self.context_ids)
        self.costs = CostModel(loaded)
        self.histories = RadixCache(0, loaded.lm.device)

    def close(self) -> None:
        """Stop background work, and drop the KV of earlier requests."""
        self.histories.clear()
        if self.write_back:
            self.write_back.close()

    def plan(self, request: Request) -> Plan:
        """Plan a prompt."""
        return self._planned(request)[0]

    def _planned(self, request: Request, deadline: Deadline | None = None) -> tuple[Plan, Lookup]:
        """Plan a prompt within a time budget for the store; return the plan and its look-up."""
        lookup = self.planner.lookup(
            request.namespace, self.loaded.identity.fingerprint, self._context, deadline
        )
        plan = self.planner.plan(request.prompt, lookup, request.prefixes, request.chat)
        lm = self.loaded.lm
        if lm.refusal is not None:
            plan = plan.without_reuse(lm.refusal)
        return plan, lookup

    def explain(self, request: Request) -> Explanation:
        """Describe a prompt's hits and how it would be prefilled, without loading KV."""
        plan, lookup = self._planned(request)
        total = len(plan.token_ids) + 1
        plan, _ = fitted(self.loaded.lm, plan, request, total)
        price = None
        if request.mode == "auto":
            price = self.costs.price(plan, request.repair, self.store)
        explained = explain_plan(plan, *outcome_of(plan, request.mode, price), lookup)
        explained.notes.extend(in_words(self.loaded.lm, total, self._state_bytes))
        if plan.has_mismatch and (variables := self.loaded.encoder.date_variables) is not None:
            named = f", as chat_template_kwargs={{{variables[0]!r}: ...}}" if variables else ""
            explained.notes.append(
                f"the chat template writes the date, so its head changes every day; pin it{named}"
            )
        return explained

    @contextmanager
    def prefilled(
        self,
        request: Request,
        *,
        max_new_tokens: int | None,
        clock: Clock,
        cancel: Cancel = None,
    ) -> Iterator[tuple[Admitted, Prefilled]]:
        """Plan a prompt, reserve KV for prompt and answer, and prefill.

        If memory runs out, prefill is retried without reuse. Raises the errors of
        :meth:`kvrag.engine.KVRagEngine.generate`, and ``CancelledError`` if ``cancel`` is set
        while the request waits or prefills.
        """
        deadline = Deadline(self.store_config.load_timeout_s)
        erasures = ERASURES.count(request.namespace)
        with clock.stage("plan"):
            space = self._space(request, deadline)
            plan, lookup = self._planned(request, deadline)
            if request.mode in ("auto", "stitch"):
                self.stats.watch.notice(plan, lookup, is_stored_later=self.write_back is not None)
        admitted = self._admitted(request, plan, max_new_tokens, space, erasures)
        lm = self.loaded.lm
        shared: dict[str, Any] = {
            "max_new_tokens": admitted.max_new_tokens,
            "clock": clock,
            "find_history": admitted.find_history,
            "cancel": cancel,
        }

        def attempt(mode: Mode) -> Prefilled:
            if lm.refusal is not None:
                return prefill_refused(
                    lm, admitted.plan, mode=mode, max_bytes=self._state_bytes, **shared
                )
            return prefill(
                lm,
                self.store,
                admitted.plan,
                mode=mode,
                config=request.repair,
                costs=self.costs,
                load_timeout_s=deadline.left_s,
                slides=admitted.slides,
                run=run,
                **shared,
            )

        with clock.waiting(room_for(self.loaded, admitted, cancel)) as run:
            done = _retried(
                attempt, admitted.mode, lambda: self.store.release() + self.histories.release()
            )
            try:
                yield admitted, done
            finally:
                done.release()

    def _admitted(
        self,
        request: Request,
        plan: Plan,
        max_new_tokens: int | None,
        space: Hashable,
        erasures: int,
    ) -> Admitted:
        """Admit a planned request: its length, its window, and what it may reuse."""
        lm = self.loaded.lm
        ids = plan.token_ids
        limit = length_of(lm, len(ids), max_new_tokens, slides=request.slides)
        total = len(ids) + limit
        missed = missed_of(request, plan, erasures) if self.write_back else None
        plan, slides = fitted(lm, plan, request, total)
        reason = plan.reason
        if lm.refusal is not None:
            reason = reason_against_history(lm, total, self._state_bytes)
        find_history = None
        if space is not None:
            find_history = partial(
                self.histories.find,
                space,
                ids,
                repair=None if request.mode == "prefix" else request.repair,
            )
        return Admitted(
            request,
            plan,
            max_new_tokens=limit,
            num_tokens=len(ids),
            slides=slides,
            reason=reason,
            find_history=find_history,
            missed=missed,
            space=space,
            erasures=erasures,
        )

    @contextmanager
    def scored(
        self, request: Request, config: SamplingConfig, clock: Clock, cancel: threading.Event
    ) -> Iterator[tuple[Admitted, Prefilled]]:
        """Prefill as :meth:`prefilled` does, and score the prompt's tokens if requested.

        Scoring the prompt turns reuse off: its other tokens are read behind the first.
        """
        length, num_top = config.max_new_tokens, config.prompt_logprobs
        first = request
        ids = list[int]()
        if num_top is not None:
            ids = self.plan(request).token_ids
            length = len(ids) - 1 + length_of(self.loaded.lm, len(ids), length, slides=False)
            first = replace(
                request, prompt=ids[:1], mode="full", form=TEXT, slides=False, chat=PLAIN
            )
        with self.prefilled(first, max_new_tokens=length, clock=clock, cancel=cancel) as (
            admitted,
            done,
        ):
            if num_top is not None:
                with clock.stage("score"):
                    done = read_on(done, ids[1:], num_top, cancel)
                admitted = replace(
                    admitted,
                    request=request,
                    max_new_tokens=admitted.max_new_tokens - len(ids) + 1,
                )
            yield admitted, done

    @property
    def _state_bytes(self) -> int:
        """Most bytes of a request's snapshots."""
        return self.histories.max_bytes // 2

    def forget(self, namespace: str | None) -> None:
        """Drop the KV of earlier requests of a namespace (a digest), or of all namespaces."""
        self.histories.clear(lambda space: namespace in (None, space[1]))

    def _space(self, request: Request, deadline: Deadline) -> Hashable:
        """Return the key of the request's radix tree: all that KV depends on besides token ids.

        The key changes with every erasure, by any process, so KV from before is not found, and is
        dropped here. ``None``: no KV is kept, or the catalog does not tell in time what was erased.
        """
        if WITHOUT_HISTORIES.get() or not self.histories.max_bytes:
            return None
        namespace = request.namespace
        erased = deadline.ask(
            lambda: self.store.catalog.erased(namespace), None, what="the KV store's catalog"
        )
        if erased is None:
            return None
        self.histories.clear(lambda space: space[1] == namespace and space[2] != erased)
        return self.loaded.fingerprint, namespace, erased

    def _keep_history(self, admitted: Admitted, done: Prefilled, answer: Sequence[int]) -> None:
        """Keep a finished request's KV. A failure drops all kept KV, which only costs time."""
        rows = [*done.token_ids, *answer[:-1]]  # no forward has seen the last token
        request = admitted.request
        space: Any = admitted.space
        if (
            space is None
            or request.mode == "full"
            # too long for reuse, or rows have left a sliding window
            or reason_against_history(self.loaded.lm, len(rows), self._state_bytes)
        ):
            return
        try:
            layers, snapshots = done.kept()
            num_prompt = len(done.token_ids)
            self.histories.keep(
                space,
                rows,
                layers,
                num_exact=len(rows) if done.num_exact == num_prompt else done.num_exact,
                num_prompt=num_prompt,
                repair=request.repair,
                # False if documents were erased here, or weights changed, since the request began;
                # what another process erased is dropped by the next request.
                is_valid=lambda: (
                    ERASURES.count(request.namespace) == admitted.erasures
                    and space[0] == self.loaded.fingerprint
                ),
                snapshots=snapshots,
            )
        except (RuntimeError, MemoryError) as error:
            self.histories.clear()
            logger.warning("the KV of a finished request could not be kept (%s)", error)

    def answer(
        self,
        request: Request,
        config: SamplingConfig,
        clock: Clock,
        emit: Emit,
        cancel: threading.Event,
    ) -> GenerationResult:
        """Prefill a prompt and decode its answer.

        ``clock`` has run since the caller asked; ``emit`` receives the text; ``cancel`` stops the
        request before its next forward.
        """
        eos_ids = end_ids(self.loaded)
        constraint = None
        if request.form != TEXT:
            with clock.stage("prepare", least_s=NOTABLE_S):
                constraint = constraint_of(request.form, self.loaded.encoder.private, eos_ids)
        with (
            self.scored(request, config, clock, cancel) as (admitted, done),
            clock.stage("decode"),
        ):
            limit = admitted.max_new_tokens
            sampler, text, calls, thoughts = parts_of(
                self.loaded, request, config, done.token_ids, limit, eos_ids, constraint
            )
            answer = decode(
                done.extend,
                done.logits,
                sampler,
                text,
                max_new_tokens=limit,
                eos_ids=eos_ids.union(config.stop_token_ids or ()),
                emit=emit,
                cancel=cancel,
                calls=calls,
                thoughts=thoughts,
            )
            end = time.perf_counter()
            self._keep_history(admitted, done, answer.ids)
        if self.write_back and admitted.missed:
            self.write_back.offer(admitted.missed)
        return GenerationResult(
            **done.accounting(clock),
            text=answer.text,
            token_ids=answer.ids,
            finish_reason=answer.finish_reason,
            ttft_ms=(answer.first_s - clock.start) * 1e3,
            total_ms=(end - clock.start) * 1e3,
            tokens_per_s=(len(answer.ids) - 1) / max(end - answer.first_s, 1e-9),
            tool_calls=answer.calls,
            logprobs=None if config.logprobs is None else tuple(sampler.logprobs),
            prompt_logprobs=done.prompt_logprobs,
            reasoning_content=answer.thought,
            reasoning_tokens=answer.num_thought,
        )


def _retried(
    attempt: Callable[[Mode], Prefilled], mode: Mode, release: Callable[[], int]
) -> Prefilled:
    """Run a prefill; if memory runs out, free memory by ``release`` and retry without reuse.

    A full prefill is retried only if ``release`` freed anything.
    """
    done, reason = _tried(attempt, mode)
    if done is None and (release() or mode != "full"):
        logger.warning("out of memory with reuse (%s); trying once more without", reason)
        gc.collect()  # the failed attempt's buffers go before the next one allocates
        torch.cuda.empty_cache()
        done, reason = _tried(attempt, "full")
        if done is not None and mode != "full":
            return replace(done, fallback_reason="memory ran out with reuse")
    if done is None:
        raise OutOfMemoryError(
            "the prompt's KV and activations don't fit into memory, with or without reuse; "
            "retrieve fewer chunks, allow the answer fewer tokens, "
            f"or use a smaller model or dtype ({reason})"
        )
    return done


def _tried(attempt: Callable[[Mode], Prefilled], mode: Mode) -> tuple[Prefilled | None, str]:
    """Return the result and an empty message, or no result and the error's message.

    The exception is not kept: it would keep the attempt's tensors alive.
    """
    try:
        return attempt(mode), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)
