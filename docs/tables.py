"""Write measured tables into README.md and docs/**/*.md from tests/benchmarks/results/*.json; ``--check`` only compares.

A block ``<!-- table: NAME -->`` … ``<!-- /table -->`` is replaced by the table of that name. No figure is typed by hand.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvrag.questions import IS_RIGHT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"

STAGES = ("plan", "load", "stitch", "select", "repair")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def source(result: dict[str, Any], file: str) -> str:
    """Say where figures come from."""
    m = result["machine"]
    device = m["gpu"] or f"{m['cpu']}, {m['threads']} thread(s)"
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name != "kvrag"
    )
    return f"\n{result['model']}; {device}; {versions}; commit {m['commit'][:10]}; all repeats in `tests/benchmarks/results/{file}`.\n"


def chat(result: dict[str, Any]) -> str:
    """Set the turns of a chat over documents beside each other: what is computed, the first token's time, the divergence in turn 2."""
    rows, chats = [], result["chats"]
    for turn in range(len(chats[0])):
        each = [c[turn] for c in chats]

        def middle(name: str, what: str, each: list[dict[str, Any]] = each) -> float:
            return statistics.median(row[name][what] for row in each)

        ratios = [
            middle("full", "ttft_ms") / middle(name, "ttft_ms") for name in ("stitch", "history")
        ]
        made = [f"{middle(name, 'made'):.1%}" for name in ("stitch", "history")]
        rows.append(
            [
                str(turn + 1),
                f"{middle('full', 'prompt_tokens'):.0f}",
                *made,
                *(f"{r:.1f}×" for r in ratios),
            ]
        )
    words = []
    for name, label in (("stitch", "stitched again"), ("history", "going on")):
        own, first = (
            statistics.fmean(c[1]["kl"][name][what] for c in chats)
            for what in ("kl_own", "kl_first")
        )
        words.append(f"{label} {own:.3f} / {first:.3f}")
    header = ["turn", "tokens", "computed or repaired: chunks alone", "with histories"]
    header += ["first token sooner: chunks alone", "with histories"]
    copied = result["copying_2500_ms"]
    note = f"\nMedians of {len(chats)} chats. Mean KL to a full prefill in turn 2, own answer / first token: {'; '.join(words)}. "
    note += (
        f"Keeping 2,500 rows took {copied['keep']:.0f} ms, copying them {copied['copy']:.0f} ms.\n"
    )
    return table(header, rows) + note + source(result, "chat.json")


def ttft(result: dict[str, Any]) -> str:
    """Time to first token by repair and by prompt length."""
    rows = []
    former = (
        {"default": "ratio 0.03 (the default then)"}
        if "ratio 0.02" in result["2500"]["summary"]
        else {}
    )
    for label in ("5800", "2500", "1000", "500"):
        for name, row in result[label]["summary"].items():
            stages = row["stages_ms"]
            rows.append(
                [
                    f"{row['tokens']:.0f}",
                    former.get(name, name),
                    f"{row['full_ms']:.0f}",
                    f"{row['ttft_ms']:.0f}",
                    f"**{row['ratio']:.2f}**",
                    f"{row['cpu_ratio']:.2f}",
                    f"{row['system_ms']:.0f}",
                    f"{row['faults']:.0f}",
                    *(f"{stages[s]:.0f}" if s in stages else "–" for s in STAGES),
                ]
            )
    header = ["tokens", "configuration", "full prefill, ms", "kvrag, ms", "ratio"]
    header += ["ratio of CPU time", "system, ms", "page faults", *STAGES]
    return table(header, rows) + source(
        result, "ttft.json" if former else f"ttft-{result['model']}.json"
    )


def kernels(result: dict[str, Any]) -> str:
    """Rates of the attention kernels beside the fastest of torch's own that takes a mask; microseconds of a call in brackets."""

    def cell(row: dict[str, Any], names: list[str]) -> str:
        times = {name: row["ms"][name] for name in names if isinstance(row["ms"].get(name), float)}
        if not times:
            return "–"
        name = min(times, key=times.__getitem__)
        return f"{row['useful_tflops'][name]:.0f} ({1e3 * times[name]:,.0f})"

    rows = []
    for row in sorted(
        result["attention"], key=lambda row: (-row["ratio"], -row["keys"], row["shape"])
    ):
        masked = [name for name in row["ms"] if name.startswith("sdpa") and "mask" in name]
        causal = [name for name in row["ms"] if name.startswith("sdpa") and "causal" in name]
        shape = f"{row['shape'].split(' ')[0]} heads of {row['dim']}"
        cells = [cell(row, names) for names in (["kvrag sm90"], ["kvrag mma"], masked, causal)]
        rows.append([shape, f"{row['keys']:,}", f"{row['ratio']:.0%}", *cells])
    header = [
        "shape",
        "keys",
        "rows",
        "`sm90`",
        "`mma`",
        "best SDPA with a mask",
        "best SDPA, causal",
    ]
    note = f"\nUseful TFLOP/s (µs of a call). An 8192³ matmul reaches {result['matmul_tflops']:.0f} TFLOP/s there, "
    note += f"a copy on the device {result['copy_gb_s']:,.0f} GB/s. {result['device']}; torch {result['versions']['torch']}; "
    note += f"commit {result['commit'][:10]}; all in `tests/benchmarks/results/kernels.json`.\n"
    return table(header, rows) + note


def kernels_missed(result: dict[str, Any]) -> str:
    """List the targets that were missed, and count the others."""
    verdicts = [target["verdict"] for target in result["targets"]]
    missed = [target for target in result["targets"] if target["verdict"] == "missed"]
    rows = [[target["target"], target["wanted"], f"{target['got']:.3g}"] for target in missed]
    note = f"\n{verdicts.count('met')} other targets were met, {verdicts.count('not measured')} were not measured.\n"
    return table(["missed", "wanted", "measured"], rows) + note


def kernels_stitch(result: dict[str, Any]) -> str:
    """Set the stitch of all layers beside the chain of torch's own operations."""
    rows = []
    for codec in ("16-bit", "int8", "int8 with zeros", "int4 with zeros"):
        ours, chain = (result["stitch"][f"{codec}, {way}"] for way in ("auto", "torch"))
        share = f"{ours['gb_s'] / result['copy_gb_s']:.2f}"
        rows.append(
            [
                codec,
                f"{ours['device_ms']:.2f}",
                f"{ours['gb_s']:,.0f}",
                share,
                f"{chain['device_ms']:.0f}",
            ]
        )
    header = ["kept as", "kernel, ms", "GB/s", "share of a copy's", "torch's operations, ms"]
    return table(header, rows)


def ttft_cuda(result: dict[str, Any]) -> str:
    """Time to first token on a GPU, by how KV is kept and by length, and how long the device was busy."""
    rows = []
    for run in result["runs"]:
        for name, row in run.get("summary", {}).items():
            work = run["work"][name]
            copies = sum(each["ms"] for kind, each in work["copies"].items() if "HtoD" in kind)
            stages = [f"{row['stages_ms'].get(stage, 0):.0f}" for stage in STAGES]
            times = [f"{row['full_ms']:.0f}", f"{row['ttft_ms']:.0f}", f"**{row['ratio']:.2f}**"]
            busy = [f"{work['kernels_ms']:.0f}", f"{copies:.0f}"]
            rows.append(
                [
                    run["kept"],
                    f"{row['tokens']:,.0f}",
                    name,
                    f"{row['repaired']:.0f}",
                    *times,
                    *busy,
                    *stages,
                ]
            )
    header = ["KV kept as", "tokens", "repair", "rows", "full prefill, ms", "kvrag, ms", "ratio"]
    header += ["kernels, ms", "copies, ms", *STAGES]
    file = f"{result.get('name', 'ttft-llama-3.1-8b-cuda')}.json"
    note = "\nTimes are medians of three prompts; kernels and copies are those of one more request, under torch's profiler.\n"
    return table(header, rows) + note + source(result, file)


