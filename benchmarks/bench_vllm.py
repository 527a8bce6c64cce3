"""vLLM with repaired chunks, beside vLLM alone and beside kvrag's own engine and server.

    KVRAG_EVAL_MODELS=... KVRAG_EVAL_DATA=... python benchmarks/bench_vllm.py   # all parts, an hour on two quiet cores
    python benchmarks/bench_vllm.py --only ttft,memory                          # these parts anew; the others stay as they were
    python benchmarks/bench_vllm.py --only streams                              # between tokens, with arrivals and without: five minutes
    python benchmarks/bench_vllm.py --quick --out build/vllm                    # short prompts, few requests: does everything run?

Runs in an environment that has vLLM. Two of its servers are up, both with their prefix cache on: vLLM alone, and vLLM with the connector;
``kvrag serve`` is a third process. Prompts are token ids: chunks of the facts benchmark's needle questions, in an order that no request
before had. So vLLM's prefix cache finds the system prompt and, now and then, a first chunk.

* **memory**: of vLLM's engine alone, and with the connector.
* **ttft**: seconds of a one-token answer, asked in random turns.
* **auto**: the same of ``auto``, of vLLM alone and of blends in any case, where none, half and all of the chunks are stored.
* **equality**: log-probabilities of the first token, and answers, beside those of kvrag's engine with the same repair.
* **throughput**: eight clients, each sends its next request when its answer has ended.
* **streams**: time between the tokens of four running streams while other prompts arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine, model_path, parser, write_result
from facts_tasks import needle_questions
from load_client import Answer, Server, ask, quantiles
from safetensors.torch import load_file

from kvrag import KVRagEngine
from kvrag.adapters import ModelSource, PromptEncoder

NAME = "model"
COMPLETIONS = "/v1/completions"
MAX_LEN = 8192
CACHE_GB = 2
CLIENTS = 8
STREAMS = 4
ANSWER_TOKENS = 16
TOP = 20  # log-probabilities that vLLM tells of a token
WITHIN = 1e-3
ALONE = "vLLM alone"
CONNECTOR = "with the connector"
EXTRA: dict[str, dict[str, Any] | None] = {
    ALONE: None,
    CONNECTOR: {},
}
"""vLLM's servers: the connector's options, or no connector."""
FULL, BLENDED = "full", "blended"
MODES: dict[str, dict[str, Any] | None] = {
    BLENDED: {"mode": "auto"},
    "blended, fast": {"mode": "auto", "repair": "fast"},
    "full, with the connector": {"mode": "full"},
    FULL: None,
}
"""What requests ask of the connector; ``None`` asks vLLM alone."""
WAYS: dict[str, dict[str, Any] | None] = {
    "auto": {"mode": "auto"},
    "stitch": {"mode": "stitch"},
    FULL: None,
}
"""The same of requests whose chunks are not all stored."""
ASKED = MODES | WAYS
SHARES = (0.0, 0.5, 1.0)
"""Shares of a prompt's chunks that are stored."""
TURNS = 3
"""How often each way is asked of each share."""


@dataclass(frozen=True)
class Size:
    """Prompts of about so many tokens: chunks of ``chunk_tokens``, for several questions.

    So many of the ``prompts`` are ``compared`` with kvrag's engine, and asked in full of the server with the connector.
    """

    chunks: int
    chunk_tokens: int
    questions: int
    prompts: int
    compared: int

    @property
    def name(self) -> str:
        """How it is called in the results."""
        return str(self.chunks * self.chunk_tokens)


@dataclass(frozen=True)
class Extent:
    """How much is measured. ``window_s`` is a window of running streams, ``period_s`` the time between arrivals in it."""

    sizes: tuple[Size, ...]
    requests: int
    answer_tokens: int
    window_s: float
    period_s: float


WHOLE = Extent((Size(10, 250, 3, 10, 4), Size(12, 500, 1, 4, 1)), 2, 32, 30.0, 10.0)
QUICK = Extent((Size(10, 120, 1, 2, 1), Size(12, 120, 1, 1, 1)), 1, 8, 6.0, 3.0)


