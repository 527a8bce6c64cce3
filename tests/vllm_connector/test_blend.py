"""vLLM's blend mode without vLLM: decisions, private blocks, jobs, and what is said of them.

A small scheduler (:mod:`vllm_kit`) does what vLLM's does, and checks at each hit whose rows a block has.
"""

import gc
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from prometheus_client import Counter as PromCounter
from texts import make_chunks
from vllm_kit import (
    BLOCK,
    HAS_VLLM,
    RECORDED,
    Cache,
    Layer,
    Request,
    Scheduler,
    Setting,
    connect,
    step_of,
)

from kvrag import KVRagError, RepairConfig, StoreConfig
from kvrag.adapters import Blending, ModelFacts
from kvrag.blend.cost import Costs
from kvrag.errors import ConfigError
from kvrag.identity.fingerprint import context_digest, ids_digest
from kvrag.model.forward import Forward
from kvrag.model.lock import ModelLock

CHUNKS = [text.partition(": ")[2] for text in make_chunks(4, words=60)]
FREE = Costs(((0.0,), (0.0,)), 1.0, 0.0, {}, "tokens")
LAUNCHED = Costs(((16.0, 512.0), (50.0, 50.0)), 0.1, 0.0, {"request": 50.0})


def blend(connector, setting, role="SCHEDULER", **extra) -> Any:
    return connect(connector, setting, role=role, extra={"mode": "blend", **extra})


def about_of(connector, setting: Setting, **own: Any) -> Any:
    engine = setting.engine
    lm = engine.loaded.reusable
    parts = {
        "fingerprint": engine.loaded.fingerprint,
        "refusal": None,
        "repair": engine.repair,
        "costs": FREE,
        "depth": lm.depth,
        "window": lm.reuse_window,
        "context": engine.context_digest,
    }
    return ModelFacts(**(parts | own))


def scheduler_side(connector, setting: Setting, mode: str = "blend", **own: Any) -> Any:
    """The connector in vLLM's scheduler, which has heard of the worker's model."""
    config = {"read_only": mode == "prefix", "kv_dtype": setting.engine.store_config.kv_dtype}
    made = blend(connector, setting, mode=mode, store_config=config)
    messages = importlib.import_module("vllm_kvrag.messages")
    made.set_xfer_handshake_metadata({0: messages.Hello(about_of(connector, setting, **own))})
    return made


def prompt_of(
    setting: Setting, *order: int, question: str = "\n\nWho asks for a box?"
) -> list[int]:
    encoder = setting.engine.loaded.encoder
    text = "Answer from these notes, please.\n\n" + "\n\n".join(CHUNKS[i] for i in order) + question
    return [*encoder.bos_ids, *encoder.live_ids(text)]


def request_with(ids: list[int], number: int = 0, **asked: Any) -> Request:
    params = {"kvrag": asked} if asked else None
    return Request(f"r{number}", ids, kv_transfer_params=params)


def test_the_connector_has_vllms_signatures(connector):
    base = connector.KVConnectorBase_V1
    for name, parameters in RECORDED.items():
        own = getattr(connector.KVRagConnector, name)
        assert tuple(inspect.signature(own).parameters) == parameters
        if HAS_VLLM:
            assert tuple(inspect.signature(getattr(base, name)).parameters) == parameters
    if HAS_VLLM:
        assert base.__abstractmethods__ <= set(RECORDED)


# -- decisions ---------------------------------------------------------------------------------------


