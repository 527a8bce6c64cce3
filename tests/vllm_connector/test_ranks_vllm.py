"""vLLM's model on two devices: rank 0 drives, and answers are those of kvrag's engine, as with one.

The workers are processes of their own. Skipped without vLLM (docs/how-to/vllm.md).
"""

from typing import Any

import pytest
from test_blend_vllm import (  # noqa: F401
    CHUNKS,
    IDS,
    REPAIR,
    Vllm,
    assert_engine,
    assert_first,
    vllm_of,
)
from vllm_kit import needs_vllm

from kvrag import KVRagEngine
from kvrag.testing.models import TINY, save_tiny_model

pytestmark = needs_vllm


@pytest.fixture
def split_vllm_of(vllm_of, monkeypatch):  # noqa: F811
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def make(name: str, **options: Any) -> Vllm:
        return vllm_of(name, tensor_parallel_size=2, **options)

    return make


def fail_in_attention(_: Any) -> bool:
    """Let the next blend fail half-way, on the rank that blends; return whether it is this one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvrag.model.forward import Forward

    attend = Forward.attend
    calls = iter(range(9))

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            Forward.attend = attend
            raise ValueError("no memory")
        return attend(*args)

    is_first = get_kv_transfer_group()._worker._blender is not None
    if is_first:
        Forward.attend = failing
    return is_first


def fail_in_a_layer(_: Any) -> bool:
    """Let forwards of the rank that blends fail in a layer of vLLM's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._worker
    if side._blender is not None:
        side._split._held.model.layers[1].mlp.forward = None
    return side._blender is not None


def test_two_ranks_blend_as_kvrags_engine_does(split_vllm_of):
    vllm = split_vllm_of("qwen2")
    ids, other = vllm.prompt(2, 0, 3), vllm.prompt(1, 4)
    blended, beside, full = vllm.ask((ids, "stitch"), (other, "stitch"), (vllm.prompt(1), "full"))
    assert vllm.said(blended)["exactness"] == vllm.said(beside)["exactness"] == "repaired"
    assert vllm.said(full)["exactness"] == "full"
    assert_engine(vllm, ids, blended)
    assert_engine(vllm, other, beside)
    own = vllm.engine.generate(ids, mode="stitch", max_new_tokens=6)
    assert list(blended.outputs[0].token_ids)[: len(own.token_ids)] == list(own.token_ids)
    # A blend that fails on the first rank ends on the other one; both go on.
    vllm.llm.reset_prefix_cache()
    assert vllm.llm.collective_rpc(fail_in_attention) == [True, False]
    (failed,) = vllm.ask((ids, "stitch"))
    assert vllm.said(failed)["exactness"] == "full"
    (alone,) = vllm.ask((ids, "full"))
    assert_first(failed, alone)
    vllm.llm.reset_prefix_cache()
    (again,) = vllm.ask((ids, "stitch"))
    assert_first(again, blended)
    vllm.assert_private()
    # The ranks would mix their forwards and their steps, so vLLM ends, and no rank waits for ever.
    vllm.llm.reset_prefix_cache()
    assert vllm.llm.collective_rpc(fail_in_a_layer) == [True, False]
    with pytest.raises(Exception, match=r"cancelled|dead"):
        vllm.ask((ids, "stitch"))


def test_ranks_with_the_same_key_heads_store_and_blend_chunks(split_vllm_of, tmp_path, monkeypatch):
    """Chunks that the split model stores are those of the whole; exact beginnings are exact."""
    shape = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 1}
    monkeypatch.setitem(TINY, "one", {"model_type": "llama", **shape})
    save_tiny_model(tmp_path / "one", "one")
    vllm = split_vllm_of("llama", model=str(tmp_path / "one"), context=None)
    ids = vllm.prompt(2, 0, 3)
    asked = {"precompute": {"texts": CHUNKS, "ids": IDS}}
    (report, _) = vllm.ask(([5, 6], "auto", asked), (ids, "full"))
    assert vllm.said(report)["precompute"]["stored"] == len(CHUNKS)
    vllm.llm.reset_prefix_cache()
    (blended,) = vllm.ask((ids, "stitch"))
    assert vllm.said(blended)["exactness"] == "repaired"
    vllm.engine = KVRagEngine.from_pretrained(
        tmp_path / "one", kv_dir=vllm.kv_dir, repair=REPAIR, context=None
    )
    assert_engine(vllm, ids, blended)
    stored, ids = vllm.beginning(2, 0)
    (alone,) = vllm.ask((ids, "full"))
    vllm.llm.reset_prefix_cache()
    (exact,) = vllm.ask((ids, "prefix"))
    assert vllm.said(exact)["cached_tokens"] == len(stored)
    assert_first(exact, alone)
    vllm.assert_private()
