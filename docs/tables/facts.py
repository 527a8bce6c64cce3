"""Facts that survive reuse, by task, method and model.

Rows of a table answered the same questions, in one run: :func:`compared` refuses all else.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from kvrag.evaluate.answers import wilson

from .core import RESULTS, ROOT, Result, Tables, read, same_run, source, table

sys.path.append(str(ROOT / "benchmarks"))
from facts_pairs import is_right, mcnemar

RUNS = "runs@auto"
"""The default."""
DEFAULT = "sentences@auto"
"""The default before runs: whole sentences."""
NAMED = {
    RUNS: "**kvrag**",
    "runs@0.03": "kvrag, `fast`: 3%",
    "runs@0.4": "kvrag, `careful`: 40%",
    DEFAULT: "**kvrag, whole sentences**",
    "sentences@0.03": "kvrag, whole sentences, 3%",
    "sentences@0.4": "kvrag, whole sentences, 40%",
    "reordered": "full prefill, chunks in another order",
    "none": "kvrag, nothing repaired",
    "bf16": "full prefill in bfloat16",
    "halfruns@auto": "**kvrag**",
    "halftwice@auto": "the other chunks computed twice",
    "halfnone": "nothing repaired",
}
FACTS = {
    "sentences": "kvrag's signal",
    "prophetkv": "ProphetKV's two stages",
    "cacheblend": "CacheBlend",
    "epic": "EPIC",
    "ape": "APE, nothing repaired",
    "apecode": "APE, nothing repaired",
}
PUBLISHED = (
    DEFAULT,
    "sentences@0.03",
    "prophetkv@0.2",
    "cacheblend@0.2",
    "epic@0.2",
    "ape",
    "none",
)
"""Methods of the run of that name, at the shares of the rows that were published."""
METHODS = (
    RUNS,
    "runs@0.03",
    "runs@0.4",
    "prophetkv",
    "cacheblend",
    "epic",
    "apecode",
    "none",
    "reordered",
)
"""Methods of the main table; those of others have whatever budget the run gave them."""
TOGETHER = "methods"
"""The run of :data:`METHODS` (``benchmarks/facts.py --name methods``)."""
EQUAL = tuple(
    f"{kind}@{share}"
    for share in ("0.1", "0.03")
    for kind in ("sentences", "prophetkv", "cacheblend", "epic")
)
MODELS = {
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma3-270m": "Gemma 3 270M",
    "smollm2-135m-instruct": "SmolLM2-135M",
}
TASKS = {
    "needles": "needles",
    "hotpotqa": "HotpotQA",
    "musique": "MuSiQue",
    "examples": "few-shot",
    "code": "code",
    "summary": "summaries",
}
FACTUAL = ("needles", "hotpotqa", "musique")
SHORT_PROMPT = 1_500
"""Tokens; needles of prompts below it are a task of their own."""

SINGLE = frozenset({"needle"})
"""Kinds of questions whose answer stands in a single sentence; others join two or more."""

COPIED = {"published-equal": {"needles"}}
"""Tasks of a run that began with another machine's lines; these stand in no table."""

REPEATS = 4_000

Pair = tuple[Result, Result]
"""Lines of a question: by full prefill, and by a method."""

COLUMNS = [
    "retention (95% interval)",
    "lost",
    "won",
    "p",
    "KL, own answer",
    "same answer",
    "rows",
    "first token sooner, by CPU time",
]


# -- lines ------------------------------------------------------------------------------------------


@cache
def lines(name: str) -> dict[tuple[str, str], dict[Any, Result]]:
    """Read the lines of a run of ``facts/``, or of a path: by task and method, then by question.

    Raises
    ------
    ValueError
        If lines come from several machines.
    """
    found: dict[tuple[str, str], dict[Any, Result]] = {}
    path = RESULTS / (f"{name}.jsonl" if "/" in name else f"facts/{name}.jsonl")
    read = [json.loads(x) for x in path.read_text().splitlines()]
    machines = {line.get("machine", "") for line in read}
    if len(machines) > 1:
        raise ValueError(f"{name}: lines of several machines: {', '.join(sorted(machines))}")
    for line in read:
        found.setdefault((line["task"], line["method"]), {})[question(line)] = line
    return found


def question(line: Result) -> tuple[Any, ...]:
    """Name the question that a line is about."""
    return line["number"], *line["shapes"]


