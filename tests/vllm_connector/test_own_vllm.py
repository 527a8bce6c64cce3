"""vLLM's own model blends: it computes the rows that kvrag chooses, quantised or not.

Skipped without vLLM (docs/how-to/vllm.md).
"""

import json
import threading
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_kit import compressed, save_base
from safetensors.torch import load_file, save_file
from test_blend_vllm import (  # noqa: F401
    CHUNKS,
    IDS,
    REPAIR,
    Vllm,
    assert_engine,
    assert_first,
    assert_first_of,
    vllm_of,
)
from vllm_kit import needs_vllm

from kvrag import KVRagEngine
from kvrag.blend.cost import measured
from kvrag.model.forward import Forward

pytestmark = needs_vllm


def blender_of(vllm: Vllm) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._blender


@pytest.mark.parametrize(
    ("name", "is_eager"), [("qwen3", False), ("gemma2", True), ("qwen3_moe", True)]
)
def test_vllms_own_model_computes_the_rows(vllm_of, name, is_eager):  # noqa: F811
    """Compiled, with sliding windows, with experts; there are no other weights."""
    vllm = vllm_of(name, enforce_eager=is_eager)
    lm = blender_of(vllm).engine.loaded.lm
    assert type(lm).__name__ == "VllmLM"
    assert [*lm.model.children()] == [lm._held]
    assert [name for name, _ in lm.model.named_parameters() if "held" not in name] == []
    ids = vllm.prompt(2, 0, 3)
    (blended,) = vllm.ask((ids, "stitch"))
    assert vllm.said(blended)["exactness"] == "repaired"
    assert_engine(vllm, ids, blended)
    vllm.assert_private()


@pytest.mark.parametrize("is_eager", [True, False])
def test_chunks_are_precomputed_by_vllms_own_model(vllm_of, is_eager):  # noqa: F811
    """They are those that kvrag's engine stores, whatever is blended and answered meanwhile."""
    vllm = vllm_of(enforce_eager=is_eager)
    ids, other = vllm.prompt(2, 0, 3), vllm.prompt(1, 4)
    (before, beside) = vllm.ask((ids, "stitch"), (other, "stitch"))
    vllm.engine.delete(IDS[:1] + IDS[2:4])
    vllm.llm.reset_prefix_cache()
    asked = {"precompute": {"texts": CHUNKS[:1] + CHUNKS[2:4], "ids": IDS[:1] + IDS[2:4]}}
    report, *others, full = vllm.ask(
        ([5, 6], "auto", asked),
        *[(vllm.prompt(1, 4, question=f" Who asks {n}?"), "stitch") for n in range(6)],
        (vllm.prompt(1), "full"),
    )
    assert vllm.said(report)["precompute"]["stored"] == 3
    assert vllm.said(full)["exactness"] == "full"
    assert {vllm.said(each)["exactness"] for each in others} == {"repaired"}
    vllm.llm.reset_prefix_cache()
    again, still = vllm.ask((ids, "stitch"), (other, "stitch"))
    for one, two in ((again, before), (still, beside)):
        assert vllm.said(one)["sources"] == vllm.said(two)["sources"]
        assert_first(one, two, limit=1e-3)
    vllm.assert_private()


@pytest.mark.parametrize("how", ["int8", "fp8", "bfloat16"])
def test_rounded_models_are_blended(vllm_of, tmp_path, how):  # noqa: F811
    """Repairing every row gives vLLM's own answer, as near as its roundings are."""
    base = save_base(str(tmp_path / "base"), hidden_size=128, head_dim=32)
    if how == "bfloat16":
        vllm = vllm_of(model=base, dtype=how)
    else:
        encode = compressed("int" if how == "int8" else "float", "token")
        vllm = vllm_of(model=encode(base, str(tmp_path / how)))
    ids = vllm.prompt(2, 0, 3)
    (report,) = vllm.ask((ids, "auto"), num=1, precompute={"texts": CHUNKS, "ids": IDS})
    assert "precompute" in vllm.said(report), vllm.said(report)
    assert vllm.said(report)["precompute"]["stored"] == len(CHUNKS)
    vllm.llm.reset_prefix_cache()
    (full,) = vllm.ask((ids, "full"))
    vllm.llm.reset_prefix_cache()
    (every,) = vllm.ask((ids, "stitch"), repair={"strategy": "all"})
    assert vllm.said(every)["repaired_tokens"] > 100
    assert_first(every, full, limit=0.3)
    vllm.llm.reset_prefix_cache()
    (some,) = vllm.ask((ids, "stitch"))
    said = vllm.said(some)
    assert said["exactness"] == "repaired", said
    assert said["cached_tokens"] > said["repaired_tokens"] > 0
    vllm.assert_private()


