"""Random tiny models, prompts and repairs: what is labelled exact must be what transformers computes. No wrong answer goes unlabelled.

``make fuzz`` runs 5,000 cases and writes benchmarks/results/fuzz.json; ``make test-all`` runs 300, ``make test`` 60. A case is
made by its number alone, so a failing one is run again by the line that its message gives.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import WORDS

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig
from kvrag.config import STRATEGIES
from kvrag.model import CausalLM
from kvrag.model.lock import text_model_of
from kvrag.testing.models import TINY, tiny_model

CASES = int(os.environ.get("KVRAG_FUZZ_CASES", "300"))
SEED = int(os.environ.get("KVRAG_FUZZ_SEED", "0"))
ONLY = os.environ.get("KVRAG_FUZZ_ONLY")
JSON = os.environ.get("KVRAG_FUZZ_JSON")

CASES_PER_MODEL = 6
QUICK_MODELS = 10
TOLERANCE = 1e-3
PREFIX, OTHER_PREFIX = "Read these notes.\n", "Notes follow here.\n"

_FREE = "llama mistral qwen2 qwen3 gemma gemma2 granite mixtral olmo2 starcoder2 qwen3_moe".split()  # noqa: SIM905
"""Architectures whose layers, heads and head dims may be anything."""

_ROPES: list[dict[str, Any]] = [
    {},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
]


@dataclass
class Summary:
    """What the cases of this run came to."""

    largest: float = 0.0
    cases: int = 0
    failed: int = 0
    comparisons: int = 0
    ties: int = 0
    """Comparisons without a result, because transformers differs as much from itself; see :meth:`World.is_tied`."""
    seconds: float = 0.0
    by_model: Counter[str] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def summary():
    """Count over all cases; written as JSON where asked for."""
    made = Summary()
    yield made
    if JSON and ONLY is None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        from common import machine, write_result

        values = {"seed": SEED, "tolerance": TOLERANCE, **vars(made)}
        counters = {
            name: dict(sorted(v.items())) for name, v in values.items() if isinstance(v, Counter)
        }
        write_result("fuzz", {"machine": machine(), **values, **counters})


def model_options(name: str, draw: random.Random) -> dict[str, Any]:
    """Config options of a random model of an architecture."""
    options: dict[str, Any] = {"model_type": name, **TINY[name]}
    if name not in _FREE:
        return options
    kv_heads = draw.choice([1, 2, 4])
    options |= {
        "hidden_size": 96,  # some architectures insist that it is a multiple of the heads
        "num_hidden_layers": draw.randint(1, 3),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw.choice([1, 2, 3]),
        "head_dim": draw.choice([8, 16, 24]),
    }
    if "sliding_window" in options:
        options["sliding_window"] = draw.choice([5, 16, 33, 70, 300])
    if "rope_parameters" not in options and (rope := draw.choice(_ROPES)):
        options["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    return options


def words(draw: random.Random, low: int, high: int) -> str:
    """Some words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


@contextmanager
def moved_embeddings(model: Any, seed: int) -> Iterator[None]:
    """Move every embedding by one unit in the last place, up or down."""
    random_signs = torch.Generator().manual_seed(seed)

    def move(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, output.shape, generator=random_signs) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


class World:
    """One random model with its store and its chunks."""

    def __init__(self, number: int, tokenizer: Any) -> None:
        draw = random.Random(f"{SEED}/world/{number}")
        names = sorted(TINY)
        random.Random(f"{SEED}/order/{number // len(names)}").shuffle(names)
        self.name = names[number % len(names)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TINY, "fuzz", model_options(self.name, draw))
            self.model = tiny_model("fuzz", seed=draw.randrange(10**6))
        self.model.config._attn_implementation = "eager"  # the reference: see kvrag/model/proof.py
        self.engine = KVRagEngine.from_pretrained(
            self.model,
            tokenizer=tokenizer,
            prefix=PREFIX,
            store_config=StoreConfig(min_chunk_tokens=1),
        )
        assert isinstance(self.engine.loaded.lm, CausalLM), (
            f"{self.name} is refused: {self.engine.loaded.lm.refusal}"
        )
        self.chunks = [f"{i}: {words(draw, 1, 40)}." for i in range(5)]
        self.engine.precompute(self.chunks, batch_size=draw.choice([1, 2, 5]))

    def prompt(self, draw: random.Random) -> list[str | Chunk]:
        """Chunks in any order, some of them twice, behind the right prefix, another one or none, with and without glue."""
        prompt: list[str | Chunk] = [draw.choice([PREFIX, PREFIX, OTHER_PREFIX, ""])]
        for _ in range(draw.randint(1, 6)):
            prompt += [
                Chunk(draw.choice(self.chunks)),
                draw.choice(["", "\n", "\n\n", f"\n{words(draw, 1, 5)}\n"]),
            ]
        return [part for part in [*prompt, words(draw, 1, 8)] if part != ""]

    def reference(self, ids: list[int]) -> torch.Tensor:
        """Transformers' own logits of the last token."""
        with torch.inference_mode():
            return text_model_of(self.model)(torch.tensor([ids])).logits[0, -1]

    def is_tied(self, ids: list[int], expected: torch.Tensor) -> bool:
        """Whether transformers differs from itself as much when embeddings are moved by one unit in the last place.

        A row that two experts would take with equal right goes to the one or the other for a rounding, and is another row then.
        """
        for seed in range(16):
            with moved_embeddings(self.model, seed):
                if float((self.reference(ids) - expected).abs().max()) > TOLERANCE:
                    return True
        return False


