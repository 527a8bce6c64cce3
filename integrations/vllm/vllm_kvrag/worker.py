"""The worker's side of the connector: rows are computed by :mod:`vllm_kvrag.blending`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrag import KVRagError, RepairConfig, StoreConfig, UnsupportedModelError
from kvrag.adapters import Blending, ModelFacts
from kvrag.config import as_config
from vllm_kvrag.blending import Blender, Said
from vllm_kvrag.loader import LOAD_FORMAT, model_of
from vllm_kvrag.messages import Ended, Hello, Jobs
from vllm_kvrag.proof import why_different
from vllm_kvrag.steps import StepClock
from vllm_kvrag.weights import engine_of, layers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A step without a forward waits this long for a job to end: each step takes the job's cores for
# some milliseconds, and a prompt that arrives meanwhile waits, too.
IDLE_WAIT_S = 0.05


class WorkerSide:
    """Run the scheduler's jobs over the model of vLLM's worker."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StoreConfig
    ) -> None:
        option = vllm_config.kv_transfer_config.get_from_extra_config
        self._config = vllm_config
        self._cache = kv_cache_config
        self._store_config = config
        self._repair = as_config(RepairConfig, option("repair", None), option="repair")
        self._block_size = vllm_config.cache_config.block_size
        self._blender: Blender | None = None
        self._clock: StepClock | None = None
        self._ended = dict[str, Said | None]()
        self._failed = set[int]()
        self._is_idle = False

    def handshake(self) -> Hello:
        """Describe the model; from now on its prompts are blended."""
        try:
            return Hello(self._opened())
        except KVRagError as error:
            reason = str(error)
        except Exception as error:  # vLLM answers without the store
            reason = f"its model can't be opened ({type(error).__name__}: {error})"
        return Hello(ModelFacts(refusal=reason))

    def _opened(self) -> ModelFacts:
        """Open the engine and start its threads; raise ``UnsupportedModelError`` if it can't."""
        model = model_of(self._config)
        if model is None:
            raise UnsupportedModelError(
                f"vLLM's weights are not known; start vLLM with --load-format {LOAD_FORMAT}"
            )
        engine = engine_of(self._config, model, self._store_config, self._repair)
        blending = Blending(engine)
        layers = self._config.compilation_config.static_forward_context
        reason = why_different(self._config, self._cache, model, layers, blending)
        if reason is not None:
            raise UnsupportedModelError(reason)
        self._blender = Blender(blending, layers_of(self._config), self._block_size)
        self._clock = StepClock(blending.lm.device)
        return blending.facts()

    def begin(self, jobs: Jobs) -> None:
        """Note that a step begins."""
        if self._clock is not None:
            self._clock.begin(jobs.step)

    def load(self, jobs: Jobs, *, is_idle: bool) -> None:
        """Begin the jobs of this step, which has no forward if ``is_idle``."""
        for job in jobs.jobs:
            assert self._blender is not None, "jobs are for a worker that has described its model"
            self._blender.submit(job)
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

    def report(self) -> Ended | None:
        """Return the ended jobs and the timed steps since the last report."""
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
