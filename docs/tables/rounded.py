"""KV in int8, fp8 and int4."""

from __future__ import annotations

from .core import Result, Tables, read, source, table


def quantised(result: Result) -> str:
    """Size, error and effect of each type."""
    shares = read("store.json")["sizes"]["shares"].values()
    rows = []
    for kind in result["outliers"]:
        errors, plain, repaired = (
            result["summary"][f"{kind}/{name}"] for name in ("error", "none", "default")
        )
        size = [row[kind] for row in shares]
        kl = [f"{row['kl_own']:.5f} (± {_half(row):.5f})" for row in (plain, repaired)]
        cells = [f"{min(size):.3f} to {max(size):.3f}"]
        cells += [f"{errors['keys']:.4f}, {errors['values']:.4f}", *kl]
        rows.append([kind, *cells, f"{result['gate'][kind]['mean_kl']:.5f}"])
    header = ["type", "bytes, share of bfloat16's", "error of keys, values"]
    header += ["KL, unrepaired", "KL, 3% repaired", "the check's KL"]
    same = min(row["same_first"] for row in result["summary"].values() if "same_first" in row)
    note = "\nErrors: root mean squares, relative. KL: from the same reuse without rounding, "
    note += f"{len(result['cases'])} MuSiQue questions of {result['chunks']} chunks, "
    note += "± half of a 95% bootstrap interval; "
    note += f"the first token was the same in at least {same:.0%}. Sizes: `store.json`.\n"
    return table(header, rows) + note + source(result, "quantised.json")


def _half(row: Result) -> float:
    low, high = row["kl_own_ci"]
    return float(high - low) / 2


TABLES: Tables = {"quantised": ("quantised.json", quantised)}