def run_case(number: int, world: World, summary: Summary) -> None:
    """Compare one prompt's results, in every mode and with one random repair, with transformers' own forward."""
    draw = random.Random(f"{SEED}/case/{number}")
    prompt, shift, first_k = (
        world.prompt(draw),
        draw.choice([0.0, 0.5, 1.0]),
        draw.choice([0, 1, 4]),
    )
    strategy = draw.choice(STRATEGIES)
    thorough = draw.choice([s for s in STRATEGIES if s != "none"])
    every = RepairConfig(thorough, recompute_ratio=1.0, first_k=first_k, shift=shift)
    some = RepairConfig(
        strategy, recompute_ratio=draw.choice([0.0, 0.05, 0.3, 0.9]), first_k=first_k, shift=shift
    )
    again = f"KVRAG_FUZZ_SEED={SEED} KVRAG_FUZZ_ONLY={number} python -m pytest tests/engine/test_fuzz.py"
    expected: torch.Tensor | None = None
    for mode, repair in (("stitch", every), ("prefix", None), ("stitch", some), ("auto", some)):
        result = world.engine.prefill(prompt, mode=mode, repair=repair)
        what = f"{world.name}, mode {mode}, {repair}, labelled {result.exactness}; run it again: {again}"
        if expected is None:
            expected = world.reference(result.prompt_ids)
        distance = float((result.logits - expected).abs().max())
        assert distance == distance, f"not finite: {what}"
        assert (
            result.cached_tokens + result.repaired_tokens + result.computed_tokens
            == result.prompt_tokens
        ), what
        assert result.exactness != "repaired" or repair is some, f"should be exact: {what}"
        if (
            result.exactness != "repaired"
            and distance >= TOLERANCE
            and world.is_tied(result.prompt_ids, expected)
        ):
            summary.ties += 1
        elif result.exactness != "repaired":
            assert distance < TOLERANCE, f"off by {distance:.3g}: {what}"
            summary.largest = max(summary.largest, distance)
            summary.comparisons += 1
        summary.labels[f"{mode}: {result.exactness}"] += 1
    summary.cases += 1
    summary.by_model[world.name] += 1
    summary.strategies[strategy] += 1


MODELS = [int(ONLY) // CASES_PER_MODEL] if ONLY else range(-(-CASES // CASES_PER_MODEL))


@pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
@pytest.mark.parametrize(
    "number",
    [
        *MODELS[:QUICK_MODELS],
        *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS[QUICK_MODELS:]),
    ],
)
def test_what_is_labelled_exact_is_what_transformers_computes(number, tokenizer, summary):
    start = time.perf_counter()
    world = World(number, tokenizer)
    first = number * CASES_PER_MODEL
    for case in range(first, min(first + CASES_PER_MODEL, max(CASES, first + 1))):
        if ONLY is None or case == int(ONLY):
            summary.failed += 1
            run_case(case, world, summary)
            summary.failed -= 1
    world.engine.close()
    summary.seconds += time.perf_counter() - start


def test_enough_was_compared(summary):
    """The prompts must be such that reuse happens: a comparison of two full prefills would prove nothing."""
    if ONLY is not None or summary.cases < max(CASES, 300):
        pytest.skip("this process ran a part of the cases")
    assert summary.ties <= max(1, CASES * 0.002), "ties are rare: a few in ten thousand comparisons"
    assert summary.labels["stitch: exact"] > CASES * 0.9
    assert summary.labels["stitch: repaired"] > CASES * 0.4
    assert summary.labels["prefix: exact"] > CASES * 0.2
    assert len(summary.by_model) > 40
    assert set(summary.strategies) == set(STRATEGIES)
