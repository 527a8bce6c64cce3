"""Architectures, and LangChain's own suites."""

from __future__ import annotations

import re
from collections import Counter

from kvrag.evaluate.estimate import human_bytes

from .core import Result, Tables, source, table


def support(result: Result) -> str:
    """Every architecture whose KV is reused, by its kind of positions; windows and towers are marked."""
    exact = {name: row for name, row in _newest(result)["rows"].items() if row["reuse"] == "exact"}
    kinds: dict[str, dict[str, None]] = {}
    notes: dict[str, dict[str, None]] = {}
    for row in exact.values():
        name = row["architecture"].removesuffix("ForCausalLM")
        name = re.sub("_?ForConditionalGeneration$", " (v)", name) + (
            " (w)" if row["windows"] else ""
        )
        kinds.setdefault(row["rope"], {})[name] = None
        for note in row["notes"]:
            notes.setdefault(note, {})[name.removesuffix(" (w)")] = None
    rows = [[kind, ", ".join(names)] for kind, names in kinds.items()]
    worst = max(error for row in exact.values() for error in row["errors"].values())
    said = f"\n{len(exact)} tiny models, largest difference {worst:.0e}. (w): with a window. "
    said += "(v): `…ForConditionalGeneration`, by prompts of text. "
    said += "".join(f"{', '.join(names)}: {note}. " for note, names in notes.items())
    return table(["RoPE", "architectures (`…ForCausalLM`)"], rows) + said + _runs(result)


def support_refused(result: Result) -> str:
    """Every architecture whose KV is not reused, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, row in _newest(result)["rows"].items():
        if row["reuse"] != "exact":
            reasons.setdefault(_reason(row["why"]), []).append(f"`{name}`")
    return table(["row", "why not"], [[", ".join(of), why] for why, of in reasons.items()])


def _reason(why: str) -> str:
    """Leave the names and numbers of a model out of its reason, so that many share it."""
    why = re.sub(r"(the forward )?of \w+(ForCausalLM|LMHeadModel) |architecture '[\w-]+' ", "", why)
    why = re.sub(r"^\w+(ForCausalLM|LMHeadModel|LMHead|Decoder|Attention):? ", "", why)
    why = re.sub(r" \((layer types|\w+Error): .*\)$", "", why)
    return re.sub(r"^(\w+Error: .*?)\. .*", r"\1", why).replace("|", "\\|")


def sweep(result: Result) -> str:
    """Every causal LM of transformers by its verdict, and by the reason where it is refused."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in result["rows"].items():
        why = _reason(row["why"]) if "why" in row else "structure understood, proof passed"
        groups.setdefault((row["verdict"], why), []).append(f"`{name}`")
    order = sorted(groups, key=lambda group: (list(result["counts"]).index(group[0]), group[1]))
    rows = [[kind, why, ", ".join(groups[kind, why])] for kind, why in order]
    counts = ", ".join(f"{count} {kind}" for kind, count in result["counts"].items() if count)
    worst = max(row["error"] for row in result["rows"].values() if "error" in row)
    versions = result["machine"]["versions"]
    said = (
        f"\n{len(result['rows'])} entries: {counts}; largest difference {worst:.0e}. float32; "
        f"transformers {versions['transformers']}, torch {versions['torch']}; "
        f"commit {result['machine']['commit'][:10]}; every sentence in `benchmarks/results/sweep.json`.\n"
    )
    return table(["verdict", "why", "models"], rows) + said


def _versions(result: Result) -> list[str]:
    """Versions of transformers, oldest first."""
    return sorted(
        result["runs"], key=lambda version: [int(part) for part in re.findall(r"\d+", version)]
    )


def _newest(result: Result) -> Result:
    return dict(result["runs"][_versions(result)[-1]])


def _runs(result: Result) -> str:
    """Name the runs, and the architectures that older versions of transformers refuse."""
    newest = _newest(result)["rows"]
    said = []
    for version in _versions(result):
        run = result["runs"][version]
        other = [n for n, r in newest.items() if run["rows"].get(n, r)["reuse"] != r["reuse"]]
        without = f" (but for {', '.join(other)})" if other else ""
        said.append(f"{version}{without} at commit {run['machine']['commit'][:10]}")
    cpu = _newest(result)["machine"]["cpu"]
    return f"float32 on {cpu}; transformers {', '.join(said)}; all in `benchmarks/results/support.json`.\n"


