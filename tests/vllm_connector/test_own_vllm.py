"""vLLM's own model blends: it computes the rows that kvrag chooses, quantised or not.

Skipped without vLLM (docs/how-to/vllm.md).
"""

import threading
import time
from typing import Any

import pytest
from quantised_kit import compressed, save_base
from test_blend_vllm import CHUNKS, IDS, Vllm, assert_engine, assert_first, vllm_of  # noqa: F401
from vllm_kit import needs_vllm

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


def test_a_model_with_adapters_is_left_to_vllm(vllm_of):  # noqa: F811
    vllm = vllm_of(enable_lora=True, max_lora_rank=8)
    (answer,) = vllm.ask((vllm.prompt(2, 0, 3), "stitch"))
    assert "--enable-lora" in vllm.said(answer)["fallback_reason"]
    assert vllm.said(answer)["exactness"] == "full"
