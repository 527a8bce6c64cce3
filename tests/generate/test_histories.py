"""A prompt that begins as an earlier one, or goes on with it, computes only what is new, and gets the same answer."""

import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from texts import make_chunks

import kvrag.blend.prefill as prefilling
from kvrag import StoreConfig
from kvrag.generate import pipeline
from kvrag.generate.radix_cache import RadixCache
from kvrag.testing.models import TINY

CHUNKS = make_chunks(6, words=42)
KEPT = StoreConfig(history_bytes=2**26)


def layers_of(ids, offset=0):
    """KV from which one can tell whose it is: keys hold the ids, values the number of ids before them."""
    rows = torch.tensor(ids, dtype=torch.float32).view(1, 1, -1, 1)
    count = torch.arange(offset, offset + len(ids), dtype=torch.float32).view(1, 1, -1, 1)
    return [(rows.expand(1, 2, -1, 3).clone(), count.expand(1, 2, -1, 5).clone())] * 2


def filled(past, num_rows):
    buffer = [
        (torch.full((1, 2, num_rows, 3), -1.0), torch.full((1, 2, num_rows, 5), -1.0))
        for _ in range(2)
    ]
    past.fill(buffer, num_rows)
    return buffer


def keep(histories, ids, *, space="", exact=None, **given):
    exact = len(ids) if exact is None else exact
    given = {"num_prompt": len(ids), **given}
    histories.keep(space, ids, layers_of(ids), num_exact=exact, **given)


def test_the_engines_of_a_device_share_the_largest_budget():
    """The engines that were used least recently lose their KV, and not those of another device."""
    size = 10 * 2 * (2 * 3 + 2 * 5) * 4
    here, there = torch.device("meta"), torch.device("meta:1")
    caches = [RadixCache(3 * size, here) for _ in range(5)]
    other = RadixCache(3 * size, there)
    for number, cache in enumerate([other, *caches, caches[2]]):
        keep(cache, [number] * 10)
    held = [each.stats()["bytes"] for each in (*caches, other)]
    assert held == [0, 0, 2 * size, 0, size, size]
    assert sum(held[:5]) <= 3 * size
    assert caches[0].release() == 3 * size, "where memory runs out"
    assert other.stats()["bytes"] == size


