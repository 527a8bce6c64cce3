"""The scheduler's side of the connector: what is loaded or blended, and what is said of it.

It plans from token ids and reports all but the last token as loaded beside vLLM's steps.
Approximate blocks get hashes of their own, so vLLM's prefix cache never gives them to another
request.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvrag import KVRagError, Library, StoreConfig, UnsupportedModelError
from kvrag.adapters import ModelFacts, ModelSource
from vllm_kvrag.blending import Job, Said
from vllm_kvrag.messages import Ended, Hello, Jobs
from vllm_kvrag.planning import Asked, Decision, Planner
from vllm_kvrag.private import PrivateBlocks
from vllm_kvrag.report import Counts, tokens_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

MOST_RECORDS = 1000
FAILED = "its stored KV could not be used (vLLM's log says why)"


class SchedulerSide:
    """Plan the requests of vLLM's scheduler; with ``is_exact``, load exact beginnings only."""

    def __init__(self, vllm_config: VllmConfig, config: StoreConfig, *, is_exact: bool) -> None:
        option = vllm_config.kv_transfer_config.get_from_extra_config
        model = vllm_config.model_config
        # As the worker's: the revision is of the tokenizer in the model's own repository.
        source = ModelSource(
            model.model,
            None if model.tokenizer == model.model else model.tokenizer,
            model.revision,
        )
        self._is_exact = is_exact
        self._library = Library(
            option("kv_dir", None),
            namespace=option("namespace", "default"),
            store_config=config,
        )
        self._planner = Planner(self._library, source)
        self._about: ModelFacts | None = None
        # Fingerprints of the model with adapters, by their numbers.
        self._adapters = dict[int, str]()
        # By request.
        self._decisions = dict[str, tuple[int, Decision]]()
        self._private = PrivateBlocks(vllm_config.cache_config.block_size)
        self._said = dict[str, Said]()
        # By the id that an ended request had, until it is asked for.
        self._records = dict[str, Said]()
        self._waiting: list[Job] = []
        self._counts = Counts()

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
        if "-beam-" in request_id:  # vLLM gives it none of the client's parameters
            return Decision("none", "it is a beam")
        if self._about is None:
            return Decision("none", "the worker has not described its model yet")
        if asked.precompute is not None:
            if self._about.fault is not None:
                raise UnsupportedModelError(self._about.fault)
            # A row that is never written: no other request may find its block.
            return Decision("blend", stop=num_computed + 1, num_exact=num_computed)
        about = self._about
        lora = request.lora_request
        if lora is not None:
            if lora.load_inplace or lora.lora_int_id not in self._adapters:
                return Decision("none", "its adapter is new here, or kvrag can't use it")
            about = replace(about, fingerprint=self._adapters[lora.lora_int_id])
        # Its answer began behind exact rows, before a preemption.
        is_behind_exact = request.num_output_tokens and request_id not in self._private
        is_exact = self._is_exact or is_behind_exact or about.only_exact is not None
        if asked.mode != "full" and is_exact:
            asked = replace(asked, mode="prefix")
        return self._planner.decide(
            request.prompt_token_ids,
            asked,
            about,
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
        self._waiting.append(
            Job(
                request.request_id,
                blocks,
                start,
                stop,
                min(start, decision.num_exact),
                decision.plan,
                decision.repair,
                asked.precompute,
                request.lora_request.lora_int_id if request.lora_request else 0,
            )
        )

    def jobs(self) -> Jobs:
        """Pass the jobs to the worker."""
        jobs = self._waiting
        self._waiting = []
        return Jobs(jobs)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Return what the response says about the request's KV, and forget the request."""
        self._decisions.pop(request.request_id, None)
        self._private.forget(request.request_id)
        said = self._said.pop(request.request_id, None)
        if said is None:
            return None
        asked = Asked()
        with suppress(Exception):  # parameters may be anything
            asked = Asked.of(request.kv_transfer_params)
        if asked.report:
            return {"kvrag": {"report": self._records.pop(asked.report, None)}}
        if "exactness" in said:
            self._counts.add(said)
            said = said | {"tokens": tokens_of(said)}
            if not asked.trace:
                del said["sources"]  # hundreds of runs
        if asked.describe and self._about is not None:
            said = said | self._about.said()
        if asked.stream:
            self._records[asked.stream] = said
            if len(self._records) > MOST_RECORDS:
                del self._records[next(iter(self._records))]
        return {"kvrag": said}

    def hear(self, metadata: Any) -> None:
        """Take the description of the worker's model, or what its jobs say."""
        if isinstance(metadata, Hello):
            self._about = metadata.about
            if metadata.about.fault:
                logger.warning(
                    "stored KV is reused in part, or not at all: %s", metadata.about.fault
                )
        elif isinstance(metadata, Ended):
            self._adapters |= metadata.adapters
            for request_id, said in metadata.said.items():
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

    def close(self) -> None:
        """Close the store."""
        self._library.close()


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
        request.mm_features
        or request.cache_salt
        or request.prompt_embeds is not None
        or not request.prompt_token_ids
    )
