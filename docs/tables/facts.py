"""Facts that survive reuse, by repair and model."""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

from kvrag.evaluate.questions import IS_RIGHT

from .core import RESULTS, Result, Tables, read, source, table

FACTS = {
    "none": "unrepaired",
    "sentences": "kvrag, sentences",
    "gain": "kvrag, single rows",
    "gainsum": "single rows by summed attention, the default before",
    "mass": "single rows by attention alone",
    "runs9": "runs of nine rows",
    "mix50": "half runs of nine rows",
    "mix50sum": "half runs, by summed attention",
    "sentonce": "sentences, the question read once",
    "sentsum": "sentences by summed attention",
    "sent50": "sentences, half of the budget",
    "sent80": "sentences, four fifths of the budget",
    "sentmean": "sentences by their mean",
    "sentroot": "sentences by their sum over the root of their length",
    "sentall": "sentences, a probe of all layers",
    "sentsee20": "sentences, repaired rows see a fifth of the other chunks",
    "sentsee50": "sentences, repaired rows see half of the other chunks",
    "reordered": "full prefill, chunks in another order",
    "sentmid": "sentences, a probe of a quarter to 60% of the layers",
    "sentnoshift": "sentences, without the shift",
    "prophetkv": "ProphetKV",
    "cacheblend": "CacheBlend",
    "epic": "EPIC",
    "ape": "APE, nothing repaired",
}


NAMED = {
    "sentences@auto": "**kvrag, the default**",
    "sentences@0.03": "kvrag, `fast`: 3%",
    "sentences@0.4": "kvrag, `careful`: 40%",
}


OURS = ("sentences@auto", "sentences@0.03", "sentences@0.4", "reordered")


SHORT = (
    "sentences@auto",
    "sentences@0.03",
    "sentences@0.4",
    "prophetkv@0.2",
    "cacheblend@0.2",
    "epic@0.2",
    "ape",
    "reordered",
)


FEWER = (
    "The default answered more questions than the other rows; published methods in an earlier run (`facts/published.json`).\n"
    "The other models answered HotpotQA, and needles in prompts of 1,000 tokens instead of 2,500.\n"
)


OTHER_MODELS = {
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma3-270m": "Gemma 3 270M",
}


SAME_QUESTIONS = ("lost", "won", "KL, own answer", "median", "KL, first token", "same answer")


def facts(result: Result) -> str:
    """Say of each repair which facts it keeps, how far its answers are, and how much sooner they begin."""
    rows = []
    for task, methods in result["tasks"].items():
        order = sorted(
            methods, key=lambda name: (name.partition("@")[0] not in ("sentences", "gainsum"), name)
        )
        for name in order:
            found, lost, kept = methods[name], "–", "–"
            if found["right"]:
                low, high = found["lost_ci"]
                lost = f"{round(found['lost'] * found['right'])} of {found['right']} ({low:.0%} to {high:.0%})"
            if found["full"]:
                kept = f"{found['retention']:.2f} ({found['retention_ci'][0]:.2f} to {found['retention_ci'][1]:.2f})"
            cells = (kept, lost, str(found["won"]), f"{found['kl']:.3f}", f"{found['same']:.0%}")
            rows.append(
                [
                    f"{task}, {found['questions']}",
                    method_name(name),
                    *cells,
                    f"{found['rows']:.0%}",
                    f"{found['sooner_cpu']:.1f}",
                ]
            )
    header = [
        "questions",
        "repair",
        "retention (95% interval)",
        "lost",
        "won",
        "KL, own answer",
        "same answer",
        "rows",
    ]
    header.append("first token, times sooner (processor time)")
    name = result.get("name", result["model"])
    lines = f"`tests/benchmarks/results/facts/{name}.jsonl` has a line per question and repair.\n"
    return table(header, rows) + source(result, f"facts/{name}.json") + lines


def facts_short(result: Result) -> str:
    """Pick the README's rows of the facts table: the tasks that published methods answered, together.

    Other models have a row each, with all of their tasks.
    """
    published = read("facts/published.json")
    compared = published["tasks"].keys()
    rows = []
    for name in SHORT:
        file = result if name in OURS else published
        found = [file["tasks"][task][name] for task in compared if name in file["tasks"][task]]
        rows.append(together(method_name(name), found))
    for name, model in OTHER_MODELS.items():
        other = read(f"facts/{name}.json")
        found = [methods["sentences@auto"] for methods in other["tasks"].values()]
        rows.append(together(f"the default on {model}", found))
    header = ["", "questions", "retention", "lost", "won", "KL, own answer", "same answer"]
    header.append("first token sooner, by CPU time")
    return table(header, rows) + source(result, f"facts/{result['model']}.json") + FEWER


