"""HTML page about an evaluation: tables and plots in a single self-contained file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrag.evaluate.answers import Compared

_PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
td, th { border: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top }
.lost { background: #fde8e6 } .won { background: #e6f4e6 }
svg { width: 100%; height: auto } text { font: 12px system-ui; fill: #444 }
@media (prefers-color-scheme: dark) {
body { color: #ddd; background: #181818 } td, th { border-color: #444 } text { fill: #bbb }
.lost { background: #4a2320 } .won { background: #21401f } }
</style>
<h1>Reuse beside full prefill</h1><p>$title</p>
<table>$totals</table>
<h2>Time to the first token</h2><p>A point is a question. Below the line, reuse is sooner.</p>$times
<h2>How far the answers differ</h2>
<p>KL from full prefill, nats per token of its answer; questions in order of it.</p>$divergence
<h2>Answers</h2>
<table><tr><th>Question<th>Right<th>Full prefill<th>Reuse<th>KL<th>Result</tr>$rows</table></html>
""")
_WIDTH = 640
_HEIGHT = 300
_EDGE = 50


def page(title: str, totals: Mapping[str, str], rows: Sequence[Compared]) -> str:
    """Return the page as HTML."""
    return _PAGE.substitute(
        title=escape(title),
        totals="".join(
            f"<tr><th>{escape(name)}<td>{escape(value)}</tr>" for name, value in totals.items()
        ),
        times=_times(rows),
        divergence=_divergence(rows),
        rows="".join(_row(row) for row in sorted(rows, key=lambda row: (not row.is_lost, -row.kl))),
    )


def _row(row: Compared) -> str:
    if row.is_lost:
        result = "lost"
    elif row.is_won:
        result = "won"
    elif row.is_same:
        result = "same answer"
    else:
        result = "other words"
    cells = (row.question, " / ".join(row.answers), row.full, row.reuse, f"{row.kl:.4f}", result)
    return (
        f'<tr class="{result.split()[0]}">{"".join(f"<td>{escape(cell)}" for cell in cells)}</tr>'
    )


def _times(rows: Sequence[Compared]) -> str:
    most = max(max(row.full_ttft_ms, row.reuse_ttft_ms) for row in rows)
    points = [(row.full_ttft_ms / most, row.reuse_ttft_ms / most, row.question) for row in rows]
    ends = [_place(0, 0), _place(1, 1)]
    line = (
        f'<line x1="{ends[0][0]:.1f}" y1="{ends[0][1]:.1f}" x2="{ends[1][0]:.1f}" '
        f'y2="{ends[1][1]:.1f}" stroke="#999"/>'
    )
    return _plot(f"{line}{_dots(points)}", "full prefill, ms", "reuse, ms", most, most)


def _divergence(rows: Sequence[Compared]) -> str:
    ordered = sorted(rows, key=lambda row: row.kl)
    most = max(ordered[-1].kl, 1e-6)
    points = [
        ((n + 1) / len(ordered), row.kl / most, row.question) for n, row in enumerate(ordered)
    ]
    return _plot(_dots(points), "questions", "KL, nats", len(ordered), most)


def _place(x: float, y: float) -> tuple[float, float]:
    return _EDGE + x * (_WIDTH - 2 * _EDGE), _HEIGHT - _EDGE - y * (_HEIGHT - 2 * _EDGE)


def _dots(points: Sequence[tuple[float, float, str]]) -> str:
    placed = ((*_place(x, y), name) for x, y, name in points)
    return "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" '
        f'fill="#2a6fbb"><title>{escape(n)}</title></circle>'
        for x, y, n in placed
    )


def _plot(inside: str, across: str, up: str, most_x: float, most_y: float) -> str:
    (left, bottom), (right, top) = _place(0, 0), _place(1, 1)
    axes = f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#999"/>'
    names = (
        f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{across}</text><text x="{left}" '
        f'y="{top - 10}">{up}</text>'
    )
    ends = (
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{most_x:,.4g}</text>'
        f'<text x="{left - 6}" y="{top + 4}" text-anchor="end">{most_y:,.3g}</text>'
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{axes}{names}{ends}{inside}</svg>'
