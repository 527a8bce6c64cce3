"""Fixtures for the tables of chains: what was reused for each request, whichever framework made it."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

import kvrag.blend.prefill
import kvrag.generate.pipeline
from kvrag import KVRagEngine


@dataclass
class Requests:
    """What the engines were asked: the text of each prompt, and how many chunks' KV was put into it."""

    prompts: list[str] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)


@pytest.fixture
def requests(monkeypatch):
    """All requests of this test, in the order of their ends."""
    seen, mine = Requests(), threading.local()
    prefill, stitch = kvrag.generate.pipeline.prefill, kvrag.blend.prefill.stitch

    def stitching(buffer: Any, layout: Any, *args: Any, **options: Any) -> None:
        mine.chunks = sum(segment.kind == "chunk" for segment in layout.reused)
        stitch(buffer, layout, *args, **options)

    def prefilling(model: Any, store: Any, plan: Any, **options: Any) -> Any:
        mine.chunks = 0
        done = prefill(model, store, plan, **options)
        seen.prompts.append("".join(piece.piece.text for piece in plan.pieces))
        seen.reused.append(mine.chunks)
        return done

    monkeypatch.setattr(kvrag.blend.prefill, "stitch", stitching)
    monkeypatch.setattr(kvrag.generate.pipeline, "prefill", prefilling)
    return seen


@pytest.fixture(scope="module", autouse=True)
def _no_shared_engines():
    """Close the engines that a module made: they are process-wide and would live on."""
    before = set(KVRagEngine._shared.values())
    yield
    for engine in set(KVRagEngine._shared.values()) - before:
        engine.close()
