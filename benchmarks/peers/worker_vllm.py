"""vLLM with its prefix cache, by its offline interface, in this process: its engine counts as ours do.

The clock stops when a request of one token is answered; the first token's distribution and the answer come from further requests.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import numpy as np
from vllm import LLM, SamplingParams
from worker import Clock, save, serve

GREEDY = {"temperature": 0.0}


class VLLM:
    """One engine; blocks of earlier prompts stay in its cache."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['threads'] - 1}"
        self.llm = LLM(
            options["model"],
            dtype="float32",
            enable_prefix_caching=True,
            max_model_len=8192,
            max_num_seqs=2,
            max_logprobs=-1,
        )

    def begin(self, **_: Any) -> dict[str, Any]:
        """Forget all prompts."""
        assert self.llm.reset_prefix_cache()
        return {"index": None}

    def ask(self, ids: list[int], **options: Any) -> Any:
        """Return the output of one greedy request."""
        prompt = {"prompt_token_ids": ids}
        return self.llm.generate([prompt], SamplingParams(**GREEDY, **options), use_tqdm=False)[0]

    def answer(
        self, ids: list[int], count: int, logits: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Time a request of one token; then ask for the rest and for the logarithms of all probabilities."""
        clock = Clock()
        first = self.ask(ids, max_tokens=1)
        took = clock.read()
        if logits:
            found = self.ask(ids, max_tokens=1, logprobs=-1).outputs[0].logprobs[0]
            whole = np.full(max(found) + 1, -np.inf, dtype=np.float32)
            for token, each in found.items():
                whole[token] = each.logprob
            save(whole, logits)
        text = self.ask(ids, max_tokens=count).outputs[0].text
        return {**took, "reused": first.num_cached_tokens, "text": text}


if __name__ == "__main__":
    serve(VLLM)
