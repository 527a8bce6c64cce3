"""Evaluation: facts planted in chunks, questions of one's own, scores, and what is said of both answers; tiny models."""

import json
import math
import random
import re
from dataclasses import replace

import pytest
from texts import make_chunks
from typer.testing import CliRunner

from kvrag import Chunk, ConfigError, InputError, KVRagEngine, RepairConfig, UnsupportedModelError
from kvrag.blend.select import BASE_SHARE, MOST_SHARE
from kvrag.cli.app import app
from kvrag.cli.measure import _all_answers
from kvrag.cli.output import write_page
from kvrag.evaluate.answers import Compared, Evaluation, wilson
from kvrag.evaluate.questions import (
    Question,
    best_chunks,
    planted,
    prompt_of,
    read_question,
    score,
    with_fact,
)

CHUNKS = make_chunks(8, words=30, seed=5)
SMALL = {"count": 3, "chunks_per_prompt": 2, "max_new_tokens": 4}


def compared(full=1.0, reuse=1.0, **options):
    values = {
        "question": "Who?",
        "answers": ("Ada",),
        "full": "Ada",
        "reuse": "Bob",
        "kl": 0.1,
        "is_same": False,
    }
    times = {
        "full_ttft_ms": 100.0,
        "reuse_ttft_ms": 20.0,
        "prompt_tokens": 90,
        "repaired_tokens": 9,
        "kv_reuse_ratio": 0.9,
    }
    return Compared(
        **values, **times, full_score=full, reuse_score=reuse, exactness="repaired", **options
    )


# -- questions ----------------------------------------------------------------------------------------------------------


def test_facts_are_planted_by_the_seed_and_each_question_has_one_answer(engine):
    one, again, other = (planted(engine, CHUNKS, 4, 3, seed) for seed in (0, 0, 1))
    assert one == again != other
    assert len(one) == 4
    for question in one:
        assert len(set(question.chunks)) == 3
        homes = [text for text in question.chunks if question.answers[0] in text]
        place = question.text.removeprefix("What is the access code of the ").removesuffix("?")
        assert [text for text in question.chunks if place in text] == homes
        assert len(homes) == 1
        assert f"he access code of the {place} is {question.answers[0]}" in homes[0]


def test_no_fact_is_asked_for_twice(engine):
    """Also with more questions than chunks: equal questions are no independent ones."""
    for count in (4, 8, 30):
        asked = planted(engine, CHUNKS, count, 3, 0)
        assert len({(question.text, question.answers) for question in asked}) == count


def test_a_planted_fact_takes_nothing_from_its_chunk(engine):
    originals = {chunk.replace(" ", "") for chunk in CHUNKS}
    for question in planted(engine, CHUNKS, 4, 3, 0):
        for text in question.chunks:
            (fact,) = re.findall(r" The access code[^.]*\.| \(the access code[^)]*\)", text)
            assert text.replace(fact, "").replace(" ", "") in originals


FORMS = {
    "a table": ("| a | b |\n| --- | --- |\n| c | 1 |", "| {what} | {code} |"),
    "a wide table": ("| a | b | c |\n|:--|--:|---|\n| d | 1 | 2 |", "| {what} | {code} | – |"),
    "JSON lines": ('{"a": 1},\n{"a": 2},', '{"{what}": "{code}"},'),
    "a log": ("2026-05-01 10:00:00 INFO  saved: x=5", "2026-05-01 10:00:00 INFO  {what}: {code}"),
    "a log with a T": ("[2026-05-01T10:00:00Z] saved", "[2026-05-01T10:00:00Z] {what}: {code}"),
    "keys": ("  site: X\n  state: open", "  {what}: {code}"),
    "settings": ("site = X", "{what} = {code}"),
    "a table without outer pipes": ("a | b\n--- | ---\nc | 1", "{what} | {code}"),
    "commas": ("name,code,size\na,1,2", "{what},{code},"),
    "pretty JSON": ('  "name": "Foo",\n  "size": 3,', '  "{what}": "{code}",'),
    "an indented table": ("  | a | b |\n  |---|---|", "  | {what} | {code} |"),
    "Windows' line ends": ("site: X\r\nstate: open", "{what}: {code}"),
    "comments": ("# keep the order\n# of all", "# The {what} is {code}."),
    "a list": ("- bread\n- milk", "- The {what} is {code}."),
}


