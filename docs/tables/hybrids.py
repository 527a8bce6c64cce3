"""Reuse in hybrids: exactness, costs and answers; and what other models' KV takes."""

from __future__ import annotations

from .core import Result, Tables, machine_of, table

KINDS = {"one": "one fact", "two": "two facts joined", "carried": "carried over a seam"}
MODELS = {"delta": "gated delta rule", "mamba": "Mamba-2"}


def hybrid_exact(result: Result) -> str:
    """Set composed states beside transformers' own, and reuse beside full prefill."""
    rows = []
    for name, row in result["states"].items():
        cells = [row["error"] / row["largest"], row["without_first"] / row["largest"]]
        rows.append([f"`{name}`", str(row["layers"]), *(f"{cell:.0e}" for cell in cells)])
    said = table(["family", "layers with a state", "composed", "without the first chunk"], rows)
    said += (
        "\nLargest differences from the state of transformers' forward, of the largest entry.\n\n"
    )
    kinds = list(next(iter(result["reuse"].values())))
    rows = [
        [kind, *(f"{errors[kind]:.0e}" for errors in result["reuse"].values())] for kind in kinds
    ]
    said += table(["computed anew", *(MODELS[name] for name in result["reuse"])], rows)
    return said + "\nLargest differences of logits from full prefill; random models, float32.\n"


def hybrid_costs(result: Result) -> str:
    """Set bytes and loading of a chunk beside computing it; bold where loading takes longer."""
    rows = []
    for row in result["hybrids"]:
        maps = row["a"] + row["b"] + row["seams"]
        sizes = [f"{size / 1e6:.1f}" for size in (row["kv"], maps, row["rows"], row["state"])]
        times = []
        for device, compute in row["compute_ms"].items():
            loads = []
            for form in ("maps", "rows"):
                load = row["load_ms"][form][result["assumed"]["from"][device]]
                shown = f"{load:.0f}" if load >= 1 else f"{load:.1f}"
                loads.append(f"**{shown}**" if load > compute else shown)
            times.append(f"{compute:,.0f}: {', '.join(loads)}")
        rows.append([row["name"], *sizes, f"{row['operations'] / 1e12:.2f}", *times])
    header = ["model", "KV", "A, B and seams", "inputs of rows", "a prefix's state", "TFLOP"]
    header += [f"{name}, ms" for name in result["hybrids"][0]["compute_ms"]]
    chunk = result["assumed"]["chunk"]
    said = f"\nA chunk of {chunk} tokens: MB, operations, and ms as computing: loading KV with A and B, and KV with inputs. "
    return table(header, rows) + said + _assumed(result)


def _assumed(result: Result) -> str:
    assumed = result["assumed"]
    rates = ", ".join(f"{name} {rate / 1e12:g} TFLOP/s" for name, rate in assumed["rates"].items())
    bandwidths = ", ".join(f"{name} {b / 1e9:g} GB/s" for name, b in assumed["bandwidths"].items())
    where = ", ".join(f"{name} from {tier}" for name, tier in assumed["from"].items())
    said = f"Arithmetic, nothing measured: {rates}; {bandwidths}; {where}; "
    said += "active parameters as published; shapes, their sources and the shapes that were not checked "
    return said + "against a config are in `benchmarks/hybrid_shapes.json`.\n"


def kv_of_models(result: Result) -> str:
    """List bytes of a token, and times to the first token of one prompt."""
    assumed = result["assumed"]
    rows = []
    for row in result["others"]:
        cells = [f"{row['token'] / 1024:.1f}", f"{row['load_ms']['CPU']:,.0f}"]
        for device, full in row["full_ms"].items():
            cells.append(f"{full:,.0f} → {row['reuse_ms'][device]:,.0f}")
        rows.append([row["name"], *cells])
    header = ["model", "KiB per token", "loading from NVMe, ms"]
    header += [f"{name}, ms" for name in result["others"][0]["full_ms"]]
    said = f"\nA prompt of {assumed['chunks']} chunks of {assumed['chunk']} tokens and a question of {assumed['question']}, "
    said += f"computed in full → loaded with {assumed['repaired']:.0%} of rows repaired. "
    return table(header, rows) + said + _assumed(result)


def hybrid_answers(result: Result) -> str:
    """Share of right answers and divergence by way of prefill."""
    said = ""
    for model, made in result["models"].items():
        ways = made["ways"]
        rows = [
            [way, *(_cell(row[kind]) for kind in KINDS)]
            for way, row in ways.items()
            if way != "all rows"
        ]
        trained = made["training"]
        counts = ", ".join(str(ways["full"][kind]["prompts"]) for kind in KINDS)
        said += f"**{MODELS[model]}**: {trained['parameters']:,} parameters, "
        said += f"trained on {trained['prompts']:,} prompts; {counts} questions.\n\n"
        said += table(["prefill", *KINDS.values()], rows) + "\n"
    return (
        said
        + "Right answers, 95% bootstrap interval; the same answers as full prefill's; mean KL from it.\n"
        + machine_of(result, "hybrid.json")
    )


def _cell(row: Result) -> str:
    low, high = row["right_interval"]
    kl = f"{row['kl']:.2f}" if row["kl"] >= 0.005 else f"{row['kl']:.0e}" if row["kl"] else "0"
    return f"{row['right']:.0%} ({low:.0%} to {high:.0%}); {row['same']:.0%}; KL {kl}"


TABLES: Tables = {
    "hybrid-exact": ("hybrid.json", hybrid_exact),
    "hybrid-answers": ("hybrid.json", hybrid_answers),
    "hybrid-costs": ("hybrid_costs.json", hybrid_costs),
    "kv-of-models": ("hybrid_costs.json", kv_of_models),
}
