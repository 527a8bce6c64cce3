"""Other libraries and methods on the same prompts, and other adapters."""

from __future__ import annotations

from collections import Counter

from .core import Result, Tables, source, table


def peers(result: Result) -> str:
    """Compare everyone that was asked the same prompts; a cell has a workload's ratio and KL."""
    workloads = result["workloads"]
    first = next(iter(workloads.values()))["summary"]
    rows = []
    for name in first:
        cells = [_cell(found["summary"][name]) for found in workloads.values()]
        label = f"**{name}**" if name.startswith("kvrag") else name
        rows.append([label, *cells, _pays_after(first[name])])
    said = "; ".join(_workload(name, found) for name, found in workloads.items())
    note = f"\nFull prefill's CPU time ÷ the peer's, and KL of the first token, medians. {said}.\n"
    header = ["", *workloads, "pays after, requests"]
    model = result["model"].partition(",")[0]
    return table(header, rows) + note + source(result, f"peers-{model}.json")


def _cell(row: Result) -> str:
    kl = f"{row['kl_median']:.3f}" if "kl" in row else "–"
    return f"{row['cpu_s_ratio']:.2f}×, {kl}"


def _pays_after(row: Result) -> str:
    if "break_even" not in row:
        return "–"
    return "never" if row["break_even"] is None else f"{row['break_even']:,.0f}"


def _workload(name: str, found: Result) -> str:
    tokens = [prompt["tokens"] for prompt in found["prompts"]]
    full = found["summary"]["transformers, full prefill"]["wall_s"]
    return f"{name}: {len(tokens)} prompts of {min(tokens):,} to {max(tokens):,} tokens, full prefill {full:.2f} s"


def overhead(result: Result) -> str:
    """Say what the adapters add to the engine's time to first token."""
    engine, *adapters = result["rows"]
    own = [row["host_ms"] for row in adapters]
    said = f"{min(own):.2f} to {max(own):.2f} ms of the engine's {engine['ttft_ms']:,.0f} ms for {result['tokens']:,} tokens, "
    said += f"{max(row['host_share'] for row in adapters):.2%} at most.\n"
    return said + source(result, "overhead.json")


def incumbents(result: Result) -> str:
    """Count the faults of other adapters, and kvrag's."""
    theirs = Counter(row["package"] for row in result["rows"] if row["theirs"]["is_fault"])
    ours = sum(row["ours"]["is_fault"] for row in result["rows"])
    said = ", ".join(f"{count} of `{package}`" for package, count in theirs.items())
    return f"Faults: {said}, {ours} of kvrag's adapters.\n" + source(result, "incumbents.json")


TABLES: Tables = {
    "peers-qwen-05b": ("peers-qwen2.5-coder-0.5b.json", peers),
    "overhead": ("overhead.json", overhead),
    "incumbents": ("incumbents.json", incumbents),
}
