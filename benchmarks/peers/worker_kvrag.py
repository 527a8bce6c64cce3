"""kvrag: its own settings, and published methods as strategies of its engine with chunks encoded alone, as they publish it."""

from __future__ import annotations

from typing import Any

import torch
from worker import Clock, save, serve

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig

PUBLISHED: dict[str, Any] = {"shift": 0.0, "mismatch_ratio": 0.0}
REPAIR: dict[str, RepairConfig] = {
    "default": RepairConfig(),
    "fast": RepairConfig.fast(),
    "10%": RepairConfig(recompute_ratio=0.10),
    "none": RepairConfig(strategy="none"),
    "cacheblend": RepairConfig(strategy="hkvd", recompute_ratio=0.15, first_k=0, **PUBLISHED),
    "epic": RepairConfig(strategy="first_k", recompute_ratio=0.0, first_k=32, **PUBLISHED),
    # Its attention is a sum over rows and heads; here it is the most of them, which chooses better rows (docs/benchmarks.md).
    "prophetkv": RepairConfig(
        strategy="query", recompute_ratio=0.20, first_k=0, probe_span=(0.0, 1.0), **PUBLISHED
    ),
}
"""Ratios and row counts as published; ``mismatch_ratio`` would repair more rows of chunks that were encoded alone."""


class KVRag:
    """One engine; each workload has a folder and a namespace of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self.options, self.engine = options, None
        self.keep = KVRagEngine.from_pretrained(
            options["model"], dtype="float32"
        )  # holds the weights between workloads
        assert self.keep.loaded.reusable

    def begin(self, chunks: list[str], kv_dir: str, **_: Any) -> dict[str, Any]:
        """Open an engine on an own folder, and precompute the chunks unless another process has."""
        if self.engine is not None:
            self.engine.close()
        options, on_miss = self.options, self.options.get("on_miss", "compute")
        self.engine = KVRagEngine.from_pretrained(
            options["model"],
            dtype="float32",
            kv_dir=kv_dir,
            context=options.get("context", "default"),
            repair=REPAIR[options["repair"]],
            store_config=StoreConfig(on_miss=on_miss),
        )
        if on_miss == "store":
            return {"index": None}
        clock = Clock()
        report = self.engine.precompute(chunks, prefix=options.get("prefix"), batch_size=4)
        assert not report.failed, report.failed
        return {"index": clock.read() if report.stored else None, "bytes": report.stored_bytes}

    def answer(
        self,
        ids: list[int],
        segments: list[tuple[str, bool]],
        count: int,
        logits: str | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Time the prefill, then, off the clock, answer if asked to, and store what was missed."""
        prompt = [Chunk(text) if is_chunk else text for text, is_chunk in segments]
        mode, clock = self.options.get("mode", "auto"), Clock()
        result = self.engine.prefill(prompt, mode=mode)
        int(result.logits.argmax())
        took = clock.read()
        save(result.logits, logits)
        store = self.options.get("on_miss") == "store"
        text = ""
        if count > 1 or store:
            text = self.engine.generate(prompt, mode=mode, max_new_tokens=count).text
        self.engine.flush_write_back()
        found = {
            "reused": result.cached_tokens,
            "repaired": result.repaired_tokens,
            "made": result.exactness,
        }
        stages = {name: round(ms, 2) for name, ms in result.timings_ms.items()}
        return {
            **took,
            **found,
            "same_ids": result.prompt_ids == ids,
            "stages_ms": stages,
            "text": text,
        }


if __name__ == "__main__":
    serve(KVRag)
