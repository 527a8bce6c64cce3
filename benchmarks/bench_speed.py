"""What surrounds a prefill: decode steps beside transformers' ``generate``, and precomputing beside plain batched forwards.

Both sides take turns in the same thread, on the same token ids. ``generate`` has a static cache; its steps' time is that of a long answer
less that of a short one. The plain forward is a batch of padded chunks behind the prefix's cache, without logits; nothing of it is stored.

    KVRAG_EVAL_DATA=... python benchmarks/bench_speed.py [--repeats 5] [--threads 2]
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common import items, machine, parser, small_engine, small_model, write_result
from transformers import DynamicCache

from kvrag import KVRagEngine
from kvrag.config import SamplingConfig
from kvrag.generate import sampling
from kvrag.model.rows import Rows

STEPS, FEW = 48, 4
CHUNKS, BATCH = 16, 8


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def decode(engine: KVRagEngine, prompt: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of a decode step, ours and transformers'."""
    model, ids = (
        engine.loaded.lm.model,
        torch.tensor([engine.prefill(prompt, mode="full").prompt_ids]),
    )
    ours, theirs = list[float](), list[float]()

    def generate(count: int) -> float:
        options = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            return seconds(
                lambda: model.generate(
                    ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, **options
                )
            )[0]

    def loop() -> float:
        """The engine's own loop, which doesn't stop at the end of an answer here."""
        lm, encoder = engine.loaded.reusable, engine.loaded.encoder
        buffer = lm.buffer(ids.shape[1] + STEPS)
        logits = lm.forward(ids[0], Rows.span(0, ids.shape[1]), buffer)[0][0, -1]
        start = time.perf_counter()
        answer = sampling.decode(
            lm.extension(buffer, ids.shape[1]),
            logits,
            sampling.Sampler(SamplingConfig(), ids[0].tolist()),
            sampling.TextStream(encoder.decode),
            max_new_tokens=STEPS,
            eos_ids=frozenset(),
            emit=lambda _: None,
            cancel=threading.Event(),
        )
        return (time.perf_counter() - start) / (len(answer.ids) - 1)

    generate(FEW)
    for _ in range(repeats):
        ours.append(loop() * 1e3)
        theirs.append((generate(STEPS) - generate(FEW)) / (STEPS - FEW) * 1e3)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {"tokens": ids.shape[1], "ours_ms": ours, "generate_ms": theirs, "ratio": ratio}


def precompute(engine: KVRagEngine, chunks: list[str], prefix: str, repeats: int) -> dict[str, Any]:
    """Seconds to precompute and store chunks, and of plain forwards over the same tokens."""
    model, encoder = engine.loaded.lm.model, engine.loaded.encoder
    head = torch.tensor([encoder.live_ids(prefix, at_start=True)])
    ids = [list(encoder.chunk_ids(chunk)) for chunk in chunks]

    @torch.inference_mode()
    def plain() -> None:
        for first in range(0, len(ids), BATCH):
            batch = ids[first : first + BATCH]
            width = max(map(len, batch))
            rows = torch.tensor([each + [0] * (width - len(each)) for each in batch])
            cache = DynamicCache()
            model.model(head.expand(len(batch), -1), past_key_values=cache, use_cache=True)
            model.model(rows, past_key_values=cache, use_cache=True)

    def stored() -> None:
        engine.clear()
        report = engine.precompute(chunks, prefix=prefix, batch_size=BATCH)
        assert report.stored >= len(chunks), report

    plain(), stored()
    rounds = [(seconds(plain), seconds(stored)) for _ in range(repeats)]
    wall, cpu = (statistics.median(b[i] / a[i] for a, b in rounds) for i in (0, 1))
    return {"tokens": sum(map(len, ids)), "rounds": rounds, "ratio": wall, "ratio_cpu": cpu}


def main() -> None:
    """Measure both, and write the JSON."""
    args = parser(__doc__, repeats=5, threads=torch.get_num_threads()).parse_args()
    torch.set_num_threads(args.threads)
    memory = small_engine(args.threads)
    found: dict[str, Any] = {"machine": machine(), "model": "SmolLM2-135M-Instruct", "decode": []}
    (item,) = items(memory.tokenizer, count=1)
    for count in (2, 10):
        found["decode"].append(
            decode(memory, "\n\n".join([*item.chunks[:count], item.question]), args.repeats)
        )
        print(found["decode"][-1], flush=True)
    texts = [chunk for each in items(memory.tokenizer, count=2) for chunk in each.chunks][:CHUNKS]
    with tempfile.TemporaryDirectory() as folder:
        engine = KVRagEngine.from_pretrained(small_model(), dtype="float32", kv_dir=folder)
        found["precompute"] = precompute(engine, texts, "Answer by the passages.\n\n", args.repeats)
        engine.close()
    print(found["precompute"], flush=True)
    write_result("speed", found, args.out)


if __name__ == "__main__":
    main()