def test_all_but_the_last_token_is_blended_beside_the_steps(connector, setting):
    own = scheduler_side(connector, setting)
    ids = prompt_of(setting, 2, 0, 3)
    request = request_with(ids, mode="stitch")
    assert own.get_num_new_matched_tokens(request, 0) == (len(ids) - 1, True)
    assert own.get_num_new_matched_tokens(request, 0) == (len(ids) - 1, True)  # waits for blocks
    blocks = list(range(100, 100 + -(-len(ids) // BLOCK)))
    own.update_state_after_alloc(
        request, SimpleNamespace(get_block_ids=lambda: (blocks,)), len(ids) - 1
    )
    (job,) = own.build_connector_meta(None).jobs
    assert (job.request_id, job.blocks, job.start, job.stop) == ("r0", blocks, 0, len(ids) - 1)
    assert job.plan.token_ids == ids
    assert job.plan.encoder is None  # the worker has its own
    assert own.build_connector_meta(None).jobs == []
    behind = request_with(ids, 1, mode="stitch")
    assert own.get_num_new_matched_tokens(behind, 2 * BLOCK) == (len(ids) - 1 - 2 * BLOCK, True)


def test_an_adapters_chunks_are_those_of_its_fingerprint(connector, setting):
    from vllm_kvrag.messages import Ended

    own, ids = scheduler_side(connector, setting), prompt_of(setting, 2, 0, 3)
    found = setting.engine.loaded.fingerprint
    asked = [{"mode": "stitch"}] * 3 + [precompute("x")["kvrag"]]
    for number, heard in enumerate(({}, {7: "another"}, {7: found}, {})):
        own._scheduler.hear(Ended({}, heard))
        request = request_with(ids, number, **asked[number])
        for is_anew in (True, False):
            request.lora_request = SimpleNamespace(lora_int_id=7, load_inplace=is_anew)
            own._scheduler._decisions.clear()
            count, _ = own.get_num_new_matched_tokens(request, 0)
            assert (count > 0) == (number == 3 or (number == 2 and not is_anew))
        own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), count)
    assert [job.adapter for job in own.build_connector_meta(None).jobs] == [7, 7]


def test_a_request_says_what_it_wants(connector, setting):
    own = scheduler_side(connector, setting)
    ids = prompt_of(setting, 2, 0, 3)
    full, stitched = (0, False), (len(ids) - 1, True)
    for number, (asked, expected) in enumerate(
        [
            ({"mode": "full"}, full),
            ({"mode": "prefix"}, full),
            ({"mode": "stitch", "namespace": "another"}, full),
            ({"mode": "stitch"}, stitched),
            ({"mode": "auto"}, stitched),  # by the number of rows
            ({"mode": "auto", "repair": {"recompute_ratio": 1.0}}, full),
            ({"mode": "stitch", "repair": "careful"}, stitched),
            ({}, stitched),
        ]
    ):
        request = request_with(ids, number, **asked)
        assert own.get_num_new_matched_tokens(request, 0) == expected, asked
    assert "another" not in own._scheduler._planner._prompts.prompts.texts._indexes
    assert own.get_num_new_matched_tokens(request_with([5] * 400, 90, mode="stitch"), 0) == full


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"modus": "auto"}, "has no 'modus'"),
        ({"repair": {"ratio": "x"}}, "RepairConfig"),
        ({"repair": {"self": 1}}, "repair"),
        ({"namespace": 7}, "namespace"),
        ("stitch", "no object"),
        ([1], "no object"),
        ({"precompute": "text"}, "no object"),
        ({"precompute": {"texts": ["a"]}, 7: 8}, ""),
        (False, "no object"),
    ],
)
def test_wrong_parameters_are_answered_and_harm_nobody(connector, setting, params, word):
    own = scheduler_side(connector, setting)
    request = Request("r", prompt_of(setting, 1), kv_transfer_params={"kvrag": params})
    said = finish_at_once(own, request)
    assert word in said["fallback_reason"]
    if word:
        assert said["error"] == said["fallback_reason"]
        assert said["code"].endswith("Error")
    for nothing in (None, {}, {"kvrag": None}, {"kvrag": {}}):
        request = Request("r", [5] * 40, kv_transfer_params=nothing)
        assert "error" not in finish_at_once(own, request)


def finish_at_once(own: Any, request: Request) -> dict[str, Any]:
    count, _ = own.get_num_new_matched_tokens(request, 0)
    own.update_state_after_alloc(
        request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), count
    )
    delay, params = own.request_finished(request, [])
    assert delay is False
    return params["kvrag"]


def test_requests_that_cannot_be_blended_are_left_to_vllm(connector, setting):
    own, ids = scheduler_side(connector, setting), prompt_of(setting, 2, 0, 3)
    for other in (
        {"lora_request": SimpleNamespace(lora_int_id=1, load_inplace=False)},
        {"mm_features": [1]},
        {"cache_salt": "salt"},
        {"prompt_embeds": 1},
        {"skip_reading_prefix_cache": True},
        {"resumable": True},
        {"max_tokens": 10**6},
        {"request_id": "cmpl-1-beam-0-2"},
    ):
        request = Request(**{"request_id": "r", "ids": ids} | other)
        assert own.get_num_new_matched_tokens(request, 0) == (0, False), other
        assert finish_at_once(own, request)["fallback_reason"]
    silent = blend(connector, setting)  # the worker has not described its model
    assert "not described" in finish_at_once(silent, Request("r", ids))["fallback_reason"]
    refusing = scheduler_side(connector, setting, refusal="another model")
    assert finish_at_once(refusing, Request("r", ids))["fallback_reason"] == "another model"
    said = finish_at_once(refusing, Request("r", ids, kv_transfer_params=precompute("x")))
    assert (said["error"], said["code"]) == ("another model", "UnsupportedModelError")
    assert not refusing.build_connector_meta(None).jobs


def test_a_stream_is_told_by_its_id_once(connector, setting):
    own = scheduler_side(connector, setting)
    ids = prompt_of(setting, 0)
    stream = Request("r", ids, kv_transfer_params={"kvrag": {"stream": "s", "mode": "full"}})
    said = finish_at_once(own, stream)
    ask = {"kvrag": {"report": "s"}}
    told = [
        finish_at_once(own, Request("q", [1, 2], kv_transfer_params=ask))["report"]
        for _ in range(2)
    ]
    assert told == [said, None]
    assert said["exactness"] == "full"


def test_a_worker_describes_its_model(connector, setting):
    own = scheduler_side(connector, setting)
    ask = Request("q", [1, 2], kv_transfer_params={"kvrag": {"describe": True}})
    said = finish_at_once(own, ask)
    engine = setting.engine
    assert said["fingerprint"] == engine.loaded.fingerprint
    assert said["context"] == context_digest(engine.context_ids)
    assert said["repair"].startswith(engine.repair.strategy)
    assert said["refusal"] is None


