"""A real server on a real socket, for real clients."""

import httpx
import openai
import pytest
from server_kit import served
from texts import make_chunks

from kvrag import KVRagEngine
from kvrag_server import ServerConfig


@pytest.fixture(scope="module")
def chunks():
    return make_chunks(4, words=42)


@pytest.fixture(scope="module")
def shared(tiny_dir, tmp_path_factory, chunks):
    """An engine that knows the chunks, its application and its address."""
    engine = KVRagEngine.from_pretrained(
        tiny_dir, kv_dir=tmp_path_factory.mktemp("kv"), context=None
    )
    engine.precompute(chunks)
    with served(engine, ServerConfig(model_name="tiny", timeout_s=60)) as (app, url):
        yield engine, app, url
    engine.close()


@pytest.fixture
def engine(shared):
    return shared[0]


@pytest.fixture
def app(shared):
    return shared[1]


@pytest.fixture
def url(shared):
    return shared[2]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made