class Prompts:
    """Prompts of a size: each a new order of a question's chunks, as token ids."""

    def __init__(self, encoder: PromptEncoder, size: Size, seed: int) -> None:
        self._encoder = encoder
        self._draw = random.Random(f"{seed} {size.name}")
        self._used = set[tuple[int, ...]]()
        shape = ((size.chunks, size.chunk_tokens),)
        self.questions = list(islice(needle_questions(self._cut, shape), size.questions))

    def _cut(self, text: str, tokens: int) -> str:
        ids = self._encoder.chunk_ids(text)
        if len(ids) <= tokens:
            return text
        return str(self._encoder.decode(list(ids[:tokens])).rpartition(" ")[0])

    @property
    def chunks(self) -> list[str]:
        """Texts to precompute."""
        return [chunk for question in self.questions for chunk in question.chunks]

    def new(self, number: int) -> list[int]:
        """Return a prompt for a question, in an order that was not used before."""
        question = self.questions[number % len(self.questions)]
        mark = "\u2063CHUNKS\u2063"
        message = {"role": "user", "content": f"{mark}{question.separator}{question.tail}"}
        head, tail = str(self._encoder.render([message])).split(mark)
        order = list(question.chunks)
        ids: list[int] = []
        while not ids or tuple(ids) in self._used:
            self._draw.shuffle(order)
            ids = list(self._encoder.live_ids(head, at_start=True))
            for index, chunk in enumerate(order):
                glue = self._encoder.live_ids(question.separator) if index else []
                ids += [*glue, *self._encoder.chunk_ids(chunk)]
            ids += self._encoder.live_ids(tail)
        self._used.add(tuple(ids))
        return ids


class VLLM(Server):
    """A server of :data:`EXTRA`."""

    def __init__(self, run: Run, name: str) -> None:
        self.name, extra = name, EXTRA[name]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", run.model]
        command += ["--dtype", "float32", "--max-model-len", str(MAX_LEN), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", NAME, "--enable-prefix-caching"]
        command += ["--enforce-eager"] if run.extent is QUICK else []
        if extra is not None:
            transfer = {
                "kv_connector": "KVRagConnector",
                "kv_connector_module_path": "vllm_kvrag.connector",
                "kv_role": "kv_consumer",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "mode": "blend",
                    "kv_dir": run.kv_dir,
                    **extra,
                    **run.options,
                },
            }
            command += ["--load-format", "kvrag", "--kv-transfer-config", json.dumps(transfer)]
        cores = os.sched_getaffinity(0)
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": f"{min(cores)}-{max(cores)}",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        start = time.perf_counter()
        super().__init__(command, run.folder / f"{name}.log", env, wait_s=600)
        self.start_s = time.perf_counter() - start
        print(f"{name}: up after {self.start_s:.0f} s", flush=True)

    def complete(
        self, ids: list[int], kvrag: dict[str, Any] | None, **options: Any
    ) -> tuple[dict[str, Any], float]:
        """Answer a prompt greedily; returns the response and its seconds."""
        body = {"model": NAME, "prompt": ids, "temperature": 0, "max_tokens": 1, **options}
        if kvrag is not None:
            body["kv_transfer_params"] = {"kvrag": kvrag}
        start = time.perf_counter()
        status, text = self.post(COMPLETIONS, body)
        wall_s = time.perf_counter() - start
        if status != 200:
            raise RuntimeError(f"vLLM answered {status}: {text[:1000]}\n{self.last_words()}")
        return json.loads(text), wall_s

    def precompute(self, texts: Sequence[str]) -> dict[str, Any]:
        """Precompute chunks in vLLM's worker."""
        response, wall_s = self.complete([1, 2], {"precompute": {"texts": list(texts)}})
        report = said(response)
        if "precompute" not in report or report["precompute"]["failed"]:
            raise RuntimeError(f"chunks were not precomputed: {report}")
        stored = report["precompute"]["stored"]
        print(f"precomputed {stored} chunks in {wall_s:.0f} s", flush=True)
        return {"chunks": stored, "wall_s": wall_s}

    def last_words(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:]


def said(response: dict[str, Any]) -> dict[str, Any]:
    """Return what a response says about its prompt's KV."""
    return dict((response.get("kv_transfer_params") or {}).get("kvrag") or {})


