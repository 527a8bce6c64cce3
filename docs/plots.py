"""Draw docs/plots/*.svg, light and dark, from benchmarks/results/*.json; ``--check`` only compares, and needs no matplotlib.

Each file holds the data that it shows as a comment, which is what ``--check`` compares: another version of matplotlib may write other
lines for the same plot. No time stamp and no random id stands in them, so drawing twice gives the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDER = ROOT / "docs" / "plots"
DATA = re.compile(r"<!-- data: (.*?) -->")

BLUE, ORANGE = "#0072B2", "#E69F00"
"""Okabe and Ito's colours, which colour-blind readers tell apart; all are readable on white and on near-black."""
THEMES = {
    "light": {"ink": "#1f2328", "grid": "#d0d7de", "blue": BLUE},
    "dark": {"ink": "#e6edf3", "grid": "#3d444d", "blue": "#4da3ff"},  # theirs is too dark on black
}

LOADED = {"kvrag": "kvrag", "full": "kvrag, reuse off", "transformers": "transformers serve"}

Data = dict[str, Any]


def result(name: str) -> Data | None:
    """Read a committed result; ``None`` where there is none yet."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


# -- what is shown -----------------------------------------------------------------------------------------------------


def load() -> Data | None:
    """TTFT, median and p95, by the number of clients that ask again as soon as they are answered."""
    found = result("load")
    if found is None:
        return None
    return {
        name: [
            [row["size"], row["ttft_s"]["p50"], row["ttft_s"]["p95"]]
            for row in found["parts"][part]["levels"]
            if row["kind"] == "closed"
        ]
        for part, name in LOADED.items()
        if part in found["parts"]
    }


def lost(task: str) -> Callable[[], Data | None]:
    """Return what reads the share that each method loses of a task, and the time that it takes."""

    def shown() -> Data | None:
        sys.path.append(str(ROOT))
        from docs.tables import facts

        return None if result(f"facts/{facts.TOGETHER}") is None else facts.lost_by_time(task)

    return shown


# -- how it is drawn ---------------------------------------------------------------------------------------------------


def draw_load(axes: Any, data: Data, theme: dict[str, str]) -> None:
    """Lines by clients on logarithmic axes: p95, and the median thin below it."""
    for (name, line), color, marker in zip(
        data.items(), (BLUE, theme["ink"], ORANGE), "osv", strict=False
    ):
        clients, median, p95 = zip(*line, strict=True)
        axes.plot(clients, p95, color=color, marker=marker, ms=5, lw=1.5, label=f"{name}, p95")
        axes.plot(clients, median, color=color, lw=0.9, ls="--", label=f"{name}, median")
    axes.set(xscale="log", yscale="log", xlabel="clients", ylabel="time to first token, s")
    ticks = sorted({x for line in data.values() for x, *_ in line})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    legend(axes, theme, loc="upper left")


def draw_lost(axes: Any, data: Data, theme: dict[str, str]) -> None:
    """Draw a point of each method, its interval thin; kvrag's own are filled."""
    for (name, (time, share, low, high)), marker in zip(data.items(), "osvDPX^*h", strict=False):
        color = theme["blue"] if name.startswith("kvrag") else theme["ink"]
        face = color if name.startswith("kvrag") else "none"
        axes.plot([time, time], [low, high], color=color, lw=0.6)
        axes.plot(time, share, marker, color=color, mfc=face, ms=7, label=name.replace("`", ""))
    axes.set(xlabel="processor time to the first token, share of a full prefill's")
    axes.set(ylabel="lost of what full prefill has right", xlim=(0, None), ylim=(-0.03, 1))
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    legend(axes, theme, loc="center left", bbox_to_anchor=(1, 0.5))


def legend(axes: Any, theme: dict[str, str], **options: Any) -> None:
    """Write a legend without a frame."""
    axes.legend(frameon=False, fontsize=9, labelcolor=theme["ink"], **options)


PLOTS: dict[str, tuple[Callable[[], Data | None], Callable[[Any, Data, dict[str, str]], None]]] = {
    "load": (load, draw_load),
    "lost-hotpotqa": (lost("hotpotqa"), draw_lost),
}


def svg(name: str, data: Data, theme: str) -> str:
    """Draw one plot, with its data as a comment."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    colors = THEMES[theme]
    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
        colors["ink"],
    )
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 10,
        **ink,
    }
    style |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": colors["grid"],
    }
    style |= {
        "grid.linewidth": 0.5,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
    }
    with mpl.rc_context(style):
        figure, axes = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
        PLOTS[name][1](axes, data, colors)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    head, mark, rest = out.getvalue().replace(BLUE.lower(), colors["blue"]).partition("<svg ")
    shown = json.dumps(data, separators=(",", ":"))
    return f"{head}<!-- data: {shown} -->\n{mark}{rest}"


def main() -> int:
    """Draw, or compare with ``--check``."""
    stale = []
    for name, (read, _) in PLOTS.items():
        data = read()
        for theme in THEMES if data is not None else ():
            path = FOLDER / f"{name}-{theme}.svg"
            found = DATA.search(path.read_text()) if path.exists() else None
            if not found or json.loads(found[1]) != json.loads(json.dumps(data)):
                stale.append(path.name)
            if "--check" not in sys.argv:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(svg(name, data, theme))
    print("stale: " + ", ".join(stale) if stale else "plots are in step")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