def auto(result: dict[str, Any]) -> str:
    """Time of ``auto`` beside a full prefill, by prompt length and share of stored chunks."""
    cells = {(cell["length"], cell["share"]): cell for cell in result["cells"]}
    shares = sorted({share for _, share in cells})
    rows = []
    for length in sorted({length for length, _ in cells}):
        row = [cells[length, share] for share in shares]
        times = [
            f"{each['ratio_ms']:.2f} ({each['ratio_cpu_ms']:.2f}), {each['exactness']}"
            for each in row
        ]
        rows.append([f"{row[0]['tokens']}", f"{row[0]['full_ms']:.0f}", *times])
    most, repeats = (
        max(cell["ratio_ms"] for cell in result["cells"]),
        len(result["cells"][0]["runs"]),
    )
    note = f"\nTime of `auto` as a share of the full prefill's, of CPU time in brackets, and the answer's label; medians of {repeats}. "
    note += f"The most is {most:.2f}; the limit is {result['limit']}.\n"
    return (
        table(["tokens", "full prefill, ms", *(f"{share:.0%} stored" for share in shares)], rows)
        + note
        + source(result, "auto.json")
    )


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
    "sentences@0.25": "kvrag, `careful`: 25%",
}


def facts(result: dict[str, Any]) -> str:
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


OURS = ("sentences@auto", "sentences@0.03", "sentences@0.25")
FEWER = (
    "The default answered more questions than the other rows; published methods in an earlier run (`facts/published.json`).\n"
    "The other models answered HotpotQA, and needles in prompts of 1,000 tokens instead of 2,500.\n"
)
SHORT = (
    "sentences@auto",
    "sentences@0.03",
    "sentences@0.25",
    "prophetkv@0.2",
    "cacheblend@0.2",
    "epic@0.2",
    "ape",
)


OTHER_MODELS = {
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma3-270m": "Gemma 3 270M",
}


def together(label: str, found: list[dict[str, Any]]) -> list[str]:
    """Return a row of figures over several tasks."""
    count, right = sum(f["questions"] for f in found), sum(f["right"] for f in found)
    lost = sum(round((f["lost"] or 0) * f["right"]) for f in found)
    score, full, kl, same, sooner = (
        sum(f["questions"] * f[key] for f in found) / count
        for key in ("score", "full", "kl", "same", "sooner_cpu")
    )
    kept = (f"{score / full:.2f}", f"{lost} of {right}", str(sum(f["won"] for f in found)))
    return [label, f"{count}", *kept, f"{kl:.3f}", f"{same:.0%}", f"{sooner:.1f}×"]


def facts_short(result: dict[str, Any]) -> str:
    """Pick the README's rows of the facts table: the tasks that published methods answered, together.

    Other models have a row each, with all of their tasks.
    """
    published = json.loads((RESULTS / "facts" / "published.json").read_text())
    compared = published["tasks"].keys()
    rows = []
    for name in SHORT:
        file = result if name in OURS else published
        found = [file["tasks"][task][name] for task in compared if name in file["tasks"][task]]
        rows.append(together(method_name(name), found))
    for name, model in OTHER_MODELS.items():
        other = json.loads((RESULTS / "facts" / f"{name}.json").read_text())
        found = [methods["sentences@auto"] for methods in other["tasks"].values()]
        rows.append(together(f"the default on {model}", found))
    header = ["", "questions", "retention", "lost", "won", "KL, own answer", "same answer"]
    header.append("first token sooner, by CPU time")
    return table(header, rows) + source(result, f"facts/{result['model']}.json") + FEWER


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


def speed(result: dict[str, Any]) -> str:
    """Set decode steps beside transformers' ``generate``, and precomputing beside plain forwards."""
    rows, made = [], result["precompute"]
    for d in result["decode"]:
        steps = (f"{statistics.median(d[side]):.1f}" for side in ("ours_ms", "generate_ms"))
        rows.append(
            [f"a decode step behind {d['tokens']:,} tokens, ms", *steps, f"{d['ratio']:.2f}"]
        )
    plain, ours = (statistics.median(each[side][0] for each in made["rounds"]) for side in (0, 1))
    rows.append(
        [
            f"precomputing {made['tokens']:,} tokens, s",
            f"{ours:.1f}",
            f"{plain:.1f}",
            f"{made['ratio']:.2f}",
        ]
    )
    note = f"\nMedians of {len(made['rounds'])} turns; of CPU time the ratio is {made['ratio_cpu']:.2f} for precomputing.\n"
    return table(["", "kvrag", "transformers", "ratio"], rows) + note + source(result, "speed.json")


def ttft_short(result: dict[str, Any]) -> str:
    """Pick the README's rows of the TTFT table."""
    rows = []
    names = {"default": "the default", "stitch": "the default", "fast": "`fast`: 3%"}
    picks = [("5800", "default"), ("5800", "fast"), ("2500", "default"), ("2500", "fast")]
    picks += [("1000", "stitch"), ("500", "stitch")]
    for label, name in picks:
        row = result[label]["summary"][name]
        times = [f"{row['full_ms']:.0f} ms", f"{row['ttft_ms']:.0f} ms", f"**{row['ratio']:.1f}×**"]
        rows.append([f"{row['tokens']:.0f}", names[name], *times, f"{row['cpu_ratio']:.1f}×"])
    header = [
        "prompt tokens",
        "repaired",
        "full prefill",
        "kvrag, load from disk included",
        "",
        "by CPU time",
    ]
    return table(header, rows) + source(result, f"ttft-{result['model']}.json")


def memory(result: dict[str, Any]) -> str:
    """Peak memory of a request."""
    rows = [
        [
            mode,
            f"{r['tokens']}",
            f"{r['kv'] / 1e6:.0f} MB",
            f"{r['above_model'] / 1e6:.0f} MB",
            f"{r['allowed'] / 1e6:.0f} MB",
        ]
        for mode, r in result["requests"].items()
    ]
    return table(
        ["mode", "prompt tokens", "the prompt's KV", "peak above the model", "limit"], rows
    ) + source(result, "memory.json")


def seams(result: dict[str, Any]) -> str:
    """Where segment-wise ids differ from the whole text's, by separator."""
    rows = []
    for name, row in result["separators"].items():
        tokens = f"{row['changed_tokens']} of {row['tokens']} ({row['changed_tokens'] / row['tokens']:.2%})"
        cells = ["–", "–", "–"]
        if "cases" in row:
            cells = [
                f"{row['kl_gold']:.3f}",
                f"{row['kl_first']:.3f}",
                f"{row['loss_whole']:.2f} → {row['loss_joined']:.2f}",
            ]
        text = json.dumps(row["separator"])
        rows.append(
            [f"{name}, `{text}`", f"{row['changed_seams']} of {row['seams']}", tokens, *cells]
        )
    header = [
        "between chunks",
        "seams changed",
        "tokens changed",
        "KL, gold answer",
        "KL, first token",
        "loss of gold",
    ]
    measured = max(len(row.get("cases", ())) for row in result["separators"].values())
    note = f"\nCounts over {result['prompts']} prompts, KL and loss over {measured}.\n"
    return table(header, rows) + note + source(result, "seams.json")


