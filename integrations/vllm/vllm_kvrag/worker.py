"""The worker's side of the connector: rows are computed by :mod:`vllm_kvrag.blending`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvrag import KVRagEngine, KVRagError, RepairConfig, StoreConfig, UnsupportedModelError
from kvrag.adapters import Blending, ModelFacts, ModelSource
from kvrag.config import as_config
from vllm_kvrag.blending import Blender, Said
from vllm_kvrag.loader import LOAD_FORMAT, model_of
from vllm_kvrag.messages import Ended, Hello, Jobs
from vllm_kvrag.own import Share, VllmLM
from vllm_kvrag.proof import why_different
from vllm_kvrag.ranks import Ranks, SplitShare

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
        self._ranks: Ranks | None = None
        self._ended = dict[str, Said | None]()
        self._failed = set[int]()
        self._store_config = config
        self._repair = as_config(RepairConfig, option("repair", None), option="repair")

    def handshake(self) -> Hello | None:
        """Describe the model; from now on its prompts are blended.

        Of the ranks that share the model, the first alone describes it.
        """
        reason = _why_not(self._take)
        if self._ranks is not None:
            reason = self._ranks.first(reason)
            if reason is None and not self._ranks.leads:
                self._share.obey()
                return None
        if reason is None:
            reason = _why_not(self._open)
            if self._ranks is not None:
                self._ranks.let_step(is_busy=False)
        return Hello(self._facts if reason is None else ModelFacts(refusal=reason))

    def _take(self) -> None:
        """Take this rank's share of the model."""
        if self._config.parallel_config.tensor_parallel_size > 1:
            self._ranks = Ranks(self._config)
        held = model_of(self._config)
        if held is None:
            raise UnsupportedModelError(
                f"vLLM's model is not known; start vLLM with --load-format {LOAD_FORMAT}"
            )
        if self._ranks is None:
            self._share = Share(self._config, held)
        else:
            self._share = SplitShare(self._config, held, self._ranks)

    def _open(self) -> None:
        """Open the engine and start its threads; raise ``UnsupportedModelError`` if it can't."""
        lm = VllmLM(self._share)
        engine = self._engine_of(lm)
        blending = Blending(engine)
        self._facts = blending.facts(why_different(lm, self._cache, blending))
        reason = blending.stored_difference()
        if reason is not None:
            raise UnsupportedModelError(
                f"{reason}; precompute into another kv_dir, by vLLM's worker"
            )
        self._blender = Blender(blending, lm.write, self._share.block_size)

    def _engine_of(self, lm: VllmLM) -> KVRagEngine:
        """Return an engine on vLLM's model."""
        option = self._config.kv_transfer_config.get_from_extra_config
        model = self._config.model_config
        own: dict[str, Any] = {
            "tokenizer": None if model.tokenizer == model.model else model.tokenizer,
            "revision": model.revision,
            "dtype": model.dtype,
            "device": self._config.device_config.device,
        }
        # Kept as long as the engine, which finds it by its source.
        loaded = lm.load(ModelSource(model.model, **own))
        engine = KVRagEngine.from_pretrained(
            model.model,
            kv_dir=option("kv_dir", None),
            prefix=option("prefix", None),
            context=option("context", "default"),
            repair=self._repair,
            namespace=option("namespace", "default"),
            store_config=self._store_config,
            **own,
        )
        assert engine.loaded is loaded
        return engine

    def load(self, jobs: Jobs, *, is_idle: bool) -> None:
        """Begin the jobs of this step, and blend a prompt whose chunks are read.

        The step has no forward if ``is_idle``.
        """
        ranks = self._ranks
        if ranks is None:
            self._advance(jobs, is_idle)
        elif not (jobs.jobs or ranks.is_busy):
            return
        elif not ranks.leads:
            self._share.obey()
        else:
            try:
                self._advance(jobs, is_idle)
            finally:
                ranks.let_step(is_busy=self._blender is not None and self._blender.is_busy)

    def _advance(self, jobs: Jobs, is_idle: bool) -> None:
        if self._blender is None:  # it has described no model, so there are no jobs
            return
        for job in jobs.jobs:
            self._blender.submit(job)
        self._blender.rest(IDLE_WAIT_S if is_idle else 0.0)
        self._blender.blend()

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
        said = self._ended
        self._ended = {}
        return Ended(said) if said else None

    def close(self) -> None:
        """End the worker's threads, and close its engine."""
        if self._ranks is not None:  # the others hear no orders any more
            self._ranks.are_together = False
        if self._blender is not None:
            self._blender.close()
            self._blender.engine.close()


def _why_not(work: Callable[[], None]) -> str | None:
    """Work; return why it can't be done: vLLM then answers without the store."""
    try:
        work()
    except KVRagError as error:
        return str(error)
    except Exception as error:
        return f"its model can't be opened ({type(error).__name__}: {error})"
    return None
