"""Tables of the docs: what stands in one table was measured together."""

import copy
import json
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

facts = pytest.importorskip("docs.tables.facts")  # absent where only the package is
core = pytest.importorskip("docs.tables.core")
RESULTS, read, same_run = core.RESULTS, core.read, core.same_run


def _line(number: int, score: float) -> dict:
    return {"number": number, "shapes": [0], "score": score}


def _pairs(*numbers: int) -> dict:
    return {n: (_line(n, 1.0), _line(n, 0.0)) for n in numbers}


@pytest.fixture
def result():
    return read("facts/published.json")


@pytest.mark.parametrize(
    ("part", "value"),
    [("cpu", "another"), ("commit", "another"), ("threads", 64), ("versions", {"torch": "1"})],
)
def test_rows_of_another_run_are_refused(result, part, value):
    other = copy.deepcopy(result)
    other["machine"][part] = value
    with pytest.raises(ValueError, match="different runs"):
        facts.compared({"a": (result, _pairs(1, 2)), "b": (other, _pairs(1, 2))})


def test_rows_of_another_model_are_refused(result):
    with pytest.raises(ValueError, match="different runs"):
        same_run(result, {**result, "model": "another"})


@pytest.mark.parametrize("numbers", [(1,), (1, 2, 3), (1, 3)])
def test_rows_of_other_questions_are_refused(result, numbers):
    with pytest.raises(ValueError, match="other questions"):
        facts.compared({"a": (result, _pairs(1, 2)), "b": (result, _pairs(*numbers))})


def test_a_task_that_began_with_another_machines_lines_is_refused():
    names = sorted(path.stem for path in (RESULTS / "facts").glob("*.jsonl"))
    for one, two in combinations(names, 2):
        machines = [read(f"facts/{name}.json")["machine"]["cpu"] for name in (one, two)]
        copied = facts.COPIED.get(one, set()) | facts.COPIED.get(two, set())
        assert machines[0] == machines[1] or facts.shared(one, two) <= copied
    with pytest.raises(ValueError, match="another machine"):
        facts.common("published-equal", "needles", facts.EQUAL)


def test_every_method_of_the_readme_answered_the_same_questions_of_one_task():
    for task in facts.tasks_together():
        found = facts.common(facts.TOGETHER, task, facts.METHODS)
        assert len(found) == len(facts.METHODS)
        asked = {
            name: [(line["task"], facts.question(line)) for _, line in pairs]
            for name, pairs in found.items()
        }
        assert all(questions == asked[facts.RUNS] for questions in asked.values())
        assert {t for t, _ in asked[facts.RUNS]} == {task}


def test_what_is_said_of_hotpotqa_is_in_its_table():
    """README and the benchmarks page say it in words."""
    found = facts.common(facts.TOGETHER, "hotpotqa", facts.METHODS)
    base = found[facts.RUNS]
    assert facts.counts(base)[:2] == (5, 21)
    published = {"prophetkv", "cacheblend", "epic", "apecode"}
    for name, pairs in found.items():
        if name.partition("@")[0] in published:
            assert 1.7 * facts.mean(base, "kl") < facts.mean(pairs, "kl")
            assert float(facts.over_default(pairs, base, "kl").split("(")[1].split(" to ")[0]) > 0


def test_what_is_said_of_the_default_is_in_its_tables():
    """README and the benchmarks page say it in words."""
    methods = (facts.RUNS, "runs@0.03", "none", "reordered")
    lost = {
        (task, short): [
            facts.counts(p)[:2]
            for p in facts.common("default", task, methods, short=short).values()
        ]
        for task, short in (("needles", True), ("needles", False), ("musique", None))
    }
    assert lost == {
        ("needles", True): [(17, 207), (75, 207), (118, 207), (38, 207)],
        ("needles", False): [(0, 6), (1, 6), (3, 6), (0, 6)],
        ("musique", None): [(2, 4), (3, 4), (4, 4), (4, 4)],
    }


def test_what_is_said_of_the_sealed_set_is_in_its_table():
    """README, the benchmarks page and the limitations say it in words."""
    shown = facts.facts_sealed(read("facts/sealed-qwen2.5-coder-0.5b.json"))
    right = "0.041; 1 of 11 | 0.015; 1 of 11 | 0.172; 7 of 11 | 0.100; 2 of 11 | 0.252; 6 of 11 |"
    assert f"| all where full prefill is right, 11 | {right}" in shown
    wrong = "0.211 | 0.157 | 0.312 | 0.235 | 0.415 |"
    assert f"| all where full prefill is wrong, 37 | {wrong}" in shown
    larger = read("facts/sealed-qwen2.5-coder-1.5b.json")
    right = "0.156; 5 of 23 | 0.075; 4 of 23 | 0.505; 18 of 23 |"
    assert f"| all where full prefill is right, 23 | {right}" in facts.facts_sealed(larger)
    file = "facts/sealed-qwen2.5-coder-1.5b.json"
    kl = {
        method: [p for p in facts._of_forms(file, larger["tasks"], method) if facts.is_right(p[0])]
        for method in ("runs@auto", "reordered")
    }
    lost = [full["kind"] for full, line in kl["runs@auto"] if not facts.is_right(line)]
    assert sorted(lost) == ["joined", "one", "one", "one", "one"]
    worst = max(range(23), key=lambda n: kl["runs@auto"][n][1]["kl"])
    rest = [sum(line["kl"] for n, (_, line) in enumerate(of) if n != worst) for of in kl.values()]
    assert [f"{each / 22:.3f}" for each in rest] == ["0.070", "0.078"]