def precompute(*texts: str, **own: Any) -> dict[str, Any]:
    return {"kvrag": {"precompute": {"texts": list(texts), **own}}}


def test_a_cache_or_model_that_cannot_be_blended_is_refused(connector, setting):
    changes: dict[str, dict[str, Any]] = {
        "'fp8'; .* pass --kv-cache-dtype float32 if it": {"cache_dtype": "fp8"},
        "'bfloat16'": {"cache_dtype": "bfloat16"},
        "several devices": {"world_size": 2},
        "prefill-context": {"world_size": 4, "tensor_parallel_size": 2},
        "decode-context": {
            "world_size": 2,
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
        },
        "external launcher": {"distributed_executor_backend": "external_launcher"},
        "shared among replicas": {"data_parallel_size": 2},
        "speculatively": {"speculative_config": "ngram"},
        "leave out --offload-group-size": {"offload_group_size": 8},
        "full attention": {"specs": [None]},
        "one group": {"specs": [None, None]},
        "recompute": {"kv_load_failure_policy": "fail"},
        "kv_consumer": {"is_kv_consumer": False, "kv_role": "kv_producer"},
        "answers": {"runner_type": "pooling"},
    }
    for word, change in changes.items():
        with pytest.raises(ConfigError, match=word):
            connect(connector, setting, extra={"mode": "blend"}, **change)
    with pytest.raises(ConfigError, match="pass 'prefix' or 'blend'"):
        connect(connector, setting, extra={"mode": "mix"})
    connect(connector, setting, data_parallel_size=2, is_moe_model=False)
    connect(connector, setting, cache_dtype="float32")
    split = connect(connector, setting, world_size=2, tensor_parallel_size=2)
    assert split.get_finished_count() == 1


def test_a_store_that_fails_is_asked_again_in_a_while(connector, setting, monkeypatch):
    own = scheduler_side(connector, setting)
    asked = []
    now = [0.0]

    def fails(*_: Any) -> Any:
        asked.append(1)
        now[0] += 2.0
        raise OSError("no such device")

    planner = own._scheduler._planner
    monkeypatch.setattr("vllm_kvrag.planning.time", SimpleNamespace(monotonic=lambda: now[0]))
    with monkeypatch.context() as patch:
        patch.setattr(planner._prompts.library.store.catalog, "texts", fails)
        ids = prompt_of(setting, 2, 0, 3)
        reasons = [finish_at_once(own, Request(f"r{i}", ids))["fallback_reason"] for i in range(5)]
        assert len(asked) == 1
        assert "no such device" in reasons[0]
        assert all("asked again in a while" in reason for reason in reasons[1:])
    now[0] += 20.0
    assert own.get_num_new_matched_tokens(request_with(ids, 9, mode="stitch"), 0)[1]


# -- private blocks ------------------------------------------------------------------------------------


class Guessing:
    """A planner that decides at random, and knows which rows are exact."""

    def __init__(self, random: Random, kinds: Any) -> None:
        self.random, self.kinds, self.decision = random, kinds, kinds.Decision

    def decide(self, ids, asked, about, *, num_computed: int, num_more: int) -> Any:
        exact = self.random.randrange(len(ids))
        kind = self.random.choice(["none", "exact", "blend", "blend"])
        if self.random.random() < 0.05:
            raise OSError("no store")
        if asked.mode == "prefix" and kind == "blend":
            kind = "none"
        if kind == "blend":
            shared = max(exact, num_computed)
            return self.decision("blend", None, len(ids) - 1, shared, exact, RepairConfig())
        if kind == "exact" and exact > num_computed:
            return self.decision("exact", None, exact, exact, exact)
        return self.decision("none")


@pytest.mark.parametrize("seed", range(6))
def test_no_request_finds_anothers_approximate_rows(connector, setting, seed):
    """Under random arrivals, hits, allocations, failures, preemptions, aborts and erasures."""
    random = Random(seed)
    own = scheduler_side(connector, setting)
    mode = own._scheduler
    mode._block_size = 4
    mode._planner = Guessing(random, importlib.import_module("vllm_kvrag.planning"))
    mode._private = type(mode._private)(4)
    scheduler = Scheduler(mode, num_blocks=random.choice([20, 30, 40]), size=4, random=random)
    heads = [[random.randrange(3) for _ in range(40)] for _ in range(2)]
    messages = importlib.import_module("vllm_kvrag.messages")
    for number in range(1500):
        if len(scheduler.requests) < 8 and number < 1400:
            ids = random.choice(heads)[: random.choice([1, 3, 22, 30, 38])]
            own_params = precompute("x") if random.random() < 0.1 else None
            most = random.randrange(1, 20)
            scheduler.add(Request(f"r{number}", ids, most, size=4, kv_transfer_params=own_params))
        scheduler.step()
        for request_id in list(scheduler.jobs):
            if random.random() < 0.4:
                succeeds = random.random() < 0.8
                scheduler.end_job(request_id, succeeds=succeeds)
                said = {"exactness": "repaired", "sources": []} if succeeds else None
                mode.hear(messages.Ended({request_id: said}))
        if scheduler.requests and random.random() < 0.08:
            request = random.choice(list(scheduler.requests.values()))
            if request.status != "finished":
                scheduler.finish(request.request_id)
    for request in list(scheduler.requests.values()):
        if request.status != "finished":
            scheduler.finish(request.request_id)
    assert scheduler.num_hits > 500
    assert scheduler.num_preempted > 20
    assert scheduler.num_own_hits > 20
    for kept in (mode._decisions, mode._private, mode._said, mode._waiting):
        assert not kept


