"""The facts benchmark: what its questions hold, how answers are judged and compared, and that the sealed set is run once."""

import random
import re
import statistics
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from texts import make_chunks

from kvrag import KVRagEngine
from kvrag.blend.layout import place

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import facts
import facts_forms as forms
import facts_methods as methods
import facts_pairs
import facts_words
from facts_tasks import Question

BOTH = [(which, form) for which in forms.SETS for form in forms.FORMS]


def size(text):
    """Count tokens much as a tokenizer does: digits and ideographs by one, words by six letters."""
    return sum(
        len(part) if not part.isalpha() or part > "\u3000" else -(-len(part) // 6)
        for part in re.findall(r"[^\W\d_]+|\d+|[^\w\s]|_", text)
    )


@pytest.fixture(autouse=True)
def passages(monkeypatch):
    """Sentences in place of the corpus, all different."""
    draw = random.Random(0)
    words = [
        "river",
        "stone",
        "carried",
        "government",
        "between",
        "mountain",
        "evening",
        "written",
        "second",
        "people",
    ]
    made = tuple(
        " ".join(
            " ".join(draw.choices(words, k=draw.randint(8, 20))).capitalize() + "."
            for _ in range(6)
        )
        for _ in range(300)
    )
    monkeypatch.setattr(forms, "passages", lambda: made)


def made(which, form, numbers):
    return [forms.question(form, which, number, size) for number in numbers]


@pytest.mark.parametrize(("which", "form"), BOTH)
def test_what_a_question_is_about_stands_in_its_chunks_once(which, form):
    for question in made(which, form, range(10)):
        text = forms.plain("\n".join(question.chunks))
        for name, field, value in question.facts:
            assert forms.times_in(name, text) == 1 + (field == "badge")
            if field in ("code", "badge", "amount"):
                assert forms.times_in(value, text) == 1
        homes = [
            index
            for index, chunk in enumerate(question.chunks)
            for name, _, value in question.facts
            if forms.times_in(name, forms.plain(chunk))
            and forms.times_in(value, forms.plain(chunk))
        ]
        assert len(set(homes)) >= len(question.facts)  # each in a chunk of its own
        said = forms.plain(question.tail)
        assert all(forms.times_in(name, said) == 1 for name in question.options)
        if question.metric == "exact":
            assert not forms.times_in(question.golds[0], said)


@pytest.mark.parametrize("form", forms.FORMS)
def test_golds_follow_from_the_facts(form):
    for question in made("develop", form, range(10)):
        values = [value for _, _, value in question.facts]
        if question.task in ("one", "joined"):
            assert question.golds == (values[-1],)
        elif question.task == "comparison":
            best = max(question.facts, key=lambda fact: float(fact[2]))
            assert question.golds == (best[0],)
        else:
            state = forms.words_of(form, "develop").states[0]
            assert question.golds == (str(values.count(state)),)
            assert state in question.tail


@pytest.mark.parametrize(("which", "form"), BOTH)
def test_prompts_and_chunks_keep_their_bounds(which, form):
    for number, question in enumerate(made(which, form, range(len(forms.SHAPES)))):
        sizes = [size(chunk) for chunk in question.chunks]
        assert len(sizes) == forms.SHAPES[number][0]
        assert 4 <= len(sizes) <= 40
        assert min(sizes) >= 60
        assert max(sizes) <= 1000
        assert 1000 <= sum(sizes) <= 8000


@pytest.mark.parametrize(("which", "form"), BOTH)
def test_names_suffice_where_a_token_holds_a_whole_word(which, form):
    question = forms.question(form, which, 11, lambda text: len(re.findall(r"\w+|[^\w\s]", text)))
    assert len(question.chunks) == 40


@pytest.mark.parametrize("form", forms.FORMS)
def test_questions_are_the_same_each_time_and_differ_from_another(form):
    one, other = (made("develop", form, range(5)) for _ in range(2))
    assert one == other
    assert len({question.chunks for question in one}) == 5
    assert {q.chunks for q in one}.isdisjoint(q.chunks for q in made("sealed", form, range(5)))


def _strings(words):
    """All texts of a set in one language, names and values apart."""
    for name in ("labels", "told", "aside", "said", "asks"):
        yield from (text for texts in getattr(words, name).values() for text in texts)
    yield from (*words.hay, *words.small_talk, words.within, words.choose, words.number)


@pytest.mark.parametrize("language", ["ENGLISH", "CHINESE", "ARABIC"])
def test_the_sets_share_no_wording_and_no_name(language):
    develop, sealed = (getattr(facts_words, language)[which] for which in forms.SETS)
    assert set(_strings(develop)).isdisjoint(_strings(sealed))
    for part in ("first", "second", "given", "family", "states"):
        assert set(getattr(develop, part)).isdisjoint(getattr(sealed, part))


def test_the_sets_share_no_line_of_dense_forms():
    develop, sealed = (
        {text for form in forms.LINES[which].values() for texts in form.values() for text in texts}
        for which in forms.SETS
    )
    assert develop.isdisjoint(sealed)
    assert len(develop) > 10 < len(sealed)


@pytest.mark.parametrize("language", ["ENGLISH", "CHINESE", "ARABIC"])
def test_the_sets_share_no_value(language):
    def drawn(which):
        words, draw = getattr(facts_words, language)[which], random.Random(0)
        makers = [make for makers in words.values.values() for make in makers]
        return {make(draw) for make in makers for _ in range(2000)}

    assert drawn("develop").isdisjoint(drawn("sealed"))


def test_the_sets_share_no_passage():
    def told(which):
        world = forms.World(random.Random(0), facts_words.ENGLISH[which], which, "code")
        return set(islice(forms.sentences(world), 500))

    assert told("develop").isdisjoint(told("sealed"))


@pytest.mark.parametrize("form", forms.DENSE)
def test_a_chunk_of_records_has_dozens_of_similar_facts(form):
    (question,) = made("develop", form, [10])
    names = Counter(
        name
        for first in facts_words.DEVELOP.first
        for second in facts_words.DEVELOP.second
        if (name := f"{first} {second}") in question.chunks[0]
    )
    assert len(names) >= 10


def test_text_is_wrapped_with_hyphens_and_facts_stay_whole():
    text = (
        "The Amber archive holds extraordinarily many uncomplicated administrative documents 48-213-7 "
        * 9
    )
    lines = forms.wrapped(text).splitlines()
    assert max(map(len, lines)) <= 72
    assert any(line.endswith("-") for line in lines)
    assert "\n".join(lines).count("48-213-7") == 9
    assert forms.wrapped(text).replace("-\n", "").split() == text.split()


def test_a_transcript_has_no_punctuation():
    (question,) = made("sealed", "transcripts", [0])
    assert all(re.fullmatch(r"[\w ]+", chunk) for chunk in question.chunks)
    assert forms.spoken("Load: 48.6, mark 47-1903.") == "load 48 point 6 mark 47 1903"


@pytest.mark.parametrize(
    ("kind", "said", "is_right"),
    [
        ("exact", "The code is 47-1903.", True),
        ("exact", "47 1903", True),
        ("exact", "密码是47-1903。", True),
        ("exact", "147-1903", False),
        ("exact", "47-19030", False),
        ("choice", "Dune depot, more than Opal mill.", True),
        ("choice", "Opal mill, not the Dune depot", False),
        ("choice", "none", False),
        ("number", "There are two of them, of 3.", True),
        ("number", "有2艘", True),
        ("number", "共两艘", True),
        ("number", "3, not 2", False),
        ("number", "some", False),
    ],
)
def test_an_answer_is_judged_by_what_it_says_first_or_holds(kind, said, is_right):
    golds = {"exact": ("47-1903",), "choice": ("Dune depot",), "number": ("2",)}[kind]
    assert forms.is_right(kind, said, golds, ("Opal mill", "Dune depot")) is is_right


# -- differences between methods --------------------------------------------------------------------


def test_mcnemars_p_is_that_of_the_binomial_test():
    assert facts_pairs.mcnemar(0, 0) == 1
    assert facts_pairs.mcnemar(5, 5) == 1
    assert facts_pairs.mcnemar(8, 0) == pytest.approx(2 / 256)
    assert facts_pairs.mcnemar(1, 9) == facts_pairs.mcnemar(9, 1) == pytest.approx(22 / 1024)


def test_the_interval_of_a_difference_is_that_of_its_mean():
    assert facts_pairs.difference([3, 4, 5], [1, 2, 3]) == (2, 2, 2)
    draw = random.Random(1)
    common = [draw.gauss(0, 100) for _ in range(400)]  # paired: what both share does not widen it
    one = [value + draw.gauss(0.5, 1) for value in common]
    mean, low, high = facts_pairs.difference(one, common)
    beyond = [x - y for x, y in zip(one, common, strict=True)]
    error = statistics.stdev(beyond) / 20
    assert mean == pytest.approx(statistics.mean(beyond))
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.02)


