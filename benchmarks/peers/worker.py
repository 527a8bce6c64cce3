"""What every worker shares: JSON lines in and out, clocks, and memory. Needs numpy alone, so that it runs in any peer's environment."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Clock:
    """Wall and CPU seconds (of all threads of this process) since it was made."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        return {"wall_s": time.perf_counter() - self.wall, "cpu_s": time.process_time() - self.cpu}


def memory(name: str) -> int | None:
    """A field of /proc/self/status in bytes; ``None`` where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def forget_peak() -> None:
    """Let the peak of resident memory start from here."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def shared_prefix(a: list[int], b: list[int]) -> int:
    """Count the tokens that two prompts begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def save(logits: Any, path: str | None) -> None:
    """Write logits of the first token, float32, for the driver to compare."""
    if path:
        np.save(path, np.asarray(logits, dtype=np.float32))


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Make the peer from the options in the last argument, then answer requests until stdin closes.

    A request is ``{"do": METHOD, …}``, the reply what the method returns, with the peak of memory. What libraries print goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = make(json.loads(sys.argv[1]))
    forget_peak()
    print(json.dumps({"rss": memory("VmRSS")}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply = getattr(peer, request.pop("do"))(**request)
        if request.get("forget_peak"):
            forget_peak()
        print(json.dumps({**reply, "peak": memory("VmHWM")}), file=replies, flush=True)
