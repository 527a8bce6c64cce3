from kvrag import KVRagEngine
from kvrag.testing.models import save_tiny_model

TEXTS = [f"chunk {number}: " + "the archive opens at nine " * 8 for number in range(2)]


def test_stored_chunks_are_reused(tmp_path):
    engine = KVRagEngine.from_pretrained(
        save_tiny_model(tmp_path / "llama"), kv_dir=tmp_path / "kv", context=None
    )
    assert engine.precompute(TEXTS).stored == len(TEXTS)
    result = engine.generate("\n".join(TEXTS) + "\nWhen?", max_new_tokens=2, mode="stitch")
    assert result.cached_tokens > 0
    engine.close()