@pytest.mark.parametrize(("text", "line"), FORMS.values(), ids=FORMS)
def test_a_fact_stands_in_a_line_like_those_of_its_chunk(text, line):
    told = line.replace("{what}", "access code of the pier").replace("{code}", "12-345")
    for seed in range(9):
        made = with_fact(text, "access code of the pier", "12-345", random.Random(seed))
        lines = made.splitlines()
        at = lines.index(told)
        assert [*lines[:at], *lines[at + 1 :]] == text.splitlines()
        assert made.count("\r\n") == (made.count("\n") if "\r" in text else 0)
        assert at, "no head of a table, and no first line"
        assert not any(set(each) <= set("|:- ") for each in lines[at + 1 :]), (
            "a table's head is one"
        )


@pytest.mark.parametrize(
    "text",
    [
        "At 10:30 we met. Then we left.",
        "Ratio 1:2 holds here.",
        "return x == y",
        "10.10.10.1 is a server",
        "Note: this is a sentence.",
        "http://x/a is a page",
    ],
)
def test_a_line_of_no_known_form_gets_the_fact_as_prose(text):
    for seed in range(9):
        made = with_fact(text, "code", "7", random.Random(seed))
        assert "he code is 7" in made
        assert "\n" not in made


@pytest.mark.parametrize("text", ["2024-01-02T" + "1" * 200_000, "a " * 100_000 + "="])
def test_a_line_of_any_length_gets_its_fact(text):
    """Patterns that look at each beginning of a line anew would take minutes."""
    made = with_fact(text, "code", "7", random.Random(0))
    assert made.replace(" The code is 7.", "").replace(" (the code is 7)", "") == text


def test_a_fact_in_prose_stands_between_sentences_or_inside_one():
    text, speech = "One two three. Four five six.", "well you know so it went on"
    made = {with_fact(text, "code", "7", random.Random(seed)) for seed in range(40)}
    assert "One two three. The code is 7. Four five six." in made
    assert "One two (the code is 7) three. Four five six." in made
    for seed in range(9):
        assert " (the code is 7) " in with_fact(speech, "code", "7", random.Random(seed))
    assert with_fact("这是。", "code", "7", random.Random(0)) == "这是。 The code is 7."


@pytest.mark.parametrize(
    "options", [{"count": 1}, {"chunks_per_prompt": 9}, {"chunks_per_prompt": 0}]
)
def test_too_little_text_is_refused(engine, options):
    with pytest.raises(InputError, match="can't be made of 8 chunks"):
        engine.evaluate([*CHUNKS, CHUNKS[0], "too short"], **{**SMALL, **options})


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"question": "Who?"},
        {"question": 3, "answers": ["x"]},
        {"question": "Who?", "answers": []},
        {"question": "Which?", "answers": ["B", "A"]},  # an article: no answer would be right
        {"question": "Who?", "answer": "?"},
        {"question": "Who?", "answers": ["x"], "chunks": "abc"},
        {"question": "Who?", "answers": ["x"], "chunks": [3]},
    ],
)
def test_a_question_that_lacks_a_part_is_named(wrong):
    with pytest.raises(InputError, match="it needs 'question', a text, and 'answers'"):
        read_question(wrong, CHUNKS, 2)


def test_a_question_of_ones_own_takes_its_chunks_or_those_that_share_its_words():
    own = read_question({"question": "Who?", "answer": "Ada", "chunks": ["x", "y"]}, CHUNKS, 2)
    assert own == Question("Who?", ("x", "y"), ("Ada",))
    texts = [
        "The cat sat.",
        "A lighthouse stands at Skerry.",
        "The dog ran.",
        "Skerry has a lighthouse keeper.",
    ]
    assert best_chunks("Who keeps the lighthouse at Skerry?", texts, 2) == [texts[1], texts[3]]
    assert best_chunks("zzz", texts, 9) == texts
    assert best_chunks("首都是哪里?", ["天气很好。", "东京是日本的首都。"], 1) == [
        "东京是日本的首都。"
    ]


