"""A real server under load and faults: every answer beside its own single run, kills, a full disk, slow clients, a long time.

    python tests/reliability/serve.py            # long form, for `make load-check`: half an hour
    python tests/reliability/serve.py --short    # what CI runs

Exit status 1 if a promise was broken; figures go to benchmarks/results/serve.json.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import run
from serving import (
    CHAT,
    KEYS,
    Answer,
    Ask,
    Load,
    Rude,
    Server,
    Singles,
    Tiny,
    asks,
    growth,
    make_chunks,
    precompute,
    precompute_all,
    run_cli,
    settle,
)
from space import fill_the_rest, on_a_small_disk
from world import Outcome

REST_S = 40.0  # in which the server returns freed memory twice
MALFORMED: tuple[Any, ...] = (
    None,
    "",
    -1,
    1e400,
    True,
    [],
    {},
    [[]],
    {"role": 7},
    "\x00",
    "9" * 400,
    [None],
    {"a": {"b": []}},
)


def answers(
    folder: Path, *, requests: int, clients: int, different: int, limit: float | None = None
) -> Outcome:
    """Ask so many times with so many clients at once, some of whom leave; judge everything that came and what is counted."""
    outcome, tiny = Outcome(), Tiny(folder)
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles = Singles(asks(different)).run(server, outcome)
        before = server.metrics()
        load = Load(server, singles, outcome, clients, leaving=0.05).run(
            lambda sent: sent >= requests
        )
        load.judge()
        load.judge_metrics(before)
        outcome.check(len(load.done) == requests, f"{requests - len(load.done)} requests are lost")
        growth(load.sizes, outcome, limit=limit)
        singles.run(server, outcome)
        outcome.check(server.stop() == 0, "the server did not end in order")
    return outcome


def kills(folder: Path, *, rounds: int) -> Outcome:
    """Kill -9 amid answers and precomputing; the next server answers from the disk at once, as the one before, and nothing is damaged."""
    outcome, tiny, rng = Outcome(), Tiny(folder), random.Random(0)
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles = Singles(asks(16)).run(server, outcome)
    cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in singles.answers]
    outcome.check(sum(cached) > 100, "nothing was reused")
    for number in range(rounds):
        server = tiny.start()
        load = Load(server, singles, outcome, 12, seed=number)

        def kill(load: Load = load, number: int = number) -> None:
            time.sleep(rng.uniform(0.2, 1.5))
            load.is_over = True
            load.server.kill()

        with_more = partial(_more_documents, server, number)
        load.run(lambda _: False, partial(_beside, with_more, kill))
        for index, answer in load.done:
            if answer.is_done:
                outcome.add("answered before the kill")
                outcome.check(
                    not (wrong := singles.wrong(index, answer)),
                    f"before a kill: request {index}: {wrong}",
                )
        outcome.add("kills")
        with tiny.start() as server:
            for index, each in enumerate(singles.asks):
                answer = asyncio.run(each.send(server.port, stream=False))
                outcome.check(
                    not (wrong := singles.wrong(index, answer)),
                    f"after a kill: request {index}: {wrong}",
                )
                now = answer.usage.get("prompt_tokens_details", {}).get("cached_tokens")
                outcome.check(
                    now == cached[index],
                    f"after a kill {now} tokens are reused, not {cached[index]}",
                )
        status, said = run_cli("fsck", "--kv-dir", str(tiny.kv_dir), "--verify-data", "--json")
        outcome.check(status == 0, f"fsck found damage: {said[-500:]}")
    return outcome


def _more_documents(server: Server, number: int) -> None:
    precompute(
        server, "ann", make_chunks(40, words=40, seed=1000 + number), start=1000 * (number + 1)
    )


def _beside(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run two things at once."""

    async def both() -> None:
        await asyncio.gather(asyncio.to_thread(first), asyncio.to_thread(second))

    asyncio.run(both())


def full_disk(folder: Path) -> Outcome:
    """Fill the disk under the store: answers go on and stay the same, precomputing says what is wrong, and it heals."""
    tiny = Tiny(folder)
    return on_a_small_disk(folder, partial(_fill_up, tiny))


