"""The fingerprint of a model in use follows what is done to its weights, and asks cheaply."""

import gc
import weakref
from typing import Any

import pytest
import torch
from kit import noted
from texts import make_chunks

import kvrag.identity.model
from kvrag import ConfigError, KVRagEngine
from kvrag.identity.model import LiveIdentity, describe, sample
from kvrag.identity.weights import content_digest, tensor_bytes
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.testing.models import tiny_model


@pytest.fixture
def digests(monkeypatch):
    """Every time the weights are hashed in memory."""
    return noted(monkeypatch, kvrag.identity.model, "weights_digest")


def watched(model: Any, tokenizer: Any) -> LiveIdentity:
    return LiveIdentity(model, describe(model, tokenizer, "commit:1"))


def scale(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def one_value(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 11] += 1


def new_parameter(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight + 1)


def new_data(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data = layer.weight.data + 1


def new_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)


def load_state(model: Any) -> None:
    model.load_state_dict(tiny_model(seed=4).state_dict())


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def rope_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


IN_PLACE = [scale, one_value, load_state, swap_layers, rope_buffer]
ANEW = [new_parameter, new_data, new_module]


@pytest.mark.parametrize(
    ("change", "context"),
    [
        *((c, torch.no_grad) for c in (*IN_PLACE, *ANEW)),
        *((c, torch.inference_mode) for c in IN_PLACE),
    ],
)
def test_a_change_of_the_weights_is_noticed(change, context, tokenizer, digests):
    model = tiny_model()
    identity = watched(model, tokenizer)
    before = identity.fingerprint
    assert digests == [], "the origin holds until something changes"
    with context():
        change(model)
    after = identity.fingerprint
    assert after != before
    assert identity.fingerprint == after
    assert len(digests) == 1, "hashed once per change"


def test_a_request_reads_no_value_and_a_change_past_the_counts_is_noticed_by_the_next_engine(
    tokenizer, monkeypatch
):
    """Reading a value would wait for the device. Whoever writes past the counts can count."""
    model = tiny_model()
    loaded = load(ModelSource(model, tokenizer))
    before = loaded.fingerprint
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.mul_(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(kvrag.identity.model, "sample", None)
        assert loaded.fingerprint == before
    after = load(ModelSource(model, tokenizer)).fingerprint
    assert after != before
    torch.autograd.graph.increment_version(weight)
    assert loaded.fingerprint == after


def test_a_replaced_weight_is_not_kept_alive(tokenizer):
    model = tiny_model()
    identity = watched(model, tokenizer)
    gone = weakref.ref(model.lm_head.weight)
    assert identity.fingerprint
    model.lm_head = torch.nn.Linear(64, 400, bias=False)
    gc.collect()
    assert gone() is None


def test_what_is_taken_back_has_its_content_for_identity(tokenizer, digests):
    model = tiny_model()
    identity = watched(model, tokenizer)
    kept = model.lm_head
    model.lm_head = torch.nn.Linear(64, 400, bias=False)
    changed = identity.fingerprint
    model.lm_head = kept
    assert identity.fingerprint != changed
    assert identity.fingerprint == watched(tiny_model(), tokenizer).fingerprint, (
        "the very tensors of the origin"
    )
    assert len(digests) == 1


def test_what_is_remembered_is_bounded_and_keeps_the_origin(tokenizer, digests):
    model = tiny_model()
    identity = watched(model, tokenizer)
    origin, kept = identity.fingerprint, model.lm_head
    heads = [torch.nn.Linear(64, 400, bias=False) for _ in range(20)]
    for head in heads:
        model.lm_head = head
        assert identity.fingerprint != origin
    assert len(identity._weights._known) == kvrag.identity.model._NUM_REMEMBERED
    assert len(digests) == 20
    model.lm_head = heads[-2]
    assert identity.fingerprint != origin
    model.lm_head = kept
    assert identity.fingerprint == origin
    assert len(digests) == 20, "recent states and the first are not hashed again"


def test_memory_that_is_used_again_is_not_mistaken(tokenizer):
    """A freed tensor's address is soon another's: addresses alone would say that nothing changed."""
    model = tiny_model()
    identity = watched(model, tokenizer)
    seen = {identity.fingerprint}
    for step in range(1, 9):
        layer = model.model.layers[0].mlp.down_proj
        content = layer.weight.detach().clone()
        content[5, 5] += 1 if step % 2 else -1
        shape = layer.weight.shape
        layer.weight = None
        layer.weight = torch.nn.Parameter(torch.empty(shape))
        layer.weight.data.copy_(content)
        del content
        seen.add(identity.fingerprint)
    assert len(seen) >= 3, "the origin, and two contents of the same weight"


def test_forwards_change_nothing(engine_of, digests):
    for name in ("llama", "gemma2", "llama-yarn"):
        engine = engine_of(tiny_model(name))
        before = engine.loaded.fingerprint
        digests.clear()
        engine.precompute(["The archive opens at nine, and closes at five. " * 8])
        engine.generate("The archive opens at nine, and closes at five. " * 8, max_new_tokens=4)
        assert engine.loaded.fingerprint == before
        assert digests == []


def test_angles_that_a_forward_moves_are_not_the_models(tokenizer, digests):
    """Long RoPE chooses its angles in each forward, in place; which of them keys belong to is the regime's business."""
    model = tiny_model()
    rotary = model.model.rotary_emb
    rotary.rope_type = "longrope"
    identity = watched(model, tokenizer)
    before = identity.fingerprint
    rotary.inv_freq.mul_(2)
    assert identity.fingerprint == before
    rotary.original_inv_freq.mul_(2)
    assert identity.fingerprint != before


def test_an_engine_does_not_reuse_kv_of_weights_that_changed_after_it_was_built(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, revision="changes-later")
    text = "The archive opens at nine, and closes at five. " * 8
    engine.precompute([text])
    assert engine.explain(text + "Who?").hits == 1
    with torch.no_grad():
        engine.loaded.lm.model.model.layers[0].self_attn.k_proj.weight.mul_(1.2)
    assert engine.explain(text + "Who?").hits == 0
    engine.precompute([text])
    assert engine.explain(text + "Who?").hits == 1
    engine.close()


def test_extra_keys_follow_a_model_that_has_changed(tokenizer):
    model = tiny_model()
    identity = watched(model, tokenizer)
    with torch.no_grad():
        scale(model)
    keyed = identity.with_extra_keys({"a": "b"})
    other = load(ModelSource(model, tokenizer, extra_keys={"a": "b"}))
    assert keyed.fingerprint == other.fingerprint != identity.fingerprint


def test_engines_with_other_extra_keys_share_weights_and_no_kv(tiny_dir, tmp_path):
    text = make_chunks(1, words=60)[0]
    plain = KVRagEngine.get(tiny_dir, kv_dir=tmp_path / "kv")
    keyed = KVRagEngine.get(tiny_dir, kv_dir=tmp_path / "kv", extra_keys={"team": "search"})
    plain.precompute([text])
    assert plain.explain(text + "Who?").hits == 1
    assert keyed.explain(text + "Who?").hits == 0
    assert keyed.loaded.lm is plain.loaded.lm
    with pytest.raises(ConfigError, match="extra_keys is 'team'; pass a dict"):
        KVRagEngine.from_pretrained(tiny_dir, extra_keys="team")
    plain.close()
    keyed.close()


def test_a_model_of_two_ropes_names_the_regime_that_its_kv_holds_for(tokenizer):
    long, plain = (
        load(ModelSource(tiny_model(name), tokenizer)) for name in ("phi3-longrope", "phi3")
    )
    assert long.identity._identity.regime == f"up to {long.reusable.reuse_window} tokens"
    assert plain.identity._identity.regime == ""


# -- bytes of tensors --------------------------------------------------------------------------------------------------------


def test_the_weights_of_a_model_are_hashed_once_for_all_its_engines(monkeypatch, tokenizer):
    hashed = noted(monkeypatch, kvrag.identity.model, "content_digest")
    model = tiny_model("llama", seed=77)
    first, second = (load(ModelSource(model, tokenizer=tokenizer)) for _ in range(2))
    before = first.fingerprint
    assert second.fingerprint == before
    assert len(hashed) == 1
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1.0)
    assert load(ModelSource(model, tokenizer=tokenizer)).fingerprint == first.fingerprint != before
    assert len(hashed) == 2, "of a change, too, once"


def test_tensor_bytes_are_those_of_the_values():
    wide = torch.arange(12.0).reshape(3, 4)
    assert tensor_bytes(wide.T) == tensor_bytes(wide.T.contiguous())
    others = [
        wide,
        wide.T,
        wide.to(torch.float64),
        wide.reshape(4, 3),
        wide + 1,
        torch.zeros(0),
        torch.tensor(1.0),
    ]
    assert len({tensor_bytes(tensor) for tensor in others}) == len(others)
    assert tensor_bytes(torch.zeros(2, dtype=torch.bfloat16)) != tensor_bytes(
        torch.zeros(2, dtype=torch.float16)
    )


def test_shared_tensors_are_read_once_and_count_under_every_name(monkeypatch):
    import kvrag.identity.weights

    one, calls = torch.ones(3), noted(monkeypatch, kvrag.identity.weights, "tensor_bytes")
    shared = content_digest({"a": one, "b": one})
    assert len(calls) == 1
    assert shared == content_digest({"b": one.clone(), "a": one.clone()})
    assert shared != content_digest({"a": one})
    assert content_digest({"a": one, "b": one + 1}) != content_digest({"a": one + 1, "b": one})


def test_a_sample_reads_values_all_over_a_tensor():
    tensors = [
        torch.zeros(100, 7),
        torch.zeros(3),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(0),
        torch.zeros(5, 5).T,
    ]
    before = sample(tensors)
    for tensor in tensors[:3]:
        changed = [other + 1 if other is tensor else other for other in tensors]
        assert sample(changed) != before
    last = torch.zeros(100, 7)
    last[80:] = 1
    assert sample([last]) != sample([torch.zeros(100, 7)])
