"""`kvrag serve` as a process: it starts, answers, and goes down without losing what it has taken."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import uvicorn
from server_kit import served
from starlette.applications import Starlette
from typer.testing import CliRunner

from kvrag import ConfigError, KVRagEngine
from kvrag.cli.app import app
from kvrag_server import ServerConfig
from kvrag_server.command import _server_of, bound


@pytest.fixture
def command(tiny_dir, tmp_path):
    start = [sys.executable, "-m", "kvrag", "serve", str(tiny_dir)]
    return [*start, "--kv-dir", str(tmp_path / "kv"), "--port", "0"]


@pytest.fixture
def process(command):
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        yield process
        process.kill()


def test_a_running_answer_is_finished_after_sigterm(process, tiny_dir):
    page = r"ask it in a browser: (http://127.0.0.1:\d+)/"
    address = next(found[1] for line in process.stderr if (found := re.search(page, line)))
    threading.Thread(target=process.stderr.read, daemon=True).start()
    with httpx.Client(base_url=address, timeout=60) as http:
        name = http.get("/v1/models").json()["data"][0]["id"]
        ask = {
            "model": name,
            "messages": [{"role": "user", "content": "Who?"}],
            "max_tokens": 200,
            "stream": True,
        }
        with http.stream("POST", "/v1/chat/completions", json=ask | {"temperature": 0}) as response:
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            text = "\n".join([first, *lines])
    assert '"finish_reason": "length"' in text or '"finish_reason": "stop"' in text
    assert text.rstrip().endswith("data: [DONE]")
    assert process.wait(30) == 0


def test_the_log_is_lines_of_json(command):
    """Uvicorn's and kvrag's; what may quote a prompt is not in it, nor beside it."""
    lines = []
    with subprocess.Popen(
        [*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stderr:
                if line.startswith("{"):  # before: progress of loading
                    lines.append(json.loads(line))
                if found := re.search(r"http://127.0.0.1:\d+", line):
                    break
            name = httpx.get(f"{found[0]}/v1/models").json()["data"][0]["id"]
            chunk = {"text": " ".join(f"word{n}" for n in range(60))}
            httpx.post(f"{found[0]}/v1/kv/precompute", json={"documents": [chunk]}, timeout=60)
            # A prefix that the chunk was not precomputed behind.
            system = {"role": "system", "content": "Swordfish"}
            ask = {
                "model": name,
                "messages": [system, {"role": "user", "content": f"{chunk['text']} Who?"}],
            }
            assert httpx.post(
                f"{found[0]}/v1/chat/completions", json={**ask, "max_tokens": 2}, timeout=60
            ).is_success
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
        finally:
            process.kill()
    assert "swordfish" not in rest.lower()
    lines += [json.loads(line) for line in rest.splitlines()]
    assert {"kvrag_server", "uvicorn.error"} <= {line["logger"] for line in lines}
    (answered,) = [line for line in lines if line.get("endpoint") == "/v1/chat/completions"]
    assert (answered["status"], answered["completion_tokens"]) == (200, 2)


def test_listening_beyond_this_machine_asks_for_keys(tiny_dir, monkeypatch):
    monkeypatch.delenv("KVRAG_API_KEYS", raising=False)
    result = CliRunner().invoke(app, ["serve", str(tiny_dir), "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "KVRAG_API_KEYS" in result.output


def test_a_port_in_use_is_found_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(
        "kvrag.cli.options.EngineGroup.open", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "no/model", "--port", str(port)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_port_that_is_taken_while_the_model_loads_is_said(loop):
    late_app = Starlette()
    late_app.state.invitation = "ask it"
    config = uvicorn.Config(late_app, loop=loop, log_config=None)
    with bound("127.0.0.1", 0) as late, bound(*late.getsockname()) as first:
        first.listen()
        with pytest.raises(ConfigError, match=r"can't listen.*another --port"):
            _server_of(config, late_app).run([late])


def test_an_address_that_is_not_here_is_said():
    with pytest.raises(ConfigError, match=r"can't listen at 192\.0\.2\.1:80.*--host"):
        bound("192.0.2.1", 80)


def test_what_prompts_cost_is_known_before_the_server_is_ready(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir)
    with served(engine, ServerConfig()):
        assert engine._answering.costs.costs is not None
    engine.close()


def test_a_model_that_is_not_reused_warms_up_too(engine_of):
    engine_of("gpt2").warm_up()