class Run:
    """What the parts share: the model, prompts, a store, and servers."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.model = model_path(args.model)
        self.seed: int = args.seed
        self.extent = QUICK if args.quick else WHOLE
        self.folder = folder
        self.options: dict[str, Any] = args.connector
        self.encoder = PromptEncoder(ModelSource(self.model).load_tokenizer())
        self.prompts = {
            size.name: Prompts(self.encoder, size, self.seed) for size in self.extent.sizes
        }
        self.precomputed: dict[str, Any] = {}
        self._servers: dict[str, VLLM] = {}

    @property
    def kv_dir(self) -> str:
        """The store."""
        return str(self.folder / "kv")

    def server(self, name: str) -> VLLM:
        """Return a server, started at first use."""
        if name not in self._servers:
            self._servers[name] = VLLM(self, name)
        return self._servers[name]

    def at(self, mode: str) -> VLLM:
        """Return the server that a mode is asked of."""
        return self.server(ALONE if ASKED[mode] is None else CONNECTOR)

    def stored(self, size: Size) -> Prompts:
        """Return the prompts of a size, their chunks precomputed and one of them answered."""
        prompts = self.prompts[size.name]
        if size.name not in self.precomputed:
            self.precomputed[size.name] = self.server(CONNECTOR).precompute(prompts.chunks)
            for mode in MODES:  # buffers grow
                self.answer(prompts.new(0), mode)
        return prompts

    def answer(self, ids: list[int], mode: str, **options: Any) -> tuple[dict[str, Any], float]:
        """Answer a prompt; returns the response and its seconds. Raises ``RuntimeError`` if it should be blended and is not."""
        response, wall_s = self.at(mode).complete(ids, ASKED[mode], **options)
        if mode.startswith(BLENDED) and said(response).get("exactness") != "repaired":
            raise RuntimeError(f"a prompt was not blended: {said(response)}")
        return response, wall_s

    def stop(self, names: Iterable[str]) -> None:
        """Stop servers."""
        for name in names:
            self._servers.pop(name).stop()

    def close(self) -> None:
        """Stop all servers."""
        self.stop(list(self._servers))


# -- first token ---------------------------------------------------------------------------------


def ttft(run: Run) -> dict[str, Any]:
    """Time one-token answers, in random turns, each with an order of its own."""
    draw = random.Random(f"{run.seed} turns")
    found: dict[str, Any] = {}
    for size in run.extent.sizes:
        prompts = run.stored(size)
        rows = []
        for number in range(size.prompts):
            row: dict[str, Any] = {}
            turns = [m for m in MODES if number < size.compared or m != "full, with the connector"]
            draw.shuffle(turns)
            for mode in turns:
                row[mode] = first_token(run, prompts.new(number), mode)
            rows.append(row)
            times = ", ".join(f"{mode} {each['wall_s']:.2f} s" for mode, each in row.items())
            print(f"{row[FULL]['tokens']} tokens: {times}", flush=True)
        found[size.name] = {"prompts": rows, "summary": summary_of(rows)}
    return found | {"precomputed": run.precomputed}


def first_token(run: Run, ids: list[int], mode: str) -> dict[str, Any]:
    """Time a one-token answer, and say where its time went."""
    response, wall_s = run.answer(ids, mode)
    about = said(response)
    kept = (
        "exactness",
        "cached_tokens",
        "repaired_tokens",
        "computed_tokens",
        "repair",
        "timings_ms",
    )
    return {"tokens": len(ids), "wall_s": wall_s} | {k: about[k] for k in kept if k in about}


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians with intervals, ratios to the full prefill of the same turn, and the stages."""
    out: dict[str, Any] = {}
    for mode in MODES:
        own = [row[mode] for row in rows if mode in row]
        ratios = [row[FULL]["wall_s"] / row[mode]["wall_s"] for row in rows if mode in row]
        stages = [stages_of(each) for each in own]
        names = dict.fromkeys(name for each in stages for name in each)
        out[mode] = {
            "tokens": statistics.median(each["tokens"] for each in own),
            "wall_s": statistics.median(each["wall_s"] for each in own),
            "wall_s_ci": interval([each["wall_s"] for each in own]),
            "ratio": statistics.median(ratios),
            "ratio_ci": interval(ratios),
            "stages_ms": {
                name: statistics.median(each.get(name, 0.0) for each in stages) for name in names
            },
        }
    return out


def stages_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each stage; the rest is vLLM's."""
    known = {name: float(ms) for name, ms in row.get("timings_ms", {}).items()}
    return known | {"vLLM": 1e3 * row["wall_s"] - sum(known.values())}


def interval(values: Sequence[float], repeats: int = 2000) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    data = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(data), size=(repeats, len(data)))
    low, high = np.quantile(np.median(data[picks], axis=1), (0.025, 0.975))
    return float(low), float(high)


# -- auto ----------------------------------------------------------------------------------------