def test_prompts_are_blended_beside_others(vllm_of):  # noqa: F811
    """Together, for an answer of a single token, and where a blend fails."""
    vllm = vllm_of()
    ids = vllm.prompt(2, 0, 3)
    full, blended, other, same = vllm.ask(
        (vllm.prompt(1), "full"), (ids, "stitch"), (vllm.prompt(3, 4), "stitch"), (ids, "stitch")
    )
    assert vllm.said(full)["exactness"] == "full"
    for each in (blended, other, same):
        assert vllm.said(each)["exactness"] == "repaired"
    assert_engine(vllm, ids, blended)
    assert_engine(vllm, ids, same)
    assert_engine(vllm, vllm.prompt(3, 4), other)
    vllm.llm.reset_prefix_cache()
    (one,) = vllm.ask((ids, "stitch"), num=1)
    assert vllm.said(one)["exactness"] == "repaired"
    vllm.llm.reset_prefix_cache()
    blender_of(vllm)._blending.repair = lambda *_: 1 / 0
    (failed,) = vllm.ask((ids, "stitch"))
    assert vllm.said(failed)["exactness"] == "full"
    (alone,) = vllm.ask((ids, "full"))
    assert_first(failed, alone)
    vllm.assert_private()


@pytest.mark.parametrize("is_eager", [True, False])
def test_steps_run_between_the_layers_of_a_blend(vllm_of, monkeypatch, is_eager):  # noqa: F811
    """Blends, a precompute and full prompts at once come out as each of them alone."""
    from vllm_kvrag.blending import Turn

    vllm = vllm_of("qwen3", enforce_eager=is_eager)
    lock = blender_of(vllm)._blending.lm.lock
    asked = [
        (vllm.prompt(2, 0, 3), "stitch"),
        (vllm.prompt(3, 4), "stitch"),
        (vllm.prompt(1), "full"),
        (vllm.prompt(2, 0, 3)[:40], "full"),
    ]
    alone = []
    for each in asked:
        vllm.llm.reset_prefix_cache()
        alone += vllm.ask(each, num=16)
    vllm.llm.reset_prefix_cache()
    monkeypatch.setattr("kvrag.model.lock.SLICE_S", 0.0)
    give, pause = Turn._give, Forward._pause
    cut = []

    def given(self: Any, *args: Any) -> Any:
        cut.append(threading.current_thread().name)
        return give(self, *args)

    def paused(self: Any) -> None:
        if self._lock is lock and not lock.is_stepping:
            lock._due = 0.0
            time.sleep(0.004)  # a step comes meanwhile
        pause(self)

    monkeypatch.setattr(Turn, "_give", given)
    monkeypatch.setattr(Forward, "_pause", paused)
    more = {"precompute": {"texts": [f"{text} More." for text in CHUNKS], "ids": [*"ABCDE"]}}
    *together, report = vllm.ask(*asked, ([5, 6], "auto", more), num=16)
    assert vllm.said(report)["precompute"]["stored"] == len(CHUNKS)
    assert cut.count("kvrag_blend") > 3, cut
    for one, two in zip(together, alone, strict=True):
        assert vllm.said(one)["sources"] == vllm.said(two)["sources"]
        assert list(one.outputs[0].token_ids) == list(two.outputs[0].token_ids)
        assert_first(one, two, limit=1e-3)
    vllm.assert_private()


