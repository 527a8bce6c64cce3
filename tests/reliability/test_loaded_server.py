"""The short form of `make load-check`, the quick form of `make load`, and what both go by: would they see an answer that is wrong?"""

import asyncio
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import load_client
import serve
import serving
from load_client import Answer, Rude, ask, quantiles
from run import run
from world import Outcome

BENCHMARKS = Path(load_client.__file__).parent
QUICK = ("malformed requests", "answers", "kills")
LONG = pytest.mark.skipif(
    "KVRAG_LOAD" not in os.environ,
    reason="takes minutes; `make load-check ARGS=--short`, `make load`",
)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in QUICK else LONG) for name in serve.SHORT],
)
def test_a_loaded_server_keeps_its_promises(name):
    result = run(name, serve.SHORT[name])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["failures"] == []


@LONG
def test_the_load_run_goes_through_all_its_parts(tmp_path):
    command = [sys.executable, "load.py", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "load.json").read_text())
    assert list(found["parts"]) == ["kvrag", "full", "transformers", "figures"]
    for part in ("kvrag", "full", "transformers"):
        levels = found["parts"][part]["levels"]
        assert [(level["kind"], level["size"]) for level in levels] == [
            ("closed", 1),
            ("closed", 4),
            ("open", 20),
        ]
        assert all(level["equal"] == level["requests"] == len(level["raw"]) for level in levels)
        assert all(
            row["ttft_s"] > 0 and row["total_s"] >= row["ttft_s"]
            for level in levels
            for row in level["raw"]
        )
    sys.path.insert(0, str(BENCHMARKS.parent / "docs"))
    import tables

    assert tables.load(found).count("kvrag, reuse off |") == 3
    assert "of a chat's turn 5" in tables.load_figures(found)


def event(index=0, text="", reason=None, id="one"):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return {"id": id, "choices": [choice]}


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
GOOD = [
    event(text="He"),
    event(text="llo"),
    event(reason="stop"),
    {"id": "one", "choices": [], "usage": USAGE, "kvrag": [{}]},
]


def ask_a_stand_in(events, *, end=b"data: [DONE]\n\n", rude=None):
    """Ask a server that sends these events, each in a chunk of HTTP's, and then closes the connection."""

    async def both():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            parts = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in events]
            for part in (*parts, *([end] if end else [])):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            writer.write(b"0\r\n\r\n" if end else b"")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            return await ask(server.sockets[0].getsockname()[1], {"model": "tiny"}, rude=rude)

    return asyncio.run(both())


def test_the_client_puts_a_stream_together():
    answer = ask_a_stand_in(GOOD)
    assert (answer.status, answer.is_done, answer.error, answer.texts) == (
        200,
        True,
        "",
        {0: "Hello"},
    )
    assert (answer.reasons, answer.tokens, len(answer.pieces), len(answer.gaps_ms)) == (
        {0: "stop"},
        2,
        2,
        1,
    )
    assert answer.sent < answer.pieces[0] <= answer.ended


BAD = {
    "cut off": (GOOD[:2], b""),
    "another's event": ([GOOD[0], event(text="llo", id="two"), *GOOD[2:]], b"data: [DONE]\n\n"),
    "another text": ([event(text="Hi"), *GOOD[2:]], b"data: [DONE]\n\n"),
    "a piece twice": ([*GOOD[:2], *GOOD[1:]], b"data: [DONE]\n\n"),
    "an end twice": ([*GOOD[:3], *GOOD[2:]], b"data: [DONE]\n\n"),
    "an error": ([GOOD[0], {"error": {"message": "no"}}], b"data: [DONE]\n\n"),
    "another usage": (
        [*GOOD[:3], {**GOOD[3], "usage": {**USAGE, "prompt_tokens": 8}}],
        b"data: [DONE]\n\n",
    ),
    "more reused than asked": (
        [
            *GOOD[:3],
            {**GOOD[3], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 10}}},
        ],
        b"data: [DONE]\n\n",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_answer_is_seen(name):
    singles = serving.Singles([], [ask_a_stand_in(GOOD)])
    assert singles.wrong(0, ask_a_stand_in(GOOD)) == ""
    events, end = BAD[name]
    assert singles.wrong(0, ask_a_stand_in(events, end=end))


def test_lost_and_repeated_answers_are_seen():
    single = ask_a_stand_in(GOOD)
    load = serving.Load(
        SimpleNamespace(), serving.Singles([None], [single]), outcome := Outcome(), 1
    )
    load.done = [(0, single), (0, deepcopy(single)), (0, Answer(error="no connection"))]
    load.judge()
    assert [what for what in outcome.failures if "came twice" in what]
    assert [what for what in outcome.failures if "no connection" in what]


def test_a_client_may_leave_early():
    assert ask_a_stand_in(GOOD, rude=Rude(leave_after=1)).left


def test_growth_is_seen():
    flat = [{"rss": 1000, "threads": 5, "files": 9} for _ in range(30)]
    serving.growth(flat, outcome := Outcome(), limit=0.02)
    assert outcome.failures == []
    grown = [{"rss": 1000 + 3 * i, "threads": 5 + i, "files": 9 + i} for i in range(30)]
    serving.growth(grown, outcome, limit=0.02)
    assert len(outcome.failures) == 3
    serving.growth(grown, outcome := Outcome(), limit=None)
    assert outcome.failures == []


def test_counters_that_do_not_add_up_are_seen():
    text = 'kvrag_requests_total{code="200",endpoint="/v1/chat/completions"}'
    after = {
        text: 1,
        "kvrag_generation_tokens_total": 2,
        'kvrag_answers_total{exactness="exact"}': 1,
    }
    idle = {"kvrag_requests_running": 0, "kvrag_requests_waiting": 0}
    for change, count in (({}, 0), ({text: 2}, 1), ({"kvrag_generation_tokens_total": 4}, 1)):
        server = SimpleNamespace(metrics=lambda change=change: {**after, **idle, **change})
        load = serving.Load(
            server, serving.Singles([]), outcome := Outcome(), 1, done=[(0, ask_a_stand_in(GOOD))]
        )
        load.judge_metrics({})
        assert len(outcome.failures) == count


def test_quantiles_are_values_that_were_seen():
    assert quantiles(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99}
    assert quantiles([7.0]) == {"p50": 7, "p95": 7, "p99": 7}
    assert quantiles([]) == {}


def test_poisson_arrivals_wait_for_no_answer_and_are_the_same_for_all(monkeypatch):
    import load

    asked = []

    async def never_quick(port, body, **_):
        asked.append((port, body["messages"][0]))
        await asyncio.sleep(0.2)
        return Answer(sent=0.0, ended=1.0)

    monkeypatch.setattr(load, "ask", never_quick)
    plan = load.Plan("m", [[number] for number in range(5)], [], 4, ())
    done, most = asyncio.run(load.run_level("kvrag", plan, 1, load.Level("open", 100, 10)))
    assert (len(done), most > 5) == (10, True)
    first = [number for _, number in asked]
    asked.clear()
    asyncio.run(load.run_level("full", plan, 2, load.Level("open", 100, 10)))
    assert [number for _, number in asked] == first
    _, most = asyncio.run(load.run_level("kvrag", plan, 1, load.Level("closed", 3, 6)))
    assert most == 3


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no such thing"):
        load_client.Server(
            [sys.executable, "-c", "raise SystemExit('no such thing')"], tmp_path / "log"
        )
