"""llama-cpp-python with its prompt cache in memory, on the GGUF file as it is.

It takes token ids; the clock stops when the first logits are there.
"""

from __future__ import annotations

from typing import Any

from llama_cpp import Llama, LlamaRAMCache, LogitsProcessorList
from worker import Clock, serve, shared_prefix


class LlamaCpp:
    """One context, and the states of earlier prompts."""

    def __init__(self, options: dict[str, Any]) -> None:
        threads = options["threads"]
        self.llama = Llama(
            options["gguf"], n_ctx=8192, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def begin(self, **_: Any) -> dict[str, Any]:
        """Forget everything."""
        self.llama.reset()
        self.llama.set_cache(LlamaRAMCache())
        return {"index": None}

    def answer(self, ids: list[int], count: int, **_: Any) -> dict[str, Any]:
        """Time until the first logits are there, and decode greedily."""
        took: dict[str, float] = {}
        kept = [
            self.llama._input_ids[: self.llama.n_tokens].tolist(),
            *map(list, self.llama.cache.cache_state),
        ]
        reused = max(shared_prefix(known, ids) for known in kept)
        clock = Clock()

        def first(_: Any, scores: Any) -> Any:
            if not took:
                took.update(clock.read())
            return scores

        done = self.llama.create_completion(
            ids,
            max_tokens=count,
            temperature=0.0,
            repeat_penalty=1.0,
            logits_processor=LogitsProcessorList([first]),
        )
        return {**took, "reused": min(reused, len(ids) - 1), "text": done["choices"][0]["text"]}

    def steps(self, ids: list[int], count: int) -> dict[str, Any]:
        """Prefill a prompt, then decode steps: seconds by the wall and of the processor."""
        self.llama.reset()
        clock = Clock()
        self.llama.eval(ids)
        took = {"prefill": [*clock.read().values()]}
        clock = Clock()
        for _ in range(count):
            self.llama.eval(ids[:1])
        took["step"] = [seconds / count for seconds in clock.read().values()]
        return took


if __name__ == "__main__":
    serve(LlamaCpp)
