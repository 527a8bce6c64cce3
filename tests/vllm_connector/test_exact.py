"""Exact beginnings of prompts: what the connector loads of them is what a full prefill computes, and it says why it loads nothing."""

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_blend import CHUNKS, blend, ended, finish_at_once, prompt_of, request_with, scheduler_side
from transformers import DynamicCache
from vllm_kit import BLOCK, BLOCKS, Cache, Layer, Request, Setting, connect

from kvrag import KVRagEngine, StoreConfig
from kvrag.adapters import Blending
from kvrag.errors import UnsupportedModelError, is_out_of_memory
from kvrag.testing.models import save_tiny_model, tiny_model

MODES = "auto", "prefix", "stitch"
INT8 = {"quantization": "int8", "hf_config": SimpleNamespace(quantization_config={})}


def stored_of(setting: Setting, number: int) -> list[int]:
    """The stored prefix, and a chunk right behind it."""
    encoder = setting.engine.loaded.encoder
    head = [*encoder.bos_ids, *encoder.live_ids(setting.engine.prefix_text)]
    return [*head, *encoder.chunk_ids(CHUNKS[number])]


def asks(setting: Setting, number: int) -> list[int]:
    encoder = setting.engine.loaded.encoder
    return [*stored_of(setting, number), *encoder.live_ids("\n\nWho asks for a box?")]