def save_adapter(path: Path, config: Any, seed: int) -> Path:
    """Save an adapter of two layers' queries and values, as ``peft`` does."""
    made = torch.Generator().manual_seed(seed)
    heads = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, count in heads.items():
            whole = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"A": (8, config.hidden_size), "B": (count * config.head_dim, 8)}
            for side, shape in shapes.items():
                key = f"{whole}.lora_{side}.weight"
                tensors[key] = torch.randn(shape, generator=made) * 0.2
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": [*heads]}
    (path / "adapter_config.json").write_text(json.dumps(about))
    return path


def merged(vllm: Vllm, adapter: Path, directory: Path) -> KVRagEngine:
    """kvrag's engine on the model with an adapter in its weights, and the chunks in its store."""
    own = vllm.engine.loaded
    model = deepcopy(own.lm.model)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in tensors:
        name, _, rest = key.removeprefix("base_model.model.").partition(".lora_A")
        if rest:
            delta = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            model.get_submodule(name).weight.data += 2 * delta
    engine = KVRagEngine.from_pretrained(
        model,
        tokenizer=own.encoder.tokenizer,
        kv_dir=directory,
        repair=REPAIR,
        context=vllm.engine.context,
    )
    assert engine.precompute(CHUNKS, ids=IDS).stored == len(CHUNKS)
    return engine


def test_prompts_of_adapters_are_blended_by_chunks_of_their_own(vllm_of, tmp_path, monkeypatch):  # noqa: F811
    """One slot for two adapters, and steps between the layers of a blend."""
    from vllm.lora.request import LoRARequest

    from vllm_kvrag.blending import Turn

    own = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
    vllm = vllm_of("llama", max_num_batched_tokens=512, context=None, **own)
    costs = []
    blender_of(vllm)._turn.rest(lambda: costs.append(measured(blender_of(vllm).lm)))
    assert 0 < costs[0].forwards[0][-1] <= 512
    monkeypatch.setattr("kvrag.model.lock.SLICE_S", 0.0)
    config = vllm.engine.loaded.lm.config
    paths = [save_adapter(tmp_path / name, config, seed) for seed, name in enumerate("xy")]
    lora = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    engines = [merged(vllm, path, tmp_path / f"{path.name}-kv") for path in paths]
    ids = vllm.prompt(2, 0, 3)
    (first,) = vllm.ask((ids, "stitch"), lora=lora[0])
    assert "adapter is new" in vllm.said(first)["fallback_reason"]
    vllm.ask((ids, "full"), lora=lora[1])
    (none,) = vllm.ask((ids, "stitch"), lora=lora[0])
    assert "no stored KV" in vllm.said(none)["fallback_reason"]
    asked = {"precompute": {"texts": CHUNKS, "ids": IDS}}
    reports = vllm.ask(([5, 6], "auto", asked), ([5, 6], "auto", asked), lora=lora)
    assert [vllm.said(each)["precompute"]["stored"] for each in reports] == [len(CHUNKS)] * 2
    vllm.llm.reset_prefix_cache()
    give, cut = Turn._give, []
    monkeypatch.setattr(
        Turn, "_give", lambda *a: cut.append(threading.current_thread().name) or give(*a)
    )
    prompts = [(ids, "stitch")] * 2 + [(vllm.prompt(1), "full")] * 2
    *blended, _, full = vllm.ask(*prompts, lora=lora * 2)
    assert "kvrag_blend" in cut
    for engine, answer in zip(engines, blended, strict=True):
        assert vllm.said(answer)["exactness"] == "repaired", vllm.said(answer)
        assert_first_of(engine, ids, answer)
    vllm.llm.reset_prefix_cache()
    # Not beside the others: on a CPU, vLLM adds their adapters to prompts without one.
    (plain,) = vllm.ask((ids, "stitch"))
    assert vllm.said(plain)["exactness"] == "repaired", vllm.said(plain)
    assert_engine(vllm, ids, plain)
    vllm.llm.reset_prefix_cache()
    (alone,) = vllm.ask((vllm.prompt(1), "full"), lora=lora[1])
    assert_first(full, alone)
    stored, begun = vllm.beginning(2, 0)
    (alone,) = vllm.ask((begun, "full"), lora=lora[1])
    vllm.llm.reset_prefix_cache()
    (exact,) = vllm.ask((begun, "prefix"), lora=lora[1])
    assert vllm.said(exact)["cached_tokens"] == len(stored)
    assert_first(exact, alone)
    vllm.assert_private()