class TestTree:
    def test_it_finds_the_longest_beginning_that_was_kept(self):
        draw, histories, kept = random.Random(3), RadixCache(2**30), []
        for _ in range(300):
            base = draw.choice(kept) if kept and draw.random() < 0.7 else []
            ids = [
                *base[: draw.randint(0, len(base))],
                *(draw.randint(0, 3) for _ in range(draw.randint(1, 30))),
            ]
            keep(histories, ids)
            kept.append(ids)
            asked = [
                *draw.choice(kept)[: draw.randint(1, 40)],
                *(draw.randint(0, 3) for _ in range(draw.randint(1, 9))),
            ]
            common = max(
                next(
                    (i for i, (a, b) in enumerate(zip(asked, k, strict=False)) if a != b),
                    min(len(asked), len(k)),
                )
                for k in kept
            )
            common = min(common, len(asked) - 1)
            past = histories.find("", asked)
            assert (past.num_rows if past else 0) == common
            if past:
                assert past.num_exact == common
                for keys, values in filled(past, common):
                    assert keys[0, 0, :, 0].tolist() == asked[:common]
                    assert values[0, 0, :, 0].tolist() == list(range(common))
        distinct = {tuple(ids[: i + 1]) for ids in kept for i in range(len(ids))}
        assert histories.stats() == {
            "tokens": len(distinct),
            "bytes": len(distinct) * 2 * 2 * (3 + 5) * 4,
        }, "nothing is kept twice"

    def test_the_last_row_is_left_to_compute(self):
        histories = RadixCache(2**20)
        keep(histories, [1, 2, 3])
        assert histories.find("", [1, 2, 3]).num_rows == 2
        assert histories.find("", [1]) is None

    def test_a_budget_is_kept_and_what_was_not_used_for_longest_goes(self):
        row = 2 * 2 * (3 + 5) * 4
        histories = RadixCache(100 * row)
        for name in range(8):
            keep(histories, [name] * 20)
            assert histories.stats()["bytes"] <= 100 * row
            assert histories.find("", [0] * 21).num_rows == 20, "it is used all the time"
        assert [histories.find("", [name] * 21) is not None for name in range(8)] == [
            True,
            *[False] * 3,
            *[True] * 4,
        ]
        keep(histories, [9] * 101)
        assert histories.find("", [9] * 101) is None, (
            "there is no room for it, and nothing goes for it"
        )
        assert histories.stats()["tokens"] == 100

    def test_leaves_go_before_what_stands_before_them(self):
        row = 2 * 2 * (3 + 5) * 4
        histories = RadixCache(30 * row)
        keep(histories, [1] * 10 + [2] * 10)
        keep(histories, [1] * 10 + [3] * 10)
        keep(histories, [4] * 5)
        assert histories.find("", [1] * 10 + [2] * 11).num_rows == 10
        assert histories.find("", [1] * 10 + [3] * 11).num_rows == 20

    def test_approximate_rows_serve_only_who_goes_on_with_them(self):
        histories, how = RadixCache(2**20), object()
        # 7 and 8 are the answer.
        keep(histories, [1, 2, 3, 4, 5, 6, 7, 8], exact=3, num_prompt=6, repair=how)
        for asked, rows, exact in [
            ([1, 2, 3, 4, 5, 9, 9], 3, 3),  # another question
            ([1, 2, 3, 4, 5, 6, 9], 3, 3),  # the prompt again
            ([1, 2, 3, 4, 5, 6, 7, 9, 9], 7, 3),
            ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8, 3),
        ]:
            past = histories.find("", asked, repair=how)
            assert (past.num_rows, past.num_exact) == (rows, exact), asked
        assert histories.find("", [1, 2, 3, 4, 5, 6, 7, 8, 9]).num_rows == 3
        keep(histories, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12], exact=3, num_prompt=10, repair=how)
        assert (
            histories.find("", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13], repair=how).num_rows == 11
        )
        assert (
            histories.find("", [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 13], repair=how).num_rows == 8
        )
        assert histories.stats()["tokens"] == 11, "the second turn adds its own rows alone"
        for answer in (7, 8, 11):
            keep(
                histories,
                [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12][:answer],
                exact=3,
                num_prompt=6,
                repair=how,
            )
        assert histories.stats()["tokens"] == 11, "an answer that was broken off adds nothing"

    def test_spaces_share_nothing(self):
        histories = RadixCache(2**20)
        keep(histories, [1, 2, 3], space="one")
        assert histories.find("other", [1, 2, 3, 4]) is None
        assert histories.find("one", [1, 2, 3, 4])
        histories.clear()
        assert histories.find("one", [1, 2, 3, 4]) is None
        assert histories.stats() == {"tokens": 0, "bytes": 0}

    def test_what_was_found_stays_while_others_evict_it(self):
        row, errors = 2 * 2 * (3 + 5) * 4, []
        histories = RadixCache(60 * row)

        def work(name):
            draw = random.Random(name)
            for _ in range(150):
                ids = [draw.randint(0, 2) for _ in range(20)]
                keep(histories, ids)
                past = histories.find("", [*ids, 5])
                if past:
                    for keys, _ in filled(past, past.num_rows):
                        if keys[0, 0, :, 0].tolist() != ids[: past.num_rows]:
                            errors.append(ids)
                assert histories.stats()["bytes"] <= 60 * row

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(work, range(6))) == [None] * 6
        assert not errors


def talk(engine, turns, **options):
    """Go on with a text, question by question; returns the results. The first word of each answer is tokenised as it was made."""
    text, results = "", []
    for question in turns:
        text += f"{question}"
        results.append(engine.generate(text, max_new_tokens=6, **options))
        text += f"{results[-1].text}\n\n"
    return results