def test_a_prompt_is_a_chat_message_where_the_model_has_a_template(engine, monkeypatch):
    [message] = prompt_of(engine, Question("Who?", ("a", "b"), ("c",)))
    assert [part.text for part in message["content"] if isinstance(part, Chunk)] == ["a", "b"]
    assert message["content"][-1].endswith("Question: Who?")
    monkeypatch.setattr(type(engine.encoder), "has_chat_template", False)
    parts = prompt_of(engine, Question("Who?", ("a", "b"), ("c",)))
    assert [part.text for part in parts if isinstance(part, Chunk)] == ["a", "b"]
    assert parts[-1].endswith("Question: Who?\nAnswer:")


# -- scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("The code is 231-4455.", ["231-4455"], 1.0),
        ("It is 2314455", ["231-4455"], 1.0),
        ("RW79-308", ["VL79-308"], 0.0),
        ("An Ada Lovelace", ["Lovelace, Ada"], 1.0 * 2 * 2 / 4),
        ("Ada", ["Ada Lovelace"], 2 / 3),
        ("", ["Ada"], 0.0),
        ("12345", ["1234"], 0.0),
        ("Bob", ["Ada", "bob"], 1.0),
        ("“Ada”, I think…", ["Ada"], 1.0),
        ("答案是东京。", ["东京"], 1.0),
        ("大阪です。", ["東京"], 0.0),
    ],
)
def test_an_answer_that_holds_a_right_one_is_right_else_words_count(answer, right, expected):
    assert score(answer, right) == pytest.approx(expected)


def test_lost_and_won_are_counted_among_what_could_be():
    rows = [compared(), compared(reuse=0.2), compared(full=0.0), compared(full=0.0, reuse=0.0)]
    found = Evaluation(rows, "none", 4, 400, 1.0)
    assert [row.is_lost for row in rows] == [False, True, False, False]
    assert [row.is_won for row in rows] == [False, False, True, False]
    assert found.lost == 0.5
    assert found.lost_interval[0] < 0.5 < found.lost_interval[1]
    assert found.retention == pytest.approx(2.2 / 2)
    assert found.speedup == 5
    nothing = Evaluation([compared(full=0.0)], "none", 1, 1, 1.0)
    assert math.isnan(nothing.lost)
    assert math.isnan(nothing.retention)
    assert nothing.lost_interval == (0.0, 1.0)


def test_wilsons_interval():
    low, high = wilson(0, 30)
    assert low == 0
    assert high == pytest.approx(0.1135, abs=1e-4)
    assert wilson(15, 30) == pytest.approx((0.3315, 0.6685), abs=1e-4)


# -- the comparison -----------------------------------------------------------------------------------------------------


def test_full_repair_gives_the_answers_of_full_prefill(engine):
    found = engine.evaluate(CHUNKS, **SMALL, repair=RepairConfig(strategy="all"))
    assert found.same == 1
    assert found.mean_kl < 1e-6
    assert all(row.full == row.reuse for row in found.rows)
    assert found.repair.startswith("all")
    assert len(found.rows) == 3
    assert found.num_chunks > 0 < found.chunk_bytes


def test_no_repair_differs_and_says_so(engine):
    found = engine.evaluate(CHUNKS, **SMALL, repair=RepairConfig(strategy="none"))
    assert found.mean_kl > 1e-6
    assert {row.exactness for row in found.rows} == {"repaired"}
    assert {row.repaired_tokens for row in found.rows} == {0}
    assert list(engine.store.catalog.keys()) == [], "nothing of it is left in the user's store"


def test_given_questions_are_asked_with_their_chunks(engine, caplog):
    asked = [
        {"question": f"What is {n}?", "answers": ["x"], "chunks": CHUNKS[n : n + 2]}
        for n in range(2)
    ]
    found = engine.evaluate([], asked, max_new_tokens=2)
    assert [row.question for row in found.rows] == ["What is 0?", "What is 1?"]
    assert not caplog.messages
    engine.evaluate([], [{**asked[0], "chunks": ["Too short."]}], max_new_tokens=2)
    assert "no prompt reused any KV" in caplog.text
    with pytest.raises(InputError, match="nothing to ask"):
        engine.evaluate(CHUNKS, [])


