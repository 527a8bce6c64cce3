"""A model whose chunks can't be moved still continues from the exact beginning of an earlier prompt, where a proof allows it."""

import random
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from kit import request_of
from texts import make_chunks
from transformers import DynamicCache

import kvrag.model.plain as plainly
from kvrag import Chunk, StoreConfig
from kvrag.blend.beginnings import MAX_SNAPSHOTS, pieces_of
from kvrag.errors import UnsupportedModelError
from kvrag.generate.radix_cache import RadixCache
from kvrag.kv.snapshot import Snapshot
from kvrag.model.lock import Clock
from kvrag.model.plain import PlainLM
from kvrag.testing.models import REFUSED, save_tiny_model, tiny_model

KEPT = StoreConfig(history_bytes=2**27)
HEAD, *CHUNKS = make_chunks(5, words=16)
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SMALL = {"mamba_chunk_size": 16}
"""Prompts here are shorter than the 256 tokens that a scan would be padded to."""
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, **SMALL}

HYBRIDS = {
    "qwen3_next-small": {
        "model_type": "qwen3_next",
        **EXPERTS,
        **LINEAR,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": LINEAR,
    "olmo_hybrid": LINEAR,
    "falcon_h1": REFUSED["falcon_h1"] | SMALL,
    "bamba": REFUSED["bamba"] | SMALL,
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "lfm2": REFUSED["lfm2"],
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
        "adapter_rank": 8,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "expand": 2,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
}
"""Models with a running state."""
WITHOUT_STATE = ("gpt2", "opt", "falcon-alibi", "llama-dynamic-ntk")
UNSURE = ("mamba", "jamba", "rwkv")
"""Of transformers 5.24, these can't read several tokens behind a state, or keep it elsewhere; a later one may."""


@pytest.fixture
def both(engine_of, monkeypatch):
    """Make an engine that keeps no request and an engine that does, on the same refused model."""

    def make(name, **options):
        monkeypatch.setitem(REFUSED, name, {**REFUSED, **HYBRIDS}[name])
        model = tiny_model(name)
        given = {"kv_dir": None, "store_config": KEPT, **options}
        made = engine_of(model, kv_dir=None), engine_of(model, **given)
        assert all(isinstance(engine.loaded.lm, PlainLM) for engine in made)
        return made

    return make


def prompt(order=(0, 1), question="Who keeps the ledger?"):
    return [
        f"Read this, with care: {HEAD}\n",
        *(part for i in order for part in (Chunk(CHUNKS[i]), "\n")),
        question,
    ]


def num_before(engine, order=(0, 1)):
    """Tokens before the question, but for the line break."""
    spans = engine.explain(prompt(order)).spans
    return next(span.stop for span in reversed(spans) if span.kind == "chunk")


def asked(engines, what, **options):
    """Ask both engines; their answers must be the same. Returns the second one's."""
    options = {"max_new_tokens": 6, "logprobs": 2, **options}
    expected, got = (engine.generate(what, **options) for engine in engines)
    assert got.token_ids == expected.token_ids
    assert expected.history_tokens == 0
    told = [[each.logprob for each in result.logprobs] for result in (expected, got)]
    assert torch.tensor(told[0]).sub(torch.tensor(told[1])).abs().max() < 1e-3
    assert got.cached_tokens == got.history_tokens
    assert got.computed_tokens == got.prompt_tokens - got.history_tokens
    assert got.exactness == ("exact" if got.history_tokens else "full")
    assert sum(count for _, count in got.sources) == got.prompt_tokens
    assert "KV of this model is not reused: " in got.fallback_reason
    return got


def test_the_longest_beginning_with_a_snapshot_is_found():
    draw, histories, kept, snapshots = random.Random(5), RadixCache(2**30), [], set()
    for _ in range(300):
        base = draw.choice(kept) if kept and draw.random() < 0.7 else []
        new = [draw.randint(0, 3) for _ in range(draw.randint(1, 30))]
        ids = [*base[: draw.randint(0, len(base))], *new]
        places = draw.sample(range(1, len(ids) + 1), min(len(ids), draw.randint(0, 4)))
        taken = {at: Snapshot(tuple(ids[:at]), 10) for at in places}
        histories.keep("", ids, [], num_exact=len(ids), num_prompt=len(ids), snapshots=taken)
        kept.append(ids)
        snapshots |= {each.cache for each in taken.values()}
        asked_for = [*draw.choice(kept)[: draw.randint(1, 40)], 0, draw.randint(0, 3)]
        found = histories.find("", asked_for, needs_state=True)
        fitting = [n for n in range(1, len(asked_for)) if tuple(asked_for[:n]) in snapshots]
        assert (found.num_rows, found.num_exact) == (max(fitting, default=0),) * 2
        assert (found.snapshot.cache if fitting else ()) == tuple(asked_for[: found.num_rows])
    assert histories.stats()["bytes"] == 10 * len(snapshots)
    histories.clear()
    assert histories.stats() == {"bytes": 0, "tokens": 0}


@pytest.mark.parametrize("name", [*HYBRIDS, *WITHOUT_STATE])
def test_another_question_over_the_same_documents_computes_the_question(both, name):
    plain, engine = engines = both(name)
    assert asked(engines, prompt()).history_tokens == 0
    before = num_before(engine)
    first = asked(engines, prompt(question="Where is the lamp in winter?"))
    assert before <= first.history_tokens < first.prompt_tokens - 4
    if name in HYBRIDS:
        assert first.history_tokens == before
    again = asked(engines, prompt(question="Where is the lamp by the river?"))
    assert again.history_tokens > first.history_tokens, "where the second left the first"
    other = asked(engines, prompt((1, 0)))
    assert 0 < other.history_tokens < first.history_tokens / 2, "the common beginning"
    assert other.history_tokens >= engine.explain(prompt()).spans[0].stop
    same = asked(engines, prompt((0, 1)))
    assert same.history_tokens >= before
    logits = [each.prefill(prompt((0, 1), "Why?")).logits for each in engines]
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    scores = [each.score(prompt((0, 1), "Why?"), [5, 6, 7]).logits for each in engines]
    assert (scores[0] - scores[1]).abs().max() < 1e-3
    assert plain.stats().get("histories") is None


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2", "gpt2"])
def test_the_next_turn_of_a_chat_computes_what_is_new(both, name):
    engines = both(name)
    messages, results = [], []
    for question in ("Who keeps the lamp by the river?", "And the ledger?", "Thank you. Why?"):
        messages.append({"role": "user", "content": question})
        results.append(asked(engines, list(messages)))
        messages.append({"role": "assistant", "content": results[-1].text})
    for before, result in pairwise(results):
        assert result.history_tokens >= before.prompt_tokens - 8


def test_a_prompt_that_names_no_chunk_is_cut_at_even_places(both):
    engines = both("lfm2")
    text = "\n\n".join(make_chunks(12, words=24, seed=3))
    total = asked(engines, f"{text}\n\nWho?").prompt_tokens
    second = asked(engines, f"{text}\n\nWhere is it?")
    assert second.history_tokens >= total / 2
    third = asked(engines, f"{text}\n\nWhere else?")
    assert third.history_tokens > total - 12, "behind all that it shares with the second"


@pytest.mark.parametrize("name", UNSURE)
def test_no_beginning_is_reused_where_the_proof_fails(both, name):
    engine = both(name)[1]
    fault = pieces_of(engine.loaded.lm).reason
    answers = [asked((both(name)[0], engine), prompt()) for _ in range(2)]
    if fault:
        assert all(answer.history_tokens == 0 for answer in answers)
        assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}
        assert fault in str(engine.explain(prompt()))


