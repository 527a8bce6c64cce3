"""A CUDA device that isn't there: tensors that say they are on one, computed on the host, and a log of what a device would be asked.

What it logs are the calls that keep the host from running ahead of a device: reads of values, copies that wait, shapes that depend on
values. What it counts besides are launches: torch's operations on the device but views, and our own kernels. It refuses what CUDA refuses:
operations on tensors of two devices. It says nothing of a device's arithmetic or speed.

Copies from page-locked memory can be late: they read what is in that memory when they run, as a device's do.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import Driver
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import kvrag_kernels
from kvrag.kv import buffers
from kvrag.model import CausalLM

CUDA = torch.device("cuda", 0)

READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__"}
_BY_VALUE = """
nonzero masked_select unique equal allclose unique_consecutive argwhere bincount
"""
BY_VALUE = set(_BY_VALUE.split())
"""Operations whose result's shape or Python value depends on the values of their input."""
WITH_CHECKS = {"linalg_solve", "linalg_cholesky", "linalg_inv", "cholesky"}
"""Operations that read on the host whether they succeeded; their ``_ex`` forms don't."""


class OnDevice(torch.Tensor):
    """A tensor on the host that says it is on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        """The device."""
        return CUDA

    @property
    def is_cuda(self) -> bool:
        """True."""
        return True

    @property
    def is_cpu(self) -> bool:
        """False."""
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        """Keep this memory from what is allocated before the stream has read it."""
        stream.fake.note(f"kept for {stream.name}")


NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "set_", "resize_"}
"""Operations besides views that a device isn't asked for; the host reads values by itself in the log."""


