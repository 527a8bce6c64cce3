"""Facts that survive reuse, by repair and model."""

from __future__ import annotations

import json
import statistics
from typing import Any

from kvrag.evaluate.questions import IS_RIGHT

from .core import RESULTS, Result, Tables, read, source, table

FACTS = {
    "reordered": "full prefill, chunks in another order",
    "prophetkv": "ProphetKV",
    "cacheblend": "CacheBlend",
    "epic": "EPIC",
    "ape": "APE, nothing repaired",
}


OURS = ("sentences@auto", "sentences@0.03", "sentences@0.4", "reordered")


NAMED = {
    "sentences@auto": "**kvrag, the default**",
    "sentences@0.03": "kvrag, `fast`: 3%",
    "sentences@0.4": "kvrag, `careful`: 40%",
}


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
    rows = [row for row in _by_task(result) if row]
    name = result.get("name", result["model"])
    return table(["questions", *BY_TASK], rows) + source(result, f"facts/{name}.json")


BY_TASK = [
    "repair",
    "retention (95% interval)",
    "lost",
    "won",
    "KL, own answer",
    "same answer",
    "rows",
    "first token sooner, by CPU time",
]


def _by_task(result: Result, shown: tuple[str, ...] = OURS) -> list[list[str]]:
    """Return a row for each task and shown repair."""
    rows = []
    for task, methods in result["tasks"].items():
        for name in (each for each in shown if each in methods):
            found, lost, kept = methods[name], "–", "–"
            if found["right"]:
                lost = f"{round(found['lost'] * found['right'])} of {found['right']}"
            if found["full"]:
                low, high = found["retention_ci"]
                kept = f"{found['retention']:.2f} ({low:.2f} to {high:.2f})"
            cells = (kept, lost, str(found["won"]), f"{found['kl']:.3f}", f"{found['same']:.0%}")
            last = (f"{found['rows']:.0%}", f"{found['sooner_cpu']:.1f}×")
            rows.append([f"{task}, {found['questions']}", method_name(name), *cells, *last])
    return rows


def facts_models(result: Result) -> str:
    """Set the other models below each other; sources last."""
    rows, said = [], []
    for name, model in {**OTHER_MODELS, result["model"]: "SmolLM2-135M"}.items():
        found = read(f"facts/{name}.json")
        rows += [[model, *row] for row in _by_task(found, ("sentences@auto",))]
        said.append(source(found, f"facts/{name}.json").strip())
    return table(["model", "questions", *BY_TASK], rows) + "\n" + "\n".join(said) + "\n"


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
    kind, _, budget = name.partition("@")
    return NAMED.get(name) or FACTS[kind] + (f", {float(budget):.0%}" if budget else "")


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
    "facts-joined": ("facts/qwen2.5-coder-0.5b.json", facts_joined),
    "facts-short": ("facts/qwen2.5-coder-0.5b.json", facts_short),
    "facts-models": ("facts/smollm2-135m-instruct.json", facts_models),
}