@pytest.mark.parametrize(
    "fault", ["state is lost", "rows are lost", "state is shared", "fails", "another cache"]
)
def test_the_proof_finds_what_goes_wrong(both, monkeypatch, fault):
    """Whatever the family: a wrong snapshot must not pass."""
    engines = both("falcon_h1")
    of, restored = Snapshot.of.__func__, Snapshot.restored

    def lost(self, rows):
        cache = restored(self, rows)
        for layer in cache.layers:
            for states in (layer.conv_states, layer.recurrent_states):
                for tensor in states.values():
                    tensor.zero_()
        return cache

    def moved(self, rows):
        return restored(self, [(keys.roll(1, 2), values) for keys, values in rows])

    def shared(self, rows):
        for layer, (keys, values) in zip(self.cache.layers, rows, strict=True):
            layer.keys, layer.values = keys, values
        return self.cache

    def fail(cls, cache, num_rows):
        raise RuntimeError("no such layer")

    def another(cls, cache, num_rows):
        own = type("QuantizedCache", (DynamicCache,), {})
        cache.__class__ = own
        try:
            return of(cls, cache, num_rows)
        finally:
            cache.__class__ = DynamicCache

    changes = {
        "state is lost": ("restored", lost),
        "rows are lost": ("restored", moved),
        "state is shared": ("restored", shared),
        "fails": ("of", classmethod(fail)),
        "another cache": ("of", classmethod(another)),
    }
    monkeypatch.setattr(Snapshot, *changes[fault])
    for _ in range(2):
        assert asked(engines, prompt()).history_tokens == 0
    assert engines[1].stats()["histories"]["tokens"] == 0
    assert pieces_of(engines[1].loaded.lm).reason


