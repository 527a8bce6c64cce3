"""KVBoost by its public interface: chunks are warmed as its documentation says, and the clock runs from the call to its first ``on_token``.

Its constructor takes any transformers model; ``from_pretrained`` forces float16 and could not be compared with the others.
"""

from __future__ import annotations

from typing import Any

import torch
from kvboost import KVBoost
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import Clock, save, serve


class Boost:
    """One engine with a recompute strategy; its other settings are its defaults."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(options["model"])
        self.engine = KVBoost(
            model,
            tokenizer,
            max_cache_bytes=4 * 2**30,
            recompute_strategy=options["strategy"],
            device="cpu",
        )

    def begin(self, chunks: list[str], head_text: str, **_: Any) -> dict[str, Any]:
        """Empty the cache, then warm the head and each chunk."""
        self.engine.reset_cache()
        clock = Clock()
        for text in (head_text, *chunks):
            self.engine.warm(text)
        return {"index": clock.read()}

    def answer(
        self, ids: list[int], text: str, count: int, logits: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Time until the first token is handed over; the rest of the answer, and what it stores then, is off the clock."""
        took: dict[str, float] = {}
        clock = Clock()
        result = self.engine.generate(
            text,
            max_new_tokens=count,
            do_sample=False,
            on_token=lambda _: took or took.update(clock.read()),
        )
        save(result.first_token_logits, logits)
        same_ids = self.engine.tokenizer.encode(text) == ids
        said = {"reused": result.cached_tokens, "said_ttft_s": result.ttft_ms / 1e3}
        return {**took, **said, "same_ids": same_ids, "text": result.output_text}


if __name__ == "__main__":
    serve(Boost)
