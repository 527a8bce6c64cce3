"""What a request asks of a CUDA device, on one that isn't there: how often the host waits, copies and launches, and in which order."""

import gc
from itertools import count

import pytest
import torch
from fake_cuda import FakeCuda, install, move
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.blend import stitch
from kvrag.blend.repair import probed_layers
from kvrag.model.attention import ragged_attention
from kvrag.model.rows import EVERYTHING, Limits

CHUNKS = make_chunks(6, words=60, seed=23)
PROMPT = [
    "Read this.\n",
    *(part for text in CHUNKS for part in (Chunk(text), "\n")),
    "Who built the tower?",
]


@pytest.fixture
def engine(engine_of) -> KVRagEngine:
    made = engine_of(prefix="Read this.\n", repair=RepairConfig(recompute_ratio=0.1))
    made.precompute(CHUNKS)
    return made


@pytest.fixture
def device(engine, monkeypatch) -> FakeCuda:
    """The device; the engine's model is on it, and has answered once: what is done once for a model is over."""
    fake = install(monkeypatch)
    move(engine.loaded.lm)
    with fake:
        engine.prefill(PROMPT, mode="stitch")
    fake.clear()
    return fake


def kinds(fake: FakeCuda, start: str) -> list[str]:
    return [kind for kind, _ in fake.log if kind.startswith(start)]


def waits(fake: FakeCuda) -> list[str]:
    return [kind for kind, _ in fake.log if kind.startswith("wait") or kind.endswith("waits")]


def test_the_host_waits_three_times_a_request(engine, device):
    """For the question's attention, the rows that were chosen, and the first token's logits."""
    with device:
        want = engine.prefill(PROMPT, mode="full")
        device.clear()
        got = engine.prefill(PROMPT, mode="stitch", repair=RepairConfig(recompute_ratio=1.0))
        whole = waits(device)
        device.clear()
        engine.prefill(PROMPT, mode="stitch")
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    assert len(waits(device)) <= 3, waits(device)
    assert len(whole) <= 1, whole


def test_layers_are_copied_beside_the_forwards_that_wait_for_them(engine, device):
    """On a stream of its own, behind what came before; each layer's readers wait for that layer alone, and the host for nothing."""
    with device:
        engine.prefill(PROMPT, mode="stitch")
    order = [kind for kind, _ in device.log if kind.startswith(("order", "event", "launch"))]
    assert order[0] == "order: copies after main"
    *ranges, behind = [kind for kind in order if kind.startswith("event")]
    assert ranges
    assert behind.endswith(" on copies"), "until which the chunks live"
    assert kinds(device, "launch: stitch") == ["launch: stitch"] * len(ranges)
    first = order.index("launch: ragged_attention")
    assert max(order.index(kind) for kind in ranges) < first, (
        "all copies are asked for before the first forward"
    )
    names = [kind.split(" on ")[0] for kind in ranges]
    waited = [
        kind.removeprefix("order: main after ") for kind in order[1:] if kind.startswith("order")
    ]
    assert set(waited) == set(names)
    layers = engine.loaded.lm.num_layers
    assert waited[:1] == names[:1]
    assert len(waited) <= 5 * layers, "a few for each layer"


def test_a_request_that_fails_waits_for_its_copies(engine, device, monkeypatch):
    """What they read and write would be given to others."""

    def fail(*_, **__):
        raise ValueError("the probe failed")

    monkeypatch.setattr("kvrag.blend.prefill.probe", fail)
    with device, pytest.raises(ValueError, match="the probe failed"):
        engine.prefill(PROMPT, mode="stitch")
    assert kinds(device, "wait: stream") == ["wait: stream"] * 2, (
        "of the copies, and of what reads them"
    )


@pytest.fixture
def late(monkeypatch, driver, engine_of):
    """Makes an engine whose chunks are read into page-locked memory for each request, and a device that copies late."""
    monkeypatch.setattr("kvrag.kv.buffers.SMALL_BYTES", 1024)
    monkeypatch.setattr("kvrag.blend.stitch.LAYERS_PER_LAUNCH", 1)

    def make(kv_dtype: str = "auto") -> tuple[KVRagEngine, FakeCuda]:
        engine = engine_of(
            prefix="Read this.\n",
            store_config={"ram_bytes": 0, "kv_dtype": kv_dtype},
            repair=RepairConfig(strategy="none", shift=0.0),
        )
        assert not engine.precompute(CHUNKS).failed
        fake = install(monkeypatch)
        move(engine.loaded.lm)
        with fake:
            engine.prefill(PROMPT, mode="stitch")
        fake.log.clear()
        fake.late = driver
        return engine, fake

    return make


def fail_at(monkeypatch, name: str, number: int, error: Exception) -> None:
    """Let a call of a part of the stitch fail when it has done its work."""
    real, calls = getattr(stitch, name), count(1)

    def failing(*args, **options):
        done = real(*args, **options)
        if next(calls) == number:
            raise error
        return done

    monkeypatch.setattr(stitch, name, failing)