def test_a_cache_that_changes_after_the_proof_costs_time_and_nothing_else(both, caplog):
    plain, engine = engines = both("gpt2")
    asked(engines, prompt())
    settings = engine.loaded.lm.model.generation_config
    settings.cache_implementation = "static"
    try:
        got = engine.generate(prompt(question="Why?"), max_new_tokens=6)
        again = engine.generate(prompt(question="Why not?"), max_new_tokens=6)
    finally:
        settings.cache_implementation = None
    assert got.token_ids == plain.generate(prompt(question="Why?"), max_new_tokens=6).token_ids
    assert (
        again.token_ids == plain.generate(prompt(question="Why not?"), max_new_tokens=6).token_ids
    )
    hybrid = both("lfm2")
    pieces_of(hybrid[1].loaded.lm)
    hybrid[1].loaded.lm.model.generation_config.use_cache = False
    for _ in range(2):
        assert asked(hybrid, prompt(), max_new_tokens=2).history_tokens == 0
    assert "no beginning of this prompt is reused" in caplog.text


def test_angles_that_change_with_the_length_end_reuse(both, monkeypatch):
    """Behind the length at which dynamic RoPE changes its angles, a beginning has others alone than in a longer prompt."""
    monkeypatch.setitem(
        REFUSED, "short-ntk", {**REFUSED["llama-dynamic-ntk"], "max_position_embeddings": 224}
    )
    engines = both("short-ntk")
    short, long = prompt((0,)), prompt((0, 1, 2))
    assert asked(engines, short).prompt_tokens < 210
    assert asked(engines, short).history_tokens > 0
    for _ in range(2):  # their answers depend on what the model's rotary module has seen before
        answer = engines[1].generate(long, max_new_tokens=6)
        assert answer.prompt_tokens > 224
        assert answer.history_tokens == 0
    assert "RoPE scaling changes beyond 224" in str(engines[1].explain(long))


def test_nothing_is_kept_by_default_and_modes_are_obeyed(both):
    plain, engine = both("lfm2")
    for _ in range(2):
        assert plain.generate(prompt(), max_new_tokens=2).history_tokens == 0
    assert "history_bytes is 0" in str(plain.explain(prompt()))
    assert plain.loaded.lm.pieces is None, "nor is anything proven"
    engine.generate(prompt(), max_new_tokens=2, mode="full")
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}
    engine.generate(prompt(), max_new_tokens=2)
    assert engine.generate(prompt(), max_new_tokens=2, mode="full").history_tokens == 0
    for mode in ("prefix", "stitch", "auto"):
        assert engine.generate(prompt(), max_new_tokens=2, mode=mode).history_tokens > 0
    assert "computes only its other tokens" in str(engine.explain(prompt()))


def test_namespaces_share_nothing(both):
    engine = both("lfm2")[1]
    engine.generate(prompt(), max_new_tokens=2, namespace="one")
    assert engine.generate(prompt(), max_new_tokens=2, namespace="other").history_tokens == 0
    assert engine.generate(prompt(), max_new_tokens=2, namespace="one").history_tokens > 0


@pytest.mark.parametrize("how", ["clear", "delete", "another engine"])
def test_erased_documents_are_forgotten(both, engine_of, tmp_path, how):
    store = tmp_path / "kv"
    engine = both("lfm2", kv_dir=store)[1]
    writer = engine_of("llama", kv_dir=store)
    writer.precompute(CHUNKS, ids=list("abcd"))
    engine.generate(prompt(), max_new_tokens=2)
    assert engine.generate(prompt(), max_new_tokens=2).history_tokens > 0
    eraser = writer if how == "another engine" else engine
    eraser.clear() if how == "clear" else eraser.delete(["a"])
    if eraser is engine:
        assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}
    assert engine.generate(prompt(), max_new_tokens=2).history_tokens == 0
    assert engine.generate(prompt(), max_new_tokens=2).history_tokens > 0