def together(label: str, found: list[Result]) -> list[str]:
    """Return a row of figures over several tasks."""
    count, right = sum(f["questions"] for f in found), sum(f["right"] for f in found)
    lost = sum(round((f["lost"] or 0) * f["right"]) for f in found)
    score, full, kl, same, sooner = (
        sum(f["questions"] * f[key] for f in found) / count
        for key in ("score", "full", "kl", "same", "sooner_cpu")
    )
    kept = (f"{score / full:.2f}", f"{lost} of {right}", str(sum(f["won"] for f in found)))
    return [label, f"{count}", *kept, f"{kl:.3f}", f"{same:.0%}", f"{sooner:.1f}×"]


def method_name(name: str) -> str:
    """Name a method and its budget."""
    behind = {"p.": ", behind the prefix alone", "c1000.": ", behind 1,000 tokens of a context"}
    behind |= {f"{dtype}.": f", KV as {dtype}" for dtype in ("int8", "fp8", "int4")}
    mark = next((mark for mark in behind if name.startswith(mark)), "")
    plain = name.removeprefix(mark)
    kind, _, budget = plain.partition("@")
    share = (
        {"": "", "auto": ", default rows"}.get(budget)
        if budget in ("", "auto")
        else f", {float(budget):.0%}"
    )
    return NAMED.get(plain, f"{FACTS[kind]}{share}") + behind.get(mark, "")


def facts_once(result: Result) -> str:
    """Compare the default with a probe that reads the question once, on the same questions."""
    name = f"facts/{result['model']}"
    rows = on_same_questions(
        {
            "once": ("facts/once", "sentences@auto"),
            "**twice, the default**": (name, "sentences@auto"),
        }
    )
    once = read("facts/once.json")
    said = source(once, "facts/once.json").lstrip()
    return (
        table(["questions", "the question is read", *SAME_QUESTIONS], rows)
        + source(result, f"{name}.json")
        + said
    )


def compared(result: Result, column: str, methods: dict[str, str]) -> str:
    """Compare methods, by label, on the questions that all of them answered."""
    name = f"facts/{result['model']}"
    rows = on_same_questions({label: (name, method) for label, method in methods.items()})
    return table(["questions", column, *SAME_QUESTIONS], rows) + source(result, f"{name}.json")


ROWS = {
    "**the default**": "sentences@auto",
    "25%": "sentences@0.25",
    "30%": "sentences@0.3",
    "40%": "sentences@0.4",
}
REORDERED = {
    "**kvrag, the default**": "sentences@auto",
    "kvrag, `careful`: 40%": "sentences@0.4",
    "full prefill, chunks in another order": "reordered",
}
SEEN = {
    "**all, the default**": "sentences@auto",
    "half": "sentsee50@auto",
    "a fifth": "sentsee20@auto",
}
ROUNDED = {
    "as computed": "sentences@auto",
    "int8": "int8.sentences@auto",
    "int4": "int4.sentences@auto",
}


def facts_musique_rows(result: Result) -> str:
    """Compare shares of rows on the questions of MuSiQue that full prefill has right."""
    name = "facts/musique-rows"
    methods = {
        "**the default**": "sentences@auto",
        "25%": "sentences@0.25",
        "40%, `careful`": "sentences@0.4",
    }
    rows = on_same_questions({label: (name, method) for label, method in methods.items()})
    found = result["tasks"]["musique"]
    for row, method in zip(rows, methods.values(), strict=True):
        row.append(f"{found[method]['sooner_cpu']:.1f}×")
    header = ["questions", "rows", *SAME_QUESTIONS, "first token sooner, by CPU time"]
    return table(header, rows) + source(result, f"{name}.json")


