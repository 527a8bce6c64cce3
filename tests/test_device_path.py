"""What a request asks of a CUDA device, on one that isn't there: how often the host waits, copies and launches, and in which order."""

import pytest
import torch
from fake_cuda import FakeCuda, install, move
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig

CHUNKS = make_chunks(6, words=60, seed=23)
PROMPT = ["Read this.\n", *(part for text in CHUNKS for part in (Chunk(text), "\n")), "Who built the tower?"]


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
    fake.log.clear()
    return fake


def kinds(fake: FakeCuda, start: str) -> list[str]:
    return [kind for kind, _ in fake.log if kind.startswith(start)]


def waits(fake: FakeCuda) -> list[str]:
    return [kind for kind, _ in fake.log if kind.startswith("wait") or kind.endswith("waits")]


def test_the_host_waits_four_times_a_request(engine, device):
    """For a sample of the weights, the question's attention, the rows that were chosen, and the first token's logits."""
    with device:
        want = engine.prefill(PROMPT, mode="full")
        device.log.clear()
        got = engine.prefill(PROMPT, mode="stitch", repair=RepairConfig(recompute_ratio=1.0))
        whole = waits(device)
        device.log.clear()
        engine.prefill(PROMPT, mode="stitch")
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    assert len(waits(device)) <= 4, waits(device)
    assert len(whole) <= 2, whole