def shared(name: str, other: str) -> set[str]:
    """Tasks of which two runs have the same lines, times included: one of them is a copy."""
    one, two = (
        set((RESULTS / f"facts/{run}.jsonl").read_text().splitlines()) for run in (name, other)
    )
    return {json.loads(text)["task"] for text in one & two}


def compared(methods: dict[str, tuple[Result, dict[Any, Pair]]]) -> dict[str, list[Pair]]:
    """Return the pairs of each method, in the order of the questions.

    ``methods``: name → the run's result, and its pairs by question.

    Raises
    ------
    ValueError
        If runs differ in model, machine or commit, or methods in the questions that they answered.
    """
    same_run(*(result for result, _ in methods.values()))
    asked = {name: set(pairs) for name, (_, pairs) in methods.items()}
    if len({frozenset(questions) for questions in asked.values()}) > 1:
        counts = ", ".join(f"{name} {len(questions)}" for name, questions in asked.items())
        raise ValueError(f"methods answered other questions ({counts}); keep the common ones")
    return {name: [pairs[q] for q in sorted(pairs)] for name, (_, pairs) in methods.items()}


def common(name: str, task: str, methods: tuple[str, ...], *, short: bool | None = None) -> Any:
    """Return :func:`compared` pairs over the questions that all of these methods answered in a run."""
    if task in COPIED.get(name, ()):
        raise ValueError(f"{name}, {task}: lines of another machine's run are among these")
    result, by = read(f"facts/{name}.json"), lines(name)
    known = [method for of, method in by if of == task]
    if not known:
        raise ValueError(f"{name} has no lines of {task}")
    shown = [
        found for method in methods for found in known if method in (found, found.partition("@")[0])
    ]
    kinds = [found.partition("@")[0] for found in shown if found not in methods]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"{name}, {task}: a method has several budgets: {', '.join(shown)}")
    full = by[task, "full"]
    kept = {
        q for q, line in full.items() if short is None or (line["tokens"] < SHORT_PROMPT) == short
    }.intersection(*(by[task, method] for method in shown))
    pairs = {m: (result, {q: (full[q], by[task, m][q]) for q in kept}) for m in shown}
    return compared(pairs)


# -- figures ----------------------------------------------------------------------------------------


