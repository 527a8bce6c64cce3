"""What is written is finite, whole and in its place, however it is cut into parts and calls."""

import os

import pytest
import torch
from kvrag.store.directory import Directory
from kvrag.store.helpers import Helpers
from kvrag.store.scan import all_finite, all_finite_on_device

from kvrag.errors import StoreError
from kvrag.identity.weights import raw
from kvrag.store import DiskStore, blob, draft, writer
from kvrag.testing.chunks import make_identity, make_kv, same_bits
from kvrag.types import ChunkKV, LayerKV

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=[0, 1, 2])
def helped(request, monkeypatch):
    """Writers with so many helpers."""
    monkeypatch.setattr(writer, "HELPED_BYTES", 0)
    monkeypatch.setattr(writer, "HELPERS", Helpers(request.param))
    return request.param


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_judged_rightly(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for number, is_finite in zip(numbers, torch.isfinite(numbers).tolist(), strict=True):
        assert all_finite(raw(number.reshape(1)), dtype) == is_finite
    assert all_finite(raw(numbers[torch.isfinite(numbers)]), dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_one_bad_number_is_found_wherever_it_is(dtype, bad):
    values = torch.randn(1000).to(dtype)
    values[7], values[8] = torch.finfo(dtype).max, torch.finfo(dtype).min
    for place in (0, 1, 499, 998, 999):
        planted = values.clone()
        if bad is not None:
            planted[place] = bad
        assert all_finite(raw(planted), dtype) == (bad is None)
        assert all_finite_on_device(planted) == (bad is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_part_of_a_long_tensor_is_scanned(root, dtype, helped):
    identity, store = make_identity(tokens=3), DiskStore(root)
    width = writer.PART_BYTES // dtype.itemsize
    for place in range(0, 3 * width, width // 2):
        values = torch.zeros(1, 3, width, dtype=dtype)
        values.view(-1)[place] = -float("nan")
        with pytest.raises(StoreError, match=r"values of layer 0 .* not finite"):
            store.put(identity, ChunkKV((LayerKV(torch.zeros(1, 3, 1, dtype=dtype), values),)), text=None)
    assert store.directory.names("tmp") == []
    store.close()


@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (3000, 1), (300_000, 5), (1, 300_000)])
def test_layers_of_any_size_come_back(root, sizes, helped):
    """Smaller and larger than a part, and than what is gathered for one call; not contiguous, too."""
    identity, store = make_identity(tokens=2), DiskStore(root)
    strided = [(torch.randn(1, 2, sizes[0]), torch.randn(sizes[1] + 1, 2, 1).permute(2, 1, 0)) for _ in range(9)]
    kv = ChunkKV(tuple(LayerKV(keys, values.contiguous()) for keys, values in strided))
    given = ChunkKV(tuple(LayerKV(keys, values) for keys, values in strided))
    assert store.put(identity, given, text=None) == kv.num_bytes
    assert same_bits(store.get(identity), kv)
    with store.stream(identity) as layers:
        assert same_bits(ChunkKV(tuple(layers)), kv)
    store.close()


def test_a_chunk_is_read_into_any_part_of_a_buffer(root):
    identity, store = make_identity(tokens=2), DiskStore(root)
    kv = ChunkKV(tuple(LayerKV(torch.randn(2, 2, 3), torch.randn(2, 2, 5)) for _ in range(3)))
    store.put(identity, kv, text=None)
    with store.objects.open(identity) as file:
        buffer = torch.empty(64 + kv.num_bytes, dtype=torch.uint8)[64:]
        place = file.place(buffer)
        file.load(range(3), place)
        assert same_bits(ChunkKV(tuple(file.tensors(place))), kv)
        buffer.zero_()
        for index in range(3):
            file.load(range(index, index + 1), place)
        assert same_bits(ChunkKV(tuple(file.tensors(place))), kv)
    store.close()


@pytest.mark.parametrize("most", [1, 7, 100, 10**9])
def test_gathered_writes_end_where_they_should(root, monkeypatch, most):
    """A call may take fewer bytes than it was given, and says so only by its result."""
    whole = os.pwritev
    monkeypatch.setattr(
        draft.os, "pwritev", lambda fd, views, at: whole(fd, [memoryview(b"".join(views))[:most]], at), raising=True
    )
    monkeypatch.setattr(draft, "GATHER_BYTES", 100)
    monkeypatch.setattr(draft, "VIEWS", 5)
    directory = Directory(root)
    root.mkdir()
    (root / "tmp").mkdir()
    pieces = [bytes([number]) * (number * 7 % 50) for number in range(1, 60)]
    with draft.Draft(directory, 0) as out:
        gather = draft.Gather(out.write_all, 10)
        for piece in pieces:
            gather.write(memoryview(piece))
        gather.flush()
        gather.flush()
        out.write_all([memoryview(b"0123456789")], 0)
        assert out.publish("file")
    assert (root / "file").read_bytes() == b"0123456789" + b"".join(pieces)


def test_a_disk_that_takes_nothing_is_an_error(root, monkeypatch):
    root.mkdir()
    (root / "tmp").mkdir()
    with draft.Draft(Directory(root), 0) as out:
        monkeypatch.setattr(draft.os, "pwritev", lambda fd, views, at: 0)
        monkeypatch.setattr(draft.os, "pwrite", lambda fd, view, at: 0)
        with pytest.raises(OSError, match="takes no more"):
            out.write_all([memoryview(b"abc"), memoryview(b"d")], 0)


def test_helped_or_alone_the_file_is_the_same(root, helped, monkeypatch):
    identity = make_identity(tokens=2)
    kv = ChunkKV(tuple(LayerKV(torch.randn(2, 2, 3), torch.randn(2, 2, 5)) for _ in range(7)))
    plan = blob.plan(identity, kv, text=None)
    files = []
    for size in (0, 2**40):
        monkeypatch.setattr(writer, "HELPED_BYTES", size)
        file = bytearray(plan.size)

        def out(views, at, file=file):
            data = b"".join(views)
            file[at : at + len(data)] = data

        writer.write(plan, kv, out)
        files.append(bytes(file))
    assert files[0] == files[1]


def test_a_helper_that_fails_fails_the_write(root, helped, monkeypatch):
    identity, store = make_identity(tokens=2), DiskStore(root)

    def broken(view, dtype):
        raise MemoryError("no memory for the scan")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "all_finite", broken)
        with pytest.raises(MemoryError, match="no memory for the scan"):
            store.objects.publish(blob.plan(identity, make_kv(identity), text=None), make_kv(identity), "0" * 64)
    assert store.directory.names("tmp") == []
    assert store.files() == set()
    assert store.put(identity, make_kv(identity), text=None)
    store.close()


def test_a_disk_that_fails_stops_the_scan_and_is_the_error(root, helped, monkeypatch):
    identity, kv = make_identity(tokens=3), make_kv(make_identity(tokens=3), layers=50)

    def full(views, at):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        writer.write(blob.plan(identity, kv, text=None), kv, full)
    written = []
    writer.write(blob.plan(identity, kv, text=None), kv, lambda views, at: written.append(at))
    assert written[-1] == 0  # the header comes last


@pytest.mark.parametrize("durable", [True, False])
def test_where_it_is_waited_for_the_disk_begins_early_and_loses_nothing(root, monkeypatch, durable):
    advised = []

    def advise(fd, offset, num_bytes, advice):
        advised.append((offset, num_bytes))
        raise OSError(95, "Operation not supported")  # a hint may fail

    monkeypatch.setattr(draft.os, "posix_fadvise", advise)
    monkeypatch.setattr(draft, "EARLY_BYTES", 100)
    monkeypatch.setattr(Directory, "allocates", True)
    root.mkdir()
    (root / "tmp").mkdir()
    pieces = [bytes([number]) * 40 for number in range(8)]
    with draft.Draft(Directory(root, durable=durable), 0) as out:
        out.write_all([memoryview(piece) for piece in pieces], 5)
        assert out.publish("file")
    assert (root / "file").read_bytes() == bytes(5) + b"".join(pieces)
    assert advised == ([(5, 120), (125, 120)] if durable else [])  # the rest is too short
