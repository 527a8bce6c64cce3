"""Quantised weights as people load them, on a CPU, for the table in docs/support.md: loads, proven, exact, or refused, and why.

Each row loads a tiny model twice, asks for its proof, and compares first-token logits of reuse (every row repaired, chunks moved) with a
full prefill. ``noise`` is how far transformers' own forward is from itself, with the prompt in two parts or eager attention. With
``--model``, an evaluation model is quantised with torchao's int8 weights: processor time of loading, proving, and one blended answer.

    python benchmarks/quantised_weights.py --model qwen2.5-coder-0.5b
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from common import machine, model_path, parser, write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from quantised_kit import GPT_OSS, compressed, fp8_blocks, mxfp4, save_base
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, ModelError, RepairConfig
from kvrag.model.lm import CausalLM
from kvrag.model.load import load
from kvrag.model.plain import PlainLM
from kvrag.model.proof import prove
from kvrag.model.source import ModelSource
from kvrag.testing.tokenizers import tiny_tokenizer

PREFIX = "Read these notes.\n"
CHUNKS = make_chunks(4, words=30)
ORDERS = ((0, 1, 2), (2, 0), (1, 1, 0))
TOLERANCE = 1e-3

Way = tuple[str, str, Callable[[], ModelSource]]
"""Package, words, and the source to load."""


def at_load(base: str) -> Iterator[Way]:
    """Methods that quantise a plain checkpoint while it loads."""

    def torchao(name: str, **options: Any) -> Any:
        from torchao import quantization

        for key, value in options.items():
            if key == "granularity":
                options[key] = getattr(quantization, value[0])(*value[1:])
        return transformers.TorchAoConfig(getattr(quantization, name)(**options))

    def torchao_int(bits: str, group: int) -> Any:
        kind = getattr(torch, bits)
        return torchao("IntxWeightOnlyConfig", weight_dtype=kind, granularity=("PerGroup", group))

    both = "Int8DynamicActivationInt8WeightConfig"
    bnb = transformers.BitsAndBytesConfig
    makers: list[tuple[str, str, Callable[[], Any]]] = [
        ("torchao", "int8 weights", lambda: torchao("Int8WeightOnlyConfig")),
        ("torchao", "int4 weights, groups of 32 (Intx)", lambda: torchao_int("int4", 32)),
        ("torchao", "int4 weights (Int4WeightOnly)", lambda: torchao("Int4WeightOnlyConfig")),
        ("torchao", "fp8 weights", lambda: torchao("Float8WeightOnlyConfig")),
        ("torchao", "int8 weights and activations, per token", lambda: torchao(both)),
        (
            "torchao",
            "int8 weights and activations, per tensor",
            lambda: torchao(both, granularity=("PerTensor",)),
        ),
        ("bitsandbytes", "4 bits, nf4", lambda: bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        ("bitsandbytes", "4 bits, fp4", lambda: bnb(load_in_4bit=True)),
        (
            "bitsandbytes",
            "8 bits, llm_int8_threshold=0.0",
            lambda: bnb(load_in_8bit=True, llm_int8_threshold=0.0),
        ),
        ("bitsandbytes", "8 bits (threshold 6.0)", lambda: bnb(load_in_8bit=True)),
        ("optimum-quanto", "int8 weights", lambda: transformers.QuantoConfig(weights="int8")),
        ("optimum-quanto", "fp8 weights", lambda: transformers.QuantoConfig(weights="float8")),
        ("optimum-quanto", "int4 weights", lambda: transformers.QuantoConfig(weights="int4")),
        ("hqq", "4 bits", lambda: transformers.HqqConfig(nbits=4, group_size=64)),
        ("transformers", "FP8 at load", transformers.FineGrainedFP8Config),
        ("transformers", "FP8 of fbgemm at load", transformers.FbgemmFp8Config),
    ]
    for package, words, make in makers:
        yield (
            package,
            words,
            lambda make=make: ModelSource(base, hf_kwargs={"quantization_config": make()}),
        )


def from_disk(base: str, folder: Path) -> Iterator[Way]:
    """Checkpoints that hold quantised weights."""
    experts = save_base(str(folder / "gpt-oss"), "gpt_oss", **GPT_OSS)
    makers = [
        ("transformers", "FP8 checkpoint, scales per block", lambda at: fp8_blocks(base, at)),
        ("transformers", "MXFP4 checkpoint (gpt-oss)", lambda at: mxfp4(experts, at)),
    ]
    for kind in ("int", "float"):
        for activations in (None, "token", "tensor"):
            words = f"{kind}8 checkpoint" + (f", activations per {activations}" * bool(activations))
            save = compressed(kind, activations)
            makers.append(("compressed-tensors", words, lambda at, save=save: save(base, at)))
    for number, (package, words, make) in enumerate(makers):
        place = str(folder / str(number))
        yield package, words, lambda make=make, place=place: ModelSource(make(place))


def in_memory(base: str) -> Iterator[Way]:
    """Models that the user quantises and passes as objects."""

    def plain() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def dynamic() -> ModelSource:
        model = plain()
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )
        return ModelSource(model, tiny_tokenizer())

    def hqq(bits: int) -> ModelSource:
        from hqq.core.quantize import BaseQuantizeConfig
        from hqq.models.hf.base import AutoHQQHFModel

        model = plain()
        how = BaseQuantizeConfig(nbits=bits, group_size=64)
        AutoHQQHFModel.quantize_model(model, how, compute_dtype=torch.float32, device="cpu")
        return ModelSource(model, tiny_tokenizer())

    yield "torch", "quantize_dynamic, a model in memory", dynamic
    yield "hqq", "8 bits, a model in memory", lambda: hqq(8)
    yield "hqq", "4 bits, a model in memory", lambda: hqq(4)


def measure(make: Callable[[], ModelSource]) -> dict[str, Any]:
    """Load twice, prove, and compare."""
    try:
        source = make()
        loaded = load(source)
    except (ModelError, ImportError, TypeError) as error:
        return {"reuse": "not loaded", "why": str(error)[:400]}
    lm = loaded.lm
    row: dict[str, Any] = {"dtype": str(lm.dtype), "fingerprint_of": _origin(loaded)}
    if isinstance(lm, PlainLM):
        return {**row, "reuse": "refused", "why": lm.refusal}
    assert isinstance(lm, CausalLM)
    proof = prove(lm)
    fingerprint = loaded.fingerprint
    engine = KVRagEngine.from_pretrained(
        lm.model, tokenizer=tiny_tokenizer(), prefix=PREFIX, context=None, prove="off"
    )
    engine.precompute(CHUNKS)
    errors, noises = [], []
    for order in ORDERS:
        asked: list[str | Chunk] = [PREFIX]
        for index in order:
            asked += [Chunk(CHUNKS[index]), "\n\n"]
        asked.append("Who keeps the ledger?")
        repaired = engine.prefill(asked, mode="stitch", repair=RepairConfig(strategy="all"))
        full = engine.prefill(asked, mode="full")
        errors.append(float((repaired.logits - full.logits).abs().max()))
        noises.append(self_noise(lm, full.prompt_ids))
    error, noise = max(errors), max(noises)
    is_stable = loaded.fingerprint == fingerprint
    engine.close()
    verdict = "exact" if max(error, noise) < TOLERANCE else "up to rounding"
    return {
        **row,
        "reuse": verdict,
        "why": "",
        "error": error,
        "noise": noise,
        "proof": proof.passed,
        "same_fingerprint": is_stable and load(_fresh(make)).fingerprint == fingerprint,
    }


def self_noise(lm: CausalLM, token_ids: list[int]) -> float:
    """Measure how far transformers' logits move with the prompt in two parts, or eager attention."""
    ids = torch.tensor([token_ids])
    found = []
    with torch.inference_mode():
        whole = lm.model(ids).logits[0, -1]
        for split in (20, 40, 60):
            first = lm.model(ids[:, :split], use_cache=True)
            key = "cache" if getattr(first, "cache", None) is not None else "past_key_values"
            rest = lm.model(ids[:, split:], **{key: getattr(first, key)}).logits[0, -1]
            found.append(float((rest - whole).abs().max()))
        own = lm.model.config._attn_implementation
        lm.model.set_attn_implementation("eager")
        found.append(float((lm.model(ids).logits[0, -1] - whole).abs().max()))
        lm.model.set_attn_implementation(own)
    return max(found)


