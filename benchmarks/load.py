"""Load on real servers over sockets: kvrag's with reuse and without, and ``transformers serve``, on the same weights and prompts.

    KVRAG_EVAL_DATA=... python benchmarks/load.py                        # all parts, about twenty minutes on two quiet cores
    python benchmarks/load.py --only kvrag,full                          # these parts anew; the others stay as they were
    python benchmarks/load.py --only transformers-batching               # not among the parts that run by themselves
    python benchmarks/load.py --model qwen2.5-coder-0.5b --only kvrag,full,transformers    # a larger model, fewer levels
    python benchmarks/load.py --quick --out build/load                   # tiny model, few requests: does everything run?

Each server is a process of its own, and the client another. Two ways of asking, the same for all servers, with the same seeds:

* **closed**, 1 to 32 clients: each sends its next request as soon as its answer has ended.
* **open**, 0.5 to 4 requests a second: arrivals are Poisson and wait for no answer; times count from when a request was due.

Servers take turns level by level, so that a change of the machine meets all of them. What is asked once by one client is the single run
that every other answer of that server is compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, SMALL, eval_data, machine, model_path, small_model, write_result
from load_client import Answer, Server, ask, quantiles
from load_figures import figures
from peers.workloads import Words, reordered_rag

PARTS = ("kvrag", "full", "transformers", "transformers-batching", "figures")
BY_THEMSELVES = ("kvrag", "full", "transformers", "figures")
NAME = "load"
QUESTION = "Answer the question after reading the passages, in three long sentences."


@dataclass(frozen=True)
class Level:
    """A way of asking: so many clients, or a rate of arrivals, and the number of requests."""

    kind: str
    size: float
    requests: int

    @property
    def name(self) -> str:
        """How it is called in the results."""
        return f"{self.size:g} clients" if self.kind == "closed" else f"{self.size:g} requests/s"


LEVELS = (
    *(
        Level("closed", clients, count)
        for clients, count in ((1, 12), (2, 8), (4, 8), (8, 24), (16, 16), (32, 32))
    ),
    *(Level("open", rate, 16) for rate in (0.5, 1, 2, 4)),
)
FEW = tuple(level for level in LEVELS if level.name in ("1 clients", "8 clients"))
LARGER = (Level("closed", 1, 12), Level("closed", 4, 8), Level("closed", 8, 16))
"""Levels of models that take longer for a prompt."""
QUICK = (Level("closed", 1, 3), Level("closed", 4, 4), Level("open", 20, 4))


@dataclass(frozen=True)
class Plan:
    """What is asked: a directory of weights, chat messages, the chunks in them, and how long answers may be."""

    model: str
    messages: list[list[dict[str, str]]]
    chunks: list[str]
    max_tokens: int
    levels: tuple[Level, ...]

    def body(self, part: str, prompt: int) -> dict[str, Any]:
        """Return the request for one of the prompts."""
        body = {
            "model": NAME,
            "messages": self.messages[prompt],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        body |= {"stream": True}
        if part.startswith("transformers"):
            return body | {"model": self.model}
        reuse = {"kvrag": {"mode": "full"}} if part == "full" else {}
        return body | {"stream_options": {"include_usage": True}, **reuse}


def saved_small_model(folder: Path) -> str:
    """Save SmolLM2 as a directory in float32; returns its path."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(small_model())
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.config.__dict__.pop(
        "quantization_config", None
    )  # it is float32 now, and can be saved as such
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def real_plan(folder: Path, model: str) -> Plan:
    """Plan prompts of ten chunks of 250 tokens, the popular chunks in many of them, for a model."""
    from transformers import AutoTokenizer

    path = saved_small_model(folder) if model == SMALL else model_path(model)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def render(messages: list[dict[str, str]]) -> str:
        return str(messages[0]["content"])

    def ids(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    rag = reordered_rag(eval_data()[:24], Words(ids, tokenizer.decode, render), 12, 0, 10)
    texts = [
        prompt.text.replace(
            "Answer the question after reading the passages, within 5 words.", QUESTION
        )
        for prompt in rag.prompts
    ]
    return Plan(
        path,
        [[{"role": "user", "content": text}] for text in texts],
        rag.used,
        32,
        LEVELS if model == SMALL else LARGER,
    )


def tiny_plan(folder: Path) -> Plan:
    """Make a random model and prompts of random words: to see that everything runs."""
    from kvrag.testing.models import save_tiny_model

    words, rng = (
        ["river", "stone", "letter", "harbour", "winter", "lamp", "ledger", "garden", "copper"],
        random.Random(0),
    )
    chunks = [" ".join(rng.choices(words, k=30)) for _ in range(6)]
    messages = [
        [{"role": "user", "content": "\n".join([*rng.sample(chunks, 3), "Which one?"])}]
        for _ in range(3)
    ]
    return Plan(save_tiny_model(folder / "model"), messages, chunks, 8, QUICK)


def start(part: str, plan: Plan, folder: Path) -> Server:
    """Start the server of a part, on a port that is free."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / f"{part}.log"
    if part.startswith("transformers"):
        command = [
            str(Path(sys.executable).with_name("transformers")),
            "serve",
            plan.model,
            "--device",
            "cpu",
        ]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", "0"]
        return Server(
            [*command, *(["--continuous-batching"] if part.endswith("batching") else [])], log, env
        )
    command = [
        sys.executable,
        "-m",
        "kvrag",
        "serve",
        plan.model,
        "--dtype",
        "float32",
        "--port",
        "0",
    ]
    return Server([*command, "--model-name", NAME, "--kv-dir", str(folder / "kv")], log, env)


async def run_level(
    part: str, plan: Plan, port: int, level: Level
) -> tuple[list[tuple[int, float, Answer]], int]:
    """Send a level's requests; returns prompt, time it was due and answer of each, and how many were open at once."""
    rng = random.Random(f"{level.kind} {level.size}")
    prompts = [index % len(plan.messages) for index in range(level.requests)]
    if level.size > 1 or level.kind == "open":
        rng.shuffle(prompts)
    done: list[tuple[int, float, Answer]] = []
    at_once = most = 0

    async def one(prompt: int, due: float) -> None:
        nonlocal at_once, most
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        at_once, most = at_once + 1, max(most, at_once + 1)
        answer = await ask(port, plan.body(part, prompt))
        at_once -= 1
        done.append((prompt, due if level.kind == "open" else answer.sent, answer))

    if level.kind == "open":
        due, tasks = time.perf_counter(), []
        for prompt in prompts:
            due += rng.expovariate(level.size)
            tasks.append(asyncio.create_task(one(prompt, due)))
        await asyncio.gather(*tasks)
        return done, most
    left = iter(prompts)

    async def client() -> None:
        for prompt in left:
            await one(prompt, 0.0)

    await asyncio.gather(*(client() for _ in range(int(level.size))))
    return done, most


def judged(
    level: Level,
    part: str,
    found: tuple[list[tuple[int, float, Answer]], int],
    singles: dict[int, str],
) -> dict[str, Any]:
    """Make figures of a level's answers; ``singles`` gets the answers of the first level, which one client asked for."""
    done, most = found
    good = [each for each in done if each[2].is_done and each[2].status == 200 and each[2].pieces]
    if level.kind == "closed" and level.size == 1:
        singles.update({prompt: answer.texts[0] for prompt, _, answer in good})
    raw = []
    for prompt, due, answer in good:
        origin = (answer.account or [{}])[0]
        raw.append(
            {
                "prompt": prompt,
                "ttft_s": round(answer.pieces[0] - due, 4),
                "total_s": round(answer.ended - due, 4),
                "tokens": [answer.usage.get("prompt_tokens", 0), answer.tokens],
                "computed": origin.get("computed_tokens"),
                "exactness": origin.get("exactness"),
                "equal": singles.get(prompt) == answer.texts[0],
                "gaps_ms": " ".join(f"{gap:.1f}" for gap in answer.gaps_ms),
            }
        )
    wall = max(a.ended for *_, a in done) - min(due for _, due, _ in done)
    if part == "full" and any(row["computed"] != row["tokens"][0] for row in raw):
        sys.exit("reuse was not off: an answer did not compute its whole prompt")
    return {
        "kind": level.kind,
        "size": level.size,
        "commit": machine()["commit"],
        "requests": level.requests,
        "failed": [
            answer.error or f"status {answer.status}" for *_, answer in done if not answer.is_done
        ],
        "open_at_once": most,
        "wall_s": round(wall, 3),
        "requests_per_s": round(len(good) / wall, 4),
        "tokens_per_s": round(sum(a.tokens for *_, a in good) / wall, 3),
        "ttft_s": quantiles([row["ttft_s"] for row in raw]),
        "gap_ms": quantiles([gap for *_, a in good for gap in a.gaps_ms]),
        "equal": sum(row["equal"] for row in raw),
        "raw": raw,
    }


def waited(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Mean seconds that requests waited for their turn, as kvrag's own metrics say."""
    total, count = (
        after.get(f"kvrag_request_queue_time_seconds_{n}", 0)
        - before.get(f"kvrag_request_queue_time_seconds_{n}", 0)
        for n in ("sum", "count")
    )
    return round(total / count, 4) if count else None


def tell(part: str, level: Level, row: dict[str, Any]) -> None:
    """Print a level's figures in a line."""
    rates = f"TTFT p50 {row['ttft_s'].get('p50', 0):.2f} s, p95 {row['ttft_s'].get('p95', 0):.2f} s, {row['tokens_per_s']:.1f} tokens/s"
    failed = f", FAILED: {row['failed'][0]}" if row["failed"] else ""
    print(
        f"{level.name:>14}, {part}: {rates}, {row['equal']} of {level.requests} equal{failed}",
        flush=True,
    )


def measure(
    parts: list[str], plan: Plan, folder: Path, known: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Start the servers, go through the levels, and yield all results so far after each of them; ``known`` rows of the other kind stay."""
    with ExitStack() as stack:
        servers = {part: stack.enter_context(start(part, plan, folder)) for part in parts}
        old = {
            part: known.get(part, {"levels": [], "singles": [], "peak_bytes": 0}) for part in parts
        }
        kinds = {level.kind for level in plan.levels}
        levels = {
            part: [row for row in found["levels"] if row["kind"] not in kinds]
            for part, found in old.items()
        }
        singles = {
            part: {i: text for i, text in enumerate(found["singles"]) if text}
            for part, found in old.items()
        }
        for (
            part,
            server,
        ) in servers.items():  # one that is not measured: buffers grow, kernels are chosen
            warm = plan.body(part, 0) | {
                "messages": [{"role": "user", "content": "\n".join(plan.chunks[:2])}]
            }
            asyncio.run(ask(server.port, warm))
        idle = {part: server.size() for part, server in servers.items()}
        for level in plan.levels:
            for part, server in servers.items():
                if part.endswith("batching") and level not in FEW + QUICK:
                    continue
                before = server.metrics() if not part.startswith("transformers") else {}
                row = judged(
                    level,
                    part,
                    asyncio.run(run_level(part, plan, server.port, level)),
                    singles[part],
                )
                if before:
                    row["queue_s"] = waited(before, server.metrics())
                levels[part].append(row)
                tell(part, level, row)
            yield {
                part: {
                    "machine": machine(),
                    "idle_bytes": idle[part]["rss"],
                    "peak_bytes": max(server.size()["peak"], old[part]["peak_bytes"]),
                    "singles": [singles[part].get(prompt) for prompt in range(len(plan.messages))],
                    "levels": levels[part],
                }
                for part, server in servers.items()
            }


def agreement(parts: dict[str, Any]) -> dict[str, list[int]]:
    """Count equal single answers of each pair of servers."""
    names = [part for part in parts if part != "figures"]
    pairs = ((a, b) for index, a in enumerate(names) for b in names[index + 1 :])
    both = {
        f"{a} and {b}": list(zip(parts[a]["singles"], parts[b]["singles"], strict=True))
        for a, b in pairs
    }
    return {name: [sum(x == y for x, y in texts), len(texts)] for name, texts in both.items()}


def precompute(plan: Plan, folder: Path) -> None:
    """Fill the store that the servers open."""
    from kvrag import KVRagEngine

    engine = KVRagEngine.from_pretrained(plan.model, dtype="float32", kv_dir=folder / "kv")
    report = engine.precompute(plan.chunks)
    engine.close()
    print(f"precomputed {report.stored} chunks, {report.stored_bytes / 1e6:.0f} MB", flush=True)


def main() -> None:
    """Run the parts asked for, and write what is found after each level."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(BY_THEMSELVES), help=f"parts, with commas: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--kind",
        choices=("closed", "open"),
        help="ask in this way alone; rows of the other one stay",
    )
    parser.add_argument(
        "--model", default=SMALL, help="SmolLM2, or a model of $KVRAG_EVAL_MODELS at fewer levels"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny model and few requests: no measurement"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if wrong := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    if args.quick and args.out == RESULTS:
        parser.error("--quick measures nothing; give it a folder with --out")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    name = "load" if args.model == SMALL else f"load-{args.model}"
    path = args.out / f"{name}.json"
    known: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvrag-load-") as temporary:
        folder = Path(temporary)
        plan = tiny_plan(folder) if args.quick else real_plan(folder, args.model)
        plan = replace(
            plan, levels=tuple(level for level in plan.levels if args.kind in (None, level.kind))
        )
        precompute(plan, folder)

        def write(found: dict[str, Any]) -> None:
            known.update(found)
            prompts = {
                "prompts": len(plan.messages),
                "chunks": len(plan.chunks),
                "max_tokens": plan.max_tokens,
            }
            kept = {part: known[part] for part in PARTS if part in known}
            whole = {
                "machine": machine(),
                "model": "tiny" if args.quick else args.model,
                "dtype": "float32",
            }
            write_result(
                name, whole | prompts | {"agreement": agreement(kept), "parts": kept}, args.out
            )

        if servers := [part for part in chosen if part != "figures"]:
            for found in measure(servers, plan, folder, known if args.kind else {}):
                write(found)
        if "figures" in chosen:
            with start("kvrag", plan, folder) as server:
                write(
                    {
                        "figures": {
                            "machine": machine(),
                            **figures(plan, server, folder, is_quick=args.quick),
                        }
                    }
                )
    minutes = (time.monotonic() - start_s) / 60
    failed = sum(
        len(level["failed"]) for part in known.values() for level in part.get("levels", ())
    )
    print(f"{minutes:.1f} minutes; written: {path.name}; failed requests: {failed}")
    if failed:
        sys.exit("requests failed")


if __name__ == "__main__":
    main()
