"""What happens at the edges: reuse that is dropped, stores that vanish or fill up, chunks that are too short, engines that are closed."""

import errno
import html
import json
import re
import shutil
import sqlite3
import textwrap
from itertools import takewhile
from operator import attrgetter

import pytest
import torch
from kit import Forwards, noted, raising
from texts import make_chunks

import kvrag.precompute.run
from kvrag import Chunk, StoreConfig, precompute_kv
from kvrag.errors import ModelError, StoreError
from kvrag.prompt.explain import CHANGES, MANY, OTHER_PREFIX_ADVICE
from kvrag.store.catalog.rows import RowTable

CHUNKS = make_chunks(4)


def about(*texts):
    return [{"role": "user", "content": "\n\n".join([*texts, "Who keeps the ledger?"])}]


def test_reuse_that_auto_drops_has_a_reason_and_is_counted_as_a_fallback(engine):
    """Exact without what was dropped, such an answer would look as good as one that reuses everything."""
    engine.precompute(CHUNKS[:2])
    prompt = about(*CHUNKS[:2])
    result, explained = engine.generate(prompt, max_new_tokens=1), engine.explain(prompt)
    assert (result.exactness, explained.mode) == ("exact", "prefix")
    assert result.fallback_reason.startswith(
        "repaired reuse would not pay; estimated: reuse as much as "
    )
    assert result.fallback_reason in explained.notes
    assert engine.stats()["fallbacks"] == engine.stats()["requests_exact"] == 1
    assert "2 chunk(s) with KV, would run in mode 'prefix'" in str(explained)


def test_a_directory_that_is_made_again_is_a_store_again(engine, tmp_path):
    engine.precompute(CHUNKS[:1], ids=["a"])
    shutil.rmtree(tmp_path / "kv")
    assert engine.generate(about(CHUNKS[0]), max_new_tokens=1).exactness == "full"
    with pytest.raises(StoreError, match="could not be stored"):
        precompute_kv(CHUNKS[:1], ids=["a"], llm=engine)
    (tmp_path / "kv").mkdir()
    assert precompute_kv(CHUNKS[:1], ids=["a"], llm=engine).stored == 1
    assert engine.generate(about(CHUNKS[0]), max_new_tokens=1).exactness == "exact"


def test_a_chunk_that_was_not_stored_is_an_error_unless_a_warning_will_do(engine):
    long = " ".join(make_chunks(1, words=1500))
    with pytest.raises(
        StoreError, match=r"1 chunk.s. could not be stored.*the first one, b: .*context window"
    ):
        precompute_kv([CHUNKS[0], long], ids=["a", "b"], llm=engine)
    assert engine.document_ids() == ["a"], "the others are stored"
    with pytest.warns(UserWarning, match="not all KV was precomputed: 1 chunk") as caught:
        report = precompute_kv([CHUNKS[0], long], ids=["a", "b"], llm=engine, on_error="warn")
    assert caught[0].filename == __file__, "the caller's line"
    assert (report.skipped, report.failed[0][0]) == (1, "b")


def test_chunks_that_are_too_short_are_told_apart_from_stored_ones(engine):
    report = engine.precompute([CHUNKS[0], "Too short."], ids=["a", "b"])
    assert (report.stored, report.skipped, report.failed) == (1, 0, [])
    assert [name for name, _ in report.short] == ["b"]
    assert "fewer than 32 (StoreConfig.min_chunk_tokens)" in report.short[0][1]
    assert "shorter than 32 tokens" in str(engine.explain(about("Too short.")))


@pytest.mark.parametrize("part", ["blobs", "catalog"])
def test_a_full_disk_ends_a_precompute_early_and_says_what_is_missing(engine, monkeypatch, part):
    chunks = make_chunks(20)
    size = engine.precompute(chunks[:1]).stored_bytes
    forwards = Forwards(monkeypatch)
    full = raising(OSError, errno.ENOSPC, "No space left on device")
    begin = engine.store.catalog.begin

    def begin_on_a_full_disk(new):
        monkeypatch.setattr(RowTable, "set", raising(sqlite3.OperationalError, "No space left"))
        return begin(new)

    if part == "blobs":
        monkeypatch.setattr(engine.store.blobs, "write", full)
    else:
        monkeypatch.setattr(engine.store.catalog, "begin", begin_on_a_full_disk)
    report = engine.precompute(chunks, batch_size=1)
    assert forwards.count <= 3, "the first one, and what was under way when it was refused"
    assert (report.stored, report.skipped, len(report.failed)) == (0, 1, 19)
    assert "No space left" in report.failed[0][1]
    given_up = [reason for _, reason in report.failed if reason.startswith("not computed")]
    missing = re.fullmatch(r".*the (\d+) that are left take ([\d.]+) MiB", given_up[-1])
    assert int(missing[1]) == len(given_up) >= 17
    assert float(missing[2]) == pytest.approx(len(given_up) * size / 2**20, rel=0.2)


