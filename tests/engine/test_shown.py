"""What users see of results, statistics and engines: in reprs, as JSON, and in other processes."""

import concurrent.futures
import copy
import json
import multiprocessing
import pickle

import pytest
from texts import make_chunks

from kvrag import ConfigError, KVRagEngine, StoreConfig
from kvrag.testing.models import tiny_model

CHUNKS = make_chunks(4, words=40, seed=5)
PROMPT = [{"role": "user", "content": f"{CHUNKS[1]}\n\n{CHUNKS[0]}\n\nWho?"}]


def test_the_repr_of_a_result_begins_with_what_came_out(engine):
    engine.precompute(CHUNKS)
    result = engine.generate(PROMPT, max_new_tokens=3, mode="stitch")
    shown = repr(result)
    assert shown.startswith(f"GenerationResult(text={result.text!r}, ")
    assert "exactness='repaired'" in shown
    assert repr(engine.score(PROMPT, " yes")).startswith("ScoreResult(loss=")
    results = (result, engine.prefill(PROMPT), engine.score(PROMPT, " yes"))
    for each in results:
        assert "_ids" not in repr(each)
        assert len(repr(each)) < 1000, "no ids, no logits"
        assert f"prompt_tokens={each.prompt_tokens}" in repr(each)


@pytest.mark.parametrize("kind", ["memory", "disk", "shared", "missed", "histories"])
def test_statistics_are_json(kind, engine_of, tmp_path):
    options = {
        "memory": {"kv_dir": None},
        "disk": {},
        "shared": {"kv_dir": f"file://{tmp_path}/shared"},
        "missed": {"store_config": StoreConfig(on_miss="store")},
        "histories": {"store_config": StoreConfig(history_bytes="10MB")},
    }
    if kind == "shared":
        pytest.importorskip("obstore")
    engine = engine_of(**options[kind])
    assert json.loads(json.dumps(engine.stats())) == engine.stats(), "before the model is loaded"
    engine.precompute(CHUNKS)
    engine.generate(PROMPT, max_new_tokens=1)
    stats = engine.stats()
    assert json.loads(json.dumps(stats)) == stats
    (lowest,) = list(stats["store"].values())[-1:]
    assert lowest["chunks"] == lowest.chunks
    assert lowest.chunks > 0 or kind == "shared"


# -- other processes -------------------------------------------------------------------------------------------------------------


def work(engine: KVRagEngine) -> str:
    return engine.generate("x").text


REMEDY = r"can't be sent to another process.*KVRagEngine\.get\(\.\.\.\).*in the function that runs in the process"


def test_an_engine_that_is_pickled_says_what_to_do(engine):
    for send in (
        pickle.dumps,
        lambda each: pickle.dumps({"engine": [each]}),
        multiprocessing.reduction.ForkingPickler.dumps,
    ):
        with pytest.raises(ConfigError, match=REMEDY):
            send(engine)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_an_engine_that_is_given_to_a_process_says_what_to_do(engine, start):
    context = multiprocessing.get_context(start)
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(ConfigError, match=REMEDY),
    ):
        pool.submit(work, engine).result(60)
    with pytest.raises(ConfigError, match=REMEDY):
        context.Process(target=work, args=(engine,)).start()


def test_a_copy_of_what_holds_an_engine_shares_it(tokenizer):
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tokenizer)
    held = {"engine": engine}
    assert copy.copy(engine) is copy.deepcopy(held)["engine"] is engine
    engine.close()