def auto(run: Run) -> dict[str, Any]:
    """Time one-token answers by each way, in random turns, where some of the chunks are stored."""
    draw = random.Random(f"{run.seed} auto")
    cells = []
    for size, (number, share) in product(run.extent.sizes, enumerate(SHARES)):
        # Of questions that no other part has stored.
        more = replace(size, questions=size.questions + len(SHARES))
        prompts, own = Prompts(run.encoder, more, run.seed), size.questions + number
        known = prompts.questions[own].chunks[: round(share * size.chunks)]
        if known:
            run.server(CONNECTOR).precompute(known)
        ways = [way for way in WAYS if known or way != "stitch"]
        rows = []
        for _ in range(TURNS):
            draw.shuffle(ways)
            rows.append({way: first_token(run, prompts.new(own), way) for way in ways})
        wall_s = {way: statistics.median(row[way]["wall_s"] for row in rows) for way in ways}
        cells.append({"share": share, "prompts": rows, "wall_s": wall_s})
        times = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in wall_s.items())
        print(f"{rows[0][FULL]['tokens']} tokens, {share:.0%} stored: {times}", flush=True)
    return {"cells": cells}


# -- equality ------------------------------------------------------------------------------------


def equality(run: Run) -> dict[str, Any]:
    """Compare vLLM's first log-probabilities and answers with the engine's, of the same ids and repair.

    On a new server: vLLM would take first chunks that earlier requests computed, exact, in place of repaired ones.
    """
    stored = [run.stored(size) for size in run.extent.sizes]
    run.stop([CONNECTOR])
    cases = []
    for size, prompts in zip(run.extent.sizes, stored, strict=True):
        for number in range(size.compared):
            ids = prompts.new(number)
            cases += [answered(run, ids, mode) for mode in MODES if mode.startswith(BLENDED)]
    engine = KVRagEngine.from_pretrained(run.model, dtype="float32", kv_dir=run.kv_dir)
    rows = [compared(engine, *case) for case in cases]
    engine.close()
    return {
        "prompts": rows,
        "max_difference": max(row["difference"] for row in rows),
        "top": TOP,
        "within": WITHIN,
        "equal_answers": sum(row["is_equal"] for row in rows),
    }


def answered(run: Run, ids: list[int], mode: str) -> tuple[list[int], str, dict[str, Any]]:
    """Return a prompt, its mode, and vLLM's answer of some tokens with log-probabilities."""
    options = {"max_tokens": ANSWER_TOKENS, "logprobs": TOP, "return_tokens_as_token_ids": True}
    response, _ = run.answer(ids, mode, **options)
    return ids, mode, response


def compared(
    engine: KVRagEngine, ids: list[int], mode: str, response: dict[str, Any]
) -> dict[str, Any]:
    """Compare a blended answer with the engine's."""
    options: dict[str, Any] = {"mode": "stitch", "repair": (MODES[mode] or {}).get("repair")}
    mine = engine.prefill(ids, **options)
    logprobs = mine.logits.log_softmax(dim=-1)
    choice = response["choices"][0]
    theirs = choice["logprobs"]["top_logprobs"][0]
    difference = max(
        abs(float(logprobs[int(token.partition(":")[2])]) - value)
        for token, value in theirs.items()
    )
    answer = engine.generate(ids, max_new_tokens=ANSWER_TOKENS, **options)
    about = said(response)
    row = {
        "tokens": len(ids),
        "mode": mode,
        "repaired_tokens": [about["repaired_tokens"], mine.repaired_tokens],
        "difference": difference,
        "is_equal": choice["text"] == answer.text,
        "texts": [choice["text"], answer.text],
    }
    equal = "equal" if row["is_equal"] else "DIFFERENT"
    print(f"{len(ids)} tokens, {mode}: {difference:.1e}, answers {equal}", flush=True)
    return row


# -- throughput ----------------------------------------------------------------------------------


def throughput(run: Run) -> dict[str, Any]:
    """Ask the same prompts of vLLM, blended and not, and of ``kvrag serve``, with eight clients."""
    prompts = run.stored(run.extent.sizes[0])
    count = CLIENTS * run.extent.requests
    asked = [prompts.new(number) for number in range(count)]
    found = {mode: loaded(run, run.at(mode), asked, mode) for mode in (BLENDED, FULL)}
    with own_server(run) as server:
        asyncio.run(ask(server.port, body_of(run, prompts.new(0), None), path=COMPLETIONS))
        found["kvrag serve"] = loaded(run, server, asked, None)
    return {"clients": CLIENTS, "requests": count, "servers": found}


