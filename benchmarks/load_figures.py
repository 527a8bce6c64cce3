"""The single figures of ``load.py``: shared decode steps, what the server adds to the engine, and what a chat's later turns compute."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from load_client import Answer, Server, ask

NAME = "load"
LONG = (
    "Retell everything that the passages say, one sentence after the other, and leave nothing out."
)
TURNS = (
    "Which passage is the longest?",
    "Name one person in them.",
    "Where was that?",
    "Say it again in other words.",
)


class Plan(Protocol):
    """What is asked."""

    model: str
    messages: list[list[dict[str, str]]]
    chunks: list[str]


def figures(plan: Plan, server: Server, folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """Take all figures, one after the other, with this process's engine and a server on the same weights and store."""
    from kvrag import KVRagEngine

    engine = KVRagEngine.from_pretrained(plan.model, dtype="float32", kv_dir=folder / "kv")
    tokens, repeats, lengths = (24, 2, (2,)) if is_quick else (160, 12, (2, 10))
    found: dict[str, Any] = {"turns": asyncio.run(turns(plan, server.port, 4 if is_quick else 48))}
    print(
        "a chat's share of computed tokens:",
        [turn["computed_share"] for turn in found["turns"]],
        flush=True,
    )
    found["overhead"] = {
        mode: overhead(plan, server.port, engine, mode, repeats) for mode in ("auto", "full")
    }
    for mode, row in found["overhead"].items():
        print(
            f"server over engine, {mode}: {row['share']:+.1%} of {row['engine_ms']:.0f} ms",
            flush=True,
        )
    found["decode"] = []
    for chunks in lengths:
        for where in ("socket", "engine"):
            row = decoding(plan, server.port if where == "socket" else engine, chunks, tokens)
            found["decode"].append({"where": where, **row})
            said = f"{row['ratio']:.2f} times one stream's {row['one']:.1f} tokens/s"
            print(f"8 streams behind {row['prompt_tokens']} tokens, {where}: {said}", flush=True)
    engine.close()
    return found


def decoding(plan: Plan, target: Any, chunks: int, tokens: int) -> dict[str, Any]:
    """Compare the decode throughput of eight streams with that of one, for prompts of so many chunks.

    ``ratio`` is of the time in which all eight decode: from the last one's first token to the first one's last. ``ratio_whole`` is of all
    tokens over all time, prefills included.
    """
    rng = random.Random(chunks)
    prompts = [
        "\n".join([*rng.sample(plan.chunks, min(chunks, len(plan.chunks))), LONG]) for _ in range(8)
    ]
    few = [run_streams(target, [prompt], tokens) for prompt in prompts[:2]]
    many = [run_streams(target, prompts, tokens) for _ in range(2)]
    one, eight = (statistics.mean(run["steady"] for run in runs) for runs in (few, many))
    wholes = [statistics.mean(run["whole"] for run in runs) for runs in (few, many)]
    return {
        "prompt_tokens": few[0]["prompt_tokens"],
        "max_tokens": tokens,
        "one": one,
        "eight": eight,
        "ratio": eight / one if one else 0.0,
        "ratio_whole": wholes[1] / wholes[0],
        "runs": few + many,
    }


def run_streams(target: Any, prompts: list[str], tokens: int) -> dict[str, Any]:
    """Let streams run at once, over a socket (``target``: its port) or in an engine; tokens per second while all decode, and of it all."""
    start = time.perf_counter()
    bodies = [[{"role": "user", "content": prompt}] for prompt in prompts]
    is_port = isinstance(target, int)
    found = (
        asyncio.run(_over_the_socket(target, bodies, tokens))
        if is_port
        else _in_threads(target, bodies, tokens)
    )
    wall = time.perf_counter() - start
    counts, times = [count for count, _, _ in found], [pieces for _, _, pieces in found]
    # A piece may hold several tokens, where characters are made of them.
    per_piece = [count / len(pieces) for count, pieces in zip(counts, times, strict=True)]
    first, last = max(pieces[0] for pieces in times), min(pieces[-1] for pieces in times)
    inside = sum(
        each * sum(first < moment <= last for moment in pieces)
        for each, pieces in zip(per_piece, times, strict=True)
    )
    return {
        "streams": len(prompts),
        "prompt_tokens": found[0][1],
        "tokens": counts,
        "window_s": round(last - first, 3),
        "steady": inside / (last - first) if last > first else 0.0,
        "whole": sum(counts) / wall,
        "ttft_s": [round(pieces[0] - start, 3) for pieces in times],
    }


