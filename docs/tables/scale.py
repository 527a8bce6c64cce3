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


TABLES: Tables = {
    "scale-loading": ("scale.json", scale_loading),
}
