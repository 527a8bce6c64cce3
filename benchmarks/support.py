"""What is supported, measured: the proof and the promises on every tiny architecture of the tests, for docs/support.md.

Each row runs the proof of :mod:`kvrag.model.proof`, and compares first-token logits of the engine with transformers' own forward: every row
repaired, chunks in any order and repeated; a chunk behind its own prefix; and a chunk moved by more than 1,000 rows and more than its
window. A refused model is asked for the greedy answer, which must be that of ``generate``. Run it once per version of transformers: the
result file keeps one run for each.

    python benchmarks/support.py
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, machine, write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, ModelError, RepairConfig
from kvrag.model import CausalLM
from kvrag.model.plain import PlainLM
from kvrag.model.proof import prove
from kvrag.testing.models import REFUSED, TINY, tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

TOLERANCE = 1e-3
PREFIX = "Read these notes.\n"
CHUNKS = make_chunks(4, words=30)
FAR = make_chunks(10, words=36, seed=7)
ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 0))
EVERY, NONE = RepairConfig(strategy="all"), RepairConfig(strategy="none")

NEVER = {
    "t5": (
        "T5ForConditionalGeneration",
        "encoder-decoder: not a causal LM, so it is not answered either",
    ),
}
"""What is no causal LM; :func:`refuse_by_name` proves that it is said so."""


def prompt(order: tuple[int, ...]) -> list[str | Chunk]:
    """Chunks in an order, with glue between, and a question."""
    parts: list[str | Chunk] = [PREFIX]
    for index in order:
        parts += [Chunk(CHUNKS[index]), "\n\n"]
    return [*parts, "Who keeps the ledger?"]


def distance(engine: KVRagEngine, asked: list[str | Chunk], repair: RepairConfig) -> float:
    """Largest difference of first-token logits between reuse and transformers' own forward of the same ids."""
    result = engine.prefill(asked, mode="stitch", repair=repair)
    assert result.exactness == "exact"
    with torch.inference_mode():
        reference = engine.loaded.lm.text_model(torch.tensor([result.prompt_ids])).logits[0, -1]
    return float((result.logits - reference).abs().max())


def rope_of(lm: CausalLM) -> str:
    """How its keys turn, in words."""
    config = lm.config
    found = getattr(config, "rope_parameters", None) or {}
    sets = [value for value in found.values() if isinstance(value, dict)] or [found]
    turning = [trait for trait in lm.traits if trait.rotation.width]
    if not turning:
        return "none (ALiBi)"
    words = "/".join(dict.fromkeys(str(rope.get("rope_type", "default")) for rope in sets))
    shares = {trait.rotation.width / trait.shape.key_dim for trait in turning}
    if shares != {1.0}:
        words += f", {min(shares):.0%} of the dimensions"
    if any(trait.is_latent for trait in turning):
        words += ", latent attention"
    still = lm.num_layers - len(turning)
    return words + (f", none in {still} of {lm.num_layers} layers" if still else "")


def accepted_row(name: str) -> dict[str, Any]:
    """Measure one architecture of the tests."""
    model = tiny_model(name)
    engine = KVRagEngine.from_pretrained(
        model, tokenizer=tiny_tokenizer(), prefix=PREFIX, context=None, prove="off"
    )
    row: dict[str, Any] = {"architecture": type(model).__name__}
    lm = engine.loaded.lm
    if isinstance(lm, PlainLM):
        return {**row, "reuse": "refused", "why": lm.refusal}
    sizes = {size for trait in lm.traits for size in (trait.reach.window, trait.reach.chunk)}
    row |= {"rope": rope_of(lm), "windows": sorted(size for size in sizes if size is not None)}
    proof = prove(lm)
    model.config._attn_implementation = (
        "eager"  # what the rest is compared with: see kvrag/model/proof.py
    )
    engine.precompute([*CHUNKS, *FAR])
    far: list[str | Chunk] = [PREFIX + "\n\n".join(FAR) + "\n\n", Chunk(CHUNKS[0]), "\n\nWhere?"]
    errors = {
        "proof": proof.max_error,
        "every row repaired": max(distance(engine, prompt(order), EVERY) for order in ORDERS),
        "behind its own prefix": distance(engine, prompt((1,)), NONE),
        "moved far": distance(engine, far, EVERY),
    }
    starts = [s.start for s in engine.explain(far, mode="stitch").spans if s.kind == "chunk"]
    assert starts[-1] > 1000
    is_exact = proof.passed and all(error < TOLERANCE for error in errors.values())
    why = proof.failure or "" if not is_exact else ""
    verdict = {"reuse": "exact" if is_exact else "refused", "why": why, "notes": proof.notes}
    return {**row, **verdict, "errors": errors, "proof_s": proof.seconds}


def refused_row(name: str) -> dict[str, Any]:
    """Check that a refused model answers as transformers does, and note why it is refused."""
    model = tiny_model(name)
    engine = KVRagEngine.from_pretrained(model, tokenizer=tiny_tokenizer())
    answer = engine.generate(prompt((0,)), mode="stitch", max_new_tokens=12)
    ids = torch.tensor([answer.prompt_ids])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ].tolist()
    assert answer.token_ids == plain, f"{name} answers otherwise than transformers"
    assert answer.fallback_reason is not None, f"{name} is accepted now: move it to TINY"
    why = answer.fallback_reason.removeprefix("KV of this model is not reused: ")
    return {
        "architecture": type(model).__name__,
        "reuse": "refused",
        "why": why,
        "answers": "as generate",
    }


def refuse_by_name(name: str) -> dict[str, Any]:
    """Check that what is no causal LM is refused with a sentence."""
    architecture, why = NEVER[name]
    from kvrag.model.plain import check_generates

    try:
        check_generates(transformers.AutoConfig.for_model(name))
    except ModelError:
        return {"architecture": architecture, "reuse": "refused", "why": why, "answers": "no"}
    raise AssertionError(f"{name} should not be taken for a causal LM")


def main() -> None:
    """Measure every row and put them into the result file beside those of other versions."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = {name: accepted_row(name) for name in TINY}
    rows |= {name: refused_row(name) for name in REFUSED}
    rows |= {name: refuse_by_name(name) for name in NEVER}
    path = RESULTS / "support.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    runs[transformers.__version__] = {"machine": machine(), "rows": rows}
    write_result("support", {"tolerance": TOLERANCE, "runs": dict(sorted(runs.items()))})
    exact = [name for name, row in rows.items() if row["reuse"] == "exact"]
    print(
        f"transformers {transformers.__version__}: {len(exact)} exact, {len(rows) - len(exact)} refused"
    )
    for name in TINY:
        if name not in exact:
            print(f"  {name}: {rows[name]['why']} {rows[name].get('errors', '')}")


if __name__ == "__main__":
    main()