async def _over_the_socket(
    port: int, bodies: list[Any], tokens: int
) -> list[tuple[int, int, list[float]]]:
    options = {"model": NAME, "max_tokens": tokens, "temperature": 0, "stream": True}
    options |= {"stream_options": {"include_usage": True}}
    answers = await asyncio.gather(*(ask(port, {**options, "messages": body}) for body in bodies))
    return [
        (checked(answer).tokens, answer.usage["prompt_tokens"], answer.pieces) for answer in answers
    ]


def checked(answer: Answer) -> Answer:
    """Return an answer that ended well; raise where one did not."""
    if not answer.is_done or not answer.pieces:
        raise RuntimeError(f"a request failed: status {answer.status} {answer.error}")
    return answer


def _in_threads(engine: Any, bodies: list[Any], tokens: int) -> list[tuple[int, int, list[float]]]:
    found: dict[int, tuple[int, int, list[float]]] = {}

    def read(index: int) -> None:
        stream = engine.stream(bodies[index], max_new_tokens=tokens, temperature=0.0)
        pieces = [time.perf_counter() for text in stream if text]
        found[index] = len(stream.result.token_ids), stream.result.prompt_tokens, pieces

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(bodies))]


def overhead(plan: Plan, port: int, engine: Any, mode: str, repeats: int) -> dict[str, Any]:
    """Time to first token over the socket beside the engine's own, prompt by prompt, who comes first in turns.

    The engine is this process's: ``generate`` of one token, from the call to its return. The server is asked for a stream, from sending to
    the first text. Both read the chunks from memory after a first time.
    """
    body = {
        "model": NAME,
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "kvrag": {"mode": mode},
    }
    body |= {"stream_options": {"include_usage": True}}

    def by_engine(messages: Any) -> tuple[float, int]:
        start = time.perf_counter()
        result = engine.generate(messages, max_new_tokens=1, temperature=0.0, mode=mode)
        return 1e3 * (time.perf_counter() - start), result.prompt_tokens

    def by_server(messages: Any) -> tuple[float, int]:
        answer = checked(asyncio.run(ask(port, {**body, "messages": messages})))
        return 1e3 * answer.ttft_s, answer.usage["prompt_tokens"]

    rows = []
    for index in range(-1, repeats):  # the first one is not counted
        messages = plan.messages[index % len(plan.messages)]
        for each in (by_engine, by_server):  # both have read its chunks
            if mode != "full":
                each(messages)
        ways = (by_engine, by_server) if index % 2 else (by_server, by_engine)
        took = {way.__name__: way(messages) for way in ways}
        if took["by_engine"][1] != took["by_server"][1]:
            raise RuntimeError("the server's prompt is not the engine's")
        if index >= 0:
            rows.append(
                {
                    "engine_ms": took["by_engine"][0],
                    "server_ms": took["by_server"][0],
                    "tokens": took["by_server"][1],
                }
            )
    shares = torch.tensor(
        [row["server_ms"] / row["engine_ms"] - 1 for row in rows], dtype=torch.float64
    )
    picks = torch.randint(len(rows), (2000, len(rows)), generator=torch.Generator().manual_seed(0))
    medians = shares[picks].median(dim=1).values.sort().values
    return {
        "engine_ms": statistics.median(row["engine_ms"] for row in rows),
        "server_ms": statistics.median(row["server_ms"] for row in rows),
        "share": float(shares.median()),
        "share_ci": [float(medians[50]), float(medians[-50])],
        "tokens": statistics.median(row["tokens"] for row in rows),
        "runs": rows,
    }


async def turns(plan: Plan, port: int, tokens: int) -> list[dict[str, Any]]:
    """Have a chat of five turns: documents in the first, then questions; what each turn computed of its prompt."""
    messages, found = list(plan.messages[0]), []
    for question in (None, *TURNS):
        if question:
            messages = [*messages, {"role": "user", "content": question}]
        body = {
            "model": NAME,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        answer = checked(await ask(port, body | {"stream_options": {"include_usage": True}}))
        messages = [*messages, {"role": "assistant", "content": answer.texts[0]}]
        origin, prompt = answer.account[0], answer.usage["prompt_tokens"]
        named = {name: count for name, count in origin.items() if name.endswith("_tokens")}
        share = round(origin["computed_tokens"] / prompt, 4)
        found.append(
            {
                "prompt_tokens": prompt,
                **named,
                "computed_share": share,
                "ttft_s": round(answer.ttft_s, 4),
            }
        )
    return found
