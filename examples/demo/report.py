"""The demo's tables, for terminals of 100 columns and more."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from demo.run import DemoReport, Row
from kvrag.evaluate.estimate import human_bytes


def print_report(report: DemoReport, console: Console) -> None:
    """Print timings, answers and the store's size."""
    console.print()
    console.print(*headline(report.rows), sep="\n", highlight=False)
    console.print(timings(report.rows))
    doubt = report.machine.doubt(report.rows)
    if doubt:
        console.print(f"[yellow]{doubt}[/]", highlight=False)
    console.print(answers(report.rows))
    console.print(summary(report))


def headline(rows: list[Row]) -> list[str]:
    """Say what became of the answers, then of the time, and draw both medians to the first token as bars."""
    full = _median(row.full.ttft_ms for row in rows)
    ours = _median(row.answer.ttft_ms for row in rows)
    longest = max(full, ours)
    bars = [
        f"{name:<13}{'█' * max(1, round(50 * ms / longest))} {_ms(ms)}"
        for name, ms in (("full prefill", full), ("kvrag", ours))
    ]
    sooner = f"First token {_median(row.speedup for row in rows):.1f}× sooner."
    return [f"[bold]{line}[/bold]" for line in (correctness(rows), sooner)] + bars


def correctness(rows: list[Row]) -> str:
    """Say how many answers hold the fact that was asked for, on either side, and how many are the same word for word."""
    same = f"Same answer word for word: {sum(row.is_same for row in rows)} of {len(rows)}."
    hinted = [row for row in rows if row.question.hint]
    if not hinted:
        return f"{same} No facts were checked: these questions come without answers."
    ours = sum(row.question.is_met_by(row.answer.text) for row in hinted)
    full = sum(row.question.is_met_by(row.full_text) for row in hinted)
    return f"Facts right: {ours} of {len(hinted)} by kvrag, {full} of {len(hinted)} by full prefill. {same}"


def timings(rows: list[Row]) -> Table:
    """Milliseconds to the first token and where each prompt's KV came from, with medians."""
    table = Table(
        title="Time to the first token, and how the prompt's KV was made", title_justify="left"
    )
    table.add_column("#", justify="right", no_wrap=True)
    for name in (
        "full prefill",
        "kvrag",
        "its load",
        "ratio",
        "prompt",
        "reused",
        "repaired",
        "computed",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("how", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        made = row.answer
        counts = (
            made.prompt_tokens,
            made.cached_tokens,
            made.repaired_tokens,
            made.computed_tokens,
        )
        table.add_row(
            str(number),
            _ms(row.full.ttft_ms),
            _ms(made.ttft_ms),
            _ms(made.load_ms),
            f"{row.speedup:.1f}×",
            *map(str, counts),
            made.exactness,
        )
    table.add_section()
    table.add_row(
        "",
        _ms(_median(row.full.ttft_ms for row in rows)),
        _ms(_median(row.answer.ttft_ms for row in rows)),
        _ms(_median(row.answer.load_ms for row in rows)),
        f"{_median(row.speedup for row in rows):.1f}×",
        *(["", "", "", "", "median"]),
        style="bold",
    )
    return table


def answers(rows: list[Row]) -> Table:
    """Both answers of each question side by side."""
    table = Table(title="The answers", title_justify="left", show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("question", ratio=3)
    table.add_column("full prefill", ratio=4)
    table.add_column("kvrag", ratio=4)
    for number, row in enumerate(rows, start=1):
        # Text objects: what a model writes may look like rich's markup.
        table.add_row(
            str(number), Text(row.question.text), Text(row.full_text), Text(row.answer.text)
        )
    return table


def summary(report: DemoReport) -> RenderableType:
    """Say what the store holds and what a second run will find."""
    rows = report.rows
    warm = []
    if report.again is not None:
        found = f"{report.again.skipped} chunks found on disk, {report.again.stored} computed"
        warm = [f"A second run starts warm: {found}."]
    size = report.num_tokens * report.bytes_per_token
    read = _median(row.answer.loaded_tokens for row in rows) * report.bytes_per_token
    return Group(
        f"Read from disk per question: {human_bytes(read)}; the memory tier is off and the page cache was dropped.",
        f"KV of this corpus: {report.num_chunks} chunks, {report.num_tokens:,} tokens, {human_bytes(size)} on disk.",
        *warm,
    )


def _median(values: Iterable[float]) -> float:
    return float(median(values))


def _ms(value: float) -> str:
    return f"{value:,.0f} ms"
