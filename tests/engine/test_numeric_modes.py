"""The caller's modes of torch that change numbers: switched off inside kvrag, or a part of the identity."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from texts import make_chunks

from kvrag import KVRagEngine, UnsupportedModelError
from kvrag.identity.model import dtype_text
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

TEXTS = make_chunks(4, words=40)
PROMPT = "\n\n".join(TEXTS) + "\n\nWho keeps the ledger?"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def autocast_of_the_thread(dtype: torch.dtype) -> Iterator[None]:
    """Autocast as a switch, without a context."""
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_enabled("cpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


@contextmanager
def gradients() -> Iterator[None]:
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast of the thread": lambda: autocast_of_the_thread(torch.bfloat16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device": lambda: default_device("meta"),
    "gradients": gradients,
}
OTHERS = "qwen3", "qwen3_moe", "gemma2", "gpt2"  # a key norm, experts, soft caps, refused
OFTEN = [("qwen3_moe", "autocast to bfloat16"), ("gpt2", "default dtype float64")]
PAIRS = [("llama", mode) for mode in MODES] + [
    pytest.param(kind, mode, marks=[] if (kind, mode) in OFTEN else pytest.mark.slow)
    for kind in OTHERS
    for mode in ("autocast to bfloat16", "default dtype float64")
]


def asked(engine: KVRagEngine) -> list[Any]:
    """Return all that an engine stores and answers."""
    found: list[Any] = []
    try:
        found.append(engine.precompute(TEXTS).failed)
    except UnsupportedModelError as error:
        found.append(str(error))
    for mode in ("full", "prefix", "auto", "stitch"):
        made = engine.prefill(PROMPT, mode=mode)
        found += [made.exactness, made.cached_tokens, made.logits]
        answer = engine.generate(PROMPT, mode=mode, max_new_tokens=3)
        found += [answer.exactness, answer.token_ids]
        stream = engine.stream(PROMPT, mode=mode, max_new_tokens=3)
        found.append("".join(stream))
    found.append(engine.score(PROMPT, " Nobody does", mode="stitch").logits)
    found.append(engine.explain(PROMPT).spans)
    return found


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        else:
            assert one == other


def engine_of(model: Any, kv_dir: Any, **options: Any) -> KVRagEngine:
    options = {"context": None, "prefix": "", **options}
    return KVRagEngine.from_pretrained(model, tokenizer=tiny_tokenizer(), kv_dir=kv_dir, **options)


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What a kind of model stores and answers without any mode; asked once."""
    return cache(lambda kind: asked(engine_of(tiny_model(kind), tmp_path_factory.mktemp(kind))))


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_an_engine_made_and_used_in_a_mode_is_the_same_engine(kind, mode, tmp_path, plain_of):
    expected = plain_of(kind)
    model = tiny_model(kind)
    with MODES[mode]():
        engine = engine_of(model, tmp_path / "inside")
        assert_equal(asked(engine), expected)
    later = engine_of(model, tmp_path / "inside")  # any process, any day
    assert later.loaded.fingerprint == engine.loaded.fingerprint
    assert_equal(asked(later), expected)


PRECISIONS: dict[str, Callable[[], object]] = {
    "products of float32": lambda: torch.set_float32_matmul_precision("medium"),
    "oneDNN's": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


@pytest.fixture
def precision():
    """torch's switches, set back at the end of the test."""
    owners = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    before = [owner.fp32_precision for owner in owners]
    yield
    for owner, value in zip(owners, before, strict=True):
        owner.fp32_precision = value


@pytest.mark.parametrize("switch", PRECISIONS)
@pytest.mark.usefixtures("precision")
def test_kv_of_less_exact_products_is_another_models(switch, tmp_path):
    """A switch of the process is turned between index time and query time, in both orders."""
    engine = engine_of(tiny_model(), tmp_path)
    plain = engine.loaded.fingerprint
    assert engine.precompute(TEXTS[:2]).stored == 2
    PRECISIONS[switch]()
    assert engine.prefill(PROMPT, mode="stitch").cached_tokens == 0
    assert engine.precompute(TEXTS[:2]).stored == 2
    assert engine.loaded.fingerprint != plain
    assert engine_of(tiny_model(), tmp_path).loaded.fingerprint == engine.loaded.fingerprint
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert engine.loaded.fingerprint == plain
    assert engine.precompute(TEXTS[:2]).stored == 0


def looks(dtype: torch.dtype, device: str = "cuda") -> str:
    return dtype_text(SimpleNamespace(dtype=dtype, device=torch.device(device)))


@pytest.mark.usefixtures("precision")
def test_the_switches_of_cuda_count_for_the_dtypes_that_they_change():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert looks(dtype) == str(dtype)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert looks(torch.float32) == "torch.float32, products in tf32"
    assert looks(torch.bfloat16) == "torch.bfloat16"
    assert looks(torch.float32, "cpu") == "torch.float32"
    for dtype, name in (
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction"),
        (torch.float16, "allow_fp16_accumulation"),
    ):
        before = getattr(torch.backends.cuda.matmul, name)
        try:
            setattr(torch.backends.cuda.matmul, name, not before)
            assert looks(dtype) == f"{dtype}, {name}"
            assert looks(torch.float32) == "torch.float32, products in tf32"
        finally:
            setattr(torch.backends.cuda.matmul, name, before)


COUNTS_THREADS = """
import os, torch
from kvrag.runtime import own_modes
torch.set_num_threads(2)
count = lambda: len(os.listdir("/proc/self/task"))
alone = count()
print(own_modes(lambda: (torch.ones(2**20) * 2, count()))()[1] - alone, count() - alone, flush=True)
torch.ones(2**20) * 2
if not os.fork():
    own_modes(lambda: 1 / 0)()
os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_who_has_computed_leaves_no_idle_threads():
    """A child of a fork, whose team has no threads, gets its error at once."""
    command = [sys.executable, "-c", COUNTS_THREADS]
    done = subprocess.run(command, text=True, timeout=60, capture_output=True)
    assert done.stdout.split() == ["1", "0"]
    assert "ZeroDivisionError" in done.stderr
