"""vLLM with repaired chunks, beside vLLM alone and kvrag's own server."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from .core import NOT_MEASURED, Result, Tables, source, table

FILE = "vllm.json"
SERVERS = {
    "blended": "vLLM with the connector",
    "full": "vLLM alone",
    "kvrag serve": "`kvrag serve`",
}
WAYS = {"full": "vLLM alone", "stitch": "blended in any case", "auto": "`auto`"}
STAGES = ("load", "stitch", "select", "repair", "write", "vLLM")


def ttft(part: Result) -> str:
    """Seconds to the first token by mode and length, and the stages of a blended prompt."""
    rows = []
    for size in _sizes(part):
        for mode, row in size["summary"].items():
            times = f"{row['wall_s']:.2f} ({_between(row['wall_s_ci'], '.2f')})"
            ratio = f"**{row['ratio']:.1f}×** ({_between(row['ratio_ci'], '.1f')})"
            stages = row["stages_ms"]
            blended = [f"{stages[name]:.0f}" if name in stages else "–" for name in STAGES]
            if "repair" not in stages:
                blended = ["–"] * len(STAGES)
            rows.append([f"{row['tokens']:,.0f}", mode, times, ratio, *blended])
    header = ["tokens", "", "first token, s", "vLLM alone over it", *(f"{s}, ms" for s in STAGES)]
    counts = " and ".join(str(len(size["prompts"])) for size in _sizes(part))
    return table(header, rows) + f"\nMedians with 95% intervals of {counts} prompts.\n"


def auto(part: Result) -> str:
    """Set what ``auto`` takes beside the better of the two ways, where some chunks are stored."""
    rows = []
    for cell in part["cells"]:
        wall_s, prompts = cell["wall_s"], cell["prompts"]
        seconds = [f"{wall_s[way]:.2f}" if way in wall_s else "–" for way in WAYS]
        chosen = [row["auto"].get("exactness", "full") == "repaired" for row in prompts]
        better = min(wall_s[way] for way in WAYS if way in wall_s and way != "auto")
        tokens = statistics.median(row["full"]["tokens"] for row in prompts)
        said = [f"{sum(chosen)} of {len(chosen)}", f"**{wall_s['auto'] / better:.2f}×**"]
        rows.append([f"{tokens:,.0f}", f"{cell['share']:.0%}", *seconds, *said])
    header = ["tokens", "stored", *(f"{name}, s" for name in WAYS.values())]
    return table([*header, "blended by `auto`", "`auto` over the better"], rows) + (
        f"\nMedians of {len(part['cells'][0]['prompts'])} prompts.\n"
    )


def equality(part: Result) -> str:
    """Say how far blended prompts are from kvrag's own engine."""
    rows = part["prompts"]
    tokens = [row["tokens"] for row in rows]
    return (
        f"Of {len(rows)} blended prompts of {min(tokens):,} to {max(tokens):,} tokens, the "
        f"{part['top']} largest log-probabilities of the first token differ by at most "
        f"{part['max_difference']:.0e} from those of kvrag's engine with the same repair (goal: "
        f"{part['within']:.0e}), and {part['equal_answers']} greedy answers are equal.\n"
    )


def throughput(part: Result) -> str:
    """Set the servers side by side."""
    base = part["servers"]["full"]["requests_per_s"]
    rows = []
    for name, row in part["servers"].items():
        rates = [f"{row['requests_per_s']:.3f}", f"**{row['requests_per_s'] / base:.1f}×**"]
        first = [f"{row['ttft_s'][p]:.1f}" for p in ("p50", "p95")]
        rows.append([SERVERS[name], *rates, f"{row['tokens_per_s']:.1f}", *first])
    header = ["", "requests/s", "over vLLM alone", "tokens/s", "first token, s: p50", "p95"]
    said = f"\n{part['clients']} clients, {part['requests']} prompts.\n"
    return table(header, rows) + said


def streams(part: Result) -> str:
    """Say how long running streams wait for a token while prompts arrive."""
    rows = []
    for row in part["windows"]:
        gaps = [f"{row['gap_ms'][name]:,.0f}" for name in ("p50", "p99", "max")]
        arrived = str(len(row["arrived"]) or "none")
        rows.append([SERVERS[row["mode"]], arrived, *gaps, f"{row['tokens_per_s']:.1f}"])
    header = ["", "arrivals", "between tokens, ms: p50", "p99", "max", "tokens/s"]
    said = f"\n{part['streams']} streams, watched for {part['window_s']:.0f} s; "
    said += f"a prompt arrives every {part['period_s']:.0f} s.\n"
    return table(header, rows) + said


def memory(part: Result) -> str:
    """Set the engines' memory side by side."""
    rows = []
    for name, row in part["engines"].items():
        sizes = [
            f"{row[when][what] / 1e9:.2f}"
            for what, when in (("rss", "started"), ("rss", "answered"), ("peak", "answered"))
        ]
        rows.append([name, *sizes])
    header = ["engine", "resident after its start, GB", "after an answer, GB", "peak, GB"]
    said = f"\nThe weights have {part['weight_bytes'] / 1e9:.2f} GB in float32.\n"
    return table(header, rows) + said


def _sizes(part: Result) -> list[Result]:
    return [each for each in part.values() if isinstance(each, dict) and "summary" in each]


def _between(ends: list[float], form: str) -> str:
    return " to ".join(f"{end:{form}}" for end in ends)


def _of(name: str, make: Callable[[Result], str], result: Result) -> str:
    """Make the table of a part, with its source."""
    part = result["parts"].get(name)
    if part is None:
        return NOT_MEASURED
    return make(part) + source({**result, "machine": part["machine"]}, FILE)


def gpu(result: Result) -> str:
    """Milliseconds to the first token on a GPU, by length."""
    rows = []
    for row in result["rows"]:
        ratio = row["full_ms"] / row["blended_ms"]
        stages = [f"{row['stages_ms'].get(name, 0)}" for name in STAGES[:-1]]
        times = [f"{row['full_ms']:,}", f"{row['blended_ms']}", f"**{ratio:.2f}×**"]
        rows.append([f"{row['tokens']:,}", *times, f"{row['repaired_rows']:,}", *stages])
    header = ["tokens", "vLLM alone, ms", "blended, ms", "vLLM alone over it", "repaired rows"]
    header += [f"{name}, ms" for name in STAGES[:-1]]
    said = f"\nOne run; {result['kept']}.\n"
    return table(header, rows) + said + source(result, "vllm-gpu.json", "the figures")


PARTS = {
    "ttft": ttft,
    "auto": auto,
    "equality": equality,
    "throughput": throughput,
    "streams": streams,
    "memory": memory,
}
TABLES: Tables = {
    **{f"vllm-{name}": (FILE, partial(_of, name, make)) for name, make in PARTS.items()},
    "vllm-gpu": ("vllm-gpu.json", gpu),
}
