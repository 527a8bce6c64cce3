"""What the scenarios of ``serve.py`` share: a server of a tiny model, what it is asked, and whether each answer is its own single run's."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from load_client import CHAT, Answer, Rude, Server, ask
from texts import make_chunks
from world import Outcome

from kvrag.testing.models import save_tiny_model

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob", "cy": "key-of-cy"}
TEXT = "/v1/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a keeper.",
        "parameters": {
            "type": "object",
            "properties": {"box": {"enum": ["red", "blue"]}},
            "required": ["box"],
        },
    },
}


@dataclass(frozen=True)
class Ask:
    """A request of a tenant's; ``body`` without ``stream``."""

    tenant: str
    path: str
    body: dict[str, Any]

    async def send(self, port: int, *, stream: bool, rude: Rude | None = None) -> Answer:
        """Send it."""
        form = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return await ask(
            port, {**self.body, **form}, key=KEYS[self.tenant], path=self.path, rude=rude
        )


def chunks_of(tenant: str) -> list[str]:
    """Documents of a tenant: nobody else's hold the same text."""
    return make_chunks(6, words=30, seed=sorted(KEYS).index(tenant))


def asks(count: int, tokens: int = 12) -> list[Ask]:
    """Make different requests, of eight kinds by turns.

    Each says how it reuses KV: by ``auto`` a machine that is slow today would answer otherwise. What is prefilled in full has a system
    message of its own, so that no exact rows of it stand in for what another request repairs.
    """
    made = []
    for index in range(count):
        tenant = sorted(KEYS)[index // 8 % len(KEYS)]
        body = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": tokens,
            "kvrag": {"mode": "stitch"},
        }
        body |= _kind(index, random.Random(index).sample(chunks_of(tenant), 3))
        made.append(Ask(tenant, TEXT if "prompt" in body else CHAT, body))
    return made


def _kind(index: int, documents: list[str]) -> dict[str, Any]:
    """Return what is special about a request: how it is sampled, where its documents are, how it ends."""
    question = f"Which of the notes, reader {index}?"
    asked = {"messages": [{"role": "user", "content": "\n\n".join([*documents, question])}]}
    alone = {"messages": [{"role": "user", "content": question}]}
    in_full = [{"role": "system", "content": f"In full, {index}."}, *asked["messages"]]
    kinds: tuple[dict[str, Any], ...] = (
        asked,
        {"messages": in_full, "kvrag": {"mode": "full"}},
        {**asked, "temperature": 0.9, "seed": index, "top_p": 0.95},
        {**asked, "temperature": 1.0, "seed": index, "n": 2},
        {**asked, "stop": ["e", "a"]},
        {**asked, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60},
        {"prompt": [question, f"A note, {index}:"]},
        {**alone, "kvrag": {"mode": "stitch", "documents": [{"text": text} for text in documents]}},
    )
    return kinds[index % len(kinds)]


class Tiny:
    """A server of a tiny model in a folder: its weights, its store, its log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kv_dir = folder, folder / "kv"
        self.model = save_tiny_model(folder / "model")

    def start(self, *options: str) -> Server:
        """Start it; on the same store each time."""
        command = [sys.executable, "-m", "kvrag", "serve", self.model]
        command += ["--kv-dir", str(self.kv_dir), "--port", "0"]
        keys = ",".join(f"{tenant}={key}" for tenant, key in KEYS.items())
        env = {"KVRAG_API_KEYS": keys, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # Nothing that a run remembers is another one's.
        env |= {"XDG_CACHE_HOME": str(self.folder / "cache")}
        return Server([*command, "--model-name", "tiny", *options], self.folder / "server.log", env)


def precompute(
    server: Server, tenant: str, texts: Sequence[str], start: int = 0
) -> tuple[int, str]:
    """Store documents of a tenant's; returns status and body."""
    documents = [{"id": f"{tenant}-{start + i}", "text": text} for i, text in enumerate(texts)]
    return server.post("/v1/kv/precompute", {"documents": documents}, KEYS[tenant])


def precompute_all(server: Server, outcome: Outcome) -> None:
    """Store the documents of all tenants."""
    for tenant in KEYS:
        status, said = precompute(server, tenant, chunks_of(tenant))
        outcome.check(status == 200, f"precomputing for {tenant} ended with {status}: {said[:300]}")


@dataclass
class Singles:
    """What each request comes to when nothing else runs."""

    asks: list[Ask]
    answers: list[Answer] = field(default_factory=list)

    def run(self, server: Server, outcome: Outcome) -> Singles:
        """Ask one after the other, whole and as a stream; the first time keep what is said, later compare."""
        for index, each in enumerate(self.asks):
            whole, stream = (
                asyncio.run(each.send(server.port, stream=form)) for form in (False, True)
            )
            outcome.check(
                whole.is_done and whole.status == 200,
                f"single {index}: {whole.status} {whole.error}",
            )
            if index >= len(self.answers):
                self.answers.append(whole)
            for form, answer in (("whole", whole), ("stream", stream)):
                outcome.check(
                    self.wrong(index, answer) == "",
                    f"single {index}, {form}: {self.wrong(index, answer)}",
                )
        return self

    def wrong(self, index: int, answer: Answer) -> str:
        """Say what is wrong with a whole answer of a request; nothing if all is right."""
        single = self.answers[index]
        if answer.status != 200 or not answer.is_done:
            return f"status {answer.status}, {answer.error or 'cut off'}"
        if answer.said != single.said:
            return f"it said {answer.said}, alone {single.said}"
        if answer.usage["prompt_tokens"] != single.usage["prompt_tokens"]:
            return f"its usage is {answer.usage}, alone {single.usage}"
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        if not 0 <= cached <= answer.usage["prompt_tokens"]:
            return f"its usage is {answer.usage}"
        return "" if len(answer.account) == len(answer.texts) else f"{len(answer.account)} accounts"