def test_single_needles_are_kept():
    """The benchmarks page says it of the short ones, shape 0."""
    of = facts.lines("default")
    full = [q for q, x in of["needles", "full"].items() if x["kind"] == "needle" and not q[1]]
    full = [q for q in full if facts.is_right(of["needles", "full"][q])]
    lost = [
        sum(not facts.is_right(of["needles", method][q]) for q in full)
        for method in ("runs@auto", "runs@0.03", "none", "reordered")
    ]
    assert (len(full), lost) == (117, [1, 19, 55, 3])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a run of two questions by methods; some lines may name another machine."""
    monkeypatch.setattr(facts, "RESULTS", tmp_path)
    monkeypatch.setattr(facts, "read", lambda _: read("facts/published.json"))
    facts.lines.cache_clear()

    def write(methods, machines=("one", "one")):
        made = []
        for number, machine in enumerate(machines):
            for method in ("full", *methods):
                line = {"task": "hotpotqa", "number": number, "shapes": [], "machine": machine}
                line |= {"method": method, "tokens": 9, "score": float(method == "full" or number)}
                made.append(json.dumps(line | {"blind": 0.0, "ttft_s": [2.0, 2.0 + number]}))
        (tmp_path / "facts").mkdir(exist_ok=True)
        (tmp_path / "facts/methods.jsonl").write_text("\n".join(made))

    yield write
    facts.lines.cache_clear()


def test_lines_of_several_machines_are_refused(run):
    run(["runs@auto"], ("one", "two"))
    with pytest.raises(ValueError, match="several machines: one, two"):
        facts.lines("methods")


def test_a_method_of_several_budgets_is_refused(run):
    run(["runs@auto", "cacheblend@0.2", "cacheblend@0.13"])
    with pytest.raises(ValueError, match="several budgets"):
        facts.common("methods", "hotpotqa", ("runs@auto", "cacheblend"))


def test_a_task_without_lines_is_named(run):
    run(["runs@auto"])
    with pytest.raises(ValueError, match="no lines of needles"):
        facts.common("methods", "needles", ("runs@auto",))


def test_what_is_lost_stands_beside_the_time(run):
    run(["runs@auto", "cacheblend@0.13"])
    shown = facts.lost_by_time("hotpotqa")
    assert list(shown) == ["kvrag", "CacheBlend, 13%"]
    assert shown["kvrag"][:2] == [1.0, 0.5]
    assert 0 < shown["kvrag"][2] < 0.5 < shown["kvrag"][3] < 1


def test_forms_are_summed_up_by_what_full_prefill_has_right(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "RESULTS", tmp_path)
    facts.lines.cache_clear()
    (tmp_path / "facts").mkdir()
    made = []
    for form, full, reuse in [("tables", 1, 0), ("tables", 1, 1), ("tables", 0, 1), ("logs", 0, 0)]:
        line = {"task": f"forms/sealed/{form}", "number": len(made), "shapes": []}
        made.append(json.dumps({**line, "method": "full", "score": full, "kl": 0}))
        line |= {"score": reuse, "kl": (1 + len(made)) / 10}
        made.append(json.dumps({**line, "method": "runs@auto"}))
    (tmp_path / "facts/sealed-tiny.jsonl").write_text("\n".join(made))

    def of(kl, lost, right):
        return {"questions": 2, "kl": kl, "lost": lost, "right": right}

    result = {**read("facts/published.json"), "model": "tiny"}
    result["tasks"] = {
        "forms/sealed/tables": {"runs@auto": of(0.1, 0.5, 2), "reordered": of(0.2, 1.0, 2)},
        "forms/sealed/logs": {"runs@auto": of(0.3, None, 0)},
    }
    shown = facts.facts_sealed(result).splitlines()
    assert shown[0] == "| form, questions | the default |"
    assert shown[2:6] == [
        "| tables, 2 | 0.100; 1 of 2 |",
        "| logs, 2 | 0.300; 0 of 0 |",
        "| all where full prefill is right, 2 | 0.300; 1 of 2 |",
        "| all where full prefill is wrong, 2 | 0.700 |",
    ]
    with pytest.raises(ValueError, match="one machine's"):
        facts.facts_sealed({**result, "tasks": {"a, b": {"runs@auto": of(0.1, 0.5, 2)}}})
    facts.lines.cache_clear()


def test_an_interval_is_paired_and_repeatable():
    """Questions are drawn whole: a ratio that is the same on each of them has no spread."""
    assert facts.interval([1, 2, 3, 4], [2, 4, 6, 8]) == (0.5, 0.5)
    low, high = facts.interval([0, 1] * 20, [1] * 40)
    assert 0.3 < low < 0.5 < high < 0.7
    assert facts.interval([0, 1] * 20, [1] * 40) == (low, high)


def test_a_published_method_is_named_with_what_is_ours_of_it():
    """It is our own version: tables say which part of it, and its bare name heads no row."""
    named = re.compile("ProphetKV's (signal|two stages)")
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for line in page.read_text().splitlines():
            assert "ProphetKV" not in named.sub("", line), (page.name, line)
