"""A front, its stand-in for vLLM, and an engine with the model, which the stand-in's worker uses."""

import logging
import signal

import httpx
import openai
import pytest
from front_kit import FakeVLLM, fronted
from texts import make_chunks

from kvrag import KVRagEngine


@pytest.fixture(autouse=True)
def process_as_before():
    """Undo what ``kvrag serve`` does to its process: signals and loggers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    loggers = [logging.getLogger(name) for name in (None, "kvrag", "uvicorn")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for each, (own, level, propagates) in zip(loggers, before, strict=True):
        each.handlers[:] = own
        each.setLevel(level)
        each.propagate = propagates


@pytest.fixture(scope="module")
def chunks():
    return make_chunks(4, words=42)


@pytest.fixture(scope="module")
def shared(tiny_dir, tmp_path_factory, chunks):
    kv_dir = tmp_path_factory.mktemp("kv")
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=kv_dir, context=None)
    engine.precompute(chunks, ids=[f"note-{n}" for n in range(len(chunks))])
    fake = FakeVLLM(engine)
    with fronted(tiny_dir, kv_dir, fake) as (url, front, _):
        yield engine, fake, url, front
    engine.close()


@pytest.fixture
def engine(shared):
    return shared[0]


@pytest.fixture
def fake(shared):
    shared[1].requests.clear()
    shared[1].cancelled.clear()
    return shared[1]


@pytest.fixture
def front(shared):
    return shared[3]


@pytest.fixture
def http(shared):
    with httpx.Client(base_url=shared[2], timeout=30) as made:
        yield made


@pytest.fixture
def client(shared):
    with openai.OpenAI(base_url=f"{shared[2]}/v1", api_key="none", max_retries=0) as made:
        yield made
