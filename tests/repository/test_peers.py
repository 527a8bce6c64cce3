"""The comparison with peers: what everyone is asked, how replies come, and what is made of them."""

import random
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "peers").is_dir(), reason="the benchmarks are not here: run from a checkout"
)


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from peers import workloads

    return workloads


@pytest.fixture
def bench(workloads):
    return runpy.run_path(str(FOLDER / "bench_peers.py"), run_name="imported")


@pytest.fixture
def words(workloads):
    """Every character is a token."""
    as_ids, as_text = lambda text: list(map(ord, text)), lambda ids: "".join(map(chr, ids))
    return workloads.Words(
        as_ids, as_text, lambda messages: "".join(f"[{m['role']}]{m['content']}|" for m in messages)
    )


def question(n):
    texts = [f"passage {n}.{i} says much and, last of all, answer{n}." for i in range(4)]
    return {
        "question": f"who {n}?",
        "answers": [f"answer{n}"],
        "ctxs": [{"text": text} for text in texts],
    }


def test_segments_joined_are_the_prompt_and_chunks_are_of_the_pool(workloads, words):
    counts, data = {"rag": 3, "chat": 3, "shots": 3, "code": 2}, [question(n) for n in range(30)]
    made = workloads.all_workloads(data, words, counts, seed=0)
    assert [workload.name for workload in made] == [
        "reordered RAG",
        "growing chat",
        "few-shot",
        "code",
    ]
    for workload in made:
        for prompt in workload.prompts:
            assert prompt.text.startswith("[user]")
            assert prompt.chunks
            assert set(prompt.chunks) <= set(workload.pool)
            assert not prompt.segments[-1].is_chunk
    assert made == workloads.all_workloads(data, words, counts, seed=0)


def test_popular_chunks_come_more_often_and_never_twice(workloads):
    rng = random.Random(0)
    drawn = [workloads.zipf(range(50), 5, rng) for _ in range(400)]
    assert all(len(set(draw)) == 5 for draw in drawn)
    counts = [sum(item in draw for draw in drawn) for item in range(50)]
    assert counts[0] > counts[5] > counts[45]


def test_an_index_pays_after_what_it_took_over_what_a_request_saves(bench):
    reply = {"reused": 50, "kl": 0.1, "top1": 1.0, "peak": 300}
    peers = {
        bench["FULL"]: reply | {"wall_s": 4.0, "cpu_s": 8.0, "reused": 0},
        "maker": reply | {"wall_s": 1.0, "cpu_s": 2.0},
        "sharer": reply | {"wall_s": 8.0, "cpu_s": 9.0},
    }
    found = {
        "prompts": [{"tokens": 100, "peers": peers}] * 3,
        "index": {"maker": {"index": {"cpu_s": 30.0}}},
    }
    found["tokens"] = {"used": 1000, "pool": 4000}
    loaded = dict.fromkeys(peers, 100)
    out = bench["summarise"](found, loaded, {bench["FULL"]: "", "maker": "one", "sharer": "one"})
    assert out["maker"]["break_even"] == pytest.approx(30 * 4 / 6)
    assert out["sharer"]["index_cpu_s"] == out["maker"]["index_cpu_s"]
    assert out["sharer"]["break_even"] is None
    assert (out["maker"]["wall_s_ratio"], out["maker"]["reuse"], out["maker"]["memory"]) == (
        4.0,
        0.5,
        200,
    )


def test_a_worker_replies_in_lines_whatever_its_libraries_print(bench, tmp_path):
    environments = sys.modules["peers.environments"]
    script = tmp_path / "worker_echo.py"
    script.write_text(
        "from worker import serve\n"
        "class Echo:\n"
        "    def __init__(self, options): print('loading')\n"
        "    def answer(self, ids): print('noise'); return {'ids': ids}\n"
        "serve(Echo)\n"
    )
    worker = environments.Worker(
        environments.Peer("echo", str(script), {}), {}, 1, tmp_path / "log"
    )
    assert "rss" in worker.ready()
    assert worker.ask("answer", ids=[1, 2])["ids"] == [1, 2]
    with pytest.raises(environments.UnavailableError, match="unknown"):
        worker.ask("unknown")
    worker.close()
    assert "noise" in (tmp_path / "log").read_text()
