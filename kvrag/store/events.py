"""What happens to stored chunks, for routers, audits and metrics. Field names are those of vLLM's KV cache events."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

log = logging.getLogger(__name__)

Kind = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One event.

    Parameters
    ----------
    type
        What happened.
    medium
        The tier, ``"gpu"``, ``"host"`` or ``"disk"``.
    block_hashes
        Keys of the chunks; none for ``AllBlocksCleared``.
    reason
        ``"put"``, ``"import"``, ``"promoted"`` from a tier below or ``"demoted"`` from one above; ``"evicted"``, ``"deleted"`` or
        ``"rejected"``; ``"cleared"``.
    block_size, num_bytes
        Tokens and bytes of a stored chunk.
    ts
        When it happened, in seconds since 1970 (UTC); two events of the same thing are equal whenever they happened.
    """

    type: Kind
    medium: str
    block_hashes: tuple[str, ...] = ()
    reason: str = ""
    block_size: int | None = None
    num_bytes: int | None = None
    ts: float = field(default_factory=time.time, compare=False)


OnEvent = Callable[[StoreEvent], None]


class Events:
    """Hands events to a callback, and appends them to a file as JSON lines. A fault of either is logged, once.

    Parameters
    ----------
    on_event
        Called in the thread that made the event happen; it must be quick and must not use the store.
    path
        File of JSON lines, made private; ``None``: none.
    """

    def __init__(self, on_event: OnEvent | None = None, path: str | None = None) -> None:
        self._on_event, self._path = on_event, path
        self._warned = threading.Event()

    def emit(self, event: StoreEvent) -> None:
        """Report an event; never raises."""
        try:
            if self._on_event is not None:
                self._on_event(event)
            if self._path is not None:
                _append(self._path, event)
        except Exception as error:
            if not self._warned.is_set():
                self._warned.set()
                log.warning("an event of the KV store could not be reported: %s", error)


def _append(path: str, event: StoreEvent) -> None:
    fields = {name: value for name, value in asdict(event).items() if value is not None}
    line = json.dumps(fields).encode() + b"\n"
    # One write in append mode: lines of several processes do not mix.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)