def chat(engine, turns, *, tokens=6, first="", **options):
    """Ask one question after the other, each with all before it; returns the results."""
    messages, results = [], []
    for i, question in enumerate(turns):
        messages.append({"role": "user", "content": f"{first}{question}" if i == 0 else question})
        results.append(engine.generate(list(messages), max_new_tokens=tokens, **options))
        messages.append({"role": "assistant", "content": results[-1].text})
    return results


QUESTIONS = [
    "Who keeps the lamp by the river?",
    "And the ledger?",
    "Where is it in winter?",
    "Thank you. Why?",
]


@pytest.mark.parametrize("name", TINY)
def test_a_chat_is_answered_as_without(engine_of, name):
    plain, engine = engine_of(name), engine_of(name, store_config=KEPT)
    expected, got = chat(plain, QUESTIONS[:3]), chat(engine, QUESTIONS[:3])
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert got[0].history_tokens == 0
    for before, result in pairwise(got):
        assert result.history_tokens <= before.prompt_tokens + len(before.token_ids) - 1
        assert result.history_tokens >= before.prompt_tokens - 8, (
            "but for the template's tail and what is tokenised otherwise"
        )
        assert (
            result.cached_tokens + result.repaired_tokens + result.computed_tokens
            == result.prompt_tokens
        )
        assert result.cached_tokens >= result.history_tokens
        assert result.exactness == "exact"
    logits = [e.prefill(QUESTIONS[0] * 3).logits for e in (plain, engine)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)


def test_nothing_is_kept_by_default(engine_of):
    engine = engine_of("llama")
    assert all(result.history_tokens == 0 for result in chat(engine, QUESTIONS))
    assert "histories" not in engine.stats()


def test_chats_over_documents_go_on_where_they_were(engine_of):
    engine = engine_of("llama", store_config=KEPT)
    engine.precompute(CHUNKS)
    turns = ["\n\n".join([*CHUNKS[:3], QUESTIONS[0]]), *QUESTIONS[1:]]
    results = talk(engine, turns, mode="stitch")
    assert [r.exactness for r in results] == ["repaired"] * 4
    for before, result in pairwise(results):
        assert result.history_tokens >= before.prompt_tokens
        assert result.repaired_tokens == 0
        assert result.loaded_bytes == 0
    exact = talk(engine, turns[:2], mode="prefix")
    assert [r.exactness for r in exact] == ["exact"] * 2
    assert exact[0].history_tokens < 150, "what stands before the second chunk"
    assert exact[1].history_tokens >= exact[0].prompt_tokens


def test_new_documents_are_stitched_behind_a_history(engine_of):
    engine = engine_of("llama", store_config=KEPT)
    engine.precompute(CHUNKS)
    turns = [*QUESTIONS[:2], f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nAnd now?", "Why?"]
    results = talk(engine, turns, mode="stitch")
    assert [r.exactness for r in results] == ["full", "exact", "repaired", "repaired"]
    third = results[2]
    assert third.history_tokens >= results[1].prompt_tokens
    assert third.repaired_tokens > 0
    assert third.cached_tokens > third.history_tokens + third.repaired_tokens
    assert results[3].history_tokens >= third.prompt_tokens
    everything = {"strategy": "all"}
    plain = engine_of("llama")
    text = f"{turns[0]}{results[0].text}\n\n{turns[2]} And then?"
    repaired = engine.prefill(text, mode="stitch", repair=everything)
    assert repaired.history_tokens > 0
    assert repaired.repaired_tokens > 0
    torch.testing.assert_close(
        repaired.logits, plain.prefill(text, mode="full").logits, atol=1e-4, rtol=1e-3
    )


def test_another_question_over_the_same_documents_gets_its_own_answer(engine_of):
    """Rows that were repaired for one question are not another's; those that are exact are."""
    engine, plain = engine_of("llama", store_config=KEPT), engine_of("llama")
    for each in (engine, plain):
        each.precompute(CHUNKS)
    context = "\n\n".join(CHUNKS[:4])
    prompts = [[{"role": "user", "content": f"{context}\n\n{question}"}] for question in QUESTIONS]
    for prompt in [*prompts, *prompts]:
        a, b = (each.generate(prompt, mode="stitch", max_new_tokens=8) for each in (engine, plain))
        assert a.token_ids == b.token_ids
        assert (a.exactness, a.repaired_tokens) == (b.exactness, b.repaired_tokens)


def test_nothing_approximate_gets_into_the_store(engine_of):
    engine = engine_of("llama", store_config=StoreConfig(history_bytes=2**26, on_miss="store"))
    engine.precompute(CHUNKS)
    chunks = (
        engine.stats()["store"]["memory"].chunks if "memory" in engine.stats()["store"] else None
    )
    chat(engine, QUESTIONS, first="\n\n".join(CHUNKS[:3]) + "\n\n", mode="stitch")
    engine.flush_write_back(30)
    assert chunks is None or engine.stats()["store"]["memory"].chunks == chunks


@pytest.mark.parametrize("erase", ["delete", "clear"])
def test_erased_documents_are_forgotten(engine_of, erase):
    engine = engine_of("llama", store_config=KEPT)
    engine.precompute(CHUNKS, ids=list("abcdef"))
    chat(engine, QUESTIONS[:1], first="\n\n".join(CHUNKS[:3]) + "\n\n", mode="stitch")
    assert engine.stats()["histories"]["bytes"] > 0
    engine.delete(["a"]) if erase == "delete" else engine.clear()
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}


