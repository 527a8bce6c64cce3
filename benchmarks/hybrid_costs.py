"""What reuse would cost in hybrids, by arithmetic on the shapes of public models: bytes of a chunk, operations, and times.

    python benchmarks/hybrid_costs.py

``hybrid_shapes.json`` holds the shapes and where they are from. Nothing is measured: times are bytes through a stated bandwidth and
operations at a stated rate. Writes ``results/hybrid_costs.json``, which docs/support.md shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import parser, write_result

Shape = dict[str, Any]

CHUNK = 512
"""Tokens of a chunk."""
CHUNKS, QUESTION, REPAIRED = 8, 64, 0.15
"""The prompt of the last columns: chunks, tokens of the question, and the share of rows that is computed anew."""
ROW, STATE = 2, 4
"""Bytes of a number: keys, values and inputs in bfloat16; states, and so A and B, in float32, as transformers keeps them."""
BANDWIDTHS = {"NVMe": 3e9, "memory or PCIe": 12e9}
RATES = {"CPU": 0.2e12, "laptop GPU": 20e12, "H100": 400e12}
FROM = {"CPU": "NVMe", "laptop GPU": "NVMe", "H100": "memory or PCIe"}
"""Where a device's chunks come from, in the tables."""


def conv_width(shape: Shape) -> int:
    """Channels of a linear layer's convolution: what enters it is what has to be kept of a row."""
    if shape["rule"] == "convolution":
        return int(shape["hidden"])
    values = shape["value_heads"] * shape["value_dim"]
    keys = shape["key_heads"] if shape["rule"] == "delta" else shape["groups"]
    return int(values + 2 * keys * shape["key_dim"])


def kv_bytes(shape: Shape) -> int:
    """Keys and values of one token in the attention layers."""
    return int(shape["attention"] * 2 * shape["kv_heads"] * shape["head_dim"] * ROW)


def row_bytes(shape: Shape) -> int:
    """Inputs of one token in the linear layers: what enters the convolution, and the gates."""
    gates = {"delta": 2, "decay": 1, "convolution": 0}[shape["rule"]] * shape.get("value_heads", 0)
    return int(shape["linear"] * (conv_width(shape) + gates) * ROW)


def map_bytes(shape: Shape, rows: int = CHUNK) -> dict[str, int]:
    """A and B of a chunk, and the rows beside its seams.

    A is one number a head where the state only decays. For the delta rule it is the smaller of a matrix, and of its WY factors: two
    vectors of the key's width for every row.
    """
    seams = 2 * (shape["kernel"] - 1) * conv_width(shape) * ROW * shape["linear"]
    if shape["rule"] == "convolution":
        return {"a": 0, "b": 0, "seams": seams}
    heads, width = shape["value_heads"], shape["key_dim"]
    dense, factors = width * width, 2 * rows * width
    a = min(dense, factors) if shape["rule"] == "delta" else 1
    layers = shape["linear"] * heads * STATE
    return {"a": layers * a, "b": layers * width * shape["value_dim"], "seams": seams}


def weights(shape: Shape) -> int:
    """Weights that a token meets in the layers: experts that are not chosen, embeddings and the head are not counted."""
    hidden = shape["hidden"]
    query = shape["heads"] * shape["head_dim"]
    attention = hidden * (query * (3 if shape.get("gated") else 2))
    attention += hidden * 2 * shape["kv_heads"] * shape["head_dim"]
    if shape["rule"] == "convolution":
        linear = 4 * hidden * hidden
    else:
        values = shape["value_heads"] * shape["value_dim"]
        gates = (2 if shape["rule"] == "delta" else 1) * shape["value_heads"]
        linear = hidden * (conv_width(shape) + values + gates) + values * hidden
    layers = shape.get("mlp_layers", shape["attention"] + shape["linear"])
    mlp = layers * 3 * hidden * shape["mlp"]
    return int(shape["attention"] * attention + shape["linear"] * linear + mlp)


def scan_operations(shape: Shape) -> int:
    """Operations of the recurrence for one token: what runs over all rows where their inputs are kept."""
    if shape["rule"] == "convolution":
        return 2 * shape["kernel"] * shape["linear"] * int(shape["hidden"])
    state = shape["key_dim"] * shape["value_dim"] * shape["value_heads"]
    times = 6 if shape["rule"] == "delta" else 4
    return int(shape["linear"] * (times * state + 2 * shape["kernel"] * conv_width(shape)))


