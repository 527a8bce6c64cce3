"""Kernels and requests on a GPU."""

from __future__ import annotations

from .core import Result, Tables, read, source, table


def kernels(result: Result) -> str:
    """Rates of the attention kernels beside the fastest of torch's own that takes a mask."""

    def cell(row: Result, names: list[str]) -> str:
        times = {name: row["ms"][name] for name in names if isinstance(row["ms"].get(name), float)}
        if not times:
            return "–"
        name = min(times, key=times.__getitem__)
        return f"{row['useful_tflops'][name]:.0f}"

    rows = []
    long = [row for row in result["attention"] if row["keys"] > 2048]
    for row in sorted(long, key=lambda row: (-row["ratio"], -row["keys"], row["shape"])):
        masked = [name for name in row["ms"] if name.startswith("sdpa") and "mask" in name]
        causal = [name for name in row["ms"] if name.startswith("sdpa") and "causal" in name]
        shape = f"{row['shape'].split(' ')[0]} × {row['dim']}"
        cells = [cell(row, names) for names in (["kvrag sm90"], ["kvrag mma"], masked, causal)]
        rows.append([shape, f"{row['keys']:,}", f"{row['ratio']:.0%}", *cells])
    header = ["heads", "keys", "rows", "`sm90`", "`mma`", "SDPA, mask", "SDPA, causal"]
    note = f"\nUseful TFLOP/s; an 8192³ matmul reaches {result['matmul_tflops']:.0f} there. "
    note += f"{result['device']}; torch {result['versions']['torch']}; "
    note += f"commit {result['commit'][:10]}; all in `benchmarks/results/kernels.json`.\n"
    return table(header, rows) + note


def ttft_cuda(result: Result) -> str:
    """Time to first token on a GPU in two runs, a table for each, and how long the device was busy."""
    first = "ttft-llama-3.1-8b-cuda-first.json"
    header = ["KV kept as", "tokens", "full prefill, ms", "the default, ms", "ratio"]
    header += ["kernels, ms", "copies, ms", "unrepaired, ratio"]
    parts = []
    for number, (file, of) in enumerate(
        ((first, read(first)), ("ttft-llama-3.1-8b-cuda.json", result)), 1
    ):
        rows = [[run["kept"], *_times(run)] for run in of["runs"] if "summary" in run]
        parts.append(f"Run {number}:\n\n{table(header, rows)}{source(of, file)}")
    note = "\nMedians of three prompts; kernels and copies are those of one more request, "
    return "\n".join(parts) + note + "under torch's profiler.\n"


def _times(run: Result) -> list[str]:
    row, work = run["summary"]["default"], run["work"]["default"]
    copies = sum(each["ms"] for kind, each in work["copies"].items() if "HtoD" in kind)
    times = [f"{row['tokens']:,.0f}", f"{row['full_ms']:.0f}", f"{row['ttft_ms']:.0f}"]
    busy = [f"**{row['ratio']:.2f}**", f"{work['kernels_ms']:.0f}", f"{copies:.0f}"]
    return [*times, *busy, f"{run['summary']['unrepaired']['ratio']:.2f}"]


def host(result: Result) -> str:
    """Costs of a request on the host, at first and now."""
    runs = [read("host-first.json"), result]
    stages = ("plan", "load", "stitch", "select", "repair", "CPU time")
    rows = [
        [name, *(f"{min(run[name] for run in of['runs']):.1f} ms" for of in runs)]
        for name in stages
    ]
    rows.append(["calls of Python", *(f"{of['python']['calls']:,}" for of in runs)])
    rows += [
        [kind, *(f"{of['device'][kind]:,}" for of in runs)]
        for kind in ("launches", "copies", "waits")
    ]
    header = ["a warm default request", *(f"`{of['machine']['commit'][:10]}`" for of in runs)]
    note = f"\n{result['chunks']} chunks, {result['tokens']:,} tokens, {result['repaired']} rows repaired; "
    note += "the fastest of all repeats on a CPU that did other work, too, and computes as well; "
    note += "launches, copies and waits of a counted device.\n"
    return table(header, rows) + note + source(result, "host.json")


TABLES: Tables = {
    "host": ("host.json", host),
    "kernels": ("kernels.json", kernels),
    "ttft-cuda": ("ttft-llama-3.1-8b-cuda.json", ttft_cuda),
}