@pytest.mark.parametrize("erase", ["document", "namespace", "all"])
def test_an_erasure_by_another_process_counts(engine_of, tmp_path, erase):
    one = engine_of("llama", kv_dir=tmp_path / "kv", store_config=KEPT)
    one.precompute(CHUNKS, ids=list("abcdef"))
    chat(one, QUESTIONS[:1])
    assert one.generate([{"role": "user", "content": QUESTIONS[0]}]).history_tokens > 0
    whose = {
        "document": ["--document", "a"],
        "namespace": ["--all", "--yes", "--namespace", "default"],
    }
    command = [sys.executable, "-m", "kvrag", "rm", "--kv-dir", tmp_path / "kv"]
    subprocess.run([*command, *whose.get(erase, ["--all", "--yes"])], check=True)
    assert one.generate([{"role": "user", "content": QUESTIONS[0]}]).history_tokens == 0
    assert one.generate([{"role": "user", "content": QUESTIONS[0]}]).history_tokens > 0


def test_what_others_erased_can_not_be_known_without_the_catalog(engine_of, tmp_path, monkeypatch):
    """So histories are neither used nor kept until it can be read."""
    engine = engine_of("llama", kv_dir=tmp_path / "kv", store_config=KEPT)
    chat(engine, QUESTIONS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine.store.catalog._rows), "many", lambda _, names: [None] * len(names)
        )
        before = engine.stats()["histories"]
        assert engine.generate([{"role": "user", "content": QUESTIONS[0]}]).history_tokens == 0
        assert engine.generate([{"role": "user", "content": QUESTIONS[1]}]).history_tokens == 0
        assert engine.stats()["histories"] == before
    assert engine.generate([{"role": "user", "content": QUESTIONS[0]}]).history_tokens > 0


def test_namespaces_and_modes(engine_of):
    engine = engine_of("llama", store_config=KEPT)
    prompt = [{"role": "user", "content": QUESTIONS[0] * 3}]
    engine.generate(prompt, mode="full")
    assert engine.stats()["histories"]["tokens"] == 0, "no reuse, both ways"
    engine.generate(prompt, namespace="one")
    assert engine.generate(prompt, namespace="other").history_tokens == 0
    assert engine.generate(prompt, namespace="one").history_tokens > 0
    assert engine.generate(prompt, namespace="one", mode="full").history_tokens == 0


def test_a_fault_costs_the_next_turn_time_and_nothing_else(engine_of, monkeypatch, caplog):
    engine = engine_of("llama", store_config=KEPT)
    expected = chat(engine_of("llama"), QUESTIONS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "clone", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
        )
        got = chat(engine, QUESTIONS[:2])
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert "could not be kept (out of memory)" in caplog.text