# -- jobs ------------------------------------------------------------------------------------------------


@pytest.fixture
def blender(connector, setting):
    blending = importlib.import_module("vllm_kvrag.blending")
    layers = [Layer(2, 16) for _ in range(setting.engine.loaded.reusable.depth)]
    made = blending.Blender(Blending(setting.engine), Cache(layers))
    made.layers = layers
    assert setting.engine.loaded.reusable.records is False, "the device's memory is vLLM's"
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


def job_of(
    connector, setting: Setting, ids: list[int], blocks: list[int], number: int = 0, **asked: Any
) -> Any:
    """The job that the scheduler's side makes."""
    own, request = scheduler_side(connector, setting), request_with(ids, number, **asked)
    count, _ = own.get_num_new_matched_tokens(request, 0)
    own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), count)
    (job,) = own.build_connector_meta(None).jobs
    return job


def resting(blender: Any, work: Callable[[], Any]) -> Any:
    """Use the model, which is the worker's, but while it rests."""
    found = []
    blender._turn.rest(lambda: found.append(work()))
    return found[0]


def prefilled(blender: Any, setting: Setting, ids: list[int], **asked: Any) -> Any:
    """What kvrag's engine computes."""
    return resting(blender, lambda: setting.engine.prefill(ids, mode="stitch", **asked))


def ended(blender: Any) -> tuple[Any, Any]:
    """The next job that ends in steps without a forward."""
    for _ in range(1000):
        left = vars(blender).setdefault("left", [])
        if left:
            return left.pop(0)
        blender.rest(0.05)
        left += blender.ended()
    raise AssertionError("no job ends")


