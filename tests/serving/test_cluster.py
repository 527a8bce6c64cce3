"""Ray itself, on this machine: workers and replicas are processes, and some are killed."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from texts import make_chunks
from typer.testing import CliRunner

from kvrag import KVRagEngine
from kvrag.cli.app import app

ray = pytest.importorskip("ray", reason="Ray is not installed")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common import pids

from kvrag_ray import build

pytestmark = pytest.mark.slow
PORT = 18_473
CHUNKS = make_chunks(400, words=24, seed=3)


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """Ray on this machine alone, which tells nobody about it."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def kv_dir(tmp_path):
    return tmp_path / "kv"


def blobs(engine):
    return {key: bytes(engine.store.blobs.read(key)) for key in engine.store.listed()}


def test_chunks_are_stored_once_and_to_the_bit_although_a_worker_is_killed(
    tiny_dir, kv_dir, tmp_path
):
    """By the command line: files, a report, and a second run that finds everything there."""
    notes = tmp_path / "notes.md"
    notes.write_text("\n\n".join(CHUNKS), "utf-8")
    killed = []

    def kill():  # once something is stored
        while not killed and not is_over.wait(0.05):
            if len(list(kv_dir.glob("objects/**/*"))) > 40 and (workers := pids("ray::MapWorker")):
                os.kill(workers[0], signal.SIGKILL)
                killed.append(workers[0])

    is_over, options = (
        threading.Event(),
        ["--chunk-tokens", "60", "--batch-size", "1", "--dtype", "float32", "--model", tiny_dir],
    )
    killer = threading.Thread(target=kill)
    killer.start()
    on_ray = [
        "precompute",
        str(notes),
        *options,
        "--kv-dir",
        str(kv_dir),
        "--ray",
        "--workers",
        "2",
    ]
    done = CliRunner().invoke(
        app, [*on_ray, "--report", str(tmp_path / "report.parquet"), "--json"]
    )
    is_over.set()
    killer.join()
    assert done.exit_code == 0, done.output
    said, rows = (
        json.loads(done.stdout),
        parquet.read_table(tmp_path / "report.parquet").to_pylist(),
    )
    assert killed
    assert (
        sum(row["chunks"] for row in rows)
        == said["chunks"]
        == said["stored"] + said["skipped"] + len(said["short"])
    )
    assert len({row["worker"] for row in rows}) >= 2
    again = CliRunner().invoke(app, [*on_ray, "--json"])
    assert json.loads(again.stdout)["skipped"] == said["stored"] + said["skipped"]
    CliRunner().invoke(app, ["precompute", str(notes), *options, "--kv-dir", str(tmp_path / "one")])
    one, many = (
        KVRagEngine.from_pretrained(tiny_dir, kv_dir=each) for each in (tmp_path / "one", kv_dir)
    )
    assert sorted(one.document_ids()) == sorted(many.document_ids())
    assert blobs(one) == blobs(many)
    one.close()
    many.close()


def ask(body, path="/v1/chat/completions"):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.headers["x-kvrag-replica"], json.load(response)


def test_a_replica_is_killed_under_load_and_no_request_is_lost(tiny_dir, tmp_path):
    chunks = CHUNKS[:16]
    kv_dir = tmp_path / "kv"
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=kv_dir, dtype="float32")
    engine.precompute(chunks)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"port": PORT})
    options = {
        "model": tiny_dir,
        "kv_dir": str(kv_dir),
        "engine": {"dtype": "float32"},
        "server": {"model_name": "tiny"},
    }
    serve.run(build(options | {"replicas": 2, "num_cpus": 0.5}))

    def asked(number):
        content = f"{chunks[number % 16]}\n\n{chunks[(number + 1) % 16]}\n\nWho?"
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
        }
        replica, answer = ask(body | {"kvrag": {"mode": "stitch", "trace": True}})
        if number == 24:
            os.kill(pids("ray::ServeReplica:default:Replica")[0], signal.SIGKILL)
        expected = engine.generate(
            [{"role": "user", "content": content}], max_new_tokens=8, temperature=0.0, mode="stitch"
        )
        return (
            replica,
            answer["choices"][0]["message"]["content"] == expected.text,
            answer["kvrag"][0]["cached_tokens"],
        )

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(asked, range(96)))
    assert len(found) == 96  # each was answered
    assert all(is_right and cached > 0 for _, is_right, cached in found)
    before = {replica for replica, _, _ in found[:16]}
    assert len(before) == 2
    deadline = time.monotonic() + 90
    while len(now := {ask(None, "/v1/kv/stats")[0] for _ in range(8)}) < 2:
        assert time.monotonic() < deadline, "no replica took the place of the one that was killed"
        time.sleep(0.5)
    assert now != before
    # Where nobody has much to do, the owner answers.
    by_chunks = {number: asked(number)[0] for number in range(16)}
    assert by_chunks == {number: asked(number)[0] for number in range(16)}
    assert set(by_chunks.values()) == now
    engine.close()