def interval(numerator: Any, denominator: Any) -> tuple[float, float]:
    """95% interval of a ratio of sums over questions, by resampling questions with a fixed seed."""
    above, below = (np.asarray(values, dtype=float) for values in (numerator, denominator))
    picks = np.random.default_rng(0).integers(len(above), size=(REPEATS, len(above)))
    sums = below[picks].sum(axis=1)
    ratios = above[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def counts(pairs: list[Pair]) -> tuple[int, int, int]:
    """Return how many answers are lost, right by full prefill, and won."""
    lost = [not is_right(r) for f, r in pairs if is_right(f)]
    return sum(lost), len(lost), sum(is_right(r) and not is_right(f) for f, r in pairs)


def mean(pairs: list[Pair], field: str) -> float:
    """Mean of a method's field."""
    return sum(r[field] for _, r in pairs) / len(pairs)


def cells(pairs: list[Pair]) -> list[str]:
    """Return the cells of :data:`COLUMNS`."""
    lost, right, won = counts(pairs)
    scores = [(f["score"], r["score"]) for f, r in pairs]
    full, reuse = (sum(each) for each in zip(*scores, strict=True))
    low, high = interval([r for _, r in scores], [f for f, _ in scores])
    sooner = sorted(f["ttft_s"][1] / r["ttft_s"][1] for f, r in pairs)[len(pairs) // 2]
    return [
        f"{reuse / full:.2f} ({low:.2f} to {high:.2f})",
        f"{lost} of {right}",
        str(won),
        f"{mcnemar(lost, won):.2f}",
        f"{mean(pairs, 'kl'):.3f}",
        f"{mean(pairs, 'same'):.0%}",
        f"{mean(pairs, 'rows'):.0%}",
        f"{sooner:.1f}×",
    ]


def over_default(pairs: list[Pair], base: list[Pair], field: str = "score") -> str:
    """Mean score, or KL, beyond the default's over the same questions, with its paired 95% interval."""
    beyond = [m[field] - d[field] for (_, m), (_, d) in zip(pairs, base, strict=True)]
    low, high = interval(beyond, [1] * len(beyond))
    digits = 2 if field == "score" else 3
    mean, low, high = (f"{x:+.{digits}f}" for x in (sum(beyond) / len(beyond), low, high))
    return f"{mean} ({low} to {high})"


def method_name(name: str) -> str:
    """Name a method and its budget."""
    kind, _, budget = name.partition("@")
    return NAMED.get(name) or FACTS[kind] + (f", {float(budget):.0%}" if budget else "")


# -- tables -----------------------------------------------------------------------------------------


def methods_table(
    name: str,
    tasks: tuple[str, ...],
    methods: tuple[str, ...],
    *,
    short: tuple[bool | None, ...] = (None,),
) -> str:
    """Set methods of a run side by side: a table for each task, over the questions common to all.

    ``short``: whether prompts are below :data:`SHORT_PROMPT`, a table for each; ``None``: any.
    """
    parts = []
    for task, length in product(tasks, short):
        found = common(name, task, methods, short=length)
        base = found[next(iter(found))]
        rows = [
            [method_name(m), *cells(pairs), "–" if pairs is base else over_default(pairs, base)]
            for m, pairs in found.items()
        ]
        tokens = sum(f["tokens"] for f, _ in base) / len(base)
        of = "" if length is None else f" of about {tokens:,.0f} tokens"
        head = f"{TASKS[task]}{of}, {len(base)} questions"
        first = method_name(next(iter(found))).strip("*")
        parts.append(table([head, *COLUMNS, f"score beyond {first} (95%)"], rows))
    return "\n".join(parts) + source(read(f"facts/{name}.json"), f"facts/{name}.json")


def facts_default(result: Result) -> str:
    """Say of the default, alone, what it keeps of each task."""
    name = result.get("name", result["model"])
    return _default(name, tuple(task for task in TASKS if (task, DEFAULT) in lines(name)))


def _default(name: str, tasks: tuple[str, ...]) -> str:
    rows = []
    for task in tasks:
        full = lines(name)[task, "full"].values()
        sizes = {line["tokens"] < SHORT_PROMPT for line in full} if task == "needles" else {None}
        for short in sorted(sizes, key=str):
            (pairs,) = common(name, task, (DEFAULT,), short=short).values()
            length = {None: "", True: " 1k", False: " 2.5k"}[short]
            rows.append([f"{TASKS[task]}{length}, {len(pairs)}", *cells(pairs)])
    return table(["questions", *COLUMNS], rows) + source(
        read(f"facts/{name}.json"), f"facts/{name}.json"
    )


def facts_models(_: Result) -> str:
    """Set the default's results on the other models below each other: a table and a source for each."""
    parts = []
    for name, model in MODELS.items():
        if name != "qwen2.5-coder-0.5b":
            tasks = tuple(task for task in FACTUAL if (task, DEFAULT) in lines(name))
            parts.append(f"{model}:\n\n{_default(name, tasks)}")
    return "\n".join(parts)


def tasks_together() -> tuple[str, ...]:
    """Tasks of the run of :data:`METHODS`."""
    return tuple(task for task in FACTUAL if (task, RUNS) in lines(TOGETHER))


def facts_methods(_: Result) -> str:
    """Set published methods, controls and named repairs beside the default, each task for itself."""
    return methods_table(TOGETHER, tasks_together(), METHODS)


def facts_needles(_: Result) -> str:
    """Set published methods beside the default before runs, on needles."""
    return methods_table("published", ("needles",), PUBLISHED)


def facts_today(_: Result) -> str:
    """Set the default beside `fast` and the controls on needles, each length for itself, and on MuSiQue."""
    methods = (RUNS, "runs@0.03", "none", "reordered")
    needles = methods_table("default", ("needles",), methods, short=(True, False))
    return needles + "\n" + methods_table("default", ("musique",), methods)


def facts_half(_: Result) -> str:
    """Set needles of whose chunks half are stored beside each other, by how the others are computed."""
    return methods_table("half", ("needles",), ("halfruns@auto", "halftwice@auto", "halfnone"))


def facts_rounding(_: Result) -> str:
    """Set full prefills in bfloat16 beside the default, by the questions that they answered."""
    return methods_table("default", ("needles",), (RUNS, "bf16", "reordered"))


def facts_arena(result: Result) -> str:
    """Set the answers of the driver for KVShareArena beside those without a source and of a full prefill."""
    found = result["hotpotqa"]
    f1 = found["f1"]
    low, high = found["beyond_full_ci"]
    recomputed = f"{found['recompute_fraction']:.0%}"
    shown = table(
        [
            f"HotpotQA, {found['questions']} questions",
            "word F1",
            "recovered gap",
            "rows recomputed",
            "first token sooner",
        ],
        [
            ["no source", f"{f1['blind']:.2f}", "0", "–", "–"],
            ["full prefill", f"{f1['full']:.2f}", "1", "100%", "1.0×"],
            [
                "**kvrag**",
                f"{f1['kvrag']:.2f}",
                f"{found['pgr']:.2f}",
                recomputed,
                f"{found['sooner']:.1f}×",
            ],
        ],
    )
    beyond = f"kvrag's F1 less full prefill's, question by question: {found['beyond_full']:+.3f} ({low:+.3f} to {high:+.3f})."
    return f"{shown}\n{beyond}\n{source(result, 'arena/qwen2.5-coder-0.5b.json')}"


def facts_short(_: Result) -> str:
    """Pick the README's columns of :func:`facts_methods`, and say what is right without passages."""
    parts = []
    for task in tasks_together():
        found = common(TOGETHER, task, METHODS)
        base = found[RUNS]
        rows = []
        for name, pairs in found.items():
            kept, lost, won, _, kl, _, _, sooner = cells(pairs)
            further = "–" if pairs is base else over_default(pairs, base, "kl")
            rows.append([method_name(name), kept, lost, won, kl, further, sooner])
        header = [f"{TASKS[task]}, {len(base)} questions", COLUMNS[0], "lost", "won"]
        header += ["KL, own answer", "KL beyond the first row's (95%)", COLUMNS[-1]]
        blind = sum(f["blind"] for f, _ in base) / sum(f["score"] for f, _ in base)
        said = f"\nWithout any passage the model keeps {blind:.2f} of the full prefill's score.\n"
        parts.append(table(header, rows) + said)
    file = f"facts/{TOGETHER}.json"
    return "\n".join(parts) + source(read(file), file)


def lost_by_time(task: str) -> dict[str, list[float]]:
    """Return a method's share of a full prefill's time, its share of lost answers and that one's 95% interval, by name."""
    shown = {}
    for name, pairs in common(TOGETHER, task, METHODS).items():
        lost, right, _ = counts(pairs)
        shares = sorted(r["ttft_s"][1] / f["ttft_s"][1] for f, r in pairs)
        of_lost = [lost / right, *wilson(lost, right)]
        shown[method_name(name).strip("*")] = [
            round(x, 4) for x in (shares[len(pairs) // 2], *of_lost)
        ]
    return shown


def facts_careful(_: Result) -> str:
    """Set `careful` and another order of the chunks beside the default."""
    methods = (DEFAULT, "sentences@0.4", "reordered")
    return methods_table("qwen2.5-coder-0.5b", ("hotpotqa",), methods)


def facts_fast(_: Result) -> str:
    """Set `fast` beside the default."""
    tasks = ("needles", "hotpotqa", "examples", "code", "summary")
    return methods_table("qwen2.5-coder-0.5b", tasks, (DEFAULT, "sentences@0.03"))


def facts_equal(_: Result) -> str:
    """Set methods side by side at equal shares of the rows."""
    return methods_table("published-equal", ("hotpotqa",), EQUAL)


def facts_joined(_: Result) -> str:
    """Split the default's answers by whether a question asks for a single fact or joins several."""
    parts = []
    for name, model in MODELS.items():
        if name == "smollm2-135m-instruct":
            continue
        rows = []
        for task in (task for task in FACTUAL if (task, DEFAULT) in lines(name)):
            (pairs,) = common(name, task, (DEFAULT,)).values()
            for label, is_single in {"a single fact": True, "joined facts": False}.items():
                chosen = [(f, r) for f, r in pairs if (f["kind"] in SINGLE) == is_single]
                if chosen:
                    rows.append([f"{TASKS[task]}, {label}, {len(chosen)}", *cells(chosen)])
        origin = source(read(f"facts/{name}.json"), f"facts/{name}.json")
        parts.append(f"{model}:\n\n{table(['questions', *COLUMNS], rows)}{origin}")
    return "\n".join(parts)


def forms_table(result: Result, methods: dict[str, str], file: str) -> str:
    """Set methods beside each other on each form of facts for itself, and sum up by what full prefill has right.

    Methods that a form lacks are left out.
    """
    asked = result["tasks"]
    methods = {
        name: said for name, said in methods.items() if all(name in of for of in asked.values())
    }
    rows = []
    for task, found in asked.items():
        if "," in task:
            raise ValueError(f"{file}: {task} is one machine's; make a table of each")
        row = [f"{task.rpartition('/')[2]}, {found[next(iter(methods))]['questions']}"]
        for name in methods:
            lost = round((found[name]["lost"] or 0) * found[name]["right"])
            row.append(f"{found[name]['kl']:.3f}; {lost} of {found[name]['right']}")
        rows.append(row)
    pairs = {name: _of_forms(file, asked, name) for name in methods}
    for said, right in {"right": True, "wrong": False}.items():
        chosen = {name: [p for p in of if is_right(p[0]) == right] for name, of in pairs.items()}
        row = [f"all where full prefill is {said}, {len(next(iter(chosen.values())))}"]
        for of in chosen.values():
            lost, known, _ = counts(of)
            row.append(f"{mean(of, 'kl'):.3f}" + (f"; {lost} of {known}" if right else ""))
        rows.append(row)
    return table(["form, questions", *methods.values()], rows) + source(result, file)


def _of_forms(file: str, tasks: Result, method: str) -> list[Pair]:
    """Return a method's pairs of all these tasks."""
    by = lines(file.removesuffix(".json"))
    return [(by[t, "full"][q], line) for t in tasks for q, line in by[t, method].items()]


def facts_forms(result: Result) -> str:
    """Set the default beside whole sentences and the controls, on each form of facts."""
    methods = {
        RUNS: "runs, the default",
        DEFAULT: "whole sentences",
        "reordered": "another order, in full",
        "none": "nothing repaired",
    }
    return forms_table(result, methods, "forms/facts/qwen2.5-coder-0.5b.json")


def facts_sealed(result: Result) -> str:
    """Set the default beside named repairs and the controls, on each form of the sealed set."""
    methods = {
        RUNS: "the default",
        "runs@0.4": "`careful`",
        "runs@0.03": "`fast`",
        "reordered": "another order, in full",
        "none": "nothing repaired",
    }
    return forms_table(result, methods, f"facts/sealed-{result['model']}.json")


def facts_sealed_short(result: Result) -> str:
    """Keep the sums over all forms."""
    head, line, *rest = facts_sealed(result).splitlines(keepends=True)
    return (
        head + line + "".join([x for x in rest if not x.startswith("|") or x.startswith("| all")])
    )


TABLES: Tables = {
    "facts-forms": ("forms/facts/qwen2.5-coder-0.5b.json", facts_forms),
    "facts-qwen-05b": ("facts/qwen2.5-coder-0.5b.json", facts_default),
    "facts-careful": ("facts/qwen2.5-coder-0.5b.json", facts_careful),
    "facts-fast": ("facts/qwen2.5-coder-0.5b.json", facts_fast),
    "facts-joined": ("facts/qwen2.5-coder-0.5b.json", facts_joined),
    "facts-today": ("facts/default.json", facts_today),
    "facts-half": ("facts/half.json", facts_half),
    "facts-rounding": ("facts/default.json", facts_rounding),
    "facts-arena": ("arena/qwen2.5-coder-0.5b.json", facts_arena),
    "facts-sealed-15b": ("facts/sealed-qwen2.5-coder-1.5b.json", facts_sealed),
    "facts-sealed": ("facts/sealed-qwen2.5-coder-0.5b.json", facts_sealed),
    "facts-sealed-short": ("facts/sealed-qwen2.5-coder-0.5b.json", facts_sealed_short),
    "facts-published": ("facts/methods.json", facts_methods),
    "facts-needles": ("facts/published.json", facts_needles),
    "facts-equal": ("facts/published-equal.json", facts_equal),
    "facts-short": ("facts/methods.json", facts_short),
    "facts-models": ("facts/smollm2-135m-instruct.json", facts_models),
}