def test_a_request_that_runs_during_an_erasure_is_not_kept(both):
    engine = both("lfm2")[1]
    stream = engine.stream(prompt(), max_new_tokens=30)
    next(stream)
    engine.clear()
    list(stream)
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}


def held(engine):
    """Bytes of all tensors that the histories of an engine hold, each memory once."""
    nodes = engine._query_side.histories._nodes
    tensors = [t for node in nodes for pair in node.layers for t in pair]
    for node in nodes:
        for snapshot in node.snapshots.values():
            left = [snapshot.cache]
            while left:
                each = left.pop()
                if isinstance(each, torch.Tensor):
                    tensors.append(each)
                elif isinstance(each, dict):
                    left += each.values()
                elif isinstance(each, list):
                    left += each
                elif type(each).__module__ == DynamicCache.__module__:
                    left += vars(each).values()
    memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(memories.values())


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "mamba2", "gpt2"])
def test_bytes_are_counted_and_the_budget_is_kept(both, name):
    engine = both(name)[1]
    state = pieces_of(engine.loaded.lm).state_bytes
    engine.generate(prompt((0, 1, 2, 3)), max_new_tokens=2)
    assert engine.stats()["histories"]["bytes"] == held(engine) > 0
    engine.generate(prompt((0, 1, 3, 2)), max_new_tokens=2)
    assert engine.stats()["histories"]["bytes"] == held(engine)
    histories = engine._query_side.histories
    assert len({n for node in histories._nodes for n in node.snapshots}) <= 2 * MAX_SNAPSHOTS
    rows = engine.stats()["histories"]["bytes"] // 2
    budget = max(6 * state, rows)
    tight = both(name, store_config=StoreConfig(history_bytes=budget))
    for order in ((0, 1), (0, 2), (0, 1), (3, 2), (1, 0), (0, 1), (0, 1)):
        last = asked(tight, prompt(order), max_new_tokens=2)
        assert tight[1].stats()["histories"]["bytes"] == held(tight[1]) <= budget
    assert last.history_tokens > 0
    engine.clear()
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}


def test_a_state_that_is_too_large_for_the_budget_is_not_kept(both):
    engines = both("falcon_h1", store_config=StoreConfig(history_bytes=2**20))
    assert pieces_of(engines[1].loaded.lm).state_bytes > 2**19
    for _ in range(2):
        assert asked(engines, prompt()).history_tokens == 0
    assert engines[1].stats()["histories"]["tokens"] == 0
    assert "more than half of history_bytes" in str(engines[1].explain(prompt()))


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "gpt2"])
def test_what_was_kept_is_never_changed(both, name):
    """Requests that continue from the same place, stop in mid-answer, or are longer, leave it as it was."""
    plain, engine = engines = both(name)
    asked(engines, prompt())
    expected = plain.generate(prompt(question="Where?"), max_new_tokens=8).token_ids
    for length in (8, 1, 3, 8):
        got = engine.generate(prompt(question="Where?"), max_new_tokens=length)
        assert got.token_ids == expected[:length]
    stream = engine.stream(prompt(question="Where?"), max_new_tokens=2000)
    next(stream)
    stream.close()
    for question in ("Where?", "Where is it?", "Who keeps the ledger?"):
        asked(engines, prompt(question=question))


def test_a_prompt_is_left_between_its_pieces(both, monkeypatch):
    engine = both("lfm2")[1]
    pieces_of(engine.loaded.lm)
    cancel, computed = threading.Event(), []
    forward = plainly.Run._forward

    def stopping(self, stop, *given):
        computed.append(stop)
        cancel.set()
        return forward(self, stop, *given)

    monkeypatch.setattr(plainly.Run, "_forward", stopping)
    request = request_of(engine, prompt((0, 1, 2)))
    with (
        pytest.raises(CancelledError),
        engine._answering.prefilled(request, max_new_tokens=4, clock=Clock(), cancel=cancel),
    ):
        pass
    assert len(computed) == 1
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}