def slide(result: dict[str, Any]) -> str:
    """Perplexity in a small window, by method."""
    rows = [
        [
            name,
            f"{row['perplexity']:.2f}",
            *(f"{q:.2f}" for q in row["quarters"]),
            f"{row['tokens_per_s']:.0f}",
        ]
        for name, row in result["methods"].items()
    ]
    header = ["method", "perplexity", "1st quarter", "2nd", "3rd", "4th", "tokens/s"]
    note = f"\n{result['tokens']:,} tokens, a window of {result['window']:,}, {result['sinks']} sinks.\n"
    return table(header, rows) + note + source(result, "slide.json")


def support(result: dict[str, Any]) -> str:
    """Every architecture whose KV is reused, with what was measured."""
    rows = []
    for name, runs in _by_name(result).items():
        newest = list(runs.values())[-1]
        if newest["reuse"] != "exact":
            continue
        windows = ", ".join(str(w) for w in newest["windows"]) or "–"
        worst = max(error for run in runs.values() for error in run.get("errors", {}).values())
        versions = ", ".join(
            v if run["reuse"] == "exact" else f"not {v}" for v, run in runs.items()
        )
        notes = "; ".join(dict.fromkeys(note for run in runs.values() for note in run["notes"]))
        reuse = f"exact ({notes})" if notes else "exact"
        rows.append(
            [
                f"`{name}`",
                newest["architecture"],
                newest["rope"],
                windows,
                reuse,
                f"{worst:.0e}",
                versions,
            ]
        )
    header = [
        "row",
        "architecture",
        "RoPE",
        "window",
        "reuse",
        "largest difference",
        "transformers",
    ]
    return table(header, rows) + f"\n{len(rows)} rows. " + _runs(result)


def support_refused(result: dict[str, Any]) -> str:
    """Every architecture whose KV is not reused, and why."""
    rows = []
    for name, runs in _by_name(result).items():
        newest = list(runs.values())[-1]
        if newest["reuse"] == "exact":
            continue
        answers = {"no": "no"}.get(newest.get("answers", ""), "yes, as `generate`")
        rows.append(
            [
                f"`{name}`",
                newest["architecture"],
                newest["why"].replace("|", "\\|"),
                answers,
                ", ".join(runs),
            ]
        )
    return table(["row", "architecture", "why not", "answered", "transformers"], rows)


