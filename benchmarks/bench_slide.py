"""Perplexity of a long text in a small window: a window that slides, with and without sinks, against ways of truncation.

The text is MuSiQue passages in a row. Each method predicts the same tokens, those from the second window on, from at most ``--window``
tokens before:

* ``slide``: attention sinks and a sliding window (:class:`kvrag.blend.slide.SlidingWindow`), what ``max_context="slide"`` does;
* ``no sinks``: the same, but that the first rows leave like others;
* ``truncate, half``: when the window is full, its second half is computed again from scratch, and the text goes on from there;
* ``truncate, last``: each piece of a quarter of the window is predicted behind the latest three quarters, computed anew for it.

    KVRAG_EVAL_DATA=... python benchmarks/bench_slide.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import eval_data, machine, parser, small_engine, write_result

from kvrag.blend.slide import BLOCKS, SINKS, SlidingWindow
from kvrag.model import CausalLM
from kvrag.model.rows import Rows

Losses = list[torch.Tensor]


def text_ids(tokenizer: Any, count: int) -> torch.Tensor:
    """The first ``count`` tokens of the passages, each once, in the order of the file."""
    passages = dict.fromkeys(passage["text"] for row in eval_data() for passage in row["ctxs"])
    ids: list[int] = [tokenizer.bos_token_id]
    for passage in passages:
        ids += tokenizer(passage + "\n\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            break
    return torch.tensor(ids[:count])


def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each target."""
    return F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").cpu()


def slide(lm: CausalLM, ids: torch.Tensor, window: int, sinks: int) -> tuple[Losses, int]:
    """Feed pieces to a window; also return how many rows left it."""
    sliding, found, step = SlidingWindow(lm, lm.buffer(window), sinks=sinks), [], window // BLOCKS
    sliding.prefill(ids[:window])
    for start in range(window, len(ids) - 1, step):
        piece = ids[start : start + step + 1]
        found.append(losses(sliding(piece[:-1]), piece[1:]))
    return found, sliding.evicted_tokens


def truncate(lm: CausalLM, ids: torch.Tensor, window: int, kept: int) -> tuple[Losses, int]:
    """Predict pieces of ``window - kept`` tokens behind the ``kept`` tokens before them, computed anew for each piece."""
    found, step = [], window - kept
    for start in range(window, len(ids) - 1, step):
        piece, num_scored = ids[start - kept : start + step + 1], min(step, len(ids) - 1 - start)
        rows = Rows.span(0, len(piece) - 1)
        logits, _ = lm.forward(piece[:-1], rows, lm.buffer(rows.stop), logits=num_scored)
        found.append(losses(logits[0], piece[-num_scored:]))
    return found, 0


METHODS: dict[str, Callable[[CausalLM, torch.Tensor, int], tuple[Losses, int]]] = {
    "slide": lambda lm, ids, window: slide(lm, ids, window, SINKS),
    "no sinks": lambda lm, ids, window: slide(lm, ids, window, 0),
    "truncate, half": lambda lm, ids, window: truncate(lm, ids, window, window // 2),
    "truncate, last": lambda lm, ids, window: truncate(lm, ids, window, window - window // BLOCKS),
}


@torch.inference_mode()
def measure(lm: CausalLM, ids: torch.Tensor, window: int, method: str) -> dict[str, Any]:
    """Perplexity over all scored tokens and over each quarter of them, and scored tokens per second."""
    start = time.perf_counter()
    found, evicted = METHODS[method](lm, ids, window)
    seconds, all_losses = time.perf_counter() - start, torch.cat(found)
    quarters = [math.exp(float(part.mean())) for part in all_losses.chunk(4)]
    return {
        "perplexity": math.exp(float(all_losses.mean())),
        "quarters": quarters,
        "scored_tokens": len(all_losses),
        "evicted_tokens": evicted,
        "tokens_per_s": len(all_losses) / seconds,
    }


def main() -> None:
    """Measure every method on one text."""
    args = parser(__doc__, tokens=20_000, window=1024, threads=1).parse_args()
    engine = small_engine(args.threads)
    lm, ids = engine.loaded.reusable, text_ids(engine.tokenizer, args.tokens)
    result = {
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct",
        "tokens": len(ids),
        "window": args.window,
    }
    rows: dict[str, Any] = {}
    for method in METHODS:
        rows[method] = measure(lm, ids, args.window, method)
        print(method, rows[method], flush=True)
        write_result("slide", result | {"sinks": SINKS, "methods": rows}, args.out)


if __name__ == "__main__":
    main()
