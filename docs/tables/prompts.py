"""Token ids at seams, and prompts beyond the context window."""

from __future__ import annotations

import json

from .core import Result, Tables, source, table


def seams(result: Result) -> str:
    """Say where segment-wise ids differ from the whole text's, by separator."""
    said = []
    for name, row in result["separators"].items():
        changed = f"{row['changed_tokens'] / row['tokens']:.2%} of the tokens"
        kl = f", KL of the gold answer {row['kl_gold']:.3f}" if "cases" in row else ""
        said.append(f"{name} `{json.dumps(row['separator'])}` changes {changed}{kl}")
    return "; ".join(said) + ".\n" + source(result, "seams.json")


def slide(result: Result) -> str:
    """Perplexity in a small window, by method."""
    rows = [
        [name, f"{row['perplexity']:.2f}", f"{row['tokens_per_s']:.0f}"]
        for name, row in result["methods"].items()
    ]
    note = f"\n{result['tokens']:,} tokens, a window of {result['window']:,}, {result['sinks']} sinks.\n"
    return table(["method", "perplexity", "tokens/s"], rows) + note + source(result, "slide.json")


TABLES: Tables = {
    "seams": ("seams.json", seams),
    "slide": ("slide.json", slide),
}