def pair(number, full, score, kl=0.0, **more):
    record = {"task": "needles", "number": number, "shapes": [0], "kind": "needle", **more}
    return {**record, "method": "full", "score": full}, {**record, "score": score, "kl": kl}


def test_methods_are_compared_over_the_questions_that_all_answered():
    found = {"a": [pair(n, 1, 1) for n in (2, 0, 1)], "b": [pair(n, 1, 0) for n in (1, 2, 3)]}
    kept = facts_pairs.common(found)
    assert {name: [r["number"] for _, r in of] for name, of in kept.items()} == {
        "a": [1, 2],
        "b": [1, 2],
    }
    with pytest.raises(ValueError, match="other questions"):
        facts_pairs.against(found["a"], found["b"])


def test_a_difference_counts_what_a_single_method_has_right():
    full, mine, theirs = (1, 1, 1, 1, 0, 0), (0, 0, 1, 1, 1, 0), (1, 1, 1, 0, 0, 1)
    ours = [pair(n, f, s, kl=0.3) for n, (f, s) in enumerate(zip(full, mine, strict=True))]
    other = [pair(n, f, s, kl=0.1) for n, (f, s) in enumerate(zip(full, theirs, strict=True))]
    found = facts_pairs.against(ours, other)
    assert (found["lost_alone"], found["kept_alone"]) == (2, 1)
    assert found["p"] == facts_pairs.mcnemar(2, 1)
    assert found["p_all"] == facts_pairs.mcnemar(3, 2)
    assert found["kl_beyond"] == pytest.approx(0.2)
    assert found["kl_beyond_ci"] == pytest.approx([0.2, 0.2])