def test_many_chats_at_once(engine_of):
    engine = engine_of("llama", store_config=StoreConfig(history_bytes=2**20))
    turns = [[f"{question} {i}" for question in QUESTIONS] for i in range(8)]
    expected = [[r.token_ids for r in chat(engine_of("llama"), each)] for each in turns]
    barrier = threading.Barrier(8)

    def run(each):
        barrier.wait(60)
        return [r.token_ids for r in chat(engine, each)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, turns)) == expected
    assert engine.stats()["histories"]["bytes"] <= 2**20


def test_a_closed_engine_keeps_nothing(engine_of):
    engine = engine_of("llama", store_config=KEPT)
    chat(engine, QUESTIONS[:1])
    histories = engine._answering.histories
    engine.close()
    assert histories.stats()["tokens"] == 0


def test_who_asks_for_another_repair_does_not_get_rows_of_this_one(engine_of):
    engine, plain = engine_of("llama", store_config=KEPT), engine_of("llama")
    for each in (engine, plain):
        each.precompute(CHUNKS)
    prompt = "\n\n".join([*CHUNKS[:3], QUESTIONS[0]])
    answer = engine.generate(prompt, mode="stitch", max_new_tokens=6).text
    more, options = (
        f"{prompt}{answer}\n\n{QUESTIONS[1]}",
        {"mode": "stitch", "repair": {"strategy": "all"}},
    )
    assert (
        engine.prefill(more, mode="stitch").history_tokens
        > len(plain.prefill(prompt).prompt_ids) - 1
    )
    results = [each.prefill(more, **options) for each in (engine, plain)]
    assert [r.exactness for r in results] == ["exact", "exact"]
    torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("erase", ["delete", "clear"])
@pytest.mark.parametrize("ends", ["before the store erases", "after"])
def test_a_request_that_runs_during_an_erasure_is_not_kept(engine_of, erase, ends, monkeypatch):
    engine = engine_of("llama", store_config=KEPT)
    engine.precompute(CHUNKS, ids=list("abcdef"))
    prompt = [{"role": "user", "content": "\n\n".join(CHUNKS[:3])}]
    stream = engine.stream(prompt, max_new_tokens=40)
    next(stream)
    step = "forget" if erase == "delete" else "clear"
    erase_stored = getattr(engine.store, step)

    def erase_after_the_request(*args):
        list(stream)
        return erase_stored(*args)

    if ends == "before the store erases":
        monkeypatch.setattr(engine.store, step, erase_after_the_request)
    engine.delete(["a"]) if erase == "delete" else engine.clear()
    list(stream)
    assert engine.stats()["histories"] == {"bytes": 0, "tokens": 0}


def test_weights_that_change_during_a_request_leave_nothing(engine_of, monkeypatch):
    engine, real = engine_of("llama", store_config=KEPT), pipeline.decode

    def decode(*args, **options):
        with torch.no_grad():
            engine.loaded.lm.model.lm_head.weight.mul_(1.5)
        return real(*args, **options)

    monkeypatch.setattr(pipeline, "decode", decode)
    engine.generate(QUESTIONS[0] * 5)
    assert engine.stats()["histories"]["bytes"] == 0


def test_without_memory_the_second_attempt_has_what_earlier_requests_held(engine_of, monkeypatch):
    engine, real, kept = engine_of("llama", store_config=KEPT), prefilling._blended, []
    chat(engine, QUESTIONS[:1])
    (root,) = engine._query_side.histories._roots.values()
    kept = [weakref.ref(t) for node in root.children for pair in node.layers for t in pair]
    del root
    fails = iter([True])

    def blend(*args, **given):
        if next(fails, False):
            raise MemoryError
        assert [ref() for ref in kept if ref() is not None] == []
        return real(*args, **given)

    monkeypatch.setattr(prefilling, "_blended", blend)
    result = engine.generate([{"role": "user", "content": QUESTIONS[0]}])
    assert kept
    assert result.fallback_reason == "memory ran out with reuse"
