"""Blend mode of the connector: reuse stored chunks anywhere in a prompt, and repair them.

The scheduler plans from token ids and reports all but the last token as loaded beside its steps.
The worker's thread computes the rows (:mod:`vllm_kvrag.blending`). Approximate blocks get hashes of
their own, so vLLM's prefix cache never gives them to another request.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrag import ConfigError, KVRagError, RepairConfig, StoreConfig, UnsupportedModelError
from kvrag.adapters import (
    Costs,
    ModelSource,
    PromptEncoder,
    TieredStore,
    as_config,
    context_digest,
    load_tokenizer,
)
from vllm_kvrag.blending import Blender, Job, Said
from vllm_kvrag.loader import LOAD_FORMAT, model_of
from vllm_kvrag.planning import About, Asked, Decision, Planner
from vllm_kvrag.private import PrivateBlocks
from vllm_kvrag.proof import why_different
from vllm_kvrag.report import Counts, Records, tokens_of
from vllm_kvrag.steps import Step, StepClock, StepCounter
from vllm_kvrag.weights import engine_of, layers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

# A step without a forward waits this long for a job to end: each step takes the job's cores for
# some milliseconds, and a prompt that arrives meanwhile waits, too.
IDLE_WAIT_S = 0.05
FAILED = "its stored KV could not be used (vLLM's log says why)"


@dataclass
class Jobs(KVConnectorMetadata):
    """Jobs for the worker, and the step that it is to time."""

    jobs: list[Job] = field(default_factory=list)
    step: Step = field(default_factory=Step)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """Description of the worker's model."""

    about: About


@dataclass
class Ended(KVConnectorWorkerMetadata):
    """What ended jobs say, by request; ``None``: it failed. ``steps`` were timed."""

    said: dict[str, Said | None]
    steps: list[Step] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Ended:
        """Join the reports of two workers."""
        assert isinstance(other, Ended)
        return Ended(self.said | other.said, self.steps + other.steps)