def test_a_precompute_that_fails_withdraws_no_document_that_has_kv(engine, monkeypatch):
    engine.precompute(CHUNKS[:2], ids=["a", "b"])
    monkeypatch.setattr(engine.store.blobs, "write", raising(OSError, errno.EIO, "Input/output"))
    names = ["a", "b", "new", "same text"]
    report = engine.precompute(
        [*CHUNKS[:3], CHUNKS[2]], ids=names, prefix="Answer in verse.", batch_size=1
    )
    assert (report.stored, sorted(name for name, _ in report.failed)) == (0, names)
    assert engine.document_ids() == ["a", "b"]
    assert engine.explain(about(*CHUNKS[:2])).hits == 2


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_chunk_that_can_not_be_stored_keeps_no_other_from_it(
    engine_of, monkeypatch, caplog, kv_dtype, batch_size
):
    engine = engine_of(store_config=StoreConfig(kv_dtype=kv_dtype))
    real = kvrag.precompute.run.encode_chunks

    def spoiled(*given):
        kvs = real(*given)
        with torch.inference_mode():
            kvs[0].layers[0].values.fill_(torch.nan)
        monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", real)
        return kvs

    monkeypatch.setattr(kvrag.precompute.run, "encode_chunks", spoiled)
    report = engine.precompute(make_chunks(6), batch_size=batch_size)
    assert (report.stored, len(report.failed)) == (5, 1)
    assert "not finite" in report.failed[0][1]
    assert f"chunk {report.failed[0][0]} (" in caplog.text, (
        "its key, as where a stored one is rejected"
    )


def test_a_prompt_without_a_chunk_reuses_the_stored_prefix(engine_of, monkeypatch):
    engine = engine_of(
        prefix="Answer from the notes of the harbour archive, in one short sentence.\n\n"
    )
    engine.precompute(CHUNKS[:1])
    catalog = engine.store.catalog
    keys = catalog.keys()
    engine.store.delete([key for key in keys if not catalog.key_texts(key)])
    assert engine.precompute(CHUNKS[:1]).skipped == 1, "it stores the lost prefix alone"
    prompt = f"{engine.prefix_text}Hello, who are you?"
    result = engine.prefill(prompt)
    assert (result.exactness, result.cached_tokens) == (
        "exact",
        len(engine.loaded.encoder.live_ids(engine.prefix_text, at_start=True)),
    )
    assert result.fallback_reason is None
    seen = noted(monkeypatch, engine.loaded.encoder, "live_ids")
    for question in ("Hello", "Good morning", "Who?"):
        engine.prefill(f"{engine.prefix_text}{question}")
    assert len(seen) == 3, "the head's ids are known, and each rest is tokenised once"
    assert float((result.logits - engine.prefill(prompt, mode="full").logits).abs().max()) < 1e-4


TEXT = f'title: The harbour\n\nA **first** "line" & more,\nand _its_ end. The rest. {CHUNKS[0]} And the ending of it all.'
REWRITTEN = {
    "escaped, as by repr()": (lambda text: str([text]), json.dumps),
    "HTML's escapes": (html.escape,),
    "backslashes": (lambda text: re.sub(r"([*_.&])", r"\\\1", text),),
    "quoted or indented": (
        lambda t: re.sub("(?m)^", "> ", t),
        lambda t: re.sub("(?m)^(?=.)", "    ", t),
    ),
    "numbers before": (
        lambda text: "\n".join(f"{n}: {line}" for n, line in enumerate(text.splitlines(), 1)),
    ),
    "line ends": (lambda text: text.replace("\n", "\r\n"),),
    "white space changed": (
        lambda t: t.replace("A **", "A  **"),
        lambda t: "\n".join(textwrap.wrap(t)),
    ),
    "upper-cased or lower-cased": (str.upper, str.lower),
    "other signs": (lambda text: text.replace('"', "\u201d").replace("notes", "no\u00adtes"),),
    "without the metadata": (lambda text: text.partition("\n\n")[2],),
    "without their HTML or Markdown": (lambda text: text.replace("**", "").replace("_", ""),),
    "cut at its beginning": (lambda text: text[50:],),
    "not the whole documents": (lambda text: text[90:-60],),
    "edited or cut": (lambda text: text.replace("line", "word"),),
}
"""Words of each cause, and what brings it about."""


@pytest.mark.parametrize(
    ("words", "rewritten"), [(w, each) for w, many in REWRITTEN.items() for each in many]
)
def test_a_rewritten_chunk_is_explained_by_its_cause_also_beside_others(engine, words, rewritten):
    engine.precompute([TEXT, CHUNKS[1]])
    assert [words in note for note in engine.explain(about(rewritten(TEXT))).notes] == [True]
    beside = engine.explain(about(CHUNKS[1], rewritten(TEXT)))
    assert any(words in note for note in beside.notes) == any(
        words in cause for cause, *_ in CHANGES
    )
    assert not engine.explain(about(CHUNKS[1])).notes[1:], "nothing is made up"


