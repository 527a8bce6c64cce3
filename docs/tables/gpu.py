"""Kernels and requests on a GPU."""

from __future__ import annotations

from statistics import median

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
    """Set what a request costs the host before recordings and now: counts, and the least times."""
    before = read("host-first.json")

    def least(of: Result, stage: str) -> str:
        return f"{min(run[stage] for run in of['runs']):,.1f}"

    def counts(kind: str, *, is_recorded: bool = False) -> list[str]:
        now = result["recorded"] if is_recorded else result["device"]
        return ["–" if is_recorded else f"{before['device'][kind]:,}", f"{now[kind]:,}"]

    calls = [f"{of['python']['calls']:,}" for of in (before, result)]
    rows = [
        ["calls of Python, on a CPU", *calls],
        ["CPU time, ms, the least", least(before, "CPU time"), least(result, "CPU time")],
        ["planning, ms, the least", least(before, "plan"), least(result, "plan")],
        ["planning alone, ms, the median", "–", f"{median(result['plan_alone_ms']):.1f}"],
        ["launches, without recordings", *counts("launches")],
        ["copies", *counts("copies")],
        ["waits of the host", *counts("waits")],
        ["launches, with recordings", *counts("launches", is_recorded=True)],
        ["of them replays", "–", f"{result['recorded']['kinds']['launch: replay']}"],
        ["calls of Python, with recordings", "–", f"{result['recorded']['python']['calls']:,}"],
    ]
    note = f"\nA prompt of {result['tokens']:,} tokens in {result['chunks']} chunks, the default repair. "
    note += f"Before: commit {before['machine']['commit'][:10]}, in `benchmarks/results/host-first.json`.\n"
    return table(["a warm request", "before", "now"], rows) + note + source(result, "host.json")


TABLES: Tables = {
    "host": ("host.json", host),
    "kernels": ("kernels.json", kernels),
    "ttft-cuda": ("ttft-llama-3.1-8b-cuda.json", ttft_cuda),
}