class BlendMode:
    """Blend mode, on the scheduler's side or on the worker's."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        store: TieredStore,
        config: StoreConfig,
        *,
        is_worker: bool,
        is_exact: bool,
    ) -> None:
        self._config = vllm_config
        self._cache = kv_cache_config
        self._block_size = vllm_config.cache_config.block_size
        self._is_exact = is_exact
        reason = refusal(vllm_config, kv_cache_config)
        if reason:
            raise ConfigError(f"vLLM can't use this store: {reason}")
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self._repair = as_config(RepairConfig, option("repair", None), option="repair")
        model = vllm_config.model_config
        self._counts = Counts()
        self._about: About | None = None
        self._blender: Blender | None = None
        self._store_config = config
        if not is_worker:
            source = ModelSource(model.model, tokenizer=model.tokenizer)
            self._planner = Planner(
                store,
                config,
                PromptEncoder(load_tokenizer(source)),
                option("namespace", "default"),
            )
        # By request.
        self._decisions = dict[str, tuple[int, Decision]]()
        self._private = PrivateBlocks(self._block_size)
        self._said = dict[str, Said]()
        self._prices = dict[str, float]()
        self._streams = Records()
        self._waiting: list[Job] = []
        self._ended = dict[str, Said | None]()
        self._failed = set[int]()
        self._is_idle = False
        self._counter = StepCounter()
        self._clock: StepClock | None = None

    # -- the scheduler ---------------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after the computed tokens are blended or loaded."""
        try:
            asked = Asked.of(request.kv_transfer_params)
            decision = self._decide(request, asked, num_computed_tokens)
        except KVRagError as error:
            decision = Decision("none", str(error), error=type(error).__name__)
        except Exception as error:  # a failure of the cache is never a failure of the answer
            logger.warning("a prompt could not be planned (%s: %s)", type(error).__name__, error)
            decision = Decision("none", f"its planning failed ({type(error).__name__})")
        if decision.kind == "blend":
            num_exact = min(decision.num_exact, self._private.num_exact(request.request_id))
            decision = replace(decision, num_exact=num_exact)
            self._private.hide(request, num_exact)
        else:
            self._private.show(request, num_computed_tokens)
        self._decisions[request.request_id] = num_computed_tokens, decision
        count = max(0, decision.stop - num_computed_tokens)
        return count, count > 0

    def _decide(self, request: Request, asked: Asked, num_computed: int) -> Decision:
        request_id = request.request_id
        known = self._decisions.get(request_id)
        if known is not None and known[0] == num_computed:
            return known[1]  # it waits for blocks
        if self._said.get(request_id, {}).get("fallback_reason") == FAILED:
            return Decision("none", FAILED)  # a second job might fail, too, and so on
        if has_own_kv(request) and request_id not in self._private:
            return Decision("none", "its KV depends on more than its token ids")
        if request.skip_reading_prefix_cache:
            return Decision("none", "it asks for a full prefill")
        if request.resumable:
            return Decision("none", "its prompt is not complete")
        if self._about is None:
            return Decision("none", "the worker has not described its model yet")
        if asked.precompute is not None:
            if self._about.refusal is not None:
                raise UnsupportedModelError(self._about.refusal)
            # A row that is never written: no other request may find its block.
            return Decision("blend", stop=num_computed + 1, num_exact=num_computed)
        # Its answer began behind exact rows, before a preemption.
        is_behind_exact = request.num_output_tokens and request_id not in self._private
        if asked.mode != "full" and (self._is_exact or is_behind_exact):
            asked = replace(asked, mode="prefix")
        ids = request.prompt_token_ids
        return self._planner.decide(
            ids,
            asked,
            self._about,
            num_computed=num_computed,
            num_more=request.max_tokens,
        )

    def allocated(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        """Note the request's job, now that its blocks are known."""
        start, decision = self._decisions.pop(request.request_id, (0, Decision("none")))
        total = request.num_prompt_tokens
        if request.request_id not in self._said:
            said = _as_computed(start, total, decision.reason)
            if decision.error is not None:
                said |= {"error": decision.reason, "code": decision.error}
            self._said[request.request_id] = said
        if num_external_tokens == 0:
            return
        asked = Asked.of(request.kv_transfer_params)
        stop = start + num_external_tokens
        job = Job(request.request_id, blocks, start, stop, min(start, decision.num_exact))
        if asked.precompute is not None:
            job = replace(job, precompute=asked.precompute)
        else:
            job = replace(job, plan=decision.plan, repair=decision.repair)
            self._prices[request.request_id] = decision.price
        self._waiting.append(job)

    def metadata(self, scheduler_output: SchedulerOutput) -> Jobs:
        """Pass the jobs to the worker."""
        jobs = self._waiting
        self._waiting = []
        return Jobs(jobs, self._counter.of(scheduler_output))

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Return what the response says about the request's KV, and forget the request."""
        self._decisions.pop(request.request_id, None)
        self._private.forget(request.request_id)
        self._prices.pop(request.request_id, None)
        said = self._said.pop(request.request_id, None)
        if said is None:
            return None
        asked = Asked()
        with suppress(Exception):  # parameters may be anything
            asked = Asked.of(request.kv_transfer_params)
        if asked.report:
            return {"kvrag": {"report": self._streams.pop(asked.report, None)}}
        if "exactness" in said:
            self._counts.add(said)
            said = said | {"tokens": tokens_of(said)}
            if not asked.trace:
                del said["sources"]  # hundreds of runs
        if asked.describe and self._about is not None:
            said = said | self._about.said()
        if asked.stream:
            self._streams.keep(asked.stream, said)
        return {"kvrag": said}

    def hear(self, metadata: Any) -> None:
        """Take the description of the worker's model, or what its jobs say."""
        if isinstance(metadata, Hello):
            self._about = metadata.about
            if metadata.about.refusal:
                logger.warning("prompts reuse no stored KV: %s", metadata.about.refusal)
        elif isinstance(metadata, Ended):
            if self._about is not None:
                for step in metadata.steps:
                    self._planner.steps.note(step, self._about.costs)
            for request_id, said in metadata.said.items():
                took = sum(((said or {}).get("timings_ms") or {}).values())
                price = self._prices.pop(request_id, 0.0)
                if price and took:
                    self._planner.learn(price, took)
                planned = self._said.get(request_id)
                if planned is None:
                    continue
                if said is None:
                    said = planned | {"fallback_reason": FAILED}
                elif "exactness" in said:
                    said = {"fallback_reason": planned["fallback_reason"]} | said
                self._said[request_id] = said

    def counted(self) -> Counts | None:
        """Return the counts since the last call."""
        counts = self._counts
        self._counts = Counts()
        return None if counts.is_empty() else counts

    # -- the worker ------------------------------------------------------------------------------

    def handshake(self) -> Hello:
        """Describe the model; from now on its prompts are blended."""
        try:
            return Hello(self._opened())
        except KVRagError as error:
            reason = str(error)
        except Exception as error:  # vLLM answers without the store
            reason = f"its model can't be opened ({type(error).__name__}: {error})"
        none = Costs(((0.0,), (0.0,)), 1.0, 0.0, {}, "tokens")
        return Hello(About("", reason, RepairConfig(), none, 1, 0, ""))

    def _opened(self) -> About:
        """Open the engine and start its threads; raise ``UnsupportedModelError`` if it can't."""
        model = model_of(self._config)
        if model is None:
            raise UnsupportedModelError(
                f"vLLM's weights are not known; start vLLM with --load-format {LOAD_FORMAT}"
            )
        engine = engine_of(self._config, model, self._store_config, self._repair)
        lm = engine.loaded.reusable
        layers = self._config.compilation_config.static_forward_context
        reason = why_different(self._config, self._cache, model, layers, lm)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._blender = Blender(engine, layers_of(self._config), self._block_size)
        self._clock = StepClock(lm.device)
        return About(
            engine.loaded.fingerprint,
            None,
            engine.repair,
            self._blender.costs.known(),
            lm.depth,
            lm.reuse_window,
            context_digest(engine.context_ids),
        )

    def begin(self, metadata: KVConnectorMetadata) -> None:
        """Note that a step begins."""
        if self._clock is not None and isinstance(metadata, Jobs):
            self._clock.begin(metadata.step)

    def load(
        self, metadata: KVConnectorMetadata, forward_context: ForwardContext, *, is_idle: bool
    ) -> None:
        """Begin the jobs of this step, which has no forward if ``is_idle``."""
        assert isinstance(metadata, Jobs)
        assert self._blender is not None or not metadata.jobs
        for job in metadata.jobs:
            self._blender.submit(job)  # type: ignore[union-attr]
        self._is_idle = is_idle

    def ended(self, finished: set[str]) -> set[str]:
        """Return the requests whose jobs have ended; the step has, too."""
        if self._blender is None or self._clock is None:
            return set()
        self._clock.end()
        self._blender.cancel(finished)
        ended = self._blender.ended(IDLE_WAIT_S if self._is_idle else 0.0)
        for job, said in ended:
            self._ended[job.request_id] = said
            if said is None:
                self._failed.update(job.failed(self._block_size))
        return {job.request_id for job, _ in ended}

    def failed_blocks(self) -> set[int]:
        """Return the blocks of failed jobs."""
        failed = self._failed
        self._failed = set()
        return failed

    def worker_metadata(self) -> Ended | None:
        """Report ended jobs and timed steps."""
        if self._blender is None or self._clock is None:
            return None
        said = self._ended
        self._ended = {}
        steps = self._clock.ended()
        return Ended(said, steps) if said or steps else None

    def close(self) -> None:
        """End the worker's threads, and close its engine."""
        if self._blender is not None:
            self._blender.close()
            self._blender.engine.close()


def _as_computed(num_cached: int, total: int, reason: str | None) -> Said:
    """Return what is said of a prompt that vLLM computes, but for its own cached rows."""
    cached = [["exact", num_cached]] if num_cached else []
    return {
        "exactness": "exact" if num_cached else "full",
        "cached_tokens": num_cached,
        "repaired_tokens": 0,
        "computed_tokens": total - num_cached,
        "fallback_reason": reason,
        "sources": [*cached, ["computed", total - num_cached]],
    }


def has_own_kv(request: Request) -> bool:
    """Whether a request's KV depends on more than its token ids."""
    return bool(
        request.lora_request
        or request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
        or not request.prompt_token_ids
    )


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why vLLM's cache can't take stored rows, and what to do; ``None`` if it can."""
    cache = vllm_config.cache_config
    transfer = vllm_config.kv_transfer_config
    runner = vllm_config.model_config.runner_type
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # With windows only, vLLM frees the blocks before the window and can't compute failed loads.
    # Latent attention is of a class below.
    is_full = len(specs) == 1 and type(specs[0]) is FullAttentionSpec
    reasons = [
        (runner == "generate", f"its runner is {runner!r}, and only answers are blended"),
        (transfer.is_kv_consumer, f"kv_role is {transfer.kv_role!r}; pass 'kv_consumer'"),
        (
            cache.cache_dtype == "auto",
            f"kv_cache_dtype is {cache.cache_dtype!r}; leave it at 'auto'",
        ),
        (vllm_config.parallel_config.world_size == 1, "the model is split among several devices"),
        (
            vllm_config.speculative_config is None,
            "it decodes speculatively, and a draft model has layers of its own",
        ),
        (is_full, "its cache is not one group of full attention"),
        # A chunk may be erased or found damaged after the scheduler has counted its tokens.
        (
            transfer.kv_load_failure_policy == "recompute",
            "kv_load_failure_policy must be 'recompute'",
        ),
    ]
    return next((reason for holds, reason in reasons if not holds), None)
