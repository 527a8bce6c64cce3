"""A simulation of many chunks and replicas."""

from __future__ import annotations

from .core import Result, Tables, table


def scale_loading(result: Result) -> str:
    """Set loading a chunk from each tier beside computing it; bold where loading takes longer."""
    rows = []
    for r in result["loading"]:
        ms = [f"{t:.1f}" if t < r["compute_ms"] else f"**{t:.0f}**" for t in r["load_ms"].values()]
        of = [f"{r['model'].removeprefix('Llama-3.1-')} {r['kind']}", f"{r['chunk_gb'] * 1e3:.0f}"]
        rows.append([*of, f"{r['compute_ms']:.1f}", *ms])
    header = ["model, KV", "MB", "computing", *result["loading"][0]["load_ms"]]
    return table(header, rows)


def scale_costs(result: Result) -> str:
    """Set time and cost beside those of computing everything, by model and workload."""
    found = {(r["model"], r["kind"], r["workload"], r["routing"]): r for r in result["runs"]}
    plan = result["plan"]
    rate = plan["rate"] * plan["replicas"]
    rows = []
    for row in result["loading"]:
        each = [
            found[row["model"], row["kind"], name, "rendezvous"]
            for name in ("zipf", "documents", "flat")
        ]
        paid = [f"{r['ms']['fastest']:.0f} ms, ${r['dollars']['fastest']:.3f}" for r in each]
        dollars, ms = each[0]["dollars"], each[0]["ms"]
        full = f"{ms['full']:.0f} ms, ${dollars['full']:.3f}"
        even = rate * dollars["objects"] / (dollars["fastest"] - dollars["on_gpu"])
        model = row["model"].removeprefix("Llama-3.1-")
        rows.append([f"{model} {row['kind']}", full, *paid, f"{even:.0f} requests/s"])
    header = ["model, KV", "computing everything", "zipf", "documents", "flat"]
    return table([*header, "object store pays from"], rows)


TABLES: Tables = {
    "scale-loading": ("scale.json", scale_loading),
    "scale-costs": ("scale.json", scale_costs),
}
