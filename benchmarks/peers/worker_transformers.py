"""transformers: a full prefill with its own SDPA attention, or behind the longest prefix that it has kept of an earlier prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from worker import Clock, save, serve, shared_prefix

KEPT = 8  # prompts whose KV is kept, besides the head of the chat template


class Transformers:
    """One model, and the KV of the latest prompts if ``keeps``."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.float32
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(options["model"])
        self.keeps = options["keeps"]
        self.kept: list[tuple[list[int], DynamicCache]] = []

    def begin(self, head: list[int], **_: Any) -> dict[str, Any]:
        """Forget all prompts, and prefill the head that all prompts of a workload begin with."""
        clock, self.kept = Clock(), []
        if self.keeps:
            self.prefill(head)
        return {"index": clock.read() if self.keeps else None}

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[torch.Tensor, int]:
        """Return the logits of the first token and how many tokens were reused."""
        known, found = max(
            self.kept, key=lambda kept: shared_prefix(kept[0], ids), default=([], None)
        )
        reused = min(shared_prefix(known, ids), len(ids) - 1)
        self.cache = DynamicCache()
        if found is not None and reused:
            for index, layer in enumerate(found.layers):
                self.cache.update(layer.keys[:, :, :reused], layer.values[:, :, :reused], index)
        rest = torch.tensor([ids[reused:]])
        logits = self.model(
            rest, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[0, -1]
        if self.keeps:
            self.kept = [*self.kept[:1], *self.kept[1:][-(KEPT - 1) :], (ids, self.cache)]
        return logits, reused

    @torch.inference_mode()
    def answer(
        self, ids: list[int], count: int, logits: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Time the first token, then decode greedily."""
        clock = Clock()
        first, reused = self.prefill(ids)
        out = [int(first.argmax())]
        took = clock.read()
        save(first, logits)
        while len(out) < count and out[-1] != self.tokenizer.eos_token_id:
            step = self.model(torch.tensor([out[-1:]]), past_key_values=self.cache, use_cache=True)
            out.append(int(step.logits[0, -1].argmax()))
        return {
            **took,
            "reused": reused,
            "text": self.tokenizer.decode(out, skip_special_tokens=True),
        }


if __name__ == "__main__":
    serve(Transformers)