def test_an_adapter_that_goes_takes_its_chunks_along(vllm_of, tmp_path, monkeypatch):  # noqa: F811
    """It is replaced under its number, or unloaded while its prompt is blended."""
    from vllm.lora.request import LoRARequest

    vllm = vllm_of("llama", enable_lora=True, max_lora_rank=8)
    config = vllm.engine.loaded.lm.config
    path = save_adapter(tmp_path / "x", config, 0)
    lora = LoRARequest("x", 1, str(path))
    ids = vllm.prompt(2, 0, 3)
    asked = {"precompute": {"texts": CHUNKS, "ids": IDS}}
    (early,) = vllm.ask(([5, 6], "auto", asked), lora=lora)
    assert "not loaded" in vllm.said(early)["error"]
    (report,) = vllm.ask(([5, 6], "auto", asked), lora=lora)
    assert vllm.said(report)["precompute"]["stored"] == len(CHUNKS)
    vllm.llm.reset_prefix_cache()
    (full,) = vllm.ask((ids, "full"), lora=lora)
    vllm.llm.reset_prefix_cache()
    manager = blender_of(vllm).lm._manager
    pause = Forward._pause

    def unload(self: Any) -> None:
        if threading.current_thread().name in ("kvrag_blend", "kvrag_precompute"):
            manager.remove_adapter(1)
        pause(self)

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "_pause", unload)
        (lost,) = vllm.ask((ids, "stitch"), lora=lora)
    more = [{"precompute": {"texts": [f"{CHUNKS[n]} More."], "ids": [f"{n}"]}} for n in range(2)]
    vllm.ask(([5, 6], "auto", more[0]), lora=lora)  # encodes the prefix
    keys = vllm.engine.store.catalog.keys()
    with monkeypatch.context() as patch:
        patch.setattr(Forward, "_pause", unload)
        (unstored,) = vllm.ask(([5, 6], "auto", more[1]), lora=lora)
    assert "unloaded" in vllm.said(unstored)["error"]
    assert vllm.engine.store.catalog.keys() == keys
    assert "could not be used" in vllm.said(lost)["fallback_reason"]
    assert_first(lost, full)
    vllm.llm.reset_prefix_cache()
    (again,) = vllm.ask((ids, "stitch"), lora=lora)
    assert vllm.said(again)["exactness"] == "repaired", vllm.said(again)
    save_adapter(path, config, 7)
    new = LoRARequest("x", 1, str(path), load_inplace=True)
    vllm.llm.llm_engine.add_lora(new)
    (stale,) = vllm.ask((ids, "stitch"), lora=lora)  # planned by the old one
    assert "could not be used" in vllm.said(stale)["fallback_reason"]
    engine = merged(vllm, path, tmp_path / "x-kv")
    (report,) = vllm.ask(([5, 6], "auto", asked), lora=lora)
    assert vllm.said(report)["precompute"]["stored"] == len(CHUNKS)
    vllm.llm.reset_prefix_cache()
    (blended,) = vllm.ask((ids, "stitch"), lora=lora)
    assert vllm.said(blended)["exactness"] == "repaired", vllm.said(blended)
    assert_first_of(engine, ids, blended)
    save_adapter(path, config, 8)
    vllm.llm.reset_prefix_cache()
    (begun,) = vllm.ask((ids, "stitch"), lora=new)  # loads it with its first step
    assert "adapter is new" in vllm.said(begun)["fallback_reason"]
    vllm.assert_private()