def test_records_are_never_pooled_over_forms_lengths_or_machines():
    records = [
        {"task": task, "shapes": shapes, "machine": where}
        for task, shapes, where in (
            ("needles", [0, 1], "one"),
            ("needles", [3], "one"),
            ("needles", [3], "two"),
            ("forms/develop/tables", [], "one"),
            ("forms/sealed/tables", [], "one"),
        )
    ]
    found = facts.by_task(records)
    assert list(found) == [
        "needles 1k",
        "needles 2.5k, one",
        "needles 2.5k, two",
        "forms/develop/tables",
        "forms/sealed/tables",
    ]
    assert all(len(of) == 1 for of in found.values())


# -- the sealed set ---------------------------------------------------------------------------------


class Here:
    """A pool that works in this process."""

    def __init__(self, *_):
        self.map = map

    def __enter__(self):
        return self

    __exit__ = __init__


@pytest.fixture
def sealed(monkeypatch, tmp_path):
    """Run `facts.py --sealed` with a stand-in for the model; returns the questions asked."""
    asked = []

    def work(item):
        task, number, methods, *_ = item
        asked.append((task, number, *methods))
        about = {"task": task, "number": number, "shapes": [], "kind": "one"}
        about["machine"] = facts.here()
        return [{**about, "method": name} for name in ("full", *methods)]

    monkeypatch.setattr(facts, "work", work)
    monkeypatch.setattr(facts, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(facts, "compared", lambda *_: {})
    monkeypatch.setattr(facts, "code_state", lambda: "one")

    def run(*more):
        options = ["--forms", "tables", "--count", "2", "--methods", "none", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["facts.py", *options, *more])
        asked.clear()
        facts.main()
        return asked

    return run


def test_the_sealed_set_goes_on_where_it_was_and_is_run_once(sealed, monkeypatch):
    task = "forms/sealed/tables"
    assert sealed("--sealed") == [(task, 0, "none"), (task, 1, "none")]
    assert sealed("--sealed", "--count", "3") == [(task, 2, "none")]
    with pytest.raises(SystemExit, match="run once"):
        sealed("--sealed", "--count", "3")
    monkeypatch.setattr(facts, "code_state", lambda: "two")
    assert len(sealed("--sealed")) == 2
    monkeypatch.setattr(facts, "code_state", lambda: "two+changes")
    with pytest.raises(SystemExit, match="commit the changes"):
        sealed("--sealed")


def test_the_sealed_set_is_not_run_by_another_option(sealed, capsys):
    with pytest.raises(SystemExit):
        sealed("--set", "sealed")
    assert "--sealed" in capsys.readouterr().err
    assert sealed() == [("forms/develop/tables", 0, "none"), ("forms/develop/tables", 1, "none")]


# -- methods ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tiny_dir):
    """A question to a tiny model, prefilled once."""
    engine = KVRagEngine.from_pretrained(tiny_dir, dtype="float32")
    chunks = tuple(make_chunks(4, words=40, seed=7))
    question = Question("one", 0, chunks, "Who keeps the ledger?", ("Ada",), max_tokens=4)
    with torch.inference_mode():
        yield facts.Case(engine, question)
    engine.close()


@pytest.mark.parametrize(
    "name", [*methods.PEERS, *methods.STORED, "sentences", "p.sentences", "int8.sentences"]
)
def test_a_method_repairs_and_answers(asked, name):
    budget = "0.2" if methods.METHODS[name].takes_budget else ""
    with torch.inference_mode():
        found = asked.measure(methods.METHODS[name], budget)
        assert asked.seconds(methods.METHODS[name], budget) > 0
    assert found["kl"] >= 0
    assert found["rows"] == pytest.approx(0.2 if budget else found["rows"], abs=0.03)
    if name.startswith("epic"):
        assert found["rows"] > 0


def test_all_rows_repaired_are_a_full_prefill(asked):
    with torch.inference_mode():
        for name in ("prophetkv", "prophetkv2", "cacheblend", "epic", "sentences"):
            assert asked.measure(methods.METHODS[name], "1.0")["kl"] < 1e-4


def test_another_dtype_is_a_control_of_rounding(asked, tiny_dir, monkeypatch):
    monkeypatch.setenv("KVRAG_EVAL_MODELS", str(Path(tiny_dir).parent))
    monkeypatch.setattr(facts, "_halved", {})
    engine = SimpleNamespace(loaded=SimpleNamespace(reusable=asked.lm))
    rounded = facts.halved(engine, Path(tiny_dir).name)
    assert rounded.dtype is torch.bfloat16
    assert facts.halved(engine, Path(tiny_dir).name) is rounded
    with torch.inference_mode():
        found, same = asked.rounded(rounded), asked.rounded(asked.lm)
    assert same["kl"] == 0
    assert same["same"]
    assert 0 < found["kl"] < 0.05
    assert asked.lm is not rounded


def test_a_control_that_memory_lacks_for_is_left_out_and_says_so(monkeypatch, capsys):
    engine = SimpleNamespace(
        loaded=SimpleNamespace(reusable=SimpleNamespace(model=torch.nn.Linear(1024, 1024)))
    )
    monkeypatch.setattr(facts, "free_bytes", lambda: 1000)
    monkeypatch.setattr(facts, "_halved", {})
    assert facts.halved(engine, "a-model") is None
    assert "bf16 is left out" in capsys.readouterr().err


def test_chunks_stand_side_by_side():
    """Prefix of 3, chunks of 5 and 4 around a separator, question of 2: as if both chunks began behind the prefix."""
    segments = [
        (3, "prefix", True, 0, False),
        (5, "chunk", False, 1, False),
        (1, "live", False, -1, False),
        (4, "chunk", False, 2, False),
        (2, "live", False, -1, False),
    ]
    moved = methods.side_by_side(place(segments), 3)
    at = torch.arange(15) + moved
    question = 13
    assert (question - at[:3]).tolist() == [8, 7, 6]  # the longest chunk is between
    assert (question - at[3:8]).tolist() == [*(question - at[9:13]).tolist(), 1]
    assert (question - at[3:8]).tolist() == [5, 4, 3, 2, 1]


def test_apes_own_way_leaves_one_chunk_as_it_is(tiny_dir, monkeypatch):
    monkeypatch.setattr(methods, "APE_TEMPERATURE", 1.0)
    monkeypatch.setattr(methods, "APE_SCALE", 1.0)
    engine = KVRagEngine.from_pretrained(tiny_dir, dtype="float32")
    chunk = tuple(make_chunks(1, words=60, seed=7))
    question = Question("one", 0, chunk, "Who keeps the ledger?", ("Ada",), max_tokens=4)
    with torch.inference_mode():
        case = facts.Case(engine, question)
        assert case.measure(methods.METHODS["apecode"], "")["kl"] < 1e-4
        assert case.measure(methods.METHODS["ape"], "")["kl"] < 1e-4


def test_the_gradual_filter_drops_rows_that_change_least_and_keeps_their_stored_kv():
    rows, chosen = torch.arange(12), torch.arange(10)
    hook = methods.Gradual(rows, chosen, num_layers=6, budget=8)
    assert hook.first(8) == 10
    assert [hook.wanted(layer) for layer in range(1, 6)] == [10, 9, 8, 7, 6]
    stored = [torch.zeros(1, 2, 12, 4) for _ in range(2)]
    change = torch.arange(12, dtype=torch.float32)[None, None, :, None].expand(1, 2, 12, 4)
    kept = []
    for layer in range(6):
        fresh = [change + 1, change + 1]
        hook(layer, *stored, *(fresh := [x.clone() for x in fresh]))
        kept.append([int(i) for i in range(12) if fresh[0][0, 0, i, 0] != 0])
    everyone = list(range(12))
    assert kept[:3] == [everyone] * 3
    assert [len(rows) for rows in kept[3:]] == [11, 10, 9]  # two of them are the question's
    assert kept[5] == everyone[3:]


def test_a_budget_takes_as_long_as_another_method():
    ladder = [(0.02, 1.0), (0.1, 2.0), (0.2, 4.0), (0.4, 8.0)]
    assert facts.budget_for(3.0, ladder) == pytest.approx(0.15)
    assert facts.budget_for(0.5, ladder) == 0.02
    assert facts.budget_for(9.0, ladder) == 0.4
    noisy = [(0.02, 1.0), (0.1, 2.5), (0.2, 2.0), (0.4, 4.5)]
    assert facts.budget_for(3.5, noisy) == pytest.approx(0.3)


def test_budgets_are_timed_once_and_kept(monkeypatch, tmp_path):
    calls = []

    def clocked(item):
        calls.append(item)
        return {
            name: 3.0 if name == "sentences@auto" else 10 * float(name.partition("@")[2])
            for name in item[2]
        }

    monkeypatch.setattr(facts, "clocked", clocked)
    monkeypatch.setattr(facts, "ProcessPoolExecutor", Here)
    args = SimpleNamespace(
        methods=["sentences@auto", "cacheblend", "epic32", "epic@0.1"],
        tasks=["forms/develop/tables"],
        match_time="sentences@auto",
        model="m",
        threads=1,
        shapes=[0],
        start=0,
        count=9,
        most_tokens=2000,
    )
    for _ in range(2):
        found = facts.matched(args, tmp_path / "m.jsonl")
        assert found == {
            "forms/develop/tables": ["sentences@auto", "cacheblend@0.3", "epic32", "epic@0.1"]
        }
    assert len(calls) == facts.TIMED
