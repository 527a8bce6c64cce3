"""Wait for kvrag's threads, and see where they run."""

from __future__ import annotations

import threading
import time
from typing import Any

import kvrag.engine
from kvrag import threads
from kvrag.model import CausalLM

OWN = ("kvrag-generate", "kvrag-prefetch")


def settle(timeout_s: float = 30.0) -> None:
    """Wait until no thread of kvrag has work."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        pools = [each for each in list(threads._forkable) if isinstance(each, threads.Pool)]
        is_busy = any(pool._jobs or any(pool._threads.values()) for pool in pools)
        if not is_busy and not any(thread.name in OWN for thread in threading.enumerate()):
            return
        time.sleep(0.005)
    raise AssertionError("kvrag's threads are still at work")


def working_threads(monkeypatch: Any) -> set[int]:
    """Return the threads that load a model, or compute with one, from now on."""
    seen: set[int] = set()

    def noting(original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.get_ident())
            return original(*args, **kwargs)

        return noted

    monkeypatch.setattr(kvrag.engine, "load", noting(kvrag.engine.load))
    monkeypatch.setattr(CausalLM, "forward", noting(CausalLM.forward))
    return seen