def test_many_at_once(both):
    plain, engine = both("falcon_h1", store_config=StoreConfig(history_bytes=2**23))
    prompts = [prompt(order, q) for order in ((0, 1), (1, 0), (0, 2)) for q in ("Who?", "Why?")]
    expected = [plain.generate(each, max_new_tokens=4).token_ids for each in prompts]
    barrier = threading.Barrier(6)

    def run(each):
        barrier.wait(60)
        return [engine.generate(each, max_new_tokens=4).token_ids for _ in range(2)]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, prompts)) == [[ids] * 2 for ids in expected]
    assert engine.stats()["histories"]["bytes"] <= 2**23


def test_a_closed_engine_keeps_nothing(both):
    engine = both("lfm2")[1]
    engine.generate(prompt(), max_new_tokens=2)
    histories = engine._answering.histories
    engine.close()
    assert histories.stats() == {"bytes": 0, "tokens": 0}


def test_memory_that_runs_out_is_freed_and_the_answer_is_given(both, monkeypatch):
    plain, engine = engines = both("lfm2")
    asked(engines, prompt())
    forward, fails = plainly.Run._forward, iter([True])

    def failing(self, stop, *given):
        if next(fails, False):
            raise MemoryError
        return forward(self, stop, *given)

    expected = plain.generate(prompt(question="Why?"), max_new_tokens=4)
    monkeypatch.setattr(plainly.Run, "_forward", failing)
    got = engine.generate(prompt(question="Why?"), max_new_tokens=4)
    assert got.token_ids == expected.token_ids
    assert (got.history_tokens, got.fallback_reason) == (0, "memory ran out with reuse")


def test_scores_of_a_prompt_and_token_ids_are_kept_too(both):
    engines = both("lfm2")
    scored = [each.generate(prompt(), max_new_tokens=3, prompt_logprobs=1) for each in engines]
    assert scored[0].token_ids == scored[1].token_ids
    assert scored[1].history_tokens == 0
    ids = [*scored[1].prompt_ids, *scored[1].token_ids, 7, 8, 9]
    assert asked(engines, ids).history_tokens == len(ids) - 4


def test_a_chat_in_langchain_continues_too(tmp_path):
    kvrag_chat = pytest.importorskip("langchain_kvrag").ChatKVRag
    chats = [
        kvrag_chat(
            model=save_tiny_model(tmp_path / "lfm2", "lfm2"),
            max_tokens=4,
            kv_dir=str(tmp_path / f"kv{history_bytes}"),
            store_config=StoreConfig(history_bytes=history_bytes),
        )
        for history_bytes in (0, 2**24)
    ]
    messages = [("human", "\n\n".join([*CHUNKS, "Who keeps the lamp?"]))]
    for turn in range(3):
        expected, got = (chat.invoke(messages) for chat in chats)
        assert got.content == expected.content
        told = got.response_metadata["kvrag"]
        assert bool(told["history_tokens"]) == bool(turn)
        assert got.usage_metadata["input_token_details"]["cache_read"] == told["history_tokens"]
        messages += [("ai", got.content), ("human", "And why?")]
    assert "KV of this model is not reused" in told["fallback_reason"]


def test_snapshots_of_a_request_take_no_more_than_they_may(monkeypatch):
    """The state behind a long prompt may be larger than that of the proof: a window fills up."""
    lm = PlainLM(tiny_model("mistral"), "by the test")  # a window of 48
    ids = torch.arange(30, 130)
    stops = (8, 16, 24, 60)
    _, free = lm.prefill(ids, max_new_tokens=1, stops=stops)
    sizes = [free.snapshots[stop].num_bytes for stop in stops]
    assert sizes == sorted(set(sizes)), "or the window would not fill up"
    _, bounded = lm.prefill(ids, max_new_tokens=1, stops=stops, max_bytes=sum(sizes[:3]))
    assert list(bounded.snapshots) == [8, 16, 24]


def test_weights_that_cannot_be_read_leave_nothing(engine_of, monkeypatch):
    """No digest would tell that they have changed."""

    def unreadable(_):
        raise UnsupportedModelError("its weights hide")

    monkeypatch.setattr("kvrag.model.load.weights_digest", unreadable)
    engine = engine_of(tiny_model(), kv_dir=None, store_config=KEPT)
    first = engine.prefill(prompt())
    with torch.no_grad():
        for parameter in engine.loaded.lm.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine.generate(prompt(), max_new_tokens=2)
    again = engine.prefill(prompt())
    assert (again.history_tokens, again.exactness) == (0, "full")
    assert not torch.allclose(again.logits, first.logits)
    assert "can change without a sign" in str(engine.explain(prompt()))