def suites(result: Result) -> str:
    """Count the outcomes of LangChain's public suites, by kind of class."""
    outcomes = ("passed", "failed", "skipped", "xfailed")
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for name, row in result["suites"].items():
        kind = re.split("[,:]", name)[0]
        counts.setdefault(kind, Counter()).update({each: row[each] for each in outcomes})
        reasons.setdefault(kind, {}).update(dict.fromkeys(row["reasons"]))
    rows = []
    for kind, count in counts.items():
        why = "; ".join(
            re.sub("^Model does not (explicitly )?", "no ", why) for why in reasons[kind]
        )
        rows.append([kind, *(str(count[each]) for each in outcomes), why])
    versions = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    said = f"\n{versions}; commit {result['machine']['commit'][:10]}; everything in `benchmarks/results/suites.json`.\n"
    return table(["suite", *outcomes, "why"], rows) + said


def latent(result: Result) -> str:
    """Say what latent attention keeps, and the arithmetic of a prompt with and without reuse."""
    constants, gqa = result["constants"], result["gqa"]
    rows = []
    for name, row in result["models"].items():
        sizes, flops = row["bytes_per_token"], row["flops"]
        kept = sizes["bfloat16"]
        rows.append(
            [
                name,
                f"{row['layers']} × ({row['latent']} + {row['rotary_key']})",
                f"{human_bytes(kept)} ({human_bytes(sizes['int8'])})",
                f"{kept / sizes['gqa']:.0%}",
                f"{kept / sizes['expanded']:.1%}",
                f"{row['prompt_bytes'] / 1e6:,.0f} MB",
                f"{flops['full'] / 1e12:,.0f} → {flops['reused'] / 1e12:,.0f} TFLOP",
                f"{flops['expansion'] / flops['reused']:.0%}",
                _bandwidth(row["break_even_bytes_per_s"]),
            ]
        )
    header = [
        "shape of",
        "layers × (latent + rotary key)",
        "a token in bfloat16 (int8)",
        f"of GQA with {gqa['heads']} heads of {gqa['dim']}",
        "of its own heads",
        f"KV of {constants['tokens']:,} tokens",
        f"prefill → {constants['repaired']:.0%} of the rows repaired",
        "of that, expanding latents",
        "break-even",
    ]
    said = (
        f"\nArithmetic from transformers' own configs, nothing is measured. "
        f"Break-even: a faster disk beats a prefill that gets {constants['flops_per_s'] / 1e12:.0f} TFLOP/s. "
        "`benchmarks/latent_costs.py`, everything in `benchmarks/results/latent_costs.json`.\n"
    )
    return table(header, rows) + said


def quantised_weights(result: Result) -> str:
    """Every way of loading quantised weights, by verdict, with its library."""
    rows = []
    for row in sorted(result["rows"], key=lambda row: _VERDICTS.index(row["reuse"])):
        why = row["why"].removeprefix("KV of this model is not reused: ")
        why = why.removeprefix("the proof on this model failed: ")
        why = re.sub(r"^.* \((\w+): (.*)\)$", r"\2", why) if row["reuse"] == "not loaded" else why
        why = re.sub(r"^no layer mixes rows; .*", "a layer rounds activations by all rows", why)
        why = re.sub(r"^\w+ quantised by .* \((.*)\);.*", r"fails in its first forward: \1", why)
        cells = [f"{row['package']} {row['version']}", row["what"], row["reuse"]]
        errors = f"{row['error']:.0e}, {row['noise']:.0e}" if "error" in row else ""
        rows.append(
            [*cells, errors, row.get("fingerprint_of", ""), why.partition(" For details")[0]]
        )
    header = [
        "library",
        "weights",
        "reuse",
        "logits off by, transformers by",
        "known by",
        "why not",
    ]
    said = "\nExact: less than 0.001. Up to rounding: a last bit may become a step of a rounded "
    said += "activation. The second figure is transformers' own forward against itself, with the "
    said += "prompt in two parts or with eager attention.\n"
    model = result.get("model")
    if model:
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in model["processor_s"].items())
        said += f"\n{model['name']} with torchao's int8 weights, processor time: {spent}; "
        said += f"{model['cached_tokens']} tokens from the store; "
        is_same = model["answer"] == model["answer_of_a_full_prefill"]
        said += f"the answer is {'that' if is_same else 'not that'} of a full prefill.\n"
    tiny = {**result, "model": "Tiny models in float32"}
    return table(header, rows) + said + source(tiny, "quantised_weights.json")


_VERDICTS = ("exact", "up to rounding", "refused", "not loaded")


TABLES: Tables = {
    "latent": ("latent_costs.json", latent),
    "quantised-weights": ("quantised_weights.json", quantised_weights),
    "support": ("support.json", support),
    "support-refused": ("support.json", support_refused),
    "sweep": ("sweep.json", sweep),
    "suites": ("suites.json", suites),
}


def _bandwidth(number: float) -> str:
    """Return bytes per second with three digits and a decimal unit, as disks are sold."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB/s"