@dataclass
class Load:
    """Many clients at once, and what each request came to. ``leaving``: share of requests whose client goes before the end."""

    server: Server
    singles: Singles
    outcome: Outcome
    clients: int
    seed: int = 0
    leaving: float = 0.0
    pause_s: float = 0.0
    done: list[tuple[int, Answer]] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    is_over: bool = False

    def run(
        self, is_enough: Callable[[int], bool], meanwhile: Callable[[], None] | None = None
    ) -> Load:
        """Ask until there is enough, as judged by the number of requests sent; do something of your own after a while."""
        asyncio.run(self._run(is_enough, meanwhile))
        return self

    async def _run(
        self, is_enough: Callable[[int], bool], meanwhile: Callable[[], None] | None
    ) -> None:
        rng, sent = random.Random(self.seed), 0

        async def client() -> None:
            nonlocal sent
            while not self.is_over and not is_enough(sent):
                sent += 1
                index, stream = rng.randrange(len(self.singles.asks)), rng.random() < 0.6
                leaves = stream and rng.random() < self.leaving
                rude = Rude(rng.randrange(1, 8) if leaves else None, self.pause_s)
                answer = await self.singles.asks[index].send(
                    self.server.port, stream=stream, rude=rude
                )
                self.done.append((index, answer))
                if answer.status == 0:
                    return  # the server is gone
                if len(self.done) % 50 == 0:
                    self.sizes.append(self.server.size())

        tasks = [asyncio.create_task(client()) for _ in range(self.clients)]
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
        await asyncio.gather(*tasks)

    def judge(self) -> None:
        """Compare every answer with its single run; none may be lost, and no two may have an id in common."""
        ids: Counter[str] = Counter()
        for index, answer in self.done:
            if answer.left:
                self.outcome.add("left")
                continue
            self.outcome.add("answers")
            self.outcome.add("tokens", answer.tokens)
            wrong = self.singles.wrong(index, answer)
            self.outcome.check(not wrong, f"request {index}: {wrong}")
            ids[answer.id] += 1
            ids.update(call["id"] for calls in answer.calls.values() for call in calls)
        self.outcome.check(
            max(ids.values(), default=1) == 1, f"an id came twice: {ids.most_common(1)}"
        )

    def judge_metrics(self, before: dict[str, float]) -> None:
        """Compare the server's counters with what came here; an answer whose client left may be counted, or not."""
        settle(self.server, self.outcome)
        whole = [answer for _, answer in self.done if not answer.left]
        left = [answer for _, answer in self.done if answer.left]
        after = self.server.metrics()

        def grown(name: str) -> float:
            return sum(
                value - before.get(key, 0) for key, value in after.items() if key.startswith(name)
            )

        seen = sum(answer.status == 200 for answer in whole + left)
        counted = sum(
            grown(f'kvrag_requests_total{{code="200",endpoint="{path}"}}') for path in (CHAT, TEXT)
        )
        self.outcome.check(counted == seen, f"{counted:.0f} responses are counted, {seen} came")
        most = {"tokens": 60 * 2 * len(left), "answers": 2 * len(left)}
        came = {"tokens": sum(a.tokens for a in whole), "answers": sum(len(a.texts) for a in whole)}
        for name, metric in (
            ("tokens", "kvrag_generation_tokens_total"),
            ("answers", "kvrag_answers_total"),
        ):
            is_right = came[name] <= grown(metric) <= came[name] + most[name]
            self.outcome.check(
                is_right, f"{grown(metric):.0f} {name} are counted, {came[name]} came"
            )


def settle(server: Server, outcome: Outcome, wait_s: float = 30.0) -> None:
    """Wait until nothing runs or waits any more."""
    end, gauges = time.monotonic() + wait_s, ("kvrag_requests_running", "kvrag_requests_waiting")
    while any(server.metrics()[name] for name in gauges):
        if time.monotonic() > end:
            outcome.check(False, "requests still run, and nobody waits for them")
            return
        time.sleep(0.1)


def growth(sizes: Sequence[dict[str, int]], outcome: Outcome, *, limit: float | None) -> None:
    """Compare the last tenth of the sizes with those after the warm-up, the first third: medians of resident bytes, threads, files.

    ``limit``: by what share memory may grow; ``None`` where there were too few requests to tell.
    """
    warm, last = (
        sizes[len(sizes) // 3 : len(sizes) // 3 + max(1, len(sizes) // 10)],
        sizes[-max(1, len(sizes) // 10) :],
    )
    found = {
        name: (median(s[name] for s in warm), median(s[name] for s in last))
        for name in ("rss", "threads", "files")
    }
    outcome.counts |= {
        "megabytes": round(found["rss"][1] / 1e6),
        "threads": round(found["threads"][1]),
    }
    outcome.counts |= {"growth": round(found["rss"][1] / found["rss"][0] - 1, 4)}
    if limit is None:
        return
    rss, share = found["rss"], found["rss"][1] / found["rss"][0] - 1
    outcome.check(
        share <= limit, f"memory grew by {share:.1%}, from {rss[0]:,} to {rss[1]:,} bytes"
    )
    for name, room in (("threads", 2), ("files", 8)):  # connections come and go
        before, after = found[name]
        outcome.check(after <= before + room, f"there were {before} {name}, and there are {after}")


def run_cli(*arguments: str) -> tuple[int, str]:
    """Run ``kvrag`` and return its exit status and what it printed."""
    command = [sys.executable, "-m", "kvrag", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    return done.returncode, done.stdout + done.stderr
