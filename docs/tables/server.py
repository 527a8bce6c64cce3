"""Chats, and servers under load."""

from __future__ import annotations

import statistics

from .core import NOT_MEASURED, Result, Tables, source, table

SERVERS = {
    "kvrag": "kvrag",
    "full": "kvrag, reuse off",
    "transformers": "transformers serve",
    "transformers-batching": "transformers serve, continuous batching",
}


def chat(result: Result) -> str:
    """Set the turns of a chat over documents beside each other: what is computed, the first token's time, the divergence in turn 2."""
    rows, chats = [], result["chats"]
    for turn in range(len(chats[0])):
        each = [c[turn] for c in chats]

        def middle(name: str, what: str, each: list[Result] = each) -> float:
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


def load(result: Result) -> str:
    """Set the servers side by side at every level of load."""
    parts = {part: row for part, row in result["parts"].items() if part in SERVERS}
    levels = dict.fromkeys(_level(level) for row in parts.values() for level in row["levels"])
    found = {(_level(level), part): level for part, row in parts.items() for level in row["levels"]}
    rows = []
    for name, part in ((name, part) for name in levels for part in parts):
        if (level := found.get((name, part))) is None:
            continue
        times = [f"{level['ttft_s'][p]:.2f}" for p in ("p50", "p95")]
        times += [f"{level['gap_ms'][p]:.0f}" for p in ("p50", "p95")]
        rows.append([name, SERVERS[part], *times, f"{level['tokens_per_s']:.1f}"])
    header = ["load", "server", "first token, s: p50", "p95", "between pieces, ms: p50", "p95"]
    same = sum(level["equal"] for level in found.values())
    said = f"\n{result['prompts']} prompts out of {result['chunks']} chunks, "
    said += f"answers of at most {result['max_tokens']} tokens; {same} of "
    said += f"{sum(level['requests'] for level in found.values())} answers equal the same server's to one client. "
    agreed = (
        f"{name.replace('full', SERVERS['full'])} {same} of {of}"
        for name, (same, of) in result["agreement"].items()
    )
    said += f"Single answers that two servers have in common: {', '.join(agreed)}. "
    sizes = (f"{SERVERS[part]} {row['peak_bytes'] / 1e9:.2f} GB" for part, row in parts.items())
    said += f"Peak memory: {', '.join(sizes)}.\n"
    machine = {**result, "machine": parts["kvrag"]["machine"]}
    file = "load-qwen2.5-coder-0.5b.json"
    return table([*header, "tokens/s"], rows) + said + source(machine, file)


def load_figures(result: Result) -> str:
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


def _level(level: Result) -> str:
    return (
        f"{level['size']:g} client{'s' * (level['size'] > 1)}"
        if level["kind"] == "closed"
        else f"{level['size']:g}/s"
    )


TABLES: Tables = {
    "chat": ("chat.json", chat),
    "load-qwen-05b": ("load-qwen2.5-coder-0.5b.json", load),
    "load-figures": ("load.json", load_figures),
}
