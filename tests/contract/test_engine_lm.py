"""A causal LM that another engine holds: it answers, stores and is identified as a model that kvrag has loaded.

transformers' own model is in the place of the other engine; its attention asks for rows.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from texts import make_chunks
from transformers import AttentionInterface, AutoModelForCausalLM

from kvrag import KVRagEngine, Library, RepairConfig, StoreError, UnsupportedModelError
from kvrag.adapters import Blending, EngineLM, ModelSource, StorePlanner, load_made
from kvrag.identity.model import describe
from kvrag.model.load import load
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.models import save_tiny_model

CHUNKS = [text.partition(": ")[2] for text in make_chunks(3, words=60)]
PROMPT = "Answer from these notes.\n\n" + "\n\n".join(CHUNKS[::-1]) + "\n\nWho asks for a box?"
ROWS: list[Any] = []


def attention(
    module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **own: Any
) -> Any:
    """Attend as an engine whose attention layers know no batches."""
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    ROWS[-1].write(module.layer_idx, key, value)
    scores = {"scale": scaling, "softcap": own.get("softcap"), "sinks": own.get("s_aux")}
    found = ROWS[-1].attend(module.layer_idx, query, scores)
    return found.view(module.batch, -1, *found.shape[1:]), None


class Other(EngineLM):
    """transformers' model."""

    def __init__(self, directory: str, angle: float = 1.0) -> None:
        AttentionInterface.register("other", attention)
        self.held = AutoModelForCausalLM.from_pretrained(directory)
        config = self.held.config
        self.held.set_attn_implementation("other")
        self.angle = angle
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * 8
        dim = getattr(config, "head_dim", None) or 16
        layers = [
            (
                config.num_key_value_heads,
                dim,
                dim,
                config.sliding_window if "sliding" in kind else None,
            )
            for kind in kinds[: config.num_hidden_layers]
        ]
        super().__init__(config, "other 1", torch.float32, "cpu", layers, 1024)

    def compute(self, ids: torch.Tensor, rows: Any, logits: int) -> torch.Tensor:
        for module in self.held.modules():
            module.batch = len(ids)
        ROWS.append(rows)
        try:
            positions = rows.positions.view(ids.shape)
            out = self.held(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            ROWS.pop()
        return out.logits[:, -logits:]

    def tables(self) -> Iterator[Any]:
        rotary = self.held.base_model.rotary_emb

        def tables(positions: torch.Tensor) -> Any:
            cos, sin = rotary(torch.empty(1), positions[None] * self.angle)
            half = cos.shape[-1] // 2
            return cos[0, :, :half], sin[0, :, :half]

        yield "halves", tables, False
        yield "neighbours", tables, True


def blended(engine: KVRagEngine, source: ModelSource, store: Any) -> tuple[Any, list[Any]]:
    """What is said of a prompt, and the keys and values of all its rows."""
    planner = StorePlanner(Library(store), source)
    ids = planner.encoder.live_ids(PROMPT)
    repair = RepairConfig(recompute_ratio=0.3)
    blending = Blending(engine)
    facts = blending.facts("its costs are not asked for")
    plan = planner.reuse(ids, None, facts, repair).plan
    chunks = blending.read(plan)
    rows: list[Any] = []

    def write(layers: Any) -> None:
        rows.extend(x[:, :, : len(ids)].clone() for pair in layers for x in pair)

    done = blending.repair(plan, repair, write, chunks)
    return done["sources"], [*rows, blending.logits(torch.tensor(ids))]


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm4", "qwen3_moe"])
def test_it_stores_and_blends_as_the_model_of_the_files(tmp_path, name):
    directory = save_tiny_model(tmp_path / "model", name)
    source = ModelSource(directory)
    lm = Other(directory)
    found = load_made(source, lm, lm.held, is_stored=True)
    made = KVRagEngine.from_pretrained(directory, kv_dir=tmp_path / "made", context=None)
    assert made.loaded is found
    loaded = KVRagEngine.from_pretrained(
        directory, kv_dir=tmp_path / "loaded", context=None, prove="off"
    )
    assert loaded.loaded is not found
    assert loaded.loaded.fingerprint == found.fingerprint
    seen = []
    for engine, store in ((made, "made"), (loaded, "loaded")):
        assert not engine.precompute(CHUNKS, ids=list("abc")).failed
        seen.append(blended(engine, source, tmp_path / store))
        engine.close()
    (own, rows), (expected, others) = seen
    assert own == expected
    assert {"reused", "repaired"} <= {each for each, _ in own}
    for one, other in zip(rows, others, strict=True):
        assert torch.allclose(one, other, atol=5e-5)


def test_weights_that_are_not_those_of_the_files_are_hashed(tmp_path):
    directory = save_tiny_model(tmp_path)
    source = ModelSource(directory)
    lm = Other(directory)
    stored = load_made(source, lm, lm.held, is_stored=True)
    seen = {stored.fingerprint}
    hashed = load_made(source, lm, lm.held, is_stored=False)
    seen.add(hashed.fingerprint)
    assert load(source, PromptEncoder) is hashed, "the latest is used"
    with torch.no_grad():
        next(lm.held.parameters()).add_(1.0)
    other = load_made(source, lm, lm.held, is_stored=False)
    assert len(seen | {other.fingerprint}) == 3


@pytest.mark.parametrize(("space", "stored"), [("default", "default"), ("default/", "default/a")])
def test_stored_kv_is_compared_with_what_the_model_computes(tmp_path, monkeypatch, space, stored):
    """Behind API keys, all chunks are in the namespaces of these."""
    directory = save_tiny_model(tmp_path / "model")
    source = ModelSource(directory)
    kept: dict[str, Any] = {"kv_dir": tmp_path / "kv"}
    with closing(
        KVRagEngine.from_pretrained(directory, namespace=stored, prove="off", **kept)
    ) as other:
        assert not other.precompute(CHUNKS, ids=list("abc")).failed
    lm = Other(directory)
    loaded = load_made(source, lm, lm.held, is_stored=True)
    with closing(KVRagEngine.from_pretrained(directory, namespace=space, **kept)) as engine:
        assert engine.loaded is loaded
        blending = Blending(engine)
        assert blending.stored_difference() is None
        compared = []
        real = lm.forward

        def counted(*args: Any, **options: Any) -> Any:
            compared.append(args)
            return real(*args, **options)

        monkeypatch.setattr(lm, "forward", counted)
        assert blending.stored_difference() is None
        assert compared
        with torch.no_grad():  # past the counts of changes, as another engine's arithmetic is
            lm.held.base_model.layers[1].self_attn.k_proj.weight.data.mul_(1.1)
        found = blending.stored_difference()
        assert found is not None
        assert "stored KV differs from what it computes" in found


def test_quantised_weights_have_chunks_of_their_own(tmp_path, monkeypatch):
    """The products of two engines round quantised weights in two ways."""
    directory = save_tiny_model(tmp_path)
    lm = Other(directory)
    plain = []

    def quantised(*parts: Any) -> Any:
        plain.append(replace(describe(*parts), quantisation="int8"))
        return plain[-1]

    monkeypatch.setattr("kvrag.adapters.running.describe", quantised)
    found = load_made(ModelSource(directory), lm, lm.held, is_stored=True)
    assert found.fingerprint != plain[0].fingerprint


def test_weights_that_change_are_noticed_and_nothing_is_blended_then(tmp_path):
    directory = save_tiny_model(tmp_path / "model")
    source = ModelSource(directory)
    lm = Other(directory)
    found = load_made(source, lm, lm.held, is_stored=True)
    engine = KVRagEngine.from_pretrained(directory, kv_dir=tmp_path / "kv", context=None)
    assert not engine.precompute(CHUNKS, ids=list("abc")).failed
    before = found.fingerprint
    blending = Blending(engine)
    planner = StorePlanner(Library(tmp_path / "kv"), source)
    ids = planner.encoder.live_ids(PROMPT)
    facts = blending.facts("its costs are not asked for")
    plan = planner.reuse(ids, None, facts, RepairConfig()).plan
    assert blending.read(plan) is not None
    with torch.no_grad():
        next(lm.held.parameters()).add_(1.0)
    assert found.fingerprint != before
    with pytest.raises(StoreError, match="the model's weights have changed"):
        blending.read(plan)
    engine.close()


def test_a_model_whose_keys_no_table_explains_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="no rotary table explains the keys of layer 0"):
        Other(save_tiny_model(tmp_path), angle=1.01)


def test_angles_that_change_with_the_length_are_refused(tmp_path):
    directory = save_tiny_model(tmp_path, "phi3-longrope")
    with pytest.raises(UnsupportedModelError, match="change with the prompt's length"):
        Other(directory)
