"""The driver's side of a launch, with ``libcuda`` played: contexts, registers, and what tensors the kernels may be given."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import at_once

from kvrag_kernels import driver, launch, selftest, torch_path
from kvrag_kernels.geometry import HOPPER_REGISTERS, hopper_geometry


class Driver:
    """Plays ``libcuda``: remembers calls, and which context each thread has."""

    def __init__(self, registers: int = 168) -> None:
        self.calls: list[str] = []
        self.launched: list[tuple[int, ...]] = []
        self.maps: list[tuple[Any, ...]] = []
        self._registers, self._of_thread = registers, threading.local()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxRetain":
                args[0]._obj.value = 4711
            elif name == "cuCtxGetCurrent":
                args[0]._obj.value = getattr(self._of_thread, "context", None)
            elif name == "cuCtxSetCurrent":
                self._of_thread.context = args[0].value
            elif name == "cuFuncGetAttribute":
                assert args[1] == 4, "not CU_FUNC_ATTRIBUTE_NUM_REGS"
                args[0]._obj.value = self._registers
            elif name == "cuTensorMapEncodeTiled":
                self.maps.append(args)
            elif name == "cuLaunchKernel":
                assert getattr(self._of_thread, "context", None) == 4711, (
                    "CUDA_ERROR_INVALID_CONTEXT"
                )
                self.launched.append(tuple(a.value for a in args[1:8]))
            return 0

        return call


@pytest.fixture
def played(monkeypatch):
    played = Driver()
    monkeypatch.setattr(driver, "_library", lambda: played)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=17))
    return played


def test_a_thread_that_has_called_nothing_of_cuda_can_launch(played):
    module = driver.CudaModule(b"cubin", 0)
    module.launch("kernel", 3, 128, 64 * 1024, b"arguments")
    at_once(*[lambda: module.launch("kernel", 5, 128, 64 * 1024, b"arguments")] * 2)
    assert played.launched == [
        (3, 1, 1, 128, 1, 1, 64 * 1024),
        *[(5, 1, 1, 128, 1, 1, 64 * 1024)] * 2,
    ]
    assert played.calls.count("cuFuncSetAttribute") == 1
    before = played.calls.count("cuCtxSetCurrent")
    module.launch("kernel", 3, 128, 64 * 1024, b"arguments")
    assert played.calls.count("cuCtxSetCurrent") == before, "the context was current already"


def test_a_hopper_kernel_that_would_wait_for_registers_is_not_run(played):
    played._registers = 160
    geometry = hopper_geometry(64)
    with pytest.raises(driver.DriverError, match="has 160 registers a thread and needs 168"):
        selftest.check(driver.CudaModule(b"cubin", 0), geometry, geometry.defines(torch.float16), 0)
    assert played.launched == []


def test_a_kernel_that_writes_nothing_fails_the_self_test_wherever_its_memory_was_before(
    monkeypatch,
):
    """Memory that is given again holds what an earlier kernel got right; the self-test must not take it for this kernel's."""
    geometry = hopper_geometry(64)
    options = geometry.defines(torch.float16)
    call = launch.prepare(selftest.call_of(geometry, options, "cpu"))
    out, lse = torch_path.attend(call)
    earlier = {tuple(x.shape): x for x in (out.transpose(1, 2).contiguous(), lse.float())}
    empty = torch.empty

    def given_again(shape, **options):
        kept = earlier.get(tuple(shape)) if isinstance(shape, tuple) else None
        return empty(shape, **options) if kept is None else kept.clone()

    idle = SimpleNamespace(
        processors=4, registers=lambda _: HOPPER_REGISTERS, launch=lambda *_: None
    )
    idle.tensor_map = lambda *_: bytes(128)
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "empty", given_again)
    monkeypatch.setattr(launch.attend, "__defaults__", (None, given_again))
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    with pytest.raises(driver.DriverError, match="a small case came out wrong by inf"):
        selftest.check(idle, geometry, options, 0)


def test_the_self_test_draws_on_the_cpu_wherever_tensors_go_by_default():
    geometry = hopper_geometry(64)
    with torch.device("meta"):
        call = selftest.call_of(geometry, geometry.defines(torch.float16), "cpu")
    assert {x.device.type for x in (call.q, call.k, call.v, call.hi)} == {"cpu"}


def test_rows_off_their_16_bytes_are_moved():
    """A contiguous tensor that begins anywhere, too: the copies would end the process's context."""
    shape = (1, 2, 5, 64)
    off = torch.arange(2 * 5 * 64 + 1, dtype=torch.float32).to(torch.bfloat16)[1:].view(shape)
    assert off.is_contiguous()
    assert off.data_ptr() % 16
    call = launch.prepare(
        launch.Call(off, off, off, torch.zeros(5, dtype=torch.int32), None, 0, 1.0)
    )
    for x in (call.q, call.k, call.v):
        assert x.data_ptr() % 16 == 0
        assert torch.equal(x, off)


def test_a_tensor_map_is_asked_for_as_the_driver_wants_it(played):
    """Innermost first, strides in bytes and without the innermost, boxes of 128 bytes, on a multiple of 128."""
    x = torch.empty(2, 100, 3, 64, dtype=torch.bfloat16).transpose(1, 2)
    module = driver.CudaModule(b"cubin", 0)
    for _ in range(5):
        assert len(module.tensor_map(x, 128)) == 128
    for to, kind, rank, address, sizes, strides, box, steps, *choices in played.maps:
        assert to.value % 128 == 0
        assert (kind.value, rank.value, address.value) == (9, 4, x.data_ptr())
        assert (list(sizes), list(strides)) == ([64, 100, 3, 2], [384, 128, 38400])
        assert (list(box), list(steps)) == ([64, 128, 1, 1], [1, 1, 1, 1])
        assert [c.value for c in choices] == [0, 3, 3, 0], (
            "no interleaving, swizzle of 128 bytes, L2 of 256, zeros beyond"
        )
