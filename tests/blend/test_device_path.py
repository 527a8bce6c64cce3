"""What a request asks of a CUDA device, on one that isn't there: how often the host waits, copies and launches, and in which order."""

import pytest
import torch
from fake_cuda import FakeCuda, install, move
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig
from kvrag.blend.repair import probed_layers

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
    assert kinds(device, "wait: stream") == ["wait: stream"]


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
