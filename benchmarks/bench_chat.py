"""What a history saves in a chat over documents, and what it costs in quality, beside stitching the documents again in every turn.

MuSiQue questions over ten chunks of 250 tokens; five turns, the first with the documents. Per turn: the share of the prompt's tokens
that is computed or repaired, and the time to first token, by a full prefill, with reuse of chunks alone, and with histories.
In turn 2: the KL to a full prefill at the first token and over ten tokens of the full prefill's own answer.

    KVRAG_EVAL_MODELS=... KVRAG_EVAL_DATA=... python benchmarks/bench_chat.py [--model NAME] [--count 8] [--threads N]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import items, machine, model_path, parser, write_result

from kvrag import KVRagEngine, StoreConfig
from kvrag.generate.radix_cache import RadixCache
from kvrag.metrics import kl_divergence

FOLLOW_UPS = (
    "Which of the passages says so? Name its subject.",
    "Tell me more about that subject.",
    "Is there another passage that mentions it?",
    "Say all of that again in one sentence.",
)
ANSWER, OWN = 24, 10


def engine(model: str, history_bytes: int) -> KVRagEngine:
    """Load an evaluation model in float32, with so much room for histories; its chunks are kept in memory."""
    return KVRagEngine.from_pretrained(
        model_path(model), dtype="float32", store_config=StoreConfig(history_bytes=history_bytes)
    )


def turns(engines: dict[str, KVRagEngine], messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Hold a chat with all engines: the answers of ``history`` are what the next turns go on with."""
    found, talk = list[dict[str, Any]](), list(messages)
    for turn, question in enumerate(("", *FOLLOW_UPS)):
        if question:
            talk.append({"role": "user", "content": question})
        row: dict[str, Any] = {"turn": turn + 1}
        if turn == 1:
            row |= divergence(engines, talk)
        for name in ("full", "stitch", "history"):
            used = engines["history" if name == "history" else "plain"]
            result = used.generate(
                talk, mode="full" if name == "full" else "stitch", max_new_tokens=ANSWER
            )
            made = (result.repaired_tokens + result.computed_tokens) / result.prompt_tokens
            row[name] = {"ttft_ms": round(result.ttft_ms, 1), "made": round(made, 4)}
            row[name] |= {
                "prompt_tokens": result.prompt_tokens,
                "history_tokens": result.history_tokens,
            }
        talk.append({"role": "assistant", "content": result.text})
        found.append(row)
    return found


def divergence(engines: dict[str, KVRagEngine], talk: list[dict[str, str]]) -> dict[str, Any]:
    """Return KL(full prefill ‖ reuse) in nats, at the first token and in the mean over the full prefill's own answer."""
    own = engines["plain"].generate(talk, mode="full", max_new_tokens=OWN).token_ids
    full = engines["plain"].score(talk, own, mode="full").logits
    found = {}
    for name, used in (("stitch", engines["plain"]), ("history", engines["history"])):
        logits = used.score(talk, own, mode="stitch").logits
        kl = [float(kl_divergence(a, b)) for a, b in zip(full, logits, strict=True)]
        found[name] = {"kl_first": kl[0], "kl_own": statistics.fmean(kl)}
    return {"kl": found}


def copying(used: KVRagEngine, num_tokens: int = 2500, repeats: int = 7) -> dict[str, float]:
    """Return the milliseconds that keeping and copying a history of so many tokens take, and a prefill of them."""
    lm, ids = used.loaded.reusable, list(range(10, 10 + num_tokens))
    kv = lm.buffer(num_tokens)
    for keys, values in kv.layers:
        keys.normal_()
        values.normal_()
    took: dict[str, list[float]] = {"keep": [], "copy": []}
    for _ in range(repeats):
        histories = RadixCache(2**40)
        start = time.perf_counter()
        histories.keep("", ids, kv.layers, num_exact=num_tokens, num_prompt=num_tokens)
        took["keep"].append(time.perf_counter() - start)
        target = lm.buffer(num_tokens)
        start = time.perf_counter()
        past = histories.find("", [*ids, 5])
        assert past is not None
        past.fill(target.layers, num_tokens)
        took["copy"].append(time.perf_counter() - start)
    return {name: round(statistics.median(seconds) * 1e3, 2) for name, seconds in took.items()}


def run(model: str, count: int, threads: int) -> dict[str, Any]:
    """Hold the chats, one per question."""
    torch.set_num_threads(threads)
    engines = {"plain": engine(model, 0), "history": engine(model, 2**32)}
    rows = []
    for number, item in enumerate(items(engines["plain"].tokenizer, count=count)):
        for each in engines.values():
            each.precompute(item.chunks)
        rows.append(turns(engines, item.messages))
        print(f"chat {number + 1} of {count}", flush=True)
    about = {"machine": machine(), "model": model, "answer_tokens": ANSWER}
    return {**about, "copying_2500_ms": copying(engines["plain"]), "chats": rows}


def main() -> None:
    """Run, and write ``results/chat.json``."""
    options = parser(__doc__, count=8, threads=2)
    options.add_argument("--model", default="qwen2.5-coder-0.5b")
    args = options.parse_args()
    print(write_result("chat", run(args.model, args.count, args.threads), args.out))


if __name__ == "__main__":
    main()