def own_server(run: Run) -> Server:
    """Start ``kvrag serve`` on the same store."""
    command = [sys.executable, "-m", "kvrag", "serve", run.model, "--dtype", "float32"]
    command += ["--port", "0", "--model-name", NAME, "--kv-dir", run.kv_dir]
    return Server(command, run.folder / "kvrag.log", {"HF_HUB_OFFLINE": "1"})


def body_of(run: Run, ids: list[int], mode: str | None) -> dict[str, Any]:
    """Return a streamed request for an answer of a fixed length."""
    tokens = run.extent.answer_tokens
    body = {"model": NAME, "prompt": ids, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "max_tokens": tokens, "min_tokens": tokens}
    kvrag = None if mode is None else MODES[mode]
    return body | ({} if kvrag is None else {"kv_transfer_params": {"kvrag": kvrag}})


def loaded(run: Run, server: Server, asked: list[list[int]], mode: str | None) -> dict[str, Any]:
    """Let clients ask prompts of a server, and return its rates."""
    before = server.metrics()
    start = time.perf_counter()
    answers = asyncio.run(clients(run, server, asked, mode))
    wall_s = time.perf_counter() - start
    failed = [answer.error or f"status {answer.status}" for answer in answers if not answer.is_done]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    gaps = [gap for answer in answers for gap in answer.gaps_ms]
    row = {
        "wall_s": wall_s,
        "requests_per_s": len(answers) / wall_s,
        "tokens_per_s": sum(answer.tokens for answer in answers) / wall_s,
        "tokens": [answer.tokens for answer in answers],
        "ttft_s": quantiles([answer.ttft_s for answer in answers]),
        "gap_ms": quantiles(gaps),
        "exactness": made(before, server.metrics()),
    }
    print(
        f"{mode or 'kvrag serve'}: {row['requests_per_s']:.3f} requests/s, "
        f"{row['tokens_per_s']:.1f} tokens/s {row['exactness']}",
        flush=True,
    )
    return row


async def clients(
    run: Run, server: Server, asked: list[list[int]], mode: str | None
) -> list[Answer]:
    """Send all prompts; each client sends its next one when its answer has ended."""
    bodies = iter([body_of(run, ids, mode) for ids in asked])

    async def client() -> list[Answer]:
        return [await ask(server.port, body, path=COMPLETIONS) for body in bodies]

    return list(chain(*await asyncio.gather(*(client() for _ in range(CLIENTS)))))


