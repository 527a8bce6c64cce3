"""What vLLM's own steps take, so that computing a prompt there is priced by what was seen.

The scheduler says how many rows a step has, the worker times it, and the scheduler compares the
time with what a forward of kvrag costs. vLLM may be several times quicker: it compiles and records.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvrag.adapters import ModelFacts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PREFILL = 64  # tokens from which on a step counts as a prefill; smaller ones are like each other
EVERY = 64  # smaller steps, of which the first is timed
LATEST = 9  # steps of a size that count
ENOUGH = 2  # steps of a size before they count: the first may compile


class Step(NamedTuple):
    """A step: its tokens, its (row, key) pairs, and its milliseconds, once they are known."""

    tokens: int = 0
    pairs: float = 0.0
    ms: float = 0.0


class StepCounter:
    """The scheduler's side: which steps are to be timed."""

    def __init__(self) -> None:
        self._num_small = 0

    def of(self, output: SchedulerOutput) -> Step:
        """Return the step of a schedule; without tokens if it is not to be timed."""
        with suppress(AttributeError, KeyError, TypeError):  # of another version of vLLM
            counts = output.num_scheduled_tokens
            tokens = sum(counts.values())
            if tokens < PREFILL:
                self._num_small += tokens > 0
                if self._num_small % EVERY != 1:
                    return Step()
            cached = output.scheduled_cached_reqs
            known = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
            known |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            return Step(tokens, sum(n * (known[name] + n / 2) for name, n in counts.items()))
        return Step()


class StepClock:
    """The worker's side: a clock of steps. On a CUDA device it records events; nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._begun: tuple[Step, Any] | None = None
        self._timed = deque[tuple[Step, Any, Any]]()

    def begin(self, step: Step) -> None:
        """Note that a step begins."""
        self._begun = (step, self._now()) if step.tokens else None

    def end(self) -> None:
        """Note that the step ends, if one has begun."""
        if self._begun is not None:
            self._timed.append((*self._begun, self._now()))
            self._begun = None

    def ended(self) -> list[Step]:
        """Return the steps that the device has ended since the last call."""
        found = []
        while self._timed and (not self._is_cuda or self._timed[0][2].query()):
            step, start, stop = self._timed.popleft()
            ms = start.elapsed_time(stop) if self._is_cuda else (stop - start) * 1e3
            found.append(step._replace(ms=ms))
        return found

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class StepPrices:
    """Times of vLLM's steps, as multiples of what forwards of kvrag over the same rows cost."""

    def __init__(self) -> None:
        self._seen = dict[int, deque[float]]()

    def note(self, step: Step, facts: ModelFacts) -> None:
        """Add a step; nothing is compared with costs that are no times."""
        price = facts.costs.of_forward(step.tokens, step.pairs)
        if facts.costs.unit == "ms" and price > 0:
            size = _size(step.tokens)
            self._seen.setdefault(size, deque(maxlen=LATEST)).append(step.ms / price)

    def factor(self, tokens: int) -> float:
        """Return the multiple for a step, or a prefill, of so many tokens; 1 until steps are seen.

        It is that of the nearest size, and a prefill's never that of a small step.
        """
        wanted = _size(tokens)
        seen = [
            (abs(size - wanted), found)
            for size, found in self._seen.items()
            if len(found) >= ENOUGH and (size > 0) == (wanted > 0)
        ]
        return median_low(min(seen)[1]) if seen else 1.0


def _size(tokens: int) -> int:
    """Return a power of two for the size of a prefill; 0 for a small step."""
    return tokens.bit_length() if tokens >= PREFILL else 0