def job_of(own: Any, request: Any, computed: int = 0) -> Any:
    """The job of an admitted request, whose rows go to blocks in a random order."""
    count, is_async = own.get_num_new_matched_tokens(request, computed)
    assert is_async == (count > 0)
    blocks = torch.randperm(BLOCKS)[: -(-request.num_prompt_tokens // BLOCK)].tolist()
    own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
    (job,) = own.build_connector_meta(None).jobs
    return job


def test_a_connector_for_exact_beginnings_loads_no_other_rows(connector, setting):
    """Whatever a request asks for; and that is the default."""
    own = scheduler_side(connector, setting, mode="prefix")
    repaired, exact = prompt_of(setting, 2, 0, 3), asks(setting, 2)
    for number, mode in enumerate(MODES):
        said = finish_at_once(own, request_with(repaired, number, mode=mode))
        assert said["fallback_reason"] == "no stored KV for the head of this prompt"
        assert said["computed_tokens"] == len(repaired)
        job = job_of(own, request_with(exact, 10 + number, mode=mode))
        assert (job.repair, job.start, job.stop) == (None, 0, len(stored_of(setting, 2)))
    assert not own._scheduler._private
    assert own.get_num_new_matched_tokens(request_with(exact, 20, mode="full"), 0) == (0, False)
    assert connect(connector, setting, role="SCHEDULER")._scheduler._is_exact


@pytest.mark.parametrize("change", ["context", "rounded", "erased"])
def test_what_is_not_exact_is_not_loaded(connector, setting, change):
    """But blended, right behind its prefix, too."""
    engine, ids, stop = setting.engine, asks(setting, 2), len(stored_of(setting, 2))
    head = stop - len(engine.loaded.encoder.chunk_ids(CHUNKS[2]))
    engine.delete(list("abcd"))
    options: dict[str, Any] = {
        "context": {"context": "default:50"},
        "rounded": {"context": None, "store_config": StoreConfig(kv_dtype="int8")},
        "erased": {"context": None},
    }[change]
    other = KVRagEngine.from_pretrained(setting.model, kv_dir=engine.kv_dir, **options)
    assert not other.precompute(CHUNKS, ids=list("abcd")).failed
    if change == "erased":
        other.delete(["c"])
    made = Setting(other, setting.model)
    own = scheduler_side(connector, made, mode="prefix")
    count, _ = own.get_num_new_matched_tokens(request_with(ids), 0)
    assert count <= head < stop
    said = finish_at_once(own, request_with(ids, 1))["fallback_reason"]
    assert ("rounded to int8" in str(said)) == (change == "rounded")
    own = scheduler_side(connector, made)
    count, _ = own.get_num_new_matched_tokens(request_with(ids, mode="stitch"), 0)
    assert count == (head if change == "erased" else len(ids) - 1)
    alone = request_with([*ids[:head], *ids[stop:]], 1, mode="stitch")
    assert own.get_num_new_matched_tokens(alone, 0)[0] <= head
    other.close()


@pytest.mark.parametrize("name", ["llama", "glm4", "gemma3_text", "smollm3"])
def test_loaded_rows_are_those_of_a_full_prefill(connector, tmp_path, name):
    """Halves and neighbours, several kinds of rotation, none."""
    directory = save_tiny_model(tmp_path / "model", name)
    engine = KVRagEngine.from_pretrained(directory, kv_dir=tmp_path / "kv", context=None)
    assert not engine.precompute(CHUNKS).failed
    setting, model = Setting(engine, str(directory)), tiny_model(name)
    model.set_attn_implementation("eager")  # some versions' SDPA leaves soft caps out
    ids, stop = asks(setting, 0), len(stored_of(setting, 0))
    own = scheduler_side(connector, setting, mode="prefix")
    job = job_of(own, request_with(ids), BLOCK)
    assert (job.start, job.stop) == (BLOCK, stop)
    blending = importlib.import_module("vllm_kvrag.blending")
    layers = [Layer(2, 16) for _ in range(engine.loaded.reusable.depth)]
    blender = blending.Blender(Blending(engine), Cache(layers))
    blender.submit(job)
    _, said = ended(blender)
    blender.close()
    engine.close()
    assert (said["exactness"], said["cached_tokens"]) == ("exact", stop)
    with torch.no_grad():  # a cache without a config drops nothing, whatever the layers' windows
        full = model(torch.tensor([ids]), use_cache=True, past_key_values=DynamicCache())
    for layer, (keys, values, *_) in zip(layers, full.past_key_values, strict=True):
        for found, wanted in zip(layer.rows(job.blocks), (keys[0], values[0]), strict=True):
            assert torch.allclose(found[:, BLOCK:stop], wanted[:, BLOCK:stop], atol=2e-5)
            assert not found[:, :BLOCK].any()
            assert not found[:, stop:].any()


def test_a_chunk_that_is_gone_by_then_is_left_to_vllm(connector, setting):
    own = scheduler_side(connector, setting, mode="prefix")
    job = job_of(own, request_with(asks(setting, 0)), BLOCK)
    setting.engine.delete(["a"])
    blending = importlib.import_module("vllm_kvrag.blending")
    layer = Layer(2, 16)
    blender = blending.Blender(Blending(setting.engine), Cache([layer, layer]))
    blender.submit(job)
    assert ended(blender)[1] is None
    blender.close()
    assert not layer.kv_cache.any()
    assert job.failed(BLOCK) == job.blocks[1 : -(-job.stop // BLOCK)]


@pytest.mark.parametrize(
    ("loaded", "word"), [(False, "--load-format kvrag"), (True, "its layers keep a state")]
)
@pytest.mark.parametrize("mode", ["prefix", "blend"])
def test_a_model_that_cannot_be_taken_runs_without_reuse(
    connector, setting, monkeypatch, mode, loaded, word
):
    """One sentence says why, and what to do."""

    def refuse(*_: Any) -> None:
        raise UnsupportedModelError("its layers keep a state")

    monkeypatch.setattr("vllm_kvrag.worker.model_of", lambda _: object() if loaded else None)
    monkeypatch.setattr("vllm_kvrag.worker.VllmLM", refuse)
    hello = blend(connector, setting, role="WORKER", mode=mode).get_handshake_metadata()
    assert word in hello.about.refusal
    assert ". " not in hello.about.refusal
    own = blend(connector, setting, mode=mode)
    own.set_xfer_handshake_metadata({0: hello})
    request = request_with(asks(setting, 2), mode="stitch")
    assert own.get_num_new_matched_tokens(request, 0) == (0, False)
    said = finish_at_once(own, request)
    assert (said["exactness"], said["fallback_reason"]) == ("full", hello.about.refusal)


def test_what_vllms_model_cannot_compute_for_us_is_told(connector):
    """A batch beyond its scratch memories is halved as for lack of memory; rounding is refused."""
    own = importlib.import_module("vllm_kvrag.own")
    small = SimpleNamespace(_most=4)
    with pytest.raises(torch.OutOfMemoryError) as found:
        own.VllmLM.check(small, torch.zeros(2, 3))
    assert is_out_of_memory(found.value)
    place = own.StandIn(SimpleNamespace(), 0, None)
    with pytest.raises(UnsupportedModelError, match="rounds its output"):
        place.forward(None, torch.zeros(1), output=torch.zeros(1), output_scale=torch.ones(1))


@pytest.mark.parametrize("tokenizer", [None, "elsewhere"])
def test_a_revision_is_that_of_the_models_own_files(connector, setting, monkeypatch, tokenizer):
    seen = []
    monkeypatch.setattr("vllm_kvrag.scheduler.ModelSource", lambda *own: seen.append(own))
    monkeypatch.setattr("vllm_kvrag.scheduler.Planner", lambda *_: None)
    connect(
        connector, setting, role="SCHEDULER", revision="x", tokenizer=tokenizer or setting.model
    )
    assert seen == [(setting.model, tokenizer, "x")]


@pytest.mark.parametrize("part", ["", "is_moe_model", "is_multimodal_model"])
def test_buffers_of_a_steps_size_bound_a_forward(connector, monkeypatch, part):
    """On GPUs they are locked, or replaced by larger ones that captured graphs don't read."""
    own = importlib.import_module("vllm_kvrag.own")
    monkeypatch.setattr(own, "attention_layers", lambda _: {})
    monkeypatch.setattr(own.EngineLM, "__init__", lambda lm, *_: vars(lm).update(most_timed=9))
    one = MagicMock(max_num_batched_tokens=4, tensor_parallel_size=1)
    one.get_total_num_kv_heads.return_value = 1
    for name in ("is_moe_model", "is_multimodal_model"):
        setattr(one, name, name == part)
    config = MagicMock(model_config=one, parallel_config=one, scheduler_config=one)
    lm = own.VllmLM(config, object())
    with pytest.raises(torch.OutOfMemoryError) if part else nullcontext():
        lm.check(torch.zeros(1, 5))
    assert lm.most_timed == (4 if part else 9)
    lm.check(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("takes_images", "more", "is_embedded"),
    [
        (False, {}, False),
        (False, {"enable_prompt_embeds": True}, True),
        (True, {"supports_multimodal_inputs": True}, True),
        (True, {"supports_multimodal_inputs": False}, False),  # served for text alone
        (True, {}, True),  # in vLLM 0.26
    ],
)
def test_compiled_code_gets_what_vllms_steps_give_it(connector, takes_images, more, is_embedded):
    own = importlib.import_module("vllm_kvrag.own")
    config = {"uses_mrope": False, "is_multimodal_model": takes_images}
    config = SimpleNamespace(**{"enable_prompt_embeds": False} | config | more)
    lm = SimpleNamespace(_vllm_config=SimpleNamespace(model_config=config), _held=MagicMock())
    own.VllmLM._forward(lm, torch.zeros(2), torch.zeros(2))
    given = lm._held.call_args.kwargs
    assert (given["input_ids"] is None) == ("inputs_embeds" in given) == is_embedded


def test_nothing_is_loaded_where_stored_kv_is_not_what_vllm_computes(
    connector, setting, monkeypatch
):
    lm = SimpleNamespace(load=lambda _: None)
    monkeypatch.setattr("vllm_kvrag.worker.model_of", lambda _: object())
    monkeypatch.setattr("vllm_kvrag.worker.VllmLM", lambda *_: lm)
    monkeypatch.setattr("vllm_kvrag.worker.why_different", lambda *_: None)
    monkeypatch.setattr("vllm_kvrag.worker.WorkerSide._engine_of", lambda *_: setting.engine)
    monkeypatch.setattr("kvrag.adapters.blending._difference", lambda *_: 0.5)
    hello = blend(connector, setting, role="WORKER").get_handshake_metadata()
    assert hello.about.refusal == (
        "stored KV differs from what it computes, by 50% of its size; precompute into another "
        "kv_dir, by vLLM's worker"
    )


def test_a_model_that_cannot_blend_gets_exact_beginnings_and_says_why(connector, setting):
    reason = "its logits differ from vLLM's"
    own = scheduler_side(connector, setting, only_exact=reason)
    for number, mode in enumerate(MODES):
        job = job_of(own, request_with(asks(setting, 2), number, mode=mode))
        assert (job.repair, job.start, job.stop) == (None, 0, len(stored_of(setting, 2)))
        request = request_with(prompt_of(setting, 2, 0, 3), 10 + number, mode=mode)
        assert finish_at_once(own, request)["fallback_reason"] == reason
    params = {"kvrag": {"precompute": {"texts": ["a"]}, "describe": True}}
    said = finish_at_once(own, Request("p", [5, 6], kv_transfer_params=params))
    assert (said["error"], said["code"]) == (reason, "UnsupportedModelError")
    assert said["refusal"] == reason
    assert (
        own.get_num_new_matched_tokens(request_with(asks(setting, 2), 20, mode="full"), 0)[0] == 0
    )


@pytest.mark.parametrize(
    ("changes", "is_stored"),
    [
        ({"quantization": None}, True),
        (INT8, True),
        ({"quantization": "fp8"}, False),
        (INT8 | {"quantization_config": {"linear": {}}}, False),
    ],
)
def test_weights_are_identified_as_they_were_loaded(connector, monkeypatch, changes, is_stored):
    """What vLLM quantises itself is another model than the files'; so is one with another config."""
    own = importlib.import_module("vllm_kvrag.own")
    seen = {}
    monkeypatch.setattr(own, "load_made", lambda *_, **options: seen.update(options))
    monkeypatch.setattr(own, "set_current_vllm_config", lambda _: nullcontext())
    plain = {"hf_config": SimpleNamespace(), "hf_overrides": {}, "hf_config_path": None}
    config = SimpleNamespace(**plain | changes)
    lm = SimpleNamespace(_vllm_config=SimpleNamespace(model_config=config), _held=None)
    own.VllmLM.load(lm, "source")
    assert seen == {"is_stored": is_stored}
    config.hf_overrides = {"rope_theta": 1.0}
    with pytest.raises(UnsupportedModelError, match="--hf-overrides"):
        own.VllmLM.load(lm, "source")
    config.hf_overrides, config.hf_config_path = {}, "elsewhere"
    with pytest.raises(UnsupportedModelError, match="--hf-config-path"):
        own.VllmLM.load(lm, "source")