def test_the_engines_own_repair_is_evaluated(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir, repair="careful")
    assert engine.evaluate(CHUNKS, **SMALL).repair == engine.explain(CHUNKS[0]).repair


def test_a_refused_model_is_not_evaluated(engine_of):
    with pytest.raises(UnsupportedModelError, match="is not reused"):
        engine_of("gpt2").evaluate(CHUNKS, **SMALL)


# -- named repairs ------------------------------------------------------------------------------------------------------


def test_a_repair_may_be_named(tiny_dir):
    for name, config in {"fast": RepairConfig.fast(), "careful": RepairConfig.careful()}.items():
        assert KVRagEngine.from_pretrained(tiny_dir, repair=name).repair == config
        found = KVRagEngine.from_pretrained(tiny_dir).explain("x", repair=name)
        assert found.repair.endswith("(given)")
    assert KVRagEngine.from_pretrained(tiny_dir, repair="auto").repair == RepairConfig()
    fast, careful = RepairConfig.fast(), RepairConfig.careful()
    assert fast.recompute_ratio < BASE_SHARE < MOST_SHARE < careful.recompute_ratio
    with pytest.raises(ConfigError, match="'auto', 'fast' or 'careful'"):
        KVRagEngine.from_pretrained(tiny_dir, repair="slow")


# -- the command --------------------------------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(app, ["evaluate", *map(str, args)])


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "notes.md").write_text("\n\n".join(CHUNKS))
    return tmp_path / "notes.md"


def test_the_command_prints_totals_and_writes_a_page_that_needs_no_other(
    tiny_dir, corpus, tmp_path
):
    options = (
        "--corpus",
        corpus,
        "--count",
        3,
        "--chunks",
        2,
        "--chunk-tokens",
        40,
        "--max-new-tokens",
        4,
    )
    done = run(tiny_dir, *options, "--html", tmp_path / "report.html", "--repair", "careful")
    assert done.exit_code == 0, done.output
    assert "by full prefill" in done.output
    assert "95% interval" in done.output
    assert "nan" not in done.output
    assert "of the corpus: about" in " ".join(done.output.replace("│", " ").split())
    page = (tmp_path / "report.html").read_text()
    assert "access code" in page
    assert "retention" in page
    assert "http" not in page
    found = json.loads(run(tiny_dir, *options, "--json").stdout)
    assert len(found["rows"]) == 3
    assert 0 <= found["reuse_score"] <= 1
    assert found["speedup"] > 0
    nowhere = run(tiny_dir, *options, "--html", tmp_path / "gone" / "report.html")
    assert nowhere.exit_code == 2
    assert "check the path" in nowhere.output
    assert "comparing" not in nowhere.output


def test_the_command_reads_questions(tiny_dir, corpus, tmp_path):
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"question": "Who?", "answers": ["Ada"]}\n\n{"question": "What?", "answer": "<b>x</b>"}\n'
    )
    options = (
        "--corpus",
        corpus,
        "--questions",
        file,
        "--chunks",
        2,
        "--chunk-tokens",
        40,
        "--max-new-tokens",
        2,
    )
    done = run(tiny_dir, *options, "--html", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    assert "&lt;b&gt;x&lt;/b&gt;" in (tmp_path / "report.html").read_text()
    file.write_text("[3]")
    assert "line 1" in run(tiny_dir, *options).output
    file.write_text("{")
    assert "is not JSON" in run(tiny_dir, *options).output


def test_lost_answers_come_first_in_the_page(tmp_path):
    rows = [compared(), replace(compared(), question="Lost?", reuse_score=0.0, kl=0.01)]
    write_page(tmp_path / "report.html", _all_answers(rows))
    page = (tmp_path / "report.html").read_text()
    assert page.index("Lost?") < page.index("Who?")