def made(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    """Count a server's requests between two looks at its metrics, by exactness."""
    grown = Counter[str]()
    for counter, value in after.items():
        if label := re.search(r'kvrag_requests_total.*exactness="(\w+)"', counter):
            grown[label[1]] += round(value - before.get(counter, 0))
    return dict(+grown)


# -- streams -------------------------------------------------------------------------------------


def streams(run: Run) -> dict[str, Any]:
    """Measure the time between tokens of running streams, alone and while prompts arrive."""
    prompts = run.stored(run.extent.sizes[0])
    running = [prompts.new(number) for number in range(STREAMS)]
    rows = []
    for mode, arrives in product((FULL, BLENDED), (False, True)):
        row = asyncio.run(window(run, prompts, running, mode, arrives=arrives))
        rows.append({"mode": mode, "arrives": arrives, **row})
        gaps = ", ".join(f"{name} {ms:.0f} ms" for name, ms in row["gap_ms"].items())
        print(f"streams, {mode}, {len(row['arrived'])} arrivals: {gaps}", flush=True)
    periods = {"period_s": run.extent.period_s, "window_s": run.extent.window_s}
    return {"streams": STREAMS, **periods, "connector": run.options, "windows": rows}


async def window(
    run: Run, prompts: Prompts, running: list[list[int]], mode: str, *, arrives: bool
) -> dict[str, Any]:
    """Run streams for a while; prompts of the same mode arrive at a fixed period, or none."""
    extent, port = run.extent, run.at(mode).port
    answers = [Answer() for _ in running]
    tasks = []
    for ids, answer in zip(running, answers, strict=True):
        body = body_of(run, ids, mode) | dict.fromkeys(("max_tokens", "min_tokens"), MAX_LEN // 2)
        tasks.append(asyncio.create_task(ask(port, body, path=COMPLETIONS, answer=answer)))
    while not all(answer.pieces or answer.error for answer in answers):
        await asyncio.sleep(0.05)
    start = time.perf_counter()
    arrived: list[asyncio.Task[dict[str, Any]]] = []
    while time.perf_counter() < start + extent.window_s:
        if arrives:
            one = asyncio.to_thread(first_token, run, prompts.new(len(arrived)), mode)
            arrived.append(asyncio.create_task(one))
        await asyncio.sleep(extent.period_s)
    end = time.perf_counter()
    ended = await asyncio.gather(*arrived)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if faults := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"a stream failed: {faults[0]}")
    inside = [[piece for piece in answer.pieces if start <= piece <= end] for answer in answers]
    gaps = [1e3 * (b - a) for pieces in inside for a, b in pairwise(pieces)]
    return {
        "arrived": ended,
        "tokens_per_s": sum(map(len, inside)) / (end - start),
        "gap_ms": quantiles(gaps) | {"max": max(gaps)},
        "gaps_ms": [round(gap, 1) for gap in gaps],
    }


# -- memory --------------------------------------------------------------------------------------


def memory(run: Run) -> dict[str, Any]:
    """Measure vLLM's engine process after its start, and after it has answered."""
    prompts = run.prompts[run.extent.sizes[0].name]
    found = {}
    for name in EXTRA:
        server = run.server(name)
        pid = largest_child(server.process.pid)
        row: dict[str, Any] = {"start_s": server.start_s, "started": resident(pid)}
        if name != ALONE:
            server.precompute(prompts.questions[0].chunks)
        response, _ = server.complete(prompts.new(0), MODES[FULL if name == ALONE else BLENDED])
        row |= {"answered": resident(pid), "exactness": said(response).get("exactness")}
        found[name] = row
        run.stop([name])  # two engines of these and the next may not fit
        sizes = (f"{when} {row[when]['rss'] / 1e9:.2f} GB" for when in ("started", "answered"))
        print(f"{name}: {', '.join(sizes)}, {row['exactness']}", flush=True)
    return {"engines": found, "weight_bytes": weight_bytes(run.model)}


def weight_bytes(model: str) -> int:
    """Return the bytes of a checkpoint's tensors in float32."""
    files = Path(model).glob("*.safetensors")
    return 4 * sum(tensor.numel() for file in files for tensor in load_file(file).values())


def largest_child(pid: int) -> int:
    """Return the process below another that holds the most memory: of vLLM, the engine."""
    return max(descendants(pid), key=lambda each: resident(each)["rss"])


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from descendants(int(child))


def resident(pid: int) -> dict[str, int]:
    """Return a process's resident bytes, its share of them, those of no file, and its peak."""
    fields = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous", "VmHWM": "peak"}
    out = {}
    for file in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in fields:
                out[fields[name]] = 1024 * int(value.split()[0])
    return out


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "memory": memory,
    "ttft": ttft,
    "auto": auto,
    "equality": equality,
    "throughput": throughput,
    "streams": streams,
}


def main() -> None:
    """Run the parts asked for, and write what is found after each of them."""
    options = parser(__doc__, seed=0)
    options.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    options.add_argument("--model", default="qwen2.5-coder-0.5b", help="of $KVRAG_EVAL_MODELS")
    options.add_argument("--quick", action="store_true", help="few short prompts: no measurement")
    options.add_argument("--connector", type=json.loads, default={}, help="its options, as JSON")
    args = options.parse_args()
    chosen = args.only.split(",")
    if wrong := set(chosen) - set(PARTS):
        options.error(f"no such part: {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    if args.quick and args.out == RESULTS:
        options.error("--quick measures nothing; give it a folder with --out")
    import vllm

    path = args.out / "vllm.json"
    known: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    where = machine()
    where["versions"]["vllm"] = vllm.__version__
    with tempfile.TemporaryDirectory(prefix="kvrag-vllm-") as temporary:
        run = Run(args, Path(temporary))
        try:
            for name in (part for part in PARTS if part in chosen):
                start = time.perf_counter()
                known[name] = {"machine": where} | PARTS[name](run)
                known[name]["seconds"] = time.perf_counter() - start
                print(f"{name}: {known[name]['seconds']:.0f} s", flush=True)
                whole = {"machine": where, "model": args.model, "dtype": "float32"}
                settings = {"max_model_len": MAX_LEN, "kv_cache_gb": CACHE_GB}
                whole |= {"seed": args.seed, "is_quick": args.quick, "vllm_options": settings}
                kept = {part: known[part] for part in PARTS if part in known}
                write_result("vllm", whole | {"parts": kept}, args.out)
        finally:
            run.close()


if __name__ == "__main__":
    main()
