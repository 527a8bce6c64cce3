"""What the examples share: where the small real models and documents lie, and how answers are printed side by side.

Nothing here concerns a framework. In your application, the paths below are names of models on the hub and folders of your own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.parts import example_corpus, packaged_embeddings, packaged_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MODEL = os.environ.get("KVRAG_MODEL") or str(packaged_model())
"""SmolLM2-135M-Instruct, a GGUF file inside a package; the environment variable ``KVRAG_MODEL`` names another model."""

EMBEDDINGS = str(packaged_embeddings())
"""all-MiniLM-L6-v2, inside a package."""

HANDBOOK = example_corpus() / "11-harbour-archive-handbook.md"
"""The handbook of an invented library: questions about it can't be answered from a model's memory."""

KV_DIR = Path(".kvrag-examples")
"""Where KV is kept between runs, in the working directory."""


def show(question: str, **sides: tuple[Any, Mapping[str, Any]]) -> None:
    """Print how a question was answered: a line per side, from the answer and kvrag's account of how it was made."""
    print(f"\n{question}")
    for name, (answer, made) in sides.items():
        total = made["cached_tokens"] + made["repaired_tokens"] + made["computed_tokens"]
        reused = f"{made['cached_tokens']} of {total} tokens reused"
        first = f"first token after {made['ttft_ms']:,.0f} ms"
        print(
            f"  {name:<6} {first:<28} {made['exactness']:<9} {reused:<26} {' '.join(str(answer).split())}"
        )
