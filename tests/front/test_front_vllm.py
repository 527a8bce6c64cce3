"""The front before vLLM itself, with the connector: documents, blended chats, streams, and the end of both."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points

import httpx
import openai
import pytest
from texts import asking, make_chunks
from vllm_kit import HAS_VLLM

from kvrag.testing.models import TINY, save_tiny_model

has_loader = "kvrag" in entry_points(group="vllm.general_plugins").names
pytestmark = pytest.mark.skipif(
    not (HAS_VLLM and has_loader), reason="`make vllm-test` runs this where vLLM is installed"
)
slow = pytest.mark.slow
CHUNKS = make_chunks(3, words=60)
SMALL = f"--kv-cache-memory-bytes {2**26}"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command of a front, which lacks the size of vLLM's cache."""
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's attention on CPUs has no head dim of 16.
        wide = {"model_type": "llama", **TINY["llama"], "hidden_size": 128, "head_dim": 32}
        patch.setitem(TINY, "wide", wide)
        model = save_tiny_model(tmp_path_factory.mktemp("model"), "wide")
    made = [sys.executable, "-m", "kvrag", "serve", str(model), "--engine", "vllm"]
    made += ["--kv-dir", str(tmp_path_factory.mktemp("kv")), "--port", "0"]
    made += ["--model-name", "tiny", "--dtype", "float32", "--", "--max-model-len", "1024"]
    return [*made, "--enforce-eager"]


def begin(command):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu-memory-utilization 5", "Input should be less than or equal to 1"),
        pytest.param("--gpu-memory-utilization 1", "less than desired CPU memory", marks=slow),
        pytest.param("--kv-cache-memory-bytes 1000", "No available memory for", marks=slow),
        pytest.param(f"{SMALL} --kv-cache-dtype fp8", "'fp8'; leave it at", marks=slow),
    ],
)
def test_an_error_of_vllms_is_told_in_its_words(command, options, said):
    with begin([*command, *options.split()]) as process:
        told = process.stderr.read().splitlines()[-1]
        assert process.wait(60) == 2
    assert told.startswith("kvrag: vLLM has ended (exit code 1): ")
    assert said in told
    assert "; correct what it names, and start the server again; vLLM's own options" in told


@pytest.fixture(scope="module")
def url(command):
    with begin([*command, *SMALL.split()]) as process:
        where = r"before vLLM, is at: (http://[\d.:]+)/"
        address = next(m[1] for line in process.stderr if (m := re.search(where, line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_documents_are_computed_by_vllm_and_blended(url):
    with httpx.Client(base_url=url, timeout=300) as http:
        documents = [{"id": f"d{n}", "text": text} for n, text in enumerate(CHUNKS)]
        report = http.post("/v1/kv/precompute", json={"documents": documents}).json()
        assert (report["stored"], report["failed"]) == (3, [])
        explained = http.post("/v1/kv/explain", json={"messages": asking(CHUNKS, 2, 0)}).json()
        assert [s["hit"] for s in explained["spans"] if s["kind"] == "chunk"] == [True, True]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        asked = {
            "model": "tiny",
            "messages": asking(CHUNKS, 2, 0),
            "max_tokens": 4,
            "temperature": 0,
            "extra_body": {"kvrag": {"mode": "stitch"}},
        }
        answer = client.chat.completions.create(**asked)
        made = answer.kvrag[0]
        assert made["exactness"] == "repaired"
        assert made["cached_tokens"] + made["repaired_tokens"] > made["computed_tokens"]
        assert answer.usage.prompt_tokens == explained["prompt_tokens"]
        events = list(
            client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
        told = "".join([e.choices[0].delta.content or "" for e in events if e.choices])
        assert told == answer.choices[0].message.content
        assert events[-1].kvrag[0]["exactness"] == "repaired"
        cut = client.chat.completions.create(**asked, stop=told[0])  # its API server finds it
        assert (cut.choices[0].finish_reason, cut.kv_transfer_params) == ("stop", None)
        assert cut.kvrag[0]["exactness"] == "repaired"
        full = {**asked, "extra_body": {"kvrag": {"mode": "full"}}}
        assert client.chat.completions.create(**full).kvrag[0]["exactness"] != "repaired"


def test_a_client_that_leaves_ends_its_request(url):
    body = {"model": "tiny", "prompt": "Count.", "max_tokens": 900, "ignore_eos": True}
    with httpx.Client(base_url=url) as http:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.5)
        end = time.monotonic() + 60
        while not re.search(
            r"(?m)^vllm:num_requests_running\S* 0\.0$", http.get("/metrics", timeout=30).text
        ):
            assert time.monotonic() < end
            time.sleep(0.2)