def _fill_up(tiny: Tiny, disk: Path) -> Outcome:
    outcome, tiny.kv_dir = Outcome(), disk / "kv"
    with tiny.start("--min-free-bytes", "0") as server:
        precompute_all(server, outcome)
        singles = Singles(asks(24)).run(server, outcome)
        fill_the_rest(disk)
        more = make_chunks(4, words=200, seed=77)
        status, said = precompute(server, "bob", more, start=100)
        stored = set(json.loads(server.get("/v1/kv/documents", KEYS["bob"]))["data"])
        is_told = (
            ("error" in json.loads(said)) if status >= 400 else bool(json.loads(said)["failed"])
        )
        outcome.check(
            is_told and "space" in said.lower(),
            f"precomputing ended with {status}, and said {said[:300]}",
        )
        outcome.check("bob-100" not in stored, "a document is listed that could not be stored")
        outcome.counts["status of precomputing"] = status
        load = Load(server, singles, outcome, 16).run(lambda sent: sent >= 100)
        load.judge()
        (disk / "filler").unlink()
        status, said = precompute(server, "bob", more, start=100)
        stored = set(json.loads(server.get("/v1/kv/documents", KEYS["bob"]))["data"])
        outcome.check(
            status == 200 and "bob-100" in stored,
            f"it does not store when there is room again: {said[:300]}",
        )
        singles.run(server, outcome)
    status, said = run_cli("fsck", "--kv-dir", str(tiny.kv_dir), "--verify-data", "--json")
    outcome.check(status == 0, f"fsck found damage: {said[-500:]}")
    return outcome


def slow_clients(folder: Path, *, requests: int) -> Outcome:
    """Let clients read slowly, and one not at all: all others are answered meanwhile, and nothing is left when they are gone."""
    outcome, tiny = Outcome(), Tiny(folder)
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles = Singles(asks(24)).run(server, outcome)
        slow = Load(server, singles, outcome, 4, pause_s=0.1)
        quick = Load(server, singles, outcome, 8, seed=1)
        long = Ask(
            "cy",
            CHAT,
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Go on."}],
                "max_tokens": 3000,
                "n": 2,
            },
        )

        async def all_at_once() -> Answer:
            stuck = asyncio.create_task(
                long.send(server.port, stream=True, rude=Rude(leave_after=40, pause_s=0.5))
            )
            await asyncio.gather(
                asyncio.to_thread(slow.run, lambda sent: sent >= 8),
                asyncio.to_thread(quick.run, lambda sent: sent >= requests),
            )
            return await stuck

        stuck = asyncio.run(all_at_once())
        outcome.check(stuck.left, f"the client that hardly read saw {stuck.status} {stuck.error}")
        for load in (slow, quick):
            load.judge()
        settle(server, outcome)
    return outcome


def soak(folder: Path, *, seconds: float, clients: int = 64, limit: float | None = None) -> Outcome:
    """Keep so many streams open for so long; neither memory nor threads grow, and every answer is right.

    Under load, memory goes up and down with what so many requests hold at a time. So it is compared at rest: after a third of the time, and
    at the end, each time when the server has returned what was freed.
    """
    outcome, tiny, at_rest = Outcome(), Tiny(folder), list[dict[str, int]]()
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles, under_load = Singles(asks(48, tokens=40)).run(server, outcome), 0
        for share in (1 / 3, 2 / 3):
            end = time.monotonic() + seconds * share
            load = Load(server, singles, outcome, clients, seed=len(at_rest), leaving=0.02)
            load.run(lambda _, end=end: time.monotonic() > end).judge()  # type: ignore[misc]
            settle(server, outcome)
            time.sleep(REST_S if limit is not None else 0)
            under_load = max([under_load, *(size["rss"] for size in load.sizes)])
            at_rest.append(server.size())
        growth(at_rest, outcome, limit=limit)
    outcome.counts |= {
        "streams": clients,
        "for_s": round(seconds),
        "megabytes under load": round(under_load / 1e6),
    }
    return outcome