def test_blended_rows_land_in_the_requests_blocks_alone(connector, setting, blender):
    ids = prompt_of(setting, 2, 0)
    blocks = torch.randperm(40)[: -(-len(ids) // BLOCK)].tolist()
    job = job_of(connector, setting, ids, blocks, mode="stitch", repair={"recompute_ratio": 1.0})
    blender.submit(job)
    _, said = ended(blender)
    assert (said["holes"], said["sources"][-1][0]) == ([], "computed")
    own = prefilled(blender, setting, ids, repair={"recompute_ratio": 1.0})
    assert said["repaired_tokens"] == own.repaired_tokens
    with torch.no_grad():
        expected = setting.engine.loaded.lm.model(
            torch.tensor([ids]), use_cache=True
        ).past_key_values
    for layer, (keys, values, *_) in zip(blender.layers, expected, strict=True):
        for found, full in zip(layer.rows(blocks), (keys[0], values[0]), strict=True):
            assert torch.allclose(found[:, : job.stop], full[:, : job.stop], atol=2e-5)
        others = [block for block in range(40) if block not in blocks]
        assert not layer.kv_cache[others].any()


def test_a_job_that_fails_ends(connector, setting, blender, monkeypatch):
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    jobs = [job_of(connector, setting, ids, blocks, i, mode="stitch") for i in range(3)]
    for failing in ("kvrag.adapters.blending.prefill", "kvrag.adapters.Blending.read"):

        def fails(*_: Any, **__: Any) -> Any:
            raise MemoryError("of the device")

        with monkeypatch.context() as patch:
            patch.setattr(failing, fails)
            for job in jobs[:2]:
                blender.submit(job)
            found = [ended(blender), ended(blender)]
        assert found == [(jobs[0], None), (jobs[1], None)]
    blender.submit(jobs[2])  # the threads live
    assert ended(blender)[1]["exactness"] == "repaired"
    assert jobs[2].failed(BLOCK) == blocks[: -(-jobs[2].stop // BLOCK)]
    assert not blender._running


def test_steps_go_on_while_a_thread_reads(connector, setting, blender, monkeypatch):
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    jobs = [job_of(connector, setting, ids, blocks, i, mode="stitch") for i in range(2)]
    goes_on = threading.Event()
    read = Blending.read

    def waits(*args: Any) -> Any:
        goes_on.wait(30)
        return read(*args)

    monkeypatch.setattr(Blending, "read", waits)
    for job in jobs:
        blender.submit(job)
    start = time.monotonic()
    for _ in range(3):  # steps with a forward
        blender.rest(0.0)
    assert blender.ended() == []
    assert time.monotonic() - start < 10
    goes_on.set()
    start = time.monotonic()
    found = []
    while len(found) < 2:
        blender.rest(30.0)  # ends when a job does
        found += blender.ended()
    assert time.monotonic() - start < 20
    assert [job for job, _ in found] == jobs


def test_steps_run_at_a_forwards_pauses(connector, setting, blender, monkeypatch):
    """A forward is cut between its layers: rows come out as without the steps in between."""
    monkeypatch.setattr("kvrag.model.lock.SLICE_S", 0.0)
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    job = job_of(connector, setting, ids, blocks, mode="stitch")
    lock = blender._blending.lm.lock
    layers = []
    update = Forward.update

    def seen(self: Any, keys: Any, values: Any, layer: int, *more: Any, **others: Any) -> Any:
        assert not lock.is_stepping
        layers.append(layer)
        return update(self, keys, values, layer, *more, **others)

    monkeypatch.setattr(Forward, "update", seen)
    blender.submit(job)
    between = set()
    found = []
    for _ in range(10000):
        blender.rest(0.0)
        before = len(layers)
        assert lock.is_stepping
        assert lock.num_prompts == 1
        time.sleep(0.002)  # the step: nobody else computes
        assert len(layers) == before
        if layers:
            between.add((len(layers), layers[-1]))
        found += blender.ended()
        if found:
            break
    ((_, said),) = found
    assert any(layer < max(layers) for _, layer in between), "no forward was cut"
    cut = [layer.kv_cache.clone() for layer in blender.layers]
    for layer in blender.layers:
        layer.kv_cache.zero_()
    monkeypatch.undo()
    blender.submit(job)
    _, whole = ended(blender)
    assert (said["exactness"], said["sources"]) == ("repaired", whole["sources"])
    for layer, found in zip(blender.layers, cut, strict=True):
        assert torch.equal(layer.kv_cache, found)


@pytest.mark.parametrize("how", ["ends", "changes", "closes"])
def test_a_blend_that_is_cut_ends_if_it_is_not_needed(
    connector, setting, blender, monkeypatch, how
):
    """Its request ends, the weights change, or vLLM ends, while it pauses; no row is written."""
    monkeypatch.setattr("kvrag.model.lock.SLICE_S", 0.0)
    job = job_of(connector, setting, prompt_of(setting, 2, 0), list(range(30)), mode="stitch")
    lm = blender._blending.lm
    paused = threading.Event()
    update = Forward.update

    def seen(*args: Any, **others: Any) -> Any:
        paused.set()
        return update(*args, **others)

    monkeypatch.setattr(Forward, "update", seen)
    blender.submit(job)
    for _ in range(10000):
        if not paused.is_set():
            blender.rest(0.0)
    assert paused.is_set()
    if how == "ends":
        blender.abandon({job.request_id})
    elif how == "changes":
        with torch.no_grad():
            next(lm.model.parameters()).add_(1e-3)
    else:
        blender.close()
        assert not blender._threads[1].is_alive()
    found = blender.ended() if how == "closes" else [ended(blender)]
    assert found == [(job, None)]
    assert not any(layer.kv_cache.any() for layer in blender.layers)


def test_idle_time_does_not_lengthen_a_slice(monkeypatch):
    lock = ModelLock()
    monkeypatch.setattr("kvrag.model.lock.LONG_SLICE_S", 0.1)
    start = time.perf_counter()
    lock.step(None, lambda _: [time.sleep(0.5)], limit=1)
    assert lock._due < time.perf_counter() + 0.2
    assert time.perf_counter() > start + 0.5


def test_an_interrupt_leaves_the_turn_to_the_worker(connector):
    """A forward is not let run beside the steps that come behind."""
    blending = importlib.import_module("vllm_kvrag.blending")
    lock = ModelLock()
    turn = blending.Turn(lock, Cache([]))
    taken = turn._taken
    calls = []

    def acquire() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        taken.acquire()

    turn._taken = SimpleNamespace(acquire=acquire, release=taken.release)
    with pytest.raises(KeyboardInterrupt):
        turn.rest(lambda: None)
    assert taken._value == 0
    assert lock.is_stepping
    turn.rest(lambda: None)
    assert lock.is_stepping
    turn.end()
    turn.thread.join(30)
    assert not turn.thread.is_alive()


@pytest.mark.parametrize("pauses", [True, False])
def test_a_forward_on_several_ranks_is_whole(connector, pauses):
    """They would have to pause at the same layer."""
    blending = importlib.import_module("vllm_kvrag.blending")
    lock = ModelLock()
    turn = blending.Turn(lock, Cache([], pauses=pauses))
    was_cut = []
    held = threading.Event()

    def forward() -> None:
        with lock:
            held.set()
            time.sleep(0.2)
            lock._due = 0.0
            was_cut.append(bool(lock.pending))
            lock.give_way()

    thread = threading.Thread(target=forward)
    thread.start()
    turn.rest(lambda: held.wait(30))
    turn.end()
    for each in (thread, turn.thread):
        each.join(30)
        assert not each.is_alive()
    assert was_cut == [pauses]


def test_what_a_step_looks_up_is_its_own(connector, setting, monkeypatch):
    """Each side leaves the context of its forward to itself while the other computes."""
    blending = importlib.import_module("vllm_kvrag.blending")
    current = ["worker's"]

    @contextmanager
    def aside() -> Iterator[None]:
        own = current[0]
        current[0] = None
        yield
        current[0] = own

    lock = ModelLock()
    used = set()  # by whom adapters are set again
    lm = SimpleNamespace(
        aside=aside,
        pauses=True,
        mapping=None,
        use=lambda _: used.add(threading.current_thread()) or 1 / 0,
    )
    turn = blending.Turn(lock, lm)
    seen = []

    def forward() -> None:
        with lock:
            own = f"forward's {threading.get_ident()}"
            current[0] = own
            for _ in range(20):
                time.sleep(0.002)  # a step comes meanwhile
                lock._due = 0.0
                lock.give_way()
                seen.append(current[0] == own)
            current[0] = "left behind"

    thread = threading.Thread(target=forward)
    thread.start()
    while thread.is_alive():
        turn.rest(lambda: time.sleep(0.001))
        assert current == ["worker's"]
    assert seen == [True] * 20
    assert used == {thread}
    turn.end()
    turn.thread.join(30)
    assert not turn.thread.is_alive()


def test_other_threads_run_the_model_only_while_the_worker_rests(connector, setting, blender):
    blending = importlib.import_module("vllm_kvrag.blending")
    blender.submit(blending.Job("r", precompute={"texts": [CHUNKS[0] + " More."]}))
    time.sleep(0.5)
    assert blender.ended() == []  # it waits for the model, which the worker has
    assert ended(blender)[1]["precompute"]["stored"] == 1


def test_loaded_chunks_live_until_the_device_has_read_them(
    connector, setting, blender, driver, monkeypatch
):
    """Nobody waits in a load, and other threads read other chunks meanwhile."""
    monkeypatch.setattr("kvrag.kv.buffers.SMALL_BYTES", 1024)
    engine = setting.engine
    encoder = engine.loaded.encoder
    head = [*encoder.bos_ids, *encoder.live_ids(engine.prefix_text)]
    ids = [*head, *encoder.chunk_ids(CHUNKS[2]), *encoder.live_ids("\n\nWho asks for a box?")]
    job = job_of(connector, setting, ids, list(range(30)), mode="prefix")
    assert job.repair is None
    for tier in engine.store.tiers:
        tier.release()
        tier.max_bytes = 0
    device = fake_cuda.install(monkeypatch)
    fake_cuda.move(engine.loaded.reusable)
    for layer in blender.layers:
        layer.kv_cache = layer.kv_cache.as_subclass(fake_cuda.OnDevice)
    device.late = driver
    blender._blending.check = lambda _: None  # moved weights are others
    blender._running[job.request_id] = threading.Event()
    with torch.inference_mode(), device:
        said = resting(blender, lambda: blender._blend(job, blender._blending.read(job.plan)))
        gc.collect()
        assert (said["exactness"], said["cached_tokens"]) == ("exact", job.stop)
        assert device.copies
        device.run()
    assert not device.spoilt


def test_erased_documents_are_holes(connector, setting, blender):
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    job = job_of(connector, setting, ids, blocks, mode="stitch")
    setting.engine.delete(["c"])
    blender.submit(job)
    _, said = ended(blender)
    assert len(said["holes"]) == 1
    setting.engine.delete(["a"])
    blender.submit(job)
    assert ended(blender)[1] is None, "vLLM computes the prompt, in its own pieces"


def test_jobs_of_ended_requests_are_left_out(connector, setting, blender):
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    jobs = [job_of(connector, setting, ids, blocks, i, mode="stitch") for i in range(2)]
    for job in jobs:
        blender.submit(job)
    blender.abandon([jobs[0].request_id, "of another request"])
    found = {job.request_id: said for job, said in (ended(blender), ended(blender))}
    assert found[jobs[0].request_id] is None
    assert found[jobs[1].request_id]["exactness"] == "repaired"
    assert not blender._running


def test_nothing_begins_after_the_end(connector, setting, monkeypatch):
    blending = importlib.import_module("vllm_kvrag.blending")
    blender = blending.Blender(Blending(setting.engine), Cache([]))
    begun, goes_on = threading.Event(), threading.Event()
    computed = []

    def waits(**given: Any) -> Any:
        begun.set()
        goes_on.wait(30)
        computed.append(given)
        raise KVRagError("it is over")

    monkeypatch.setattr(setting.engine, "precompute", waits)
    for number in range(3):
        blender.submit(blending.Job(f"r{number}", precompute={"texts": ["a"]}))
    assert begun.wait(30)
    closing = threading.Thread(target=blender.close)
    closing.start()
    while not blender._running["r2"].is_set():
        time.sleep(0.01)
    goes_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert len(computed) == 1
    assert [said for _, said in blender.ended()][1:] == [None, None]


def test_a_slow_store_holds_no_step(connector, setting, blender, monkeypatch):
    """What was read is handed to the thread that blends, which never reads."""
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    read, is_read = Blending.read, threading.Event()

    def reads(*args: Any) -> Any:
        found = read(*args)
        is_read.set()
        return found

    monkeypatch.setattr(Blending, "read", reads)
    blender.submit(job_of(connector, setting, ids, blocks, mode="stitch"))
    assert is_read.wait(30)
    monkeypatch.setattr(setting.engine.store, "get_many", lambda *_, **__: time.sleep(60))
    for tier in setting.engine.store.tiers:
        tier.release()
    start = time.monotonic()
    assert ended(blender)[1]["exactness"] == "repaired"
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("how", ["needed", "abandoned", "closed"])
def test_a_thread_reads_one_prompt_ahead(connector, setting, blender, monkeypatch, how):
    """Prompts that wait hold no KV, and a document that is erased meanwhile is not blended."""
    ids, blocks = prompt_of(setting, 2, 0), list(range(30))
    jobs = [job_of(connector, setting, ids, blocks, i, mode="stitch") for i in range(5)]
    read, has_read = Blending.read, threading.Semaphore(0)

    def reads(*args: Any) -> Any:
        has_read.release()
        return read(*args)

    monkeypatch.setattr(Blending, "read", reads)
    for job in jobs:
        blender.submit(job)
    assert [has_read.acquire(timeout=30) for _ in range(2)] == [True, True]
    assert not has_read.acquire(timeout=0.5)
    if how == "abandoned":
        blender.abandon({job.request_id for job in jobs})
    elif how == "closed":
        blender.close()
        assert not any(thread.is_alive() for thread in blender._threads)
    found = blender.ended() if how == "closed" else [ended(blender) for _ in jobs]
    assert {job.request_id for job, _ in found} == {job.request_id for job in jobs}
    assert [said is not None for _, said in found] == [how == "needed"] * 5
    assert blender._room._value == 2


def test_precompute_is_answered_whatever_comes_of_it(connector, setting, blender, monkeypatch):
    blending = importlib.import_module("vllm_kvrag.blending")

    def answer(**given: Any) -> Any:
        blender.submit(blending.Job("r", precompute=given))
        return ended(blender)[1]

    assert answer(texts=[CHUNKS[0], CHUNKS[0] + " More."])["precompute"]["stored"] == 1
    assert answer(texts=[""])["code"] == "InputError"
    assert answer(words=["a"])["code"] == "ConfigError"
    monkeypatch.setattr(setting.engine, "precompute", lambda **_: 1 / 0)
    assert answer(texts=["a"])["code"] == "ZeroDivisionError"


def test_a_failed_job_is_not_tried_again(connector, setting):
    own, ids = scheduler_side(connector, setting), prompt_of(setting, 2, 0)
    messages = importlib.import_module("vllm_kvrag.messages")
    scheduler = importlib.import_module("vllm_kvrag.scheduler")
    request = request_with(ids, mode="stitch")
    count, _ = own.get_num_new_matched_tokens(request, 0)
    assert count
    own.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), count)
    failed = SimpleNamespace(kv_connector_worker_meta=messages.Ended({"r0": None}))
    own.update_connector_output(failed)
    assert own.get_num_new_matched_tokens(request, 0) == (0, False)
    _, params = own.request_finished(request, [])
    assert params["kvrag"]["fallback_reason"] == scheduler.FAILED
    assert params["kvrag"]["exactness"] == "full"


def test_what_is_said_is_counted(connector, setting):
    report = importlib.import_module("vllm_kvrag.report")
    own, ids = scheduler_side(connector, setting), prompt_of(setting, 2, 0)
    assert own.get_kv_connector_stats() is None
    finish_at_once(own, request_with(ids, mode="full"))
    finish_at_once(own, request_with(ids, 1, mode="full"))
    counts = own.get_kv_connector_stats()
    assert counts.data == {"requests_full": 2, "tokens_computed": 2 * len(ids)}
    assert own.get_kv_connector_stats() is None
    total = connector.KVRagConnector.build_kv_connector_stats({"tokens_reused": 3})
    assert total.aggregate(counts).reduce() == {**counts.data, "tokens_reused": 3}
    if not HAS_VLLM:
        shown: dict[Any, float] = {}

        def make(name: str, labelnames: list[str], **_: Any) -> Any:
            def labels(*values: str) -> Any:
                key = (name, *values)
                return SimpleNamespace(inc=lambda by: shown.update({key: shown.get(key, 0) + by}))

            return SimpleNamespace(labels=labels)

        metrics = report.Metrics(None, {PromCounter: make}, ["engine"], {0: ["0"]})
        metrics.observe(counts.data)
        metrics.observe(counts.data)
        assert shown == {
            ("vllm:kvrag_requests", "0", "full"): 4,
            ("vllm:kvrag_prompt_tokens", "0", "computed"): 4 * len(ids),
        }


def test_said_counts_what_vllm_had(connector):
    behind = importlib.import_module("vllm_kvrag.blending")._counts_behind
    sources = [("exact", 3), ("reused", 5), ("repaired", 2), ("computed", 4)]
    assert behind(sources, 0)["sources"] == [list(each) for each in sources]
    assert behind(sources, 6) == {
        "sources": [["exact", 6], ["reused", 2], ["repaired", 2], ["computed", 4]],
        "cached_tokens": 8,
        "repaired_tokens": 2,
        "computed_tokens": 4,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_cpu_vllm_sleeps_while_it_waits(connector, setting, monkeypatch, device):
    done = []
    name = "vllm.distributed.device_communicators.shm_broadcast"
    waiting = importlib.import_module(name).SpinCondition
    monkeypatch.setattr(
        waiting, "wait", lambda _, timeout_ms: done.append(timeout_ms), raising=False
    )
    monkeypatch.setattr(time, "sleep", lambda _: done.append("slept"))
    connect(connector, setting, device_type=device)
    waiting.__new__(waiting).wait(timeout_ms=7)
    assert done == (["slept", 7] if device == "cpu" else [7])


def test_only_a_step_without_a_forward_waits_for_jobs(connector, setting):
    own, modes = blend(connector, setting, role="WORKER"), []
    own._worker.load = lambda *_, is_idle: modes.append(is_idle)
    own.bind_connector_metadata(scheduler_side(connector, setting).build_connector_meta(None))
    own.start_load_kv(step_of())
    own.start_load_kv(step_of(is_idle=True))
    own.start_load_kv(step_of(is_idle=True), scheduler_output=1)  # of vLLM's second runner
    assert modes == [False, True, False]


def test_chunks_are_no_prefixes_and_a_prefix_is_read_once():
    """Models without BOS have an empty prefix, so their chunks stand behind no token, as prefixes do."""
    from kvrag.adapters.planning import Prefixes

    read = list[str]()
    record = SimpleNamespace(model="m", namespace="n", prefix=ids_digest(()))
    changes = iter(range(9))

    def identity(key: str) -> Any:
        read.append(key)
        return SimpleNamespace(token_ids=(1, 2))

    catalog = SimpleNamespace(
        state=lambda: [next(changes)],
        keys=lambda: ["prefix", "chunk"],
        get=lambda key: record,
        key_texts=lambda key: ["text"] if key == "chunk" else [],
    )
    prefixes = Prefixes(SimpleNamespace(catalog=catalog, identity=identity))
    for _ in range(2):
        prefixes._next = 0.0
        assert prefixes.of("m", "n") == [(1, 2)]
    assert prefixes.of("m", "other") == []
    assert read == ["prefix"]


def test_a_store_that_hangs_delays_a_prompt_by_its_deadline(connector, setting, monkeypatch):
    own = scheduler_side(connector, setting)
    planner = own._scheduler._planner
    short = replace(planner._prompts.prompts, config=StoreConfig(load_timeout_s=0.2))
    monkeypatch.setattr(planner._prompts, "prompts", short)
    hanging = threading.Event()
    monkeypatch.setattr(type(planner._prompts.prefixes), "of", lambda *_: hanging.wait(30))
    start = time.monotonic()
    said = finish_at_once(own, request_with(prompt_of(setting, 2, 0), mode="stitch"))
    hanging.set()
    assert time.monotonic() - start < 10
    assert said["exactness"] in ("full", "exact")


def test_a_model_that_cannot_be_opened_is_answered_without_the_store(
    connector, setting, monkeypatch
):
    worker_side = importlib.import_module("vllm_kvrag.worker")

    def fail(*_: Any) -> None:
        raise ValueError("unrecognised")

    monkeypatch.setattr(worker_side, "model_of", lambda _: object())
    monkeypatch.setattr(worker_side, "VllmLM", fail)
    worker = blend(connector, setting, role="WORKER")
    assert "ValueError: unrecognised" in worker.get_handshake_metadata().about.refusal


def test_an_option_that_is_gone_is_answered_with_the_remedy(connector, setting):
    with pytest.raises(ConfigError, match="leave 'weights' out of kv_connector_extra_config"):
        blend(connector, setting, weights="copy")


def test_auto_prices_both_ways_by_the_same_forwards(connector, setting):
    """A forward whose launch takes all the time costs as much for a repair as for a prompt."""
    ids = prompt_of(setting, 2, 0, 3)

    def reason(costs: Costs) -> str | None:
        own = scheduler_side(connector, setting, costs=costs)
        own.get_num_new_matched_tokens(request_with(ids, mode="auto"), 0)
        return own._scheduler._decisions["r0"][1].reason

    assert "repaired reuse would not pay: estimated" in str(reason(LAUNCHED))
    assert str(reason(LAUNCHED)).endswith(
        f"to compute the {len(ids)} tokens that vLLM does not have"
    )
    assert reason(replace(LAUNCHED, forwards=((0.0,), (1.0,)), row=1.0, each={})) is None


def test_escaped_documents_are_named(connector, setting):
    """Whatever is reused, and beside what else is said."""
    text = "\n".join(make_chunks(6, words=60)[4:])
    setting.engine.precompute([text])
    own = scheduler_side(connector, setting, costs=LAUNCHED)
    ids = prompt_of(setting, 2, 0, question=repr(text))
    said = [
        finish_at_once(own, request_with(ids, number, mode=mode))["fallback_reason"]
        for number, mode in enumerate(["auto", "prefix", "stitch"])
    ]
    assert ["chunks escaped" in each for each in said] == [True] * 3
    assert "; repaired reuse would not pay" in said[0]


def test_reports_of_two_workers_are_joined(connector):
    messages = importlib.import_module("vllm_kvrag.messages")
    both = messages.Ended({"a": None}).aggregate(messages.Ended({"b": {}}))
    assert both.said == {"a": None, "b": {}}


def test_facts_that_a_response_leaves_out_are_those_of_no_model():
    """A connector that has had no handshake says nothing of its model."""
    assert ModelFacts.of({}) == ModelFacts()