def _fresh(make: Callable[[], ModelSource]) -> ModelSource:
    """Return the source for a second load; its directory may exist already."""
    try:
        return make()
    except FileExistsError as error:
        return ModelSource(str(error.filename))


def _origin(loaded: Any) -> str:
    """Return ``files`` or ``tensors``: the origin of the weights' part of the fingerprint."""
    kind = str(loaded.identity._identity.weights).partition(":")[0]
    return {"sha256": "files", "tensors": "tensors"}.get(kind, kind)


def measure_model(name: str) -> dict[str, Any]:
    """Quantise an evaluation model at load: processor time of each step, and an answer."""
    from torchao.quantization import Int8WeightOnlyConfig

    seconds: dict[str, float] = {}

    def timed(step: str, action: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = action()
        seconds[step] = time.process_time() - start
        return found

    config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    options = {"quantization_config": config}
    source = ModelSource(model_path(name), hf_kwargs=options, prove="off")
    loaded = timed("load, quantise and identify", lambda: load(source))
    proof = timed("prove", lambda: prove(loaded.lm))
    engine = KVRagEngine.from_pretrained(
        model_path(name), quantization_config=config, prove="off", prefix=PREFIX, context=None
    )
    fact = "The code of the harbour's gate is 4719. "
    chunks = [CHUNKS[0] + CHUNKS[1], CHUNKS[2] + fact + CHUNKS[3]]
    timed("precompute two chunks", lambda: engine.precompute(chunks))
    asked = [PREFIX, *map(Chunk, reversed(chunks)), "\n\nThe code of the harbour's gate is"]
    answer = timed("answer", lambda: engine.generate(asked, max_new_tokens=6, mode="stitch"))
    full = engine.generate(asked, max_new_tokens=6, mode="full")
    engine.close()
    return {
        "name": name,
        "proof": proof.to_dict(),
        "processor_s": seconds,
        "answer": answer.text,
        "answer_of_a_full_prefill": full.text,
        "cached_tokens": answer.cached_tokens,
        "fingerprint_of": _origin(loaded),
    }


def main() -> None:
    """Measure every row, and write the result."""
    made = parser(__doc__)
    made.add_argument("--model", help="an evaluation model to quantise as well")
    options = made.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVRAG_CACHE_DIR"] = str(Path(folder, "cache"))
        base = save_base(str(Path(folder, "base")))
        for ways in (at_load(base), from_disk(base, Path(folder)), in_memory(base)):
            for package, words, make in ways:
                try:
                    version = importlib.metadata.version(package)
                except importlib.metadata.PackageNotFoundError:
                    version = "not installed"
                row = {"package": package, "version": version, "what": words, **measure(make)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    result: dict[str, Any] = {"machine": machine(), "tolerance": TOLERANCE, "rows": rows}
    if options.model:
        result["model"] = measure_model(options.model)
        print(json.dumps(result["model"]), flush=True)
    write_result("quantised_weights", result, options.out)


if __name__ == "__main__":
    main()
