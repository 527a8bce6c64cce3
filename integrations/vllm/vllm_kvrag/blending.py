"""Blending for vLLM's worker: prompts are stitched and repaired in turn with its own steps.

A thread reads the chunks of prompts. Then vLLM's model computes rows in the worker's thread, which
writes them to vLLM's cache with the function that the attention itself uses.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from kvrag import KVRagError, RepairConfig
from kvrag.adapters import Blending

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a request: rows ``start`` to ``stop`` of its prompt, for its blocks.

    Of the rows before, vLLM has ``num_exact`` as a full prefill would compute them.
    ``repair`` is ``None`` if the rows equal a full prefill's, and need none. ``precompute`` are
    arguments of :meth:`kvrag.KVRagEngine.precompute`; then there are no rows.
    """

    request_id: str
    blocks: Sequence[int] = ()
    start: int = 0
    stop: int = 0
    num_exact: int = 0
    plan: Any = None
    repair: RepairConfig | None = None
    precompute: Mapping[str, Any] | None = None

    def slots(self, block_size: int) -> torch.Tensor:
        """Return the slot of every row in vLLM's cache."""
        rows = torch.arange(self.start, self.stop)
        return torch.tensor(self.blocks)[rows // block_size] * block_size + rows % block_size

    def failed(self, block_size: int) -> list[int]:
        """Return the blocks that stay unwritten if the job fails."""
        return list(self.blocks[self.start // block_size : -(-self.stop // block_size)])


Said = dict[str, Any]
"""What a request's response says about its KV."""


class Blender:
    """Blends prompts into vLLM's cache; a thread reads their chunks, and another precomputes.

    The thread that makes it, the worker's, holds the model's lock, but while it rests. ``write``
    takes keys and values, ``(T, H, D)``, of slots of vLLM's cache, after the layer's index.
    """

    def __init__(self, blending: Blending, write: Callable[..., None], block_size: int) -> None:
        self.engine = blending.engine
        self._blending = blending
        self._write_slots = write
        self._block_size = block_size
        self._lock = blending.lm.lock
        self._running = set[str]()
        self._abandoned = set[str]()
        self._is_closing = False
        self._came = threading.Event()
        self._read = queue.SimpleQueue[tuple[Job, Any]]()
        self._done = queue.SimpleQueue[tuple[Job, Said | None]]()
        self._queues = [queue.SimpleQueue[Job | None]() for _ in range(2)]
        cores = _cores()
        device = blending.lm.device
        # The worker's stream, too: what it computes for both is in order.
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(jobs, work, cores, torch.get_num_threads(), stream),
                name=f"kvrag{work.__name__}",
                daemon=True,
            )
            for jobs, work in zip(self._queues, (self._read_ahead, self._precompute), strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self._lock.acquire()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._running.add(job.request_id)
        self._queues[job.precompute is not None].put(job)

    @property
    def is_busy(self) -> bool:
        """Whether there are jobs that have not ended."""
        return bool(self._running)

    def rest(self, wait_s: float) -> None:
        """Let the other threads use the model.

        With jobs, and no prompt to blend, wait at most ``wait_s`` seconds for news of them.
        """
        self._lock.release()
        try:
            if wait_s and self._running and self._read.empty():
                self._came.wait(wait_s)
            self._came.clear()
        finally:
            self._lock.acquire()

    def blend(self) -> None:
        """Blend the first prompt whose chunks are read, if there is one."""
        with suppress(queue.Empty):
            job, chunks = self._read.get_nowait()
            self._do(job, partial(self._blend, chunks))

    def ended(self) -> list[tuple[Job, Said | None]]:
        """Return the jobs that have ended, with what to say; ``None`` if a job failed."""
        found = []
        with suppress(queue.Empty):
            while True:
                job, said = self._done.get_nowait()
                found.append((job, said))
                self._running.discard(job.request_id)
                self._abandoned.discard(job.request_id)
        return found

    def abandon(self, requests: Iterable[str]) -> None:
        """Fail the jobs of requests that have ended, unless they are under way."""
        self._abandoned |= self._running.intersection(requests)

    def close(self) -> None:
        """End the threads after their present jobs; wait for these at most ``CLOSE_WAIT_S``.

        Jobs that wait fail.
        """
        self._is_closing = True
        self._lock.release()
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)

    def _run(
        self,
        jobs: queue.SimpleQueue[Job | None],
        work: Callable[[Job], Said | None],
        cores: set[int],
        num_threads: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Work until there is no job any more."""
        _use_cores(cores, num_threads)
        while (job := jobs.get()) is not None:
            with torch.cuda.stream(stream) if stream else nullcontext():
                self._do(job, work)
            self._came.set()

    def _do(self, job: Job, work: Callable[[Job], Said | None]) -> None:
        """Work on a job; it has ended if that says something, or fails."""
        said = None
        try:
            is_needed = not self._is_closing and job.request_id not in self._abandoned
            if is_needed and (said := work(job)) is None:
                return  # it has only been read
        except Exception as error:  # a failure costs time, never the answer
            words = "a prompt could not be blended (%s: %.200s); vLLM computes it"
            logger.warning(words, type(error).__name__, error)
        self._done.put((job, said))

    def _read_ahead(self, job: Job) -> None:
        self._read.put((job, self._blending.read(job.plan)))

    @torch.inference_mode()
    def _blend(self, chunks: Any, job: Job) -> Said:
        write = partial(self._write, job)
        if job.repair is None:
            return self._blending.load(job.plan, job.stop, write, chunks)
        done = self._blending.repair(job.plan, job.repair, write, chunks)
        return said_of(done, job.repair) | _counts_behind(done["sources"], job.num_exact)

    def _write(self, job: Job, layers: Iterable[Sequence[torch.Tensor]]) -> None:
        """Write the rows of all layers to vLLM's cache."""
        slots = job.slots(self._block_size).to(self._blending.lm.device)
        rows = slice(job.start, job.stop)
        for index, pair in enumerate(layers):
            own = [x[0, :, rows].transpose(0, 1).contiguous() for x in pair]
            self._write_slots(index, *own, slots)

    def _precompute(self, job: Job) -> Said:
        given = {"show_progress": False, **(job.precompute or {})}
        try:
            report = self.engine.precompute(**given)
        except KVRagError as error:
            return {"error": str(error), "code": type(error).__name__}
        except TypeError as error:  # a name that precompute does not have
            return {"error": f"precompute: {error}", "code": "InputError"}
        except Exception as error:  # out of memory, a full disk
            return {"error": f"precompute: {error}", "code": type(error).__name__}
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


def _cores() -> set[int]:
    """Return the cores that any thread of this process may use.

    vLLM binds each of its own threads to a core on CPUs, and new threads inherit the binding.
    """
    cores = set[int]()
    with suppress(OSError):  # there is no /proc on macOS
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                cores |= os.sched_getaffinity(int(thread))
    return cores


def _use_cores(cores: set[int], num_threads: int) -> None:
    """Let this thread, and the threads of its forwards, use these cores."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, cores)
    with suppress(OSError, AttributeError):  # OpenMP's setting is of the thread
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(num_threads)