class Launches(TorchDispatchMode):
    """Counts the operations that a device would be asked for, by name: all but views and allocations.

    An operation counts as one launch. Some take several on a device, as a sort, so that its count is a lower bound.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH | {"_local_scalar_dense"}:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class FakeCuda(TorchFunctionMode):
    """Calls under this mode find a device.

    ``log`` has each call that waits for it, copies, or is a kernel of ours, in order; ``launches`` counts torch's operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, int]] = []
        self.numbers = count()
        self.launches = Launches()
        self.running = _Running(Stream(self, "main"))
        self.late: Driver | None = None
        """Copies from what this driver has locked run at :meth:`run`, or when the host waits."""
        self.copies: deque[tuple[torch.Tensor, int, bytes]] = deque()
        """Late copies: where to, from which address, and what is to come from there."""
        self.ended = 0
        self.spoilt = 0
        """Late copies that read something else than was there when they were asked for."""
        self.room: int | None = None
        """How often memory of the device can still be allocated."""

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Count what runs inside as a replay of a recording: one launch, whatever it computes.

        Raises
        ------
        RuntimeError
            If what runs inside waits for the device, or copies from or to the host: it can't be recorded.
        """
        before, kept = len(self.log), self.launches.counts.copy()
        yield
        inside = {kind for kind, _ in self.log[before:]}
        if unfit := sorted(
            kind for kind in inside if not kind.startswith(("launch", "order", "event"))
        ):
            raise RuntimeError(f"a recording can't have {', '.join(unfit)}")
        del self.log[before:]
        self.launches.counts = kept
        self.note("launch: replay")

    def record(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        """Record a function: a replay of it is a launch, computes nothing, and gives what was computed at first."""
        compute()  # as before a recording
        with self.replay():
            found = compute()

        def replay() -> Any:
            self.note("launch: replay")
            return found

        return replay

    @property
    def num_launches(self) -> int:
        """How often a device was asked to compute: torch's operations, our kernels, and replays."""
        return self.launches.counts.total() + sum(kind.startswith("launch") for kind, _ in self.log)

    def clear(self) -> None:
        """Forget what was asked so far."""
        self.log.clear()
        self.launches.counts.clear()

    def run(self) -> None:
        """Let the device do its late copies."""
        assert self.late is not None
        while self.copies:
            to, address, content = self.copies.popleft()
            self.ended += 1
            if self.late.overlaps(address, len(content)):
                found = ctypes.string_at(address, len(content))
                ctypes.memmove(to.data_ptr(), found, len(found))
                self.spoilt += found != content
            else:  # it is the driver's no more
                self.spoilt += 1

    def wait(self, what: str) -> None:
        """Let the host wait for all that the device was asked for."""
        self.note(f"wait: {what}")
        if self.late is not None:
            self.run()

    @property
    def counts(self) -> Counter[str]:
        """How often each kind of call was made."""
        return Counter(kind for kind, _ in self.log)

    def bytes_of(self, kind: str) -> int:
        """Bytes of all copies of a kind."""
        return sum(size for found, size in self.log if found == kind)

    def note(self, kind: str, num_bytes: int = 0) -> None:
        """Log a call."""
        self.log.append((kind, num_bytes))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), _name(func)
        given = list(_tensors((args, kwargs)))
        is_on = any(isinstance(x, OnDevice) for x in given)
        if name == "__get__":  # an attribute, as .T
            return _put(func(*args, **kwargs)) if is_on else func(*args, **kwargs)
        if name in ("to", "cpu", "cuda", "pin_memory"):
            return self._moved(name, func, args, kwargs)
        if name == "copy_":
            return self._copied(*args, **kwargs)
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            kwargs["device"] = "cpu"
            if self.room is not None and name == "empty":
                self.room -= 1
                if self.room < 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            if name in ("tensor", "as_tensor"):
                self.note("upload, waits", 8)
                return _put(func(*args, **kwargs))
            return _put(self._launched(func, args, kwargs))
        if not is_on:
            return func(*args, **kwargs)
        if name in READS | BY_VALUE | WITH_CHECKS:
            self.note(f"wait: {name}")
        if (
            name == "repeat_interleave"
            and len(args) > 1
            and torch.is_tensor(args[1])
            and "output_size" not in kwargs
        ):
            self.note("wait: repeat_interleave")
        if name in ("__getitem__", "__setitem__"):
            self._indexed(name, *args)
        elif name not in READS:
            self._check_devices(name, given)
        out = self._launched(func, args, kwargs)
        return out if name in READS else _put(out)

    def _launched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self.launches:
            return func(*args, **kwargs)

    def _indexed(self, name: str, x: torch.Tensor, index: Any, value: Any = None) -> None:
        for each in _tensors((index,)):
            if each.dtype == torch.bool:
                self.note(f"wait: {name} by a mask")
            elif not isinstance(each, OnDevice) and each.dim():
                self.note("upload, waits", each.nbytes)
        if (
            torch.is_tensor(value)
            and isinstance(x, OnDevice)
            and not isinstance(value, OnDevice)
            and value.dim()
        ):
            self.note("upload, waits", value.nbytes)

    def _check_devices(self, name: str, given: list[torch.Tensor]) -> None:
        if any(not isinstance(x, OnDevice) and x.dim() for x in given):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu"
            )

    def _moved(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, *rest = args
        wanted = kwargs.pop("device", None)
        if rest and isinstance(rest[0], str | torch.device):
            wanted = rest.pop(0)
        elif rest and torch.is_tensor(rest[0]):
            wanted = rest[0].device
        wanted = "cpu" if name == "cpu" else "cuda" if name == "cuda" else wanted
        if name == "pin_memory":
            return x
        kind = x.device.type if wanted is None else torch.device(wanted).type
        if kind == x.device.type:
            if name != "to":
                return x
            if kind == "cuda":
                return _put(self._launched(torch.Tensor.to, (x, *rest), kwargs))
            return torch.Tensor.to(x, *rest, **kwargs)
        waits = "" if kwargs.get("non_blocking") else ", waits"
        kwargs.pop("non_blocking", None)
        self.note(f"{'upload' if kind == 'cuda' else 'download'}{waits}", x.nbytes)
        out = torch.Tensor.to(x.as_subclass(torch.Tensor), *rest, **{**kwargs, "copy": True})
        if kind == "cuda" and not waits:
            self._is_late(out, x)
        return _put(out) if kind == "cuda" else out

    def _copied(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if isinstance(to, OnDevice) != isinstance(source, OnDevice):
            way = "upload" if isinstance(to, OnDevice) else "download"
            self.note(way if non_blocking else f"{way}, waits", source.nbytes)
            if non_blocking and self._is_late(to, source):
                return to
            torch.Tensor.copy_(to, source.as_subclass(torch.Tensor))
        elif isinstance(to, OnDevice):
            self._launched(torch.Tensor.copy_, (to, source.as_subclass(torch.Tensor)), {})
        else:
            torch.Tensor.copy_(to, source)
        return to

    def _is_late(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        """Ask for a copy that runs later, if it is of page-locked bytes, as they are."""
        is_plain = to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype
        if not (self.late and is_plain and self.late.holds(source)):
            return False
        self.note(f"copy on {self.running.streams[-1].name}", source.nbytes)
        address = source.data_ptr()
        self.copies.append((to, address, ctypes.string_at(address, source.nbytes)))
        return True


def _name(func: Any) -> str:
    return getattr(func, "__name__", "") or str(resolve_name(func)).rpartition(".")[2]


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(given):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)
    elif isinstance(given, dict):
        yield from _tensors(list(given.values()))


def _put(out: Any) -> Any:
    """Put results on the device."""
    if torch.is_tensor(out):
        return out.as_subclass(OnDevice)
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*map(_put, out))
    if isinstance(out, list | tuple):
        made = [_put(each) for each in out]
        try:
            return type(out)(made)
        except TypeError:  # torch.return_types
            return type(out)(tuple(made))
    return out


class Stream:
    """A queue of the device: notes who waits for whom. All queues run in the order in which they were asked."""

    def __init__(self, fake: FakeCuda, name: str) -> None:
        self.fake, self.name = fake, name

    def wait_stream(self, other: Stream) -> None:
        """Let what follows here wait for all that the other was asked for."""
        self.fake.note(f"order: {self.name} after {other.name}")

    def wait_event(self, event: Event) -> None:
        """Let what follows here wait for an event."""
        self.fake.note(f"order: {self.name} after {event.name}")

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event behind all that this stream was asked for so far, and return it."""
        event = event or Event(self.fake)
        event.behind = self.fake.ended + len(self.fake.copies)
        self.fake.note(f"{event.name} on {self.name}")
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        self.fake.wait("stream")


class Event:
    """A place in a queue."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.name = fake, f"event {next(fake.numbers)}"
        self.behind = fake.ended + len(fake.copies)

    def query(self) -> bool:
        """Whether all before it has run."""
        return self.fake.ended >= self.behind

    def synchronize(self) -> None:
        """Let the host wait."""
        self.fake.wait(self.name)


class _Running(threading.local):
    """The streams that a thread uses, the present one last."""

    def __init__(self, main: Stream) -> None:
        self.streams = [main]


def install(patch: pytest.MonkeyPatch) -> FakeCuda:
    """Give torch streams, events and kvrag's kernels on the device that isn't there; use the result as a context."""
    fake = FakeCuda()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        fake.running.streams.append(stream)
        try:
            yield
        finally:
            fake.running.streams.pop()

    patch.setattr(torch.cuda, "Event", lambda **_: Event(fake))
    patch.setattr(torch.cuda, "synchronize", lambda *_: fake.wait("synchronize"))
    patch.setattr(torch.cuda, "Stream", lambda *_: Stream(fake, "copies"))
    patch.setattr(buffers, "_sources", {})
    patch.setattr(buffers, "_streams", {})
    patch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**40)
    )
    patch.setattr(torch.cuda, "current_stream", lambda *_: fake.running.streams[-1])
    patch.setattr(torch.cuda, "stream", on)
    for name in ("ragged_attention", "ragged_plan", "probe_mass", "stitch"):
        patch.setattr(kvrag_kernels, name, _launching(fake, name, getattr(kvrag_kernels, name)))
    for name in ("has_kernel", "has_stitch"):
        patch.setattr(kvrag_kernels, name, lambda *_: True)
    return fake


def _launching(fake: FakeCuda, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Let an op of ours compute on the host, and note its launch."""

    def launch(*given: Any, **options: Any) -> Any:
        fake.note(f"launch: {name}")
        if any(not isinstance(x, OnDevice) for x in _tensors((given, options)) if x.dim()):
            raise RuntimeError(f"{name}: a tensor is not on the device")
        with torch._C.DisableTorchFunction():
            return _put(compute(*_taken(given), **_taken(options)))

    return launch


def _taken(given: Any) -> Any:
    """Take tensors from the device, wherever they are in some arguments."""
    if torch.is_tensor(given):
        return given.as_subclass(torch.Tensor)
    if isinstance(given, list | tuple):
        return type(given)(map(_taken, given))
    return {name: _taken(x) for name, x in given.items()} if isinstance(given, dict) else given


def move(model: CausalLM) -> None:
    """Put a model on the device."""
    for module in model.model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = tensor.detach().as_subclass(OnDevice)
    model.device = CUDA
    model._tables._kept = ()
    model.records = False  # a test that means recordings calls ``record``
    model._switch = replace(model._switch, device=CUDA)