def test_memory_that_runs_out_half_way_is_freed_when_the_copies_are_over(late, monkeypatch):
    """Copies of two ranges of layers and a part of a third are under way, and their events not told yet."""
    engine, device = late()
    assert engine.loaded.lm.num_layers > 2
    fail_at(monkeypatch, "move", 3, torch.OutOfMemoryError("CUDA out of memory"))
    with device:
        found = engine.prefill(PROMPT, mode="stitch")
        assert found.fallback_reason == "memory ran out with reuse"
        assert kinds(device, "copy")
        assert not device.copies
    assert not device.spoilt
    assert kinds(device, "wait: stream") == ["wait: stream"] * 2, (
        "of the copies, and of what reads them"
    )


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_stitch_that_fails_spoils_no_copy(late, monkeypatch, has_kernel):
    """By the kernel or by torch, which takes codes to the device as they are."""
    engine, device = late("auto" if has_kernel else "int8")
    monkeypatch.setattr("kvrag_kernels.has_stitch", lambda *_: has_kernel)
    fail_at(monkeypatch, "place" if has_kernel else "unpack", 2, ValueError("half-way"))
    with device, pytest.raises(ValueError, match="half-way"):
        engine.prefill(PROMPT, mode="stitch")
    assert kinds(device, "copy")
    assert not device.copies
    assert not device.spoilt


@pytest.mark.parametrize("has_kernel", [True, False])
def test_who_goes_on_before_the_copies_have_run_spoils_none(late, monkeypatch, has_kernel):
    """As vLLM's worker, which waits for the device when the request's chunks are gone."""
    engine, device = late("auto" if has_kernel else "int8")
    monkeypatch.setattr("kvrag_kernels.has_stitch", lambda *_: has_kernel)
    vocab = engine.loaded.lm.model.config.vocab_size
    monkeypatch.setattr("kvrag.blend.prefill.repair", lambda *_, **__: torch.zeros(vocab))
    with device:
        engine.prefill(PROMPT, mode="stitch")
        gc.collect()
        assert device.copies
        device.run()
    assert not device.spoilt
    assert not [kind for kind in waits(device) if "stream" in kind or "event" in kind]


@pytest.mark.parametrize(("kv_dtype", "each"), [("auto", 1), ("int8", 3)])
def test_chunks_cross_the_wire_as_they_are_kept_and_in_few_copies(
    engine_of, monkeypatch, kv_dtype, each
):
    """A copy for each chunk and range of layers, of the bytes that are stored; nothing is widened before.

    Here codes take one for each layer: scales of a few heads end where the device's loads of 16 bytes may not begin.
    """
    config = {"kv_dtype": kv_dtype}
    engine = engine_of(
        prefix="Read this.\n", store_config=config, repair=RepairConfig(strategy="none", shift=0.0)
    )
    report = engine.precompute(CHUNKS)
    assert not report.failed
    fake = install(monkeypatch)
    move(engine.loaded.lm)
    with fake:
        engine.prefill(PROMPT, mode="stitch")
        fake.clear()
        found = engine.prefill(PROMPT, mode="stitch")
    large = [size for kind, size in fake.log if kind == "upload" and size > 4096]
    assert sum(large) == pytest.approx(found.loaded_bytes, rel=0.05)
    assert len(large) <= each * (len(CHUNKS) + 1)
    assert waits(fake) == ["download, waits"]


def test_a_decode_step_waits_once(engine, device):
    with device:
        engine.generate(PROMPT, mode="stitch", max_new_tokens=2)
        two = len(waits(device))
        device.clear()
        engine.generate(PROMPT, mode="stitch", max_new_tokens=5)
    assert len(waits(device)) == two + 3


def test_a_layer_costs_one_launch_of_attention_a_forward(engine, device):
    """The probe's layers have one more, which weighs keys.

    Tiles are planned once for all rows of a forward, and once for the question's in the probe's last layer; in that of the repair torch
    attends for one row.
    """
    with device:
        engine.prefill(PROMPT, mode="stitch")
    layers = engine.loaded.lm.num_layers
    probed = probed_layers(engine.repair.probe_span, layers)
    assert len(kinds(device, "launch: probe_mass")) == len(probed)
    assert len(kinds(device, "launch: ragged_plan")) == 3
    assert len(kinds(device, "launch: ragged_attention")) == probed.stop + layers - 1


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_single_row_takes_the_kernel_in_a_recording_alone(device, is_fixed):
    """There torch would need a mask of all slots."""
    with device:
        query = torch.zeros(1, 4, 1, 16, device="cuda")
        keys = torch.zeros(1, 2, 9, 16, device="cuda")
        limits = Limits(torch.tensor([5], device="cuda"), 9, is_fixed=is_fixed)
        ragged_attention(query, keys, keys, limits, scale=1.0)
    assert len(kinds(device, "launch: ragged_attention")) == is_fixed


def test_spare_rows_of_a_recording_see_nothing_in_a_kernel(device):
    """Else each tile of rows with one of them would be read up to the end of the pool."""
    with device:
        query = torch.zeros(1, 4, 3, 16, device="cuda")
        keys = torch.zeros(1, 2, 10, 16, device="cuda")
        hi, first = (torch.tensor(x, device="cuda") for x in ([3, 9, 9], [0, 9, 9]))
        limits = Limits(hi, 10, hi, first, is_fixed=True)
        found = limits.for_kernel(query, keys, EVERYTHING)
    assert found.lo.as_subclass(torch.Tensor).tolist() == [0, 10, 10]
