"""A CUDA runtime that isn't there: it locks and unlocks pages of the host's memory as the driver does."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch


class Driver:
    """Stands for the CUDA runtime: locks pages, up to a limit, and refuses to lock what is locked, mapped or not.

    The next launch of a kernel raises the error of a refusal. A forked child has no driver.
    """

    def __init__(self, limit: int = 2**40) -> None:
        self.locked: dict[int, int] = {}
        self.limit, self.error, self.process = limit, 0, os.getpid()
        self.mapped = 0
        """How many of the next ranges are mapped to something else."""
        self.keeps_locks = False
        """Whether it refuses to unlock."""
        self.refused: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert flags == 1
        if self.mapped:
            self.mapped -= 1
            return self._refuse(208)
        if self.overlaps(address, num_bytes):
            return self._refuse(712)
        if sum(self.locked.values()) + num_bytes > self.limit:
            return self._refuse(2)
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.keeps_locks:
            return self._refuse(900)
        if address not in self.locked:
            return self._refuse(713)
        ctypes.string_at(address, self.locked.pop(address))  # a crash, if it were unmapped by now
        return 0

    def _refuse(self, error: int) -> int:
        self.refused.append(error)
        self.error = error
        return error

    def launching(self, ones: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Let ``torch.ones`` on a device launch a kernel."""

        def launch(*size: Any, **options: Any) -> torch.Tensor:
            if options.get("device") == "cuda":
                options["device"] = "cpu"
                error, self.error = self.error, 0
                if error:
                    raise RuntimeError(f"CUDA error {error}")
            return ones(*size, **options)

        return launch

    def overlaps(self, address: int, num_bytes: int) -> bool:
        """Whether any byte of a range is locked."""
        return any(a < address + num_bytes and address < a + n for a, n in self.locked.items())

    def holds(self, x: torch.Tensor) -> bool:
        """Whether all of a tensor is locked."""
        start = x.data_ptr()
        return any(a <= start and start + x.nbytes <= a + n for a, n in self.locked.items())

    def runtime(self) -> Driver:
        """Return the runtime, as ``torch.cuda.cudart`` does."""
        if os.getpid() != self.process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> Driver:
        """Let kvrag find this driver."""
        driver = cls()
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", driver.runtime)
        patch.setattr(torch, "ones", driver.launching(torch.ones))
        return driver