def sigterm(folder: Path, *, rounds: int) -> Outcome:
    """Ask the server to end amid load: whoever was there before is answered to the end, whoever comes later is told, and it ends with 0."""
    outcome, tiny = Outcome(), Tiny(folder)
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles = Singles(asks(24)).run(server, outcome)
    for number in range(rounds):
        server = tiny.start()
        load, ended, told = Load(server, singles, outcome, 32, seed=number), [0], [0.0]

        def end(load: Load = load, ended: list[int] = ended, told: list[float] = told) -> None:
            time.sleep(1.0 + 0.3 * number)  # noqa: B023 - it has run before the next round
            told[0] = time.perf_counter()
            ended[0] = load.server.stop()
            load.is_over = True

        load.run(lambda _: False, end)
        outcome.check(ended[0] == 0, f"it ended with {ended[0]}")
        for index, answer in load.done:
            if answer.sent < told[0] - 0.2 or answer.status == 200:
                outcome.add("taken and answered")
                outcome.check(
                    not (wrong := singles.wrong(index, answer)),
                    f"taken, and then: request {index}: {wrong}",
                )
            elif answer.status == 503:
                outcome.add("told to go elsewhere")
            else:
                outcome.check(answer.status == 0, f"a late request got {answer.status}")
                outcome.add("no connection any more", int("no connection" in answer.error))
    return outcome


def malformed(folder: Path, *, requests: int) -> Outcome:
    """Send bodies that are wrong in every way: each is refused in OpenAI's shape, and none disturbs the answers beside it."""
    outcome, tiny, rng = Outcome(), Tiny(folder), random.Random(0)
    with tiny.start() as server:
        precompute_all(server, outcome)
        singles = Singles(asks(8)).run(server, outcome)
        # Another tenant's: what is harmless may be prefilled in full, and its exact rows would stand in for repaired ones.
        others = asks(16)[8:]
        fields = (
            "messages",
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "stop",
            "seed",
            "stream",
            "tools",
        )
        fields += (
            "response_format",
            "kvrag",
            "stream_options",
            "model",
            "tool_choice",
            "logit_bias",
            "made_up",
        )

        async def send(number: int) -> None:
            each = others[number % len(others)]
            body = {**each.body, "max_tokens": 2}
            for name in rng.sample(fields, rng.randrange(1, 3)):
                body[name] = rng.choice(MALFORMED)
            answer = await Ask(each.tenant, each.path, body).send(server.port, stream=False)
            is_told = answer.status == 200 or (400 <= answer.status < 500 and bool(answer.error))
            outcome.check(is_told, f"{json.dumps(body)[:300]} got {answer.status} {answer.error}")
            outcome.add("refused" if answer.status != 200 else "harmless")

        async def send_all() -> None:
            for start in range(0, requests, 16):
                await asyncio.gather(*(send(start + i) for i in range(min(16, requests - start))))

        asyncio.run(send_all())
        singles.run(server, outcome)
        settle(server, outcome)
    return outcome


SHORT: dict[str, run.Scenario] = {
    "answers": partial(answers, requests=300, clients=24, different=32),
    "kills": partial(kills, rounds=1),
    "full disk": full_disk,
    "slow clients": partial(slow_clients, requests=60),
    "64 streams": partial(soak, seconds=15),
    "SIGTERM": partial(sigterm, rounds=1),
    "malformed requests": partial(malformed, requests=200),
}
LONG: dict[str, run.Scenario] = {
    **SHORT,
    "answers": partial(answers, requests=10_000, clients=32, different=96, limit=0.02),
    "kills": partial(kills, rounds=20),
    "slow clients": partial(slow_clients, requests=600),
    "64 streams": partial(soak, seconds=600, limit=0.02),
    "SIGTERM": partial(sigterm, rounds=10),
    "malformed requests": partial(malformed, requests=1000),
}


if __name__ == "__main__":
    run.main(__doc__, SHORT, LONG, "serve")