def test_every_cause_has_a_case(engine):
    assert all(sum(words in cause for words in REWRITTEN) == 1 for cause, *_ in CHANGES)
    assert "no chunk of 32 tokens or more is stored" in str(engine.explain(about(TEXT)))


@pytest.mark.parametrize("words", ["escaped", "HTML", "line ends", "cut at its beginning"])
def test_a_rewritten_chunk_is_warned_of_once(engine, words, recwarn):
    engine.precompute([TEXT, CHUNKS[1]])
    prompt = about(next(many[0] for name, many in REWRITTEN.items() if words in name)(TEXT))
    with pytest.warns(UserWarning, match=f"no stored chunk is reused.*{words}"):
        engine.generate(prompt, max_new_tokens=1)
    engine.generate(prompt, max_new_tokens=1)
    assert not recwarn.list, "once is enough"
    assert engine.stats()["requests_without_hits"] == 2


def test_prompts_that_have_nothing_to_do_with_the_store_are_warned_of_late_and_never_after_a_hit(
    engine, recwarn
):
    engine.generate(about("Good morning."), max_new_tokens=1)
    engine.precompute(CHUNKS[:1])
    for _ in range(MANY - 1):
        engine.generate(about("Good morning."), max_new_tokens=1)
    assert engine.stats()["requests_without_hits"] == MANY - 1, "the first one asked an empty store"
    assert not recwarn.list
    with pytest.warns(UserWarning, match="this prompt has no known chunk text"):
        engine.generate(about("Good morning."), max_new_tokens=1)


RULES = "Answer from the notes. " * 20
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": RULES}


def of_tool(*before):
    """An agent's messages: the question, its call, and the chunk that the tool found."""
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "search", "arguments": "{}"},
    }
    found = {"role": "tool", "tool_call_id": "call00000", "content": CHUNKS[0]}
    return [
        *before,
        {"role": "user", "content": "Is Zelda in?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        found,
    ]


ADVISED = {
    "a text": (f"{RULES} Is Zelda in?\n\n{CHUNKS[0]}", ()),
    "segments": ([f"{RULES} Is Zelda in?", Chunk(CHUNKS[0])], ()),
    "metadata": ([SYSTEM, *about(f"path: /Zelda.txt\n\n{CHUNKS[0]}")], ()),
    "the system's and tools": ([SYSTEM, *about(CHUNKS[0])], (TOOL,)),
    "a turn before": ([SYSTEM, *about("Is Zelda in?"), *about(CHUNKS[0])], ()),
    "an agent's": (of_tool(SYSTEM), (TOOL,)),
}
"""Prompts and their tools."""


@pytest.mark.parametrize("case", ADVISED)
def test_advice_on_the_prefix_is_one_sentence_and_explain_shows_what_to_pass(engine_of, case):
    """The warning goes to logs, so it shows no text of users or documents."""
    prompt, tools = ADVISED[case]
    engine = engine_of(prefix="Another beginning than that of every prompt here.")
    engine.precompute(CHUNKS)
    with pytest.warns(UserWarning, match="encoded behind another prefix") as caught:
        engine.prefill(prompt, mode="stitch", tools=tools)
    assert str(caught[0].message) == OTHER_PREFIX_ADVICE
    explained = engine.explain(prompt, mode="stitch", tools=tools)
    assert OTHER_PREFIX_ADVICE in explained.notes
    prefix = "".join(
        [span.text for span in takewhile(lambda span: span.kind != "chunk", explained.spans)]
    )
    engine.precompute(CHUNKS, prefix=prefix)
    assert not engine.prefill(prompt, mode="stitch", tools=tools).has_other_prefix


def test_an_engine_that_was_closed_says_so_and_loads_nothing_again(engine):
    engine.precompute(CHUNKS[:1])
    engine.close()
    for use in (
        lambda: engine.generate("Who?"),
        lambda: engine.precompute(CHUNKS),
        lambda: engine.explain("Who?"),
    ):
        with pytest.raises(ModelError, match="this engine is closed"):
            use()
    with pytest.raises(ModelError, match="this engine is closed"):
        list(engine.stream("Who?"))


@pytest.mark.parametrize("step", ["load", "QuantiseCheck.admit"])
def test_an_engine_that_is_closed_while_its_model_loads_holds_none(engine, step, monkeypatch):
    real = attrgetter(step)(kvrag.engine)
    monkeypatch.setattr(
        f"kvrag.engine.{step}", lambda *args, **given: engine.close() or real(*args, **given)
    )
    with pytest.raises(ModelError, match="this engine is closed"):
        engine.generate("Who?")
    assert engine._loaded is engine._query_side is None