def operations(shape: Shape, rows: int, before: int = 0) -> int:
    """Operations of computing so many rows behind so many others, the head not counted."""
    pairs = rows * before + rows * rows // 2
    attention = shape["attention"] * 4 * pairs * shape["heads"] * shape["head_dim"]
    return 2 * rows * weights(shape) + attention + rows * scan_operations(shape)


def hybrid(shape: Shape) -> dict[str, Any]:
    """Work out one row of the table: bytes of a chunk in every form, and times of loading and of computing."""
    maps = map_bytes(shape)
    kv, rows = CHUNK * kv_bytes(shape), CHUNK * row_bytes(shape)
    forms = {"maps": kv + sum(maps.values()), "rows": kv + rows}
    compute = operations(shape, CHUNK)
    return {
        "name": shape["name"],
        "source": shape["source"],
        "weights": weights(shape),
        "kv": kv,
        **maps,
        "rows": rows,
        "operations": compute,
        "load_ms": {
            form: {name: 1e3 * size / rate for name, rate in BANDWIDTHS.items()}
            for form, size in forms.items()
        },
        "compute_ms": {name: 1e3 * compute / rate for name, rate in RATES.items()},
        "scan_share": CHUNK * scan_operations(shape) / compute,
        "state": state_bytes(shape),
    }


def state_bytes(shape: Shape) -> int:
    """The state at one chunk's boundary, which exact reuse of prefixes keeps beside keys and values."""
    seams = (shape["kernel"] - 1) * conv_width(shape) * ROW * shape["linear"]
    return map_bytes(shape)["b"] + int(seams)


def other(shape: Shape) -> dict[str, Any]:
    """Bytes of a token, and the time to the first token of one prompt: loaded and partly repaired, or computed."""
    token = ROW * sum(layer["count"] * layer["numbers"] for layer in shape["layers"])
    prompt, active = CHUNK * CHUNKS, 2e9 * shape["active"]
    again = REPAIRED * prompt + QUESTION
    load = {n: 1e3 * prompt * token / BANDWIDTHS[where] for n, where in FROM.items()}
    return {
        "name": shape["name"],
        "source": shape["source"],
        "token": token,
        "load_ms": load,
        "full_ms": {n: 1e3 * (prompt + QUESTION) * active / r for n, r in RATES.items()},
        "reuse_ms": {n: load[n] + 1e3 * again * active / r for n, r in RATES.items()},
    }


def measure(shapes: dict[str, list[Shape]]) -> dict[str, Any]:
    """Work out both tables."""
    return {
        "assumed": {
            "chunk": CHUNK,
            "chunks": CHUNKS,
            "question": QUESTION,
            "repaired": REPAIRED,
            "bandwidths": BANDWIDTHS,
            "rates": RATES,
            "from": FROM,
        },
        "hybrids": [hybrid(shape) for shape in shapes["hybrids"]],
        "others": [other(shape) for shape in shapes["others"]],
    }


def main() -> None:
    """Work out and write the result."""
    options = parser(__doc__).parse_args()
    shapes = json.loads(Path(__file__).with_name("hybrid_shapes.json").read_text())
    result = measure(shapes)
    for row in result["hybrids"]:
        print(
            f"{row['name']:20s} weights {row['weights'] / 1e9:5.2f}e9 KV {row['kv'] / 1e6:6.2f} MB "
            f"A {row['a'] / 1e6:6.2f} B {row['b'] / 1e6:6.2f} rows {row['rows'] / 1e6:7.2f} "
            f"load {row['load_ms']['maps']['NVMe']:6.1f} / {row['load_ms']['rows']['NVMe']:6.1f} ms "
            + " ".join(f"{n} {ms:8.1f}" for n, ms in row["compute_ms"].items())
        )
    for row in result["others"]:
        print(row["name"], row["token"], row["load_ms"], row["full_ms"], row["reuse_ms"])
    print(write_result("hybrid_costs", result, options.out))


if __name__ == "__main__":
    main()