def on_same_questions(sides: dict[str, tuple[str, str]]) -> list[list[str]]:
    """Return a row per task and side, over the questions that every side answered; a side is a file of lines and a method in it."""
    found: dict[str, dict[tuple[Any, ...], tuple[Result, Result]]] = {}
    for label, (file, method) in sides.items():
        lines = _lines(file)
        full = {_question(line): line for line in lines if line["method"] == "full"}
        found[label] = {
            _question(r): (full[_question(r)], r) for r in lines if r["method"] == method
        }
    common = set.intersection(*(set(by) for by in found.values()))
    rows = []
    for task in sorted({question[0] for question in common}):
        for label, by in found.items():
            pairs = [by[question] for question in sorted(common) if question[0] == task]
            rows.append([f"{task}, {len(pairs)}", label, *_same_questions(pairs)])
    return rows


FACTUAL = frozenset({"needles", "hotpotqa", "musique"})
SINGLE = frozenset({"needle"})
"""Kinds of questions whose answer stands in a single sentence; others join two or more."""


def facts_joined(result: Result) -> str:
    """Split the default's answers by whether a question asks for a single fact or joins several."""
    rows = []
    for name, model in {result["model"]: "Qwen2.5-Coder-0.5B", **OTHER_MODELS}.items():
        lines = [line for line in _lines(f"facts/{name}") if line["task"] in FACTUAL]
        full = {_question(line): line for line in lines if line["method"] == "full"}
        pairs = [
            (full[_question(line)], line) for line in lines if line["method"] == "sentences@auto"
        ]
        for label, is_single in {"a single fact": True, "joined facts": False}.items():
            chosen = [(f, r) for f, r in pairs if (f["kind"] in SINGLE) == is_single]
            cells = _same_questions(chosen)
            rows.append([model, f"{label}, {len(chosen)}", *cells])
    return table(["model", "questions", *SAME_QUESTIONS], rows)


def _lines(file: str) -> list[Result]:
    """Read a file's lines of results."""
    return [json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()]


def _same_questions(pairs: list[tuple[Result, Result]]) -> list[str]:
    """Return the cells of :data:`SAME_QUESTIONS` for pairs of full prefill and reuse."""
    right = [r for f, r in pairs if f["score"] >= IS_RIGHT]
    lost = sum(r["score"] < IS_RIGHT for r in right)
    won = sum(f["score"] < IS_RIGHT <= r["score"] for f, r in pairs)
    kl = [r["kl"] for _, r in pairs]
    return [
        f"{lost} of {len(right)}",
        str(won),
        f"{statistics.fmean(kl):.3f}",
        f"{statistics.median(kl):.3f}",
        f"{statistics.fmean(r['kl_first'] for _, r in pairs):.3f}",
        f"{statistics.fmean(r['same'] for _, r in pairs):.0%}",
    ]


def _question(line: Result) -> tuple[Any, ...]:
    """Name the question that a line of results is about."""
    return line["task"], line["number"], *line["shapes"]


TABLES: Tables = {
    "facts-qwen-05b": ("facts/qwen2.5-coder-0.5b.json", facts),
    "facts-rows": ("facts/qwen2.5-coder-0.5b.json", partial(compared, column="rows", methods=ROWS)),
    "facts-joined": ("facts/qwen2.5-coder-0.5b.json", facts_joined),
    "facts-reordered": (
        "facts/qwen2.5-coder-0.5b.json",
        partial(compared, column="", methods=REORDERED),
    ),
    "facts-sparse": (
        "facts/qwen2.5-coder-0.5b.json",
        partial(compared, column="seen of other chunks", methods=SEEN),
    ),
    "facts-once": ("facts/qwen2.5-coder-0.5b.json", facts_once),
    "facts-musique-rows": ("facts/musique-rows.json", facts_musique_rows),
    "facts-rounded": (
        "facts/qwen2.5-coder-0.5b.json",
        partial(compared, column="KV", methods=ROUNDED),
    ),
    "facts-equal": ("facts/published-equal.json", facts),
    "facts-published": ("facts/published.json", facts),
    "facts-search": ("facts/search.json", facts),
    "facts-short": ("facts/qwen2.5-coder-0.5b.json", facts_short),
    "facts-qwen-15b": ("facts/qwen2.5-coder-1.5b.json", facts),
    "facts-gemma": ("facts/gemma3-270m.json", facts),
    "facts-smollm2": ("facts/smollm2-135m-instruct.json", facts),
}
