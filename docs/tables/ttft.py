"""Time to first token, decode steps, precomputing, memory."""

from __future__ import annotations

import statistics

from .core import Result, Tables, source, table

STAGES = ("plan", "load", "stitch", "select", "repair")


def ttft(result: Result) -> str:
    """Time to first token by repair and by prompt length."""
    rows = []
    for label in ("5800", "2500", "1000", "500"):
        for name, row in result[label]["summary"].items():
            stages = row["stages_ms"]
            rows.append(
                [
                    f"{row['tokens']:.0f}",
                    name,
                    f"{row['full_ms']:.0f}",
                    f"{row['ttft_ms']:.0f}",
                    f"**{row['ratio']:.2f}**",
                    f"{row['cpu_ratio']:.2f}",
                    *(f"{stages[s]:.0f}" if s in stages else "–" for s in STAGES),
                ]
            )
    header = ["tokens", "configuration", "full prefill, ms", "kvrag, ms", "ratio"]
    header += ["ratio of CPU time", *STAGES]
    return table(header, rows) + source(result, f"ttft-{result['model']}.json")


def ttft_short(result: Result) -> str:
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


def auto(result: Result) -> str:
    """Time of ``auto`` beside a full prefill, by prompt length and share of stored chunks."""
    cells = {(cell["length"], cell["share"]): cell for cell in result["cells"]}
    shares = sorted({share for _, share in cells})
    rows = []
    for length in sorted({length for length, _ in cells}):
        row = [cells[length, share] for share in shares]
        times = [f"{cell['ratio_ms']:.2f}, {cell['exactness']}" for cell in row]
        rows.append([f"{row[0]['tokens']}", f"{row[0]['full_ms']:.0f}", *times])
    worst = max(result["cells"], key=lambda cell: cell["ratio_ms"])
    note = "\nTime of `auto` as a share of the full prefill's, and the answer's label; "
    note += f"medians of {len(worst['runs'])}. The most is {worst['ratio_ms']:.2f} "
    note += f"({worst['ratio_cpu_ms']:.2f} of CPU time); the limit is {result['limit']}.\n"
    header = ["tokens", "full prefill, ms", *(f"{share:.0%} stored" for share in shares)]
    return table(header, rows) + note + source(result, "auto.json")


def speed(result: Result) -> str:
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


def cpu(result: Result) -> str:
    """Set weights of fewer bits beside float32: times by the processor's clock, and divergence."""
    rows = []
    for kind, made in sorted(result["kinds"].items(), key=lambda item: "gguf" in item[1]):
        cells = []
        for name, times in made["times_s"].items():
            own = statistics.median(cpu for _, cpu in times) * 1e3
            ratio, low, high = made["sooner"][f"{name}_cpu"]
            said = "" if kind == "float32" else f" ({ratio:.2f}×, {low:.2f} to {high:.2f})"
            cells.append(f"{own:,.0f}{said}")
        if "gguf" in made:
            rows.append([f"{kind}, {made['gguf']}", *cells, "–", "–", "–", "–"])
        else:
            sides = f"{made['load_s'][1]:.0f}", f"{made['kl_mean']:.1e}", f"{made['kl_max']:.1e}"
            rows.append([kind, *cells, *sides])
    walls = result["kinds"]["float16"]["sooner"]
    rates = " and ".join(f"{rate / 1e9:.0f}" for rate in result["reading_bytes_per_s"])
    note = "\nMilliseconds of processor time, medians of "
    note += f"{len(made['times_s']['step'])} turns, with the median of the ratios to float32 and a 95% interval of their mean. "
    note += f"Others computed on the machine (load {result['load_average'][0]:.1f} on {result['machine']['cores']} cores); "
    note += "by the wall, float16's ratios are " + ", ".join(
        f"{walls[f'{name}_wall'][0]:.1f}" for name in ("prefill", "step", "steps")
    )
    note += f". A float32 sum read {rates} GB/s before and after. KL: to float32's full prefill, {128} rows.\n"
    header = [
        "weights",
        f"prefill of {result['prompt']} tokens",
        "a step",
        f"a step of {result['streams']} requests",
    ]
    header += ["load, s", "KL, mean", "largest"]
    is_small = result["model"] == "qwen2.5-coder-0.5b"
    file = "cpu.json" if is_small else f"cpu-{result['model']}.json"
    return table(header, rows) + note + source(result, file)


def memory(result: Result) -> str:
    """Peak memory of a request."""
    modes = result["requests"].items()
    peaks = ", ".join(f"{r['above_model'] / 1e6:.0f} MB (`{mode}`)" for mode, r in modes)
    r = result["requests"]["stitch"]
    said = f"{peaks} for {r['tokens']:,} tokens with {r['kv'] / 1e6:.0f} MB of KV; "
    said += f"the limit is {r['allowed'] / 1e6:.0f} MB.\n"
    return said + source(result, "memory.json")


def gguf(result: Result) -> str:
    """Seconds from the start of a process to its first token."""
    rows = []
    for name in ("transformers", "kvrag"):
        row = result["starts"][name]
        limit = result["limits"].get(name)
        rows.append(
            [
                name,
                f"{row['wall_s']:.1f}",
                f"{row['cpu_s']:.1f}",
                f"{limit:.0f}" if limit else "–",
            ]
        )
    said = f"\nThe file has {result['bytes']['file'] / 1e9:.2f} GB.\n"
    header = ["start", "first token after, s", "CPU time, s", "limit, s"]
    return table(header, rows) + said + source(result, "gguf.json")


TABLES: Tables = {
    "gguf": ("gguf.json", gguf),
    "ttft-qwen-05b": ("ttft-qwen2.5-coder-0.5b.json", ttft),
    "ttft-short": ("ttft-qwen2.5-coder-0.5b.json", ttft_short),
    "auto": ("auto.json", auto),
    "speed": ("speed.json", speed),
    "cpu": ("cpu.json", cpu),
    "cpu-15b": ("cpu-qwen2.5-coder-1.5b.json", cpu),
    "memory": ("memory.json", memory),
}