def _by_name(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Row name → version of transformers, oldest first → row."""
    order = sorted(
        result["runs"], key=lambda version: [int(part) for part in re.findall(r"\d+", version)]
    )
    names = dict.fromkeys(
        name for version in reversed(order) for name in result["runs"][version]["rows"]
    )
    return {
        name: {
            v: result["runs"][v]["rows"][name] for v in order if name in result["runs"][v]["rows"]
        }
        for name in names
    }


def _runs(result: dict[str, Any]) -> str:
    machines = [run["machine"] for run in result["runs"].values()]
    said = "; ".join(
        f"transformers {m['versions']['transformers']} at commit {m['commit'][:10]}"
        for m in machines
    )
    return f"float32 on {machines[-1]['cpu']}; {said}; all in `tests/benchmarks/results/support.json`.\n"


def fuzz(result: dict[str, Any]) -> str:
    """Sum up the random cases."""
    labels = result["labels"]
    rows = [
        ["cases", f"{result['cases']:,}, of {len(result['by_model'])} architectures"],
        ["failed", str(result["failed"])],
        [
            "compared with transformers",
            f"{result['comparisons']:,} prefills labelled exact or full",
        ],
        [
            "largest difference of logits",
            f"{result['largest']:.1e} (allowed {result['tolerance']:g})",
        ],
        ["without a result: an expert's choice hangs on a rounding", str(result["ties"])],
        [
            "labelled repaired",
            f"{sum(n for label, n in labels.items() if label.endswith('repaired')):,}",
        ],
    ]
    m = result["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name != "kvrag"
    )
    return (
        table(["", ""], rows)
        + f"\nSeed {result['seed']}; {m['cpu']}; {versions}; commit {m['commit'][:10]}.\n"
    )


def machine_of(result: dict[str, Any], file: str) -> str:
    """Say where figures come from that need no model; scenarios were run at commits of their own."""
    m = result["machine"]
    ran = {
        row["commit"][:10] for row in result.get("scenarios", {}).values() if "commit" in row
    } or {m["commit"][:10]}
    at = f"commit{'s' if ran - {min(ran)} else ''} {', '.join(sorted(ran))}"
    return f"\n{m['cpu']}, {m['cores']} cores; {at}; everything in `tests/benchmarks/results/{file}`.\n"


def store(result: dict[str, Any]) -> str:
    """Set writes beside plain files, in memory and on the disk."""
    rows = []
    for name, r in result["writes"].items():
        place, durability, _ = name.split("/")
        times = [f"{r[f'{kind}_ms']:.1f}" for kind in ("plain", "file", "put")]
        size = f"{r['bytes'] / 1e6:.0f} MB"
        rows.append(
            [size, place, durability, *times, f"**{r['file_ratio']:.2f}**", f"{r['put_ratio']:.2f}"]
        )
    header = ["blob", "file system", "durability", "plain, ms", "chunk's file", "whole put"]
    return table([*header, "ratio, file", "ratio, put"], rows) + machine_of(result, "store.json")


def store_reads(result: dict[str, Any]) -> str:
    """Set verified reads beside plain files."""
    rows = []
    for name, r in result["reads"].items():
        place, state, _ = name.split("/")
        times = [f"{r[f'{kind}_ms']:.1f}" for kind in ("plain", "layers", "get")]
        ratios = [f"**{r['layers_ratio']:.2f}**", f"{r['get_ratio']:.2f}"]
        rows.append(
            [
                f"{r['bytes'] / 1e6:.0f} MB",
                place,
                state,
                *times,
                *ratios,
                f"{r['first_layer_ms']:.2f}",
            ]
        )
    header = ["blob", "file system", "page cache", "plain, ms", "layer by layer", "whole chunk"]
    return table([*header, "ratio, layers", "ratio, chunk", "first layer, ms"], rows) + machine_of(
        result, "store.json"
    )


def fuzz_reader(result: dict[str, Any]) -> str:
    """Count inputs that a fuzzer made up, by what reads them."""
    rows = [
        [name, f"{count:,}", f"{result['accepted'].get(name, 0):,}"]
        for name, count in result["by_target"].items()
    ]
    rows.append(["all", f"{result['inputs']:,}", f"{sum(result['accepted'].values()):,}"])
    text = table(["what is read", "inputs", "accepted and proven"], rows)
    said = f"{result['fuzzer']}, {result['covered_edges']} edges; failures: {result['failures']}; "
    said += f"slowest input: {result['slowest_cpu_ms']:.0f} ms of a processor. "
    return text + "\n" + said + machine_of(result, "fuzz_reader.json").lstrip()


def store_index(result: dict[str, Any]) -> str:
    """Look-ups, and opening."""
    rows = [
        [f"look-up among {r['rows']:,} rows", f"{r['lookup_us']:.0f} µs", "50 µs"]
        for r in [result["index"]["diskcache"]]
    ]
    r = result["opening"]
    rows.append([f"opening a store of {r['chunks']:,} chunks", f"{r['open_s']:.2f} s", "0.5 s"])
    rows.append(["the same, for reading only", f"{r['read_only_s']:.2f} s", "–"])
    return table(["", "measured", "target"], rows) + machine_of(result, "store.json")


def _said(value: Any) -> str:
    return (
        ", ".join(f"{count} by {name}" for name, count in value.items())
        if isinstance(value, dict)
        else f"{value:,}"
    )


NOT_COUNTS = ("failures", "seconds", "skipped", "form", "commit")


def masks(result: dict[str, Any]) -> str:
    """Compare masks by their errors and by the keys that rows see or miss."""
    names = {
        "exact": "kvrag's, exact",
        "aligned": "causal, aligned bottom-right",
        "blocks": "blocks of 32 × 32",
    }
    rows = [
        [
            found["shape"],
            label,
            f"{found[name]['max_error']:.1e}",
            f"{found[name]['mean_error']:.1e}",
            f"{found[name]['future_keys']:.0f}",
            f"{found[name]['missed_keys']:.0f}",
        ]
        for found in result["shapes"]
        for name, label in names.items()
    ]
    header = [
        "heads, keys, rows",
        "mask",
        "largest error",
        "mean error",
        "future keys seen, a row",
        "keys missed, a row",
    ]
    return table(header, rows) + machine_of(result, "masks.json")


def reliability(result: dict[str, Any], file: str = "reliability.json") -> str:
    """List what each scenario did, and what it saw broken."""
    rows = []
    for name, r in result["scenarios"].items():
        counts = [f"{key}: {_said(value)}" for key, value in r.items() if key not in NOT_COUNTS]
        broken = f"not run: {r['skipped']}" if "skipped" in r else str(len(r["failures"]))
        rows.append([name, "; ".join(counts), broken])
    return table(["scenario", "what happened", "promises broken"], rows) + machine_of(result, file)


def serve(result: dict[str, Any]) -> str:
    """List what the scenarios on a server did."""
    return reliability(result, "serve.json")


SERVERS = {
    "kvrag": "kvrag",
    "full": "kvrag, reuse off",
    "transformers": "transformers serve",
    "transformers-batching": "transformers serve, continuous batching",
}


def load(result: dict[str, Any], file: str = "load.json") -> str:
    """Set the servers side by side at every level of load, and say where kvrag's is behind."""
    parts = {part: row for part, row in result["parts"].items() if part in SERVERS}
    levels = dict.fromkeys(_level(level) for row in parts.values() for level in row["levels"])
    found = {(_level(level), part): level for part, row in parts.items() for level in row["levels"]}
    rows: list[list[str]] = []
    behind: dict[str, list[str]] = {}
    for name in levels:
        for part in parts:
            if (level := found.get((name, part))) is None:
                continue
            times = [" / ".join(f"{level['ttft_s'][p]:.2f}" for p in ("p50", "p95", "p99"))]
            times.append(" / ".join(f"{level['gap_ms'][p]:.0f}" for p in ("p50", "p95", "p99")))
            rates = [
                f"{level['tokens_per_s']:.1f}",
                f"{level['requests_per_s']:.2f}",
                f"{level['open_at_once']}",
            ]
            equal = f"{level['equal']} of {level['requests']}"
            rows.append([name, SERVERS[part], *times, *rates, equal])
            if part != "kvrag" and (ours := found.get((name, "kvrag"))):
                for what in _behind(ours, level):
                    behind.setdefault(f"{what}, beside {SERVERS[part]}", []).append(name)
    header = [
        "load",
        "server",
        "first token, s",
        "between pieces, ms",
        "tokens/s",
        "requests/s",
        "open at once",
    ]
    said = f"\np50 / p95 / p99. {result['prompts']} prompts out of {result['chunks']} chunks, "
    said += f"answers of at most {result['max_tokens']} tokens. "
    said += "Equal: to the same server's answer to one client. "
    agreed = (
        f"{name.replace('full', SERVERS['full'])} {same} of {of}"
        for name, (same, of) in result["agreement"].items()
    )
    said += f"Single answers that two servers have in common: {', '.join(agreed)}. "
    sizes = (f"{SERVERS[part]} {row['peak_bytes'] / 1e9:.2f} GB" for part, row in parts.items())
    losses = "; ".join(f"{what}: {', '.join(names)}" for what, names in behind.items())
    said += f"Peak memory: {', '.join(sizes)}. Measured at commits "
    said += ", ".join(sorted({level["commit"][:10] for level in found.values()}))
    said += f".\n\nWhere kvrag is behind by more than 2%: {losses or 'nowhere'}.\n"
    machine = {**result, "machine": parts["kvrag"]["machine"]}
    return table([*header, "equal"], rows) + said + source(machine, file)


def _level(level: dict[str, Any]) -> str:
    return (
        f"{level['size']:g} client{'s' * (level['size'] > 1)}"
        if level["kind"] == "closed"
        else f"{level['size']:g}/s"
    )


def _behind(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = {"ttft_s": "first token", "gap_ms": "between pieces"}
    found = [
        f"{said} {p}"
        for key, said in names.items()
        for p in ("p50", "p95", "p99")
        if ours[key][p] > 1.02 * theirs[key][p]
    ]
    return found + ["tokens/s"] * (ours["tokens_per_s"] < 0.98 * theirs["tokens_per_s"])


def ray_kill(result: dict[str, Any]) -> str:
    """Say what became of chunks whose workers were killed."""
    rows = [
        ["chunks", f"{result['chunks']:,}"],
        ["workers killed", str(result["kills"])],
        [
            "stored, and skipped by who took the batch again",
            f"{result['stored']:,} + {result['skipped']:,}",
        ],
        ["failed", str(result["failed"])],
        [
            "in the store, in the catalog, documents",
            ", ".join(f"{result[w]:,}" for w in ("in_store", "in_catalog", "documents")),
        ],
        ["with other bits than one process gives", str(result["other_bits"])],
        [
            "time; of one process, without kills, on a disk",
            f"{result['seconds']:.0f} s; {result['single_process_seconds']:.0f} s",
        ],
    ]
    return table(["what", "result"], rows) + machine_of(result, "ray_kill.json")


def ray_scale(result: dict[str, Any]) -> str:
    """Set two workers beside one."""
    found = result["chunks_per_s"]
    rows = [[name, ", ".join(f"{each:.2f}" for each in found[name])] for name in sorted(found)]
    said = (
        f"\n{result['chunks']} chunks of up to 250 tokens in each run. Two workers on two cores are **{result['ratio']:.2f} times** "
        f"as quick as one on one core, and **{result['ratio_same_cores']:.2f} times** as quick as one that has a second core "
        "for Ray's own processes.\n"
    )
    return (
        table(["workers, cores", "chunks per second"], rows)
        + said
        + machine_of(result, "ray_scale.json")
    )


def serving(result: dict[str, Any]) -> str:
    """Set routing by chunks beside routing by load, and say what a replica that is killed costs."""
    rows = [
        [
            name,
            *(
                ", ".join(form.format(run[what]) for run in result[name])
                for what, form in (
                    ("hit_rate", "{:.2f}"),
                    ("requests_per_s", "{:.2f}"),
                    ("median_s", "{:.2f}"),
                )
            ),
        ]
        for name in ("chunks", "load")
    ]
    kill = result["kill"]
    said = (
        f"\nA replica killed under load: {kill['requests']} requests, **{kill['lost']} lost**; "
        "reused tokens before, during and after it: "
        f"{kill['reused_before']:.3f}, {kill['reused_during']:.3f}, {kill['reused_after']:.3f} of the prompt; "
        f"slowest answer {kill['slowest_s']:.1f} s.\n"
    )
    header = ["routed by", "hits of look-ups in memory", "requests per second", "median time, s"]
    return table(header, rows) + said + machine_of(result, "serving.json")


def shared(result: dict[str, Any]) -> str:
    """Set reading through kvrag beside the server's own client, for each kind of server."""
    names = {
        "redis": "redis-server, redis-py",
        "objects": "a directory in memory, obstore",
        "s3": "moto (S3), obstore",
    }
    rows = [
        [
            names[tier],
            f"{row['gb_per_s']['client']:.2f}",
            f"{row['gb_per_s']['kvrag']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['lookup_ms']:.2f} ({row['lookup_first_ms']:.2f})",
        ]
        for tier, row in result["tiers"].items()
    ]
    header = ["server, client", "client, GB/s", "kvrag, GB/s", "ratio", "look-up of 20 chunks, ms"]
    said = f"\n{result['chunks']} chunks of {result['bytes'] / 1e6:.0f} MB; the ratio's target is {result['target']}. "
    said += "In brackets: a look-up that asks the journal first, as one a second does.\n"
    return table(header, rows) + said + machine_of(result, "shared.json")


def shared_catalog(result: dict[str, Any]) -> str:
    """Say what a catalog of many chunks costs its writer, the server and a new machine."""
    rates = result["chunks_per_s"]
    rows = [
        ["chunks; rows", f"{result['chunks']:,}; {result['rows']:,}"],
        [
            "written by one machine, chunks per second: first, slowest and last tenth",
            f"{rates[0]:.0f}, {min(rates):.0f}, {rates[-1]:.0f}",
        ],
        ["a snapshot, beside changes", f"{result['snapshot_s']:.0f} s"],
        [
            "in Redis; in the copy of each machine",
            f"{result['redis_bytes'] / 1e6:.0f} MB; {result['database_bytes'] / 1e9:.1f} GB",
        ],
        [
            "until a new machine has begun; memory for it",
            f"{result['begin_s']:.0f} s; {result['begin_memory_mb']} MB",
        ],
        ["its look-up of 20 chunks", f"{result['lookup_ms']:.2f} ms"],
    ]
    return table(["what", "result"], rows) + machine_of(result, "shared_catalog.json")


def load_figures(result: dict[str, Any]) -> str:
    """Set the single figures beside their goals."""
    parts, rows = result["parts"], []
    if (figures := parts.get("figures")) is None:
        return NOT_MEASURED
    for d in figures["decode"]:
        what = f"decode throughput of 8 streams over one's, {d['prompt_tokens']:,} tokens, {d['where']}"
        rows.append(
            [what, f"{d['ratio']:.2f}× (prefills included: {d['ratio_whole']:.2f}×)", "≥ 3×"]
        )
    p95 = {
        part: next(
            (x["ttft_s"]["p95"] for x in row["levels"] if (x["kind"], x["size"]) == ("closed", 8)),
            None,
        )
        for part, row in parts.items()
        if part in ("kvrag", "full")
    }
    if all(p95.get(part) for part in ("kvrag", "full")):
        said = f"{p95['full'] / p95['kvrag']:.2f}× ({p95['full']:.2f} s over {p95['kvrag']:.2f} s)"
        rows.append(["p95 of the first token at 8 clients, reuse off over reuse", said, "≥ 3×"])
    for mode, r in figures["overhead"].items():
        low, high = r["share_ci"]
        said = f"{r['share']:+.1%} ({low:+.1%} to {high:+.1%}) of {r['engine_ms']:.0f} ms"
        goal = "< 3%" if mode == "auto" else ""
        rows.append(
            [
                f"server over engine, first token at {r['tokens']:,.0f} tokens, mode {mode}",
                said,
                goal,
            ]
        )
    last = figures["turns"][-1]
    said = f"{last['computed_share']:.1%} of {last['prompt_tokens']:,}"
    rows.append([f"computed tokens of a chat's turn {len(figures['turns'])}", said, "< 10%"])
    return table(["", "measured", "goal"], rows) + source(
        {**result, "machine": figures["machine"]}, "load.json"
    )


def suites(result: dict[str, Any]) -> str:
    """Count the outcomes of LangChain's public suites."""
    outcomes = ("passed", "failed", "skipped", "xfailed")
    rows = [
        [
            name,
            *(str(row[each]) for each in outcomes),
            "; ".join(f"{n} × {why}" for why, n in row["reasons"].items()),
        ]
        for name, row in result["suites"].items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    said = f"\n{versions}; commit {result['machine']['commit'][:10]}; everything in `tests/benchmarks/results/suites.json`.\n"
    return table(["suite", *outcomes, "why"], rows) + said


def quantised_sizes(result: dict[str, Any]) -> str:
    """Size of a chunk's file by type, as a share of bfloat16's."""
    sizes = result["sizes"]
    kinds = list(sizes["targets"])
    rows = [
        [name, f"{row['auto'] / 1e6:.1f} MB", *(f"{row[kind]:.3f}" for kind in kinds)]
        for name, row in sizes["shares"].items()
    ]
    rows.append(["at most", "", *(f"{limit:.2f}" for limit in sizes["targets"].values())])
    return table(["shape of", "bfloat16", *kinds], rows) + machine_of(sizes, "store.json")


def quantised_errors(result: dict[str, Any]) -> str:
    """Error of single elements by type."""
    rows = []
    for kind, outliers in result["outliers"].items():
        errors = result["summary"][f"{kind}/error"]
        factor = f"{outliers['swapped'] / outliers['ours']:.1f}×"
        cells = (errors["keys"], errors["values"], outliers["ours"], outliers["swapped"])
        rows.append([kind, *(f"{value:.4f}" for value in cells), factor])
    header = [
        "type",
        "its keys",
        "its values",
        "outlier channels, per channel",
        "outlier channels, per token",
        "",
    ]
    return table(header, rows) + source(result, "quantised.json")


def quantised(result: dict[str, Any]) -> str:
    """KL of rounded reuse by type and repair."""
    rows = []
    for name, row in result["summary"].items():
        kind, _, repair = name.partition("/")
        if repair == "error":
            continue
        low, high = row["kl_own_ci"]
        gate = (
            f"{result['gate'][kind]['mean_kl']:.5f}"
            if kind in result["gate"] and repair == "none"
            else "–"
        )
        rounding = "–" if kind == "auto" else f"{row['kl_own']:.5f} ± {(high - low) / 2:.5f}"
        same = "–" if kind == "auto" else f"{row['same_first']:.2f}"
        rows.append([kind, repair, rounding, same, f"{row['kl_own_from_full']:.4f}", gate])
    header = [
        "type",
        "repair",
        "KL from reuse without rounding",
        "same first token",
        "KL from full prefill",
        "gate's KL",
    ]
    note = f"\nMeans over {len(result['cases'])} MuSiQue questions of {result['chunks']} chunks, ± half of a 95% bootstrap interval.\n"
    return table(header, rows) + note + source(result, "quantised.json")


def facts_once(result: dict[str, Any]) -> str:
    """Compare the default with a probe that reads the question once, on the same questions."""
    name = f"facts/{result['model']}"
    rows = on_same_questions(
        {
            "once": ("facts/once", "sentences@auto"),
            "**twice, the default**": (name, "sentences@auto"),
        }
    )
    once = json.loads((RESULTS / "facts" / "once.json").read_text())
    said = source(once, "facts/once.json").lstrip()
    return (
        table(["questions", "the question is read", *SAME_QUESTIONS], rows)
        + source(result, f"{name}.json")
        + said
    )


def facts_rows(result: dict[str, Any]) -> str:
    """Compare shares of rows on the questions that all of them answered."""
    name = f"facts/{result['model']}"
    shares = {"**the default**": "auto", "25%": "0.25", "30%": "0.3", "40%": "0.4"}
    rows = on_same_questions(
        {label: (name, f"sentences@{share}") for label, share in shares.items()}
    )
    return table(["questions", "rows", *SAME_QUESTIONS], rows) + source(result, f"{name}.json")


SAME_QUESTIONS = ("lost", "won", "KL, own answer", "median", "KL, first token", "same answer")


def on_same_questions(sides: dict[str, tuple[str, str]]) -> list[list[str]]:
    """Return a row per task and side, over the questions that every side answered; a side is a file of lines and a method in it."""
    found: dict[str, dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]]] = {}
    for label, (file, method) in sides.items():
        lines = [json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()]
        full = {_question(line): line for line in lines if line["method"] == "full"}
        found[label] = {
            _question(r): (full[_question(r)], r) for r in lines if r["method"] == method
        }
    common = set.intersection(*(set(by) for by in found.values()))
    rows = []
    for task in sorted({question[0] for question in common}):
        for label, by in found.items():
            pairs = [by[question] for question in sorted(common) if question[0] == task]
            right = [r for f, r in pairs if f["score"] >= IS_RIGHT]
            lost = sum(r["score"] < IS_RIGHT for r in right)
            won = sum(f["score"] < IS_RIGHT <= r["score"] for f, r in pairs)
            kl = [r["kl"] for _, r in pairs]
            cells = [
                f"{lost} of {len(right)}",
                str(won),
                f"{statistics.fmean(kl):.3f}",
                f"{statistics.median(kl):.3f}",
            ]
            cells.append(f"{statistics.fmean(r['kl_first'] for _, r in pairs):.3f}")
            rows.append(
                [
                    f"{task}, {len(pairs)}",
                    label,
                    *cells,
                    f"{statistics.fmean(r['same'] for _, r in pairs):.0%}",
                ]
            )
    return rows


def _question(line: dict[str, Any]) -> tuple[Any, ...]:
    """Name the question that a line of results is about."""
    return line["task"], line["number"], *line["shapes"]


def peers(result: dict[str, Any]) -> str:
    """Compare everyone that was asked the same prompts, workload by workload, with the plots of the first one."""
    text = ""
    for name, found in result["workloads"].items():
        tokens = [prompt["tokens"] for prompt in found["prompts"]]
        length = (
            f"{min(tokens):,}"
            if min(tokens) == max(tokens)
            else f"{min(tokens):,} to {max(tokens):,}"
        )
        count, chunks = len(tokens), found["chunks"]
        text += f"\n**{name[0].upper()}{name[1:]}**: {count} prompts of {length} tokens; "
        text += f"{chunks['used']} of {chunks['pool']} chunks used.\n\n"
        text += _peers_of(found["summary"])
    text += "\nMedians over prompts, with 95% bootstrap intervals of the median in brackets; reuse, top-1 and F1 are means. "
    text += "Ratios are full prefill ÷ peer, prompt by prompt.\n"
    if result["missing"]:
        text += (
            "\nNot available: "
            + "; ".join(f"{name} ({why})" for name, why in result["missing"].items())
            + ".\n"
        )
    if same := [p["same_ids"] for found in result["workloads"].values() for p in found["prompts"]]:
        text += (
            f"\nIn {sum(same)} of {len(same)} prompts the joined ids are those of the whole text.\n"
        )
    if (model := result["model"].partition(",")[0]) != "SmolLM2-135M-Instruct":
        return text + source(result, f"peers-{model}.json")
    pictures = picture("peers", "KL of the first token against time to first token, all peers")
    return (
        pictures
        + picture("warm-up", "time to first token by request number")
        + text
        + source(result, "peers.json")
    )


def _peers_of(summary: dict[str, Any]) -> str:
    rows = []
    for name, row in summary.items():
        kl = f"{row['kl_median']:.3f} {_interval(row, 'kl_median', 3)}" if "kl" in row else "–"
        pays = (
            {None: "never"}.get(row["break_even"], f"{row['break_even'] or 0:,.1f}")
            if "break_even" in row
            else "–"
        )
        rows.append(
            [
                f"**{name}**" if name.startswith("kvrag") else name,
                f"{row['wall_s']:.2f} {_interval(row, 'wall_s', 2)}",
                f"{row['cpu_s']:.2f} {_interval(row, 'cpu_s', 2)}",
                f"{row['wall_s_ratio']:.2f}",
                f"{row['cpu_s_ratio']:.2f}",
                f"{row['reuse']:.0%}",
                kl,
                f"{row['kl']:.3f}" if "kl" in row else "–",
                f"{row['top1']:.2f}" if "top1" in row else "–",
                f"{row['f1']:.2f}" if "f1" in row else "–",
                f"{row['memory'] / 1e6:,.0f}" if "memory" in row else "–",
                pays,
            ]
        )
    header = [
        "",
        "TTFT, s",
        "TTFT, CPU s",
        "ratio",
        "ratio of CPU time",
        "reuse",
        "KL, first token",
        "mean",
        "top-1",
        "F1",
    ]
    return table([*header, "memory, MB", "pays after, requests"], rows)


def _interval(row: dict[str, Any], key: str, digits: int) -> str:
    low, high = row[f"{key}_ci"]
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


PREDICTED = "Llama-3.1-8B", 32768
NOTHING_MEASURED = (
    "\nPredicted, not measured; everything in `tests/benchmarks/results/roofline.json`.\n"
)
HIDDEN_BY = {
    "copy": "probe and repair",
    "probe": "copy of its layers",
    "stitch": "copy",
    "repair, host": "repair on the device",
}


def _predicted(result: dict[str, Any], **wanted: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the predictions with these values, by shape, tokens, device, kind of wire and ratio."""
    rows = [
        r for r in result["predictions"] if all(r[name] == value for name, value in wanted.items())
    ]
    return {tuple(r[n] for n in ("shape", "tokens", "device", "wire", "ratio")): r for r in rows}


def roofline(result: dict[str, Any]) -> str:
    """Set one schedule after the other beside the full prefill: an 8B shape at 32k on an H100."""
    found = _predicted(result, device="H100")
    columns = [
        (wire, ratio) for ratio in (0.03, 0.10) for wire in ("bf16", "int8", "int4", "device")
    ]
    rows = []
    for index, name in enumerate(result["schedules"]):
        cells = [found[(*PREDICTED, "H100", *column)] for column in columns]
        speeds = [(r["ttft_ms"][index], r["full_ms"] / r["ttft_ms"][index]) for r in cells]
        rows.append([name, *(f"{ms:.0f} ms, {speed:.1f}×" for ms, speed in speeds)])
    header = [
        "",
        *(f"{wire.replace('device', 'on the device')}, {ratio:.0%}" for wire, ratio in columns),
    ]
    return table(header, rows) + NOTHING_MEASURED


def roofline_devices(result: dict[str, Any]) -> str:
    """List the rates that predictions go by, and where they are from."""
    rates = ("linear", "prefill", "attention", "float32", "copy", "link")
    rows = [
        [d["name"], *(f"{d[rate]:,.0f}" for rate in rates), d["source"]] for d in result["devices"]
    ]
    header = [
        "device",
        "linear layers",
        "prefill's attention",
        "repaired rows' attention",
        "float32",
        "copy",
        "link",
    ]
    return table([*header, "source"], rows) + "\nTFLOP/s; copy and link in GB/s.\n"


def roofline_stages(result: dict[str, Any]) -> str:
    """List what each stage does, and how long that takes today and with everything changed."""
    row = _predicted(result)[(*PREDICTED, "H100", "int8", 0.03)]
    rows = []
    for index, (name, work) in enumerate(result["work"].items()):
        flop = sum(work[kind] for kind in ("flop", "attention_flop", "float32_flop")) / 1e12
        moved = [
            f"{work[f'{where}_bytes'] / 1e9:.2f}" if work[f"{where}_bytes"] else "–"
            for where in ("link", "device")
        ]
        computed, host = (
            f"{flop:.2f}" if flop else "–",
            f"{work['host_ms']:.1f}" if work["host_ms"] else "–",
        )
        times = [f"{row[which][index]:.1f}" for which in ("stages_ms", "last_stages_ms")]
        rows.append([name, *moved, computed, host, *times, HIDDEN_BY.get(name, "–")])
    header = [
        "stage",
        "GB over the link",
        "GB on the device",
        "TFLOP",
        "host's ms",
        "ms today",
        "ms, all changes",
    ]
    return table([*header, "can hide behind"], rows) + NOTHING_MEASURED


def roofline_lengths(result: dict[str, Any]) -> str:
    """Set today and all changes beside the full prefill, by device, shape and length."""
    rows, today = (
        [],
        next(i for i, name in enumerate(result["schedules"]) if name.endswith("today")),
    )
    for (shape, tokens, device, wire, _), r in _predicted(result, ratio=0.03).items():
        if wire == "bf16":
            both = [r, _predicted(result, ratio=0.03)[shape, tokens, device, "int8", 0.03]]
            times = [
                f"{x['ttft_ms'][i]:.0f} ms, {x['full_ms'] / x['ttft_ms'][i]:.1f}×"
                for i in (today, -1)
                for x in both
            ]
            rows.append([device, shape, f"{tokens:,}", f"{r['full_ms']:.0f} ms", *times])
    header = [
        "device",
        "shape",
        "tokens",
        "full prefill",
        "today, bf16",
        "today, int8",
        "all changes, bf16",
    ]
    rows.sort(key=lambda row: [[d["name"] for d in result["devices"]].index(row[0]), row[1]])
    return table([*header, "all changes, int8"], rows) + NOTHING_MEASURED


def scale_constants(result: dict[str, Any]) -> str:
    """List what the simulation goes by, and where it is from."""
    rows = [
        [name, f"{value:.4g}", unit, kind, source]
        for name, value, unit, kind, source in result["constants"]
    ]
    return table(["constant", "value", "unit", "kind", "source"], rows)


def scale_loading(result: dict[str, Any]) -> str:
    """Set loading a chunk from each tier beside computing it; bold where loading takes longer."""
    rows, chunks = [], result["plan"]["chunks"]
    for r in result["loading"]:
        sizes = " / ".join(f"{size:,}" for size in r["sizes"])
        ms = [f"{t:.1f}" if t < r["compute_ms"] else f"**{t:.0f}**" for t in r["load_ms"].values()]
        of = [f"{r['chunk_gb'] * 1e3:.0f} MB", f"{r['chunk_gb'] * chunks / 1e3:.0f} TB", sizes]
        rows.append(
            [
                f"{r['model']}, {r['kind']}",
                *of,
                f"{r['compute_ms']:.1f}",
                f"{r['break_even_gb_s']:.1f}",
                *ms,
            ]
        )
    header = [
        "model, KV",
        "a chunk",
        "the corpus",
        "chunks in GPU / host / disk of a replica",
        "computing, ms",
    ]
    return table([*header, "break-even, GB/s", *result["loading"][0]["load_ms"]], rows)


def scale_hits(result: dict[str, Any]) -> str:
    """Set the share of chunks that each tier has, and the network's GB/s, by workload and routing."""
    rows: dict[str, list[str]] = {}
    for r in result["runs"]:
        shares = [
            *(r["hits"][tier] for tier in ("gpu", "host", "disk")),
            r["hits"]["redis"] + r["hits"]["objects"],
        ]
        cell = " / ".join(f"{share:.0%}"[:-1] for share in shares) + f"; {r['network_gb_s']:.2f}"
        rows.setdefault(f"{r['workload']}, {r['routing']}", []).append(cell)
    header = [f"{r['model'].removeprefix('Llama-3.1-')} {r['kind']}" for r in result["loading"]]
    return table(["workload, routing", *header], [[name, *cells] for name, cells in rows.items()])


def _paid(r: dict[str, Any], ms: str, dollars: str) -> str:
    """Milliseconds, and dollars for 1,000 requests."""
    return f"{r['ms'][ms]:.0f} ms, ${r['dollars'][dollars]:.3f}"


def scale_costs(result: dict[str, Any]) -> str:
    """Set time and cost beside those of computing everything, by model and workload."""
    rows, found = (
        [],
        {(r["model"], r["kind"], r["workload"], r["routing"]): r for r in result["runs"]},
    )
    columns = [
        ("zipf", "random"),
        *((name, "rendezvous") for name in ("zipf", "drift", "documents", "flat")),
    ]
    for row in result["loading"]:
        each = [found[row["model"], row["kind"], *column] for column in columns]
        fastest = [_paid(r, "fastest", "fastest") for r in each]
        rows.append([f"{row['model']}, {row['kind']}", _paid(each[0], "full", "full"), *fastest])
    header = [f"{name}, at random" if routing == "random" else name for name, routing in columns]
    return table(["model, KV", "computing everything", *header], rows)


def scale_shared(result: dict[str, Any]) -> str:
    """Say what shared stores cost, and from how many requests a second the object store's costs are less than what it saves."""
    rows, hour = [], {name: value for name, value, *_ in result["constants"]}["redis_hour"]
    plan = result["plan"]
    rate, runs = (
        plan["rate"] * plan["replicas"],
        [r for r in result["runs"] if r["workload"] == "zipf"],
    )
    for row, r in zip(
        result["loading"], [r for r in runs if r["routing"] == "rendezvous"], strict=True
    ):
        cost = r["dollars"]
        even = rate * cost["objects"] / (cost["fastest"] - cost["on_gpu"])
        in_redis = row["chunk_gb"] * plan["chunks"] * hour / (rate * 3.6)
        cells = [
            _paid(r, name, of)
            for name, of in (("full", "full"), ("fastest", "fastest"), ("least_gpu", "on_gpu"))
        ]
        shared = [
            f"${cost['objects']:.3f}",
            f"{even:.0f} requests/s",
            f"${in_redis:.2f}",
            f"${cost['zones']:.2f}",
        ]
        rows.append([f"{row['model']}, {row['kind']}", *cells, *shared])
    header = [
        "model, KV",
        "computing everything",
        "fastest",
        "least GPU time",
        "object store",
        "saves more from",
    ]
    return table([*header, "all in Redis", "misses across zones"], rows)


def scale_changes(result: dict[str, Any]) -> str:
    """Set one change after the other beside computing everything."""
    rows: dict[str, list[str]] = {}
    for r in result["changes"]:
        kept = r["dollars"]["objects"] + r["dollars"]["redis"]
        cells = [_paid(r, name, name) for name in ("full", "fastest")] + [
            _paid(r, "least_gpu", "on_gpu"),
            f"${kept:.3f}",
        ]
        rows.setdefault(r["change"], []).extend(cells)
    header = [
        f"{m}: {what}"
        for m in ("8B", "70B")
        for what in ("computing", "fastest", "least GPU time", "shared store")
    ]
    return table(["change", *header], [[name, *cells] for name, cells in rows.items()])


def scale_prompts(result: dict[str, Any]) -> str:
    """Set prompts whose chunks all are in the host's memory beside a full prefill; bold where that is as fast."""
    rows = []
    for r in result["prompts"]:
        full = r["full_ms"]
        ms = [
            f"{t:.0f} ms, {full / t:.1f}×" if t < full else f"**{t:.0f} ms**"
            for t in r["from_host_ms"]
        ]
        rows.append([r["model"], str(r["chunks"]), f"{full:.0f} ms", *ms])
    header = [
        "model",
        "chunks",
        "full prefill",
        "today, 3%",
        "today, 15%",
        "all changes, 3%",
        "all changes, 15%",
    ]
    return table(header, rows)


def overhead(result: dict[str, Any]) -> str:
    """Set each adapter's time to first token beside the engine's own."""
    rows = []
    for r in result["rows"]:
        cells = [
            f"{r['ttft_ms']:.0f}",
            f"{r['more_ms']:+.0f}",
            f"{r['more_cpu_ms']:+.0f}",
            f"{r['host_ms']:.2f}",
        ]
        rows.append([r["name"], *cells, f"{r['host_share']:.2%}"])
    header = [
        "",
        "first token, ms",
        "more than the engine, ms",
        "of CPU time",
        "its own part, ms",
        "of the engine's time",
    ]
    count = f"\n{result['tokens']} tokens, medians of {len(result['rounds'])}.\n"
    return table(header, rows) + count + source(result, "overhead.json")


def incumbents(result: dict[str, Any]) -> str:
    """Set what was observed of other adapters beside kvrag's."""
    rows = []
    for row in result["rows"]:
        theirs, own = row["theirs"], row["ours"]
        seen = theirs["what"] + ("" if theirs["is_fault"] else " (no longer a fault)")
        rows.append(
            [
                f"`{row['package']}`",
                row["name"],
                seen,
                own["what"] + (" (**fault**)" if own["is_fault"] else ""),
            ]
        )
    return table(["beside", "", "there", "kvrag's adapter"], rows) + source(
        result, "incumbents.json"
    )


def picture(name: str, alt: str) -> str:
    """Show a plot of docs/plots.py, in the reader's theme."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="plots/{name}-dark.svg">'
    return f'<picture>{dark}<img alt="{alt}" src="plots/{name}-light.svg"></picture>\n\n'


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "ttft": ("ttft.json", ttft),
    "ttft-qwen-05b": ("ttft-qwen2.5-coder-0.5b.json", ttft),
    "ttft-short": ("ttft-qwen2.5-coder-0.5b.json", ttft_short),
    "ttft-cuda": ("ttft-llama-3.1-8b-cuda.json", ttft_cuda),
    "ttft-cuda-first": ("ttft-llama-3.1-8b-cuda-first.json", ttft_cuda),
    "kernels": ("kernels.json", kernels),
    "kernels-missed": ("kernels.json", kernels_missed),
    "kernels-stitch": ("kernels.json", kernels_stitch),
    "auto": ("auto.json", auto),
    "facts-qwen-05b": ("facts/qwen2.5-coder-0.5b.json", facts),
    "facts-rows": ("facts/qwen2.5-coder-0.5b.json", facts_rows),
    "facts-once": ("facts/qwen2.5-coder-0.5b.json", facts_once),
    "facts-published": ("facts/published.json", facts),
    "facts-search": ("facts/search.json", facts),
    "facts-short": ("facts/qwen2.5-coder-0.5b.json", facts_short),
    "facts-qwen-15b": ("facts/qwen2.5-coder-1.5b.json", facts),
    "facts-gemma": ("facts/gemma3-270m.json", facts),
    "facts-smollm2": ("facts/smollm2-135m-instruct.json", facts),
    "speed": ("speed.json", speed),
    "chat": ("chat.json", chat),
    "memory": ("memory.json", memory),
    "seams": ("seams.json", seams),
    "slide": ("slide.json", slide),
    "support": ("support.json", support),
    "support-refused": ("support.json", support_refused),
    "fuzz": ("fuzz.json", fuzz),
    "store": ("store.json", store),
    "store-reads": ("store.json", store_reads),
    "store-index": ("store.json", store_index),
    "fuzz-reader": ("fuzz_reader.json", fuzz_reader),
    "masks": ("masks.json", masks),
    "reliability": ("reliability.json", reliability),
    "serve": ("serve.json", serve),
    "load": ("load.json", load),
    "load-qwen-05b": (
        "load-qwen2.5-coder-0.5b.json",
        partial(load, file="load-qwen2.5-coder-0.5b.json"),
    ),
    "shared": ("shared.json", shared),
    "shared-catalog": ("shared_catalog.json", shared_catalog),
    "ray-kill": ("ray_kill.json", ray_kill),
    "ray-scale": ("ray_scale.json", ray_scale),
    "serving": ("serving.json", serving),
    "load-figures": ("load.json", load_figures),
    "suites": ("suites.json", suites),
    "quantised": ("quantised.json", quantised),
    "quantised-errors": ("quantised.json", quantised_errors),
    "peers": ("peers.json", peers),
    "peers-qwen-05b": ("peers-qwen2.5-coder-0.5b.json", peers),
    "quantised-sizes": ("store.json", quantised_sizes),
    "overhead": ("overhead.json", overhead),
    "incumbents": ("incumbents.json", incumbents),
    "roofline": ("roofline.json", roofline),
    "roofline-devices": ("roofline.json", roofline_devices),
    "roofline-stages": ("roofline.json", roofline_stages),
    "roofline-lengths": ("roofline.json", roofline_lengths),
    "scale-constants": ("scale.json", scale_constants),
    "scale-loading": ("scale.json", scale_loading),
    "scale-hits": ("scale.json", scale_hits),
    "scale-costs": ("scale.json", scale_costs),
    "scale-shared": ("scale.json", scale_shared),
    "scale-changes": ("scale.json", scale_changes),
    "scale-prompts": ("scale.json", scale_prompts),
}


def render(text: str) -> str:
    """Replace every block of a document."""

    def block(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        path = RESULTS / file
        body = make(json.loads(path.read_text())) if path.exists() else NOT_MEASURED
        return f"{match[1]}{body}{match[4]}"

    return BLOCK.sub(block, text)


def main() -> int:
    """Write, or check with ``--check``."""
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = document.read_text()
        after = render(before)
        if after != before:
            stale.append(document.name)
            if "--check" not in sys.argv:
                document.write_text(after)
    print("stale: " + ", ".join(stale) if stale else "tables are in step")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
