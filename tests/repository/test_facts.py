"""The facts benchmark: what its questions hold, how answers are judged and compared, and that the sealed set is run once."""

import random
import re
import statistics
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import facts
import facts_forms as forms
import facts_pairs
import facts_words

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

    class Here:
        def __init__(self, *_):
            self.map = map

        def __enter__(self):
            return self

        __exit__ = __init__

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
