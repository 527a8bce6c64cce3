"""The worker's side of the connector: rows are computed by :mod:`vllm_kvrag.blending`."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvrag import KVRagEngine, KVRagError, RepairConfig, StoreConfig, UnsupportedModelError
from kvrag.adapters import Blending, ModelFacts, ModelSource
from kvrag.config import as_config
from vllm_kvrag.blending import AdapterBlending, Blender, Said
from vllm_kvrag.loader import LOAD_FORMAT, model_of
from vllm_kvrag.messages import Ended, Hello, Jobs
from vllm_kvrag.own import VllmLM, adapter_digest
from vllm_kvrag.proof import why_different
from vllm_kvrag.ranks import SplitLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

# A step without a forward waits this long for news of a job: else vLLM steps on and on, and takes
# the cores that a thread reads or precomputes with.
IDLE_WAIT_S = 0.05


class WorkerSide:
    """Run the scheduler's jobs over the model of vLLM's worker."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig
    ) -> None:
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self._config = vllm_config
        self._cache = kv_cache_config
        self._blender: Blender | None = None
        self._lm: VllmLM | None = None
        self._split: SplitLM | None = None
        self._ended = dict[str, Said | None]()
        self._failed = set[int]()
        # By number: adapters, and fingerprints that the scheduler has not heard.
        self._adapters = WeakValueDictionary[int, Any]()
        self._told = dict[int, str]()
        self._store_config = config
        self._repair = as_config(RepairConfig, option("repair", None), option="repair")

    def handshake(self) -> Hello | None:
        """Describe the model, on its first rank; from now on its prompts are blended."""
        facts = self._facts()
        if self._split is not None:
            self._split.end_turn(is_busy=False)
            if not self._split.leads:
                return None
        return Hello(facts)

    def _facts(self) -> ModelFacts:
        """Describe the model, or say why it can't be used: vLLM then answers without the store."""
        try:
            return self._opened()
        except KVRagError as error:
            reason = str(error)
        except Exception as error:
            reason = f"its model can't be opened ({type(error).__name__}: {error})"
        return ModelFacts(refusal=reason)

    def _opened(self) -> ModelFacts:
        """Open the engine and start its threads; raise ``UnsupportedModelError`` if it can't."""
        held = model_of(self._config)
        if held is None:
            raise UnsupportedModelError(
                f"vLLM's model is not known; start vLLM with --load-format {LOAD_FORMAT}"
            )
        if self._config.parallel_config.tensor_parallel_size == 1:
            lm = self._lm = VllmLM(self._config, held)
        else:
            lm = self._lm = self._split = SplitLM(self._config, held)
            if not self._split.leads:
                return ModelFacts()
        blending = Blending(self._engine_of(lm))
        facts = blending.facts(why_different(lm, self._cache, blending))
        reason = blending.stored_difference()
        if reason is not None:
            raise UnsupportedModelError(
                f"{reason}; precompute into another kv_dir, by vLLM's worker"
            )
        self._blender = Blender(blending, lm)
        return facts

    def _engine_of(self, lm: VllmLM, **more: Any) -> KVRagEngine:
        """Return an engine on vLLM's model; with more options, on the model of the first one."""
        option = self._config.kv_transfer_config.get_from_extra_config
        model = self._config.model_config
        own: dict[str, Any] = {
            "tokenizer": None if model.tokenizer == model.model else model.tokenizer,
            "revision": model.revision,
            "dtype": model.dtype,
            "device": self._config.device_config.device,
        }
        # Kept as long as the engine, which finds it by its source.
        loaded = None if more else lm.load(ModelSource(model.model, **own))
        engine = KVRagEngine.from_pretrained(
            model.model,
            kv_dir=option("kv_dir", None),
            prefix=option("prefix", None),
            context=option("context", "default"),
            repair=self._repair,
            namespace=option("namespace", "default"),
            store_config=self._store_config,
            **own,
            **more,
        )
        assert more or engine.loaded is loaded
        return engine

    def _meet(self, blender: Blender) -> None:
        """Have prompts of adapters blended that vLLM has loaded since the last step."""
        for number, adapter in blender.lm.adapters().items():
            if self._adapters.get(number) is adapter:
                continue
            self._adapters[number] = adapter
            try:
                engine = self._engine_of(
                    blender.lm, extra_keys={"adapter": adapter_digest(adapter)}
                )
                engine._loaded = replace(engine.loaded, lm=blender.lm.adapted(adapter))
                blender.adapted[number] = AdapterBlending(engine)
                self._told[number] = engine.loaded.fingerprint
            except Exception as error:  # a failure costs time, never the answer
                logger.warning(
                    "prompts of adapter %s are left to vLLM (%s: %s)",
                    number,
                    type(error).__name__,
                    error,
                )

    def load(self, jobs: Jobs, *, is_idle: bool) -> None:
        """Begin the jobs of this step, and let those before it go on for a while.

        The step has no forward if ``is_idle``.
        """
        split = self._split
        mapping = None if self._lm is None else self._lm.mapping
        if split is None:
            self._advance(jobs, is_idle)
        elif jobs.jobs or split.is_busy:
            try:
                self._advance(jobs, is_idle)
            finally:
                split.end_turn(is_busy=self._blender is not None and self._blender.is_busy)
        if self._lm is not None and not is_idle:
            # vLLM's second model runner sets the adapters of a step later; these may be gone.
            with suppress(LookupError, ValueError):
                self._lm.use(mapping)

    def _advance(self, jobs: Jobs, is_idle: bool) -> None:
        if self._blender is None:  # another rank, or one without a model and so without jobs
            return
        if self._split is None:  # else all ranks would have to use the same adapter
            self._meet(self._blender)
        for job in jobs.jobs:
            self._blender.submit(job)
        self._blender.rest(IDLE_WAIT_S if is_idle else 0.0)

    def ended(self, finished: set[str]) -> set[str]:
        """Return the requests whose jobs have ended; those of finished requests are left out."""
        if self._blender is None:
            return set()
        self._blender.abandon(finished)
        ended = self._blender.ended()
        for job, said in ended:
            self._ended[job.request_id] = said
            if said is None:
                self._failed.update(job.failed(self._config.cache_config.block_size))
        return {job.request_id for job, _ in ended}

    def failed_blocks(self) -> set[int]:
        """Return the blocks of failed jobs."""
        failed = self._failed
        self._failed = set()
        return failed

    def report(self) -> Ended | None:
        """Return what the jobs that ended since the last report say."""
        ended = Ended(self._ended, self._told)
        self._ended = {}
        self._told = {}
        return ended if ended.said or ended.adapters else None

    def close(self) -> None:
        """End the worker's threads, and close its engine."""
        if self._split is not None:
            self._split.is_lost = True  # the other ranks hear no orders any more
        if self._blender is not None:
            self._blender.close()
            self._blender.engine.close()
