"""Blending for vLLM's worker: prompts are stitched and repaired in turn with its own steps.

A thread reads the chunks of prompts, and another blends them: vLLM's model computes rows, which are
written to vLLM's cache with the function that the attention itself uses. A forward pauses between
its layers for the worker's steps, so these wait for a slice of it (:mod:`kvrag.model.lock`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvrag import KVRagError, RepairConfig, StoreError
from kvrag.adapters import Blending

if TYPE_CHECKING:
    from vllm_kvrag.own import VllmLM

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 5.0
IN_MEMORY = 2
"""Prompts whose chunks are in memory: one is blended, and one waits."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a request: rows ``start`` to ``stop`` of its prompt, for its blocks.

    Of the rows before, vLLM has ``num_exact`` as a full prefill would compute them.
    ``repair`` is ``None`` if the rows equal a full prefill's, and need none. ``precompute`` are
    arguments of :meth:`kvrag.KVRagEngine.precompute`; then there are no rows. ``adapter`` is the
    number of the request's adapter (LoRA), if it has one.
    """

    request_id: str
    blocks: Sequence[int] = ()
    start: int = 0
    stop: int = 0
    num_exact: int = 0
    plan: Any = None
    repair: RepairConfig | None = None
    precompute: Mapping[str, Any] | None = None
    adapter: int = 0

    def slots(self, block_size: int) -> torch.Tensor:
        """Return the slot of every row in vLLM's cache."""
        rows = torch.arange(self.start, self.stop)
        return torch.tensor(self.blocks)[rows // block_size] * block_size + rows % block_size

    def failed(self, block_size: int) -> list[int]:
        """Return the blocks that stay unwritten if the job fails."""
        return list(self.blocks[self.start // block_size : -(-self.stop // block_size)])


Said = dict[str, Any]
"""What a request's response says about its KV."""


class Turn:
    """Turn of the worker's steps at the model, which is theirs from the start, but while it rests.

    To the model's lock it is a step of a request that decodes, asked for by a thread of its own: a
    forward that holds the lock lets it through at a pause, if ``lm.pauses``.
    """

    def __init__(self, lock: Any, lm: VllmLM) -> None:
        self._lock = lock
        self._lm = lm
        self._wanted = queue.SimpleQueue[bool]()
        self._taken = threading.Semaphore(0)
        self._left = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name="kvrag_turn", daemon=True)
        self.thread.start()
        with lm.aside():
            self._take()

    def rest(self, wait: Callable[[], object]) -> None:
        """Leave the model to others while ``wait`` runs, and until it is the worker's again."""
        with self._lm.aside():
            self._left.release()
            try:
                wait()
            finally:
                self._take()

    def end(self) -> None:
        """Leave the model for good."""
        self._wanted.put(False)
        self._left.release()

    def _take(self) -> None:
        self._wanted.put(True)
        try:
            self._taken.acquire()
        except BaseException:  # an interrupt; no forward may run beside a step of the worker's
            self._taken.acquire()
            raise

    def _run(self) -> None:
        while self._wanted.get():
            if self._lm.pauses:
                self._lock.step(None, self._give, limit=1)
            else:
                with self._lock:
                    self._give()

    def _give(self, *_: object) -> list[None]:
        """Let the worker compute; the forward of this thread, if there is one, pauses meanwhile."""
        mapping = self._lm.mapping
        with self._lm.aside():
            self._taken.release()
            self._left.acquire()
        if threading.current_thread() is not self.thread:
            # The forward itself finds out if it can't go on, and nobody else must fail.
            with suppress(Exception):
                self._lm.use(mapping)
        return [None]


class AdapterBlending(Blending):
    """Blends prompts of an adapter, as long as vLLM has it."""

    lm: VllmLM

    def check(self, plan: Any) -> None:
        """Raise ``StoreError`` also if the adapter was unloaded, or replaced."""
        super().check(plan)
        self.lm.check_adapter()


class Blender:
    """Blends prompts into vLLM's cache; threads read their chunks, blend, and precompute.

    The thread that makes it, the worker's, has its :class:`Turn` at the model, but while it rests.
    """

    def __init__(self, blending: Blending, lm: VllmLM) -> None:
        self.engine = blending.engine
        self._blending = blending
        # By number, of the model with adapters.
        self.adapted = {0: blending}
        self.lm = lm
        # By request, of jobs that have not ended; one that is set is not needed any more.
        self._running = dict[str, threading.Event]()
        self._came = threading.Event()
        self._done = queue.SimpleQueue[tuple[Job, Said | None]]()
        self._queues = [queue.SimpleQueue[tuple[Any, ...]]() for _ in range(3)]
        self._room = threading.Semaphore(IN_MEMORY)
        device = blending.lm.device
        # The worker's stream, too: what it computes for both is in order.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(jobs, work, torch.get_num_threads(), stream),
                name=f"kvrag{work.__name__}",
                daemon=True,
            )
            for jobs, work in zip(
                self._queues, (self._read, self._blend, self._precompute), strict=True
            )
        ]
        for thread in self._threads:
            thread.start()
        self._turn = Turn(blending.lm.lock, lm)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._running[job.request_id] = threading.Event()
        self._queues[0 if job.precompute is None else 2].put((job,))

    @property
    def is_busy(self) -> bool:
        """Whether there are jobs that have not ended."""
        return bool(self._running)

    def rest(self, wait_s: float) -> None:
        """Let other threads use the model; with jobs, for ``wait_s`` seconds, or until one ends."""
        self._blending.lm.lock.num_prompts = len(self._running)
        if wait_s:
            self._blending.leave_cores()
        self._turn.rest(partial(self._await, wait_s if self._running else 0.0))

    def _await(self, wait_s: float) -> None:
        self._came.wait(wait_s)
        self._came.clear()

    def ended(self) -> list[tuple[Job, Said | None]]:
        """Return the jobs that have ended, with what to say; ``None`` if a job failed."""
        found = [self._done.get() for _ in range(self._done.qsize())]
        for job, _ in found:
            self._running.pop(job.request_id, None)
        return found

    def abandon(self, requests: Set[str]) -> None:
        """Fail the jobs of requests that have ended, at the next place where they can end."""
        for request_id in self._running.keys() & requests:
            self._running[request_id].set()

    def close(self) -> None:
        """End the threads; wait for their present forwards at most ``CLOSE_WAIT_S`` each.

        Their jobs fail.
        """
        self.abandon(self._running.keys())
        self._turn.end()
        for jobs in self._queues:
            jobs.put(())
        for thread in [*self._threads, self._turn.thread]:
            thread.join(CLOSE_WAIT_S)

    def _run(
        self,
        jobs: queue.SimpleQueue[tuple[Any, ...]],
        work: Callable[..., Said | None],
        num_threads: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Work until there is no job any more."""
        if work == self._read:
            _leave_core()
        with suppress(OSError, AttributeError):  # OpenMP's setting is of the thread
            ctypes.CDLL("libgomp.so.1").omp_set_num_threads(num_threads)
        while given := jobs.get():
            with torch.cuda.stream(stream) if stream else nullcontext():
                self._do(work, *given)

    def _do(self, work: Callable[..., Said | None], job: Job, *given: object) -> None:
        """Work on a job; it has ended if that says something, or fails."""
        said = None
        if work == self._read:  # held until the job ends, by whichever thread
            self._room.acquire()
        try:
            if not self._running[job.request_id].is_set():
                said = work(job, *given)
                if said is None:
                    return  # it has only been read
        except CancelledError:
            pass
        except Exception as error:  # a failure costs time, never the answer
            logger.warning(
                "a prompt could not be blended (%s: %.200s); vLLM computes it",
                type(error).__name__,
                error,
            )
        if job.precompute is None:
            self._room.release()
        self._done.put((job, said))
        self._came.set()

    def _read(self, job: Job) -> None:
        self._queues[1].put((job, self.adapted[job.adapter].read(job.plan)))

    @torch.inference_mode()
    def _blend(self, job: Job, chunks: Any) -> Said:
        blending = self.adapted[job.adapter]
        write = partial(self._write, job, blending)
        if job.repair is None:
            return blending.load(job.plan, job.stop, write, chunks)
        done = blending.repair(job.plan, job.repair, write, chunks, self._running[job.request_id])
        return said_of(done, job.repair) | _counts_behind(done["sources"], job.num_exact)

    def _write(
        self, job: Job, blending: Blending, layers: Iterable[Sequence[torch.Tensor]]
    ) -> None:
        """Write the rows of all layers to vLLM's cache, between two of its steps."""
        slots = job.slots(self.lm.block_size).to(self._blending.lm.device)
        rows = slice(job.start, job.stop)
        with self._blending.lm.lock.unless(self._running[job.request_id]):
            blending.check(job.plan)
            for index, pair in enumerate(layers):
                keys, values = (x[0, :, rows].transpose(0, 1).contiguous() for x in pair)
                self.lm.write(index, keys, values, slots)

    def _precompute(self, job: Job) -> Said:
        given = {"show_progress": False, **(job.precompute or {})}
        try:
            if job.adapter not in self.adapted:
                raise StoreError(
                    "its adapter is not loaded yet: send a prompt by it first; with several "
                    "devices, adapters have no stored KV"
                )
            report = self.adapted[job.adapter].engine.precompute(**given)
        except KVRagError as error:
            return {"error": str(error), "code": type(error).__name__}
        except Exception as error:  # out of memory, a full disk
            # A name that precompute does not have is a TypeError.
            code = "InputError" if isinstance(error, TypeError) else type(error).__name__
            return {"error": f"precompute: {error}", "code": code}
        return {"precompute": asdict(report)}


def said_of(accounting: Mapping[str, Any], repair: RepairConfig) -> Said:
    """Return what a blended request's response says, as plain JSON values."""
    names = (
        "exactness",
        "fallback_reason",
        "kv_dtype",
        "loaded_bytes",
    )
    return {name: accounting[name] for name in names} | {
        "holes": [str(hole) for hole in accounting["holes"]],
        "timings_ms": dict(accounting["timings_ms"]),
        "repair": {
            "strategy": repair.strategy,
            "recompute_ratio": repair.recompute_ratio,
            "shift": repair.shift,
        },
    }


def _counts_behind(sources: Sequence[tuple[str, int]], start: int) -> Said:
    """Return a prompt's tokens by origin, if vLLM had the first ``start`` rows."""
    runs = [("exact", start)] if start else []
    row = 0
    for origin, count in sources:
        rest = min(count, row + count - start)
        row += count
        if rest > 0:
            runs.append((origin, rest))
    found = Counter[str]()
    for origin, count in runs:
        found[origin] += count
    return {
        "sources": [list(run) for run in runs],
        "cached_tokens": found["exact"] + found["reused"],
        "repaired_tokens": found["repaired"],
        "computed_tokens": found["computed"],
    }


def _leave_core() -> None:
    """Let this thread run on all cores of the process.

    On CPUs vLLM binds each of its own threads to a core, and new threads inherit the binding. That
    is right for a thread that computes: OpenMP binds the others of its team to the other cores.
    """
    cores = set[int]()
    with suppress(OSError):  # there is no /proc on macOS
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                cores |= os.sched_getaffinity(int(thread))
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, cores)
