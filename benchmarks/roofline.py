"""What time to first token could be on a GPU, by arithmetic: bytes, FLOPs and the host's work of each stage beside a full prefill.

Predictions, not measurements: a first run is compared with them (docs/gpu.md). Each schedule changes one more thing: the first is the
engine before it was made ready for a device, :data:`TODAY` is the engine as it is, and the last is what 20 times the speed of a full
prefill would need. ``python roofline.py`` writes
``results/roofline.json``; it needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

CHUNK, SUFFIX, GLUE = 512, 64, 2
"""Tokens of a chunk, of the question, and between two chunks: all but the first are computed in every request."""
TOKENS, WIRES, RATIOS = (
    (6000, 8192, 16384, 31000, 32768),
    ("bf16", "int8", "int4", "device"),
    (0.03, 0.10),
)
"""``device``: the accelerator's own tier, where nothing comes over the link."""


@dataclass(frozen=True)
class Shape:
    """A model's shape, as in its config."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def parameters(self) -> int:
        """Weights of the linear layers; embeddings and the head of the model cost nothing that counts here."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    def attention_flop(self, visible: float) -> float:
        """FLOPs of attention in all layers, where the rows see so many keys together."""
        return 4 * self.heads * self.dim * self.layers * visible

    def kv_bytes(self, tokens: int, wire: str = "bf16") -> float:
        """Bytes of stored KV, scales included: as docs/quantised.md keeps them in chunks of :data:`CHUNK`."""
        d = self.dim
        per_head = {
            "bf16": 4 * d,
            "int8": 2 * d + 2 + 4 * d / CHUNK,
            "int4": d + 4 * d / 32 + 2 * d / 32,
            "device": 0,
        }
        return tokens * self.layers * self.kv_heads * per_head[wire]


SHAPES = (
    Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128),
    Shape("Qwen2.5-3B", 2048, 11008, 36, 16, 2, 128),
)


@dataclass(frozen=True)
class Device:
    """Rates of a device: TFLOP/s of linear layers, of the full prefill's attention, of repaired rows' attention and of float32; GB/s.

    ``copy`` counts what is read and written in the device's memory, ``link`` what comes from pinned memory of the host.
    """

    name: str
    linear: float
    prefill: float
    attention: float
    float32: float
    copy: float
    link: float
    source: str


SUSTAINED = 0.75  # assumed: linear layers of a model, as a share of an 8192³ matmul
LINK = 0.78  # assumed: what copies from pinned memory reach of the data sheet's 64 GB/s (PCIe 5) or 32 GB/s (PCIe 4)
HOPPER = "matmul (8192³, bf16, random data) and copy: measured elsewhere; prefill's attention: cuDNN at 16k, FlashAttention-3 paper; "
HOPPER += "repaired rows' attention: the kernel's target; float32 and link: data sheet"
H100 = Device("H100", 798 * SUSTAINED, 539, 500, 67, 3000, 64 * LINK, HOPPER)
H200 = Device("H200", 788 * SUSTAINED, 539, 500, 67, 4300, 64 * LINK, HOPPER)
MMA = replace(H200, name="H200, mma kernel", attention=300.0)
RTX_4090 = Device(
    "RTX 4090", 124, 124, 124, 82.6, 1008, 32 * LINK, "data sheet, of 165.2 TFLOP/s the same share"
)
DEVICES = (H100, H200, MMA, RTX_4090)


@dataclass(frozen=True)
class Schedule:
    """How a request runs. Times of the host are estimates: of the source's number of launches, and of runs on a CPU."""

    name: str
    ranges: int = 0  # of layers, into which a chunk's copy is cut; 0: a copy for each tensor
    row_plan_ms: float = 0.15  # a chunk: ten operations and two synchronisations
    is_shift_fast: bool = False  # the residual shift in 16-bit on tensor cores, not in float32
    is_pipelined: bool = False
    probed: float = 0.8  # share of the layers whose KV must be there before rows are chosen
    plan_us: float = 0.9  # a token: rendering, tokenising, finding chunks


COPY_MS = 0.01  # the host's part of one copy
LAYER_MS = 0.5  # the host's part of one layer of a forward
STEPS_MS = 64 * 0.1  # choosing rows in 64 steps of a dozen launches
SCHEDULES = [Schedule("tensor by tensor")]
for name, change in {
    "+ copies of 4 MiB, rows planned at once": {"ranges": 16, "row_plan_ms": 0.01},
    "+ residual shift on tensor cores": {"is_shift_fast": True},
    "+ copies beside computing: today": {"is_pipelined": True},
    "+ probe of the first quarter of the layers": {"probed": 0.25},
    "+ rows known when the prompt comes": {"probed": 0.0},
    "+ a plan in a ninth of the time": {"plan_us": 0.1},
}.items():
    SCHEDULES.append(replace(SCHEDULES[-1], name=name, **change))  # type: ignore[arg-type]
TODAY = SCHEDULES[3]


@dataclass(frozen=True)
class Work:
    """What a stage does: FLOPs by kind, bytes read and written on the device, bytes over the link, and the host's milliseconds."""

    flop: float = 0.0
    attention_flop: float = 0.0
    float32_flop: float = 0.0
    device_bytes: float = 0.0
    link_bytes: float = 0.0
    host_ms: float = 0.0

    def ms(self, on: Device) -> float:
        """Milliseconds, where FLOPs of several kinds take turns and everything else runs beside them."""
        computing = (
            self.flop / on.linear
            + self.attention_flop / on.attention
            + self.float32_flop / on.float32
        )
        moving = max(self.device_bytes / on.copy, self.link_bytes / on.link)
        return max(computing / 1e9, moving / 1e6, self.host_ms)


def full_prefill_ms(shape: Shape, tokens: int, on: Device) -> float:
    """Milliseconds of a causal prefill of the whole prompt."""
    linear, attention = 2 * shape.parameters * tokens, shape.attention_flop(tokens**2 / 2)
    return linear / on.linear / 1e9 + attention / on.prefill / 1e9


def stages(
    shape: Shape, tokens: int, wire: str, ratio: float, schedule: Schedule = TODAY
) -> dict[str, Work]:
    """Return the work of each stage of a request whose chunks are all stored; ``ratio`` of the prompt's rows are repaired."""
    chunks, kv = tokens / CHUNK, shape.kv_bytes(tokens)
    live, rows = SUFFIX + GLUE * chunks, ratio * tokens
    learned, width = (
        min(rows, 1024.0),
        2 * shape.kv_heads * shape.dim,
    )  # rows that the shift counts; keys and values
    shift, weights = 2 * tokens * learned * width * (shape.layers - 1), 2.0 * shape.parameters
    tensors = shape.layers * (2 if wire == "bf16" else 5)
    copies, probed = (
        0.0 if wire == "device" else chunks * (schedule.ranges or tensors),
        schedule.probed,
    )
    seen = (
        rows * tokens / 2 + live * tokens
    )  # keys that the repaired and the live rows see, rows spread evenly
    reading = shape.kv_bytes(tokens, wire) or kv
    return {
        "plan": Work(host_ms=tokens * schedule.plan_us / 1e3),
        "copy": Work(link_bytes=shape.kv_bytes(tokens, wire), host_ms=copies * COPY_MS),
        "stitch": Work(device_bytes=reading + kv),
        "probe": Work(
            flop=probed * weights * live,
            attention_flop=probed * shape.attention_flop(live * tokens),
            device_bytes=probed * (weights + kv),
            host_ms=probed * shape.layers * LAYER_MS,
        ),
        "select": Work(host_ms=chunks * schedule.row_plan_ms + (STEPS_MS if probed else 0.0)),
        "repair, linear": Work(flop=weights * (rows + live), device_bytes=weights),
        "repair, attention": Work(attention_flop=shape.attention_flop(seen), device_bytes=kv),
        "repair, shift": Work(
            flop=shift * schedule.is_shift_fast,
            float32_flop=shift * (not schedule.is_shift_fast),
            device_bytes=12.0
            * tokens
            * width
            * (shape.layers - 1),  # float32 written and read, 16-bit read and written
        ),
        "repair, host": Work(host_ms=shape.layers * LAYER_MS),
    }


def ttft_ms(ms: dict[str, float], schedule: Schedule, layers: int) -> float:
    """Milliseconds from the request to the first token, from those of its stages.

    With copies beside computing, the probe waits for its own layers, the repair for the others, and everything for the first one.
    """
    repair = max(
        ms["repair, linear"] + ms["repair, attention"] + ms["repair, shift"], ms["repair, host"]
    )
    if not schedule.is_pipelined:
        return ms["plan"] + ms["copy"] + ms["stitch"] + ms["probe"] + ms["select"] + repair
    s, rest = schedule.probed, 1 - schedule.probed
    chosen = (
        ms["plan"]
        + ms["copy"] / layers
        + max(s * ms["copy"], ms["probe"] + s * ms["stitch"])
        + ms["select"]
    )
    return chosen + max(rest * ms["copy"], repair + rest * ms["stitch"])


def prediction(shape: Shape, tokens: int, wire: str, ratio: float, on: Device) -> dict[str, Any]:
    """Return a full prefill's time, and of every schedule that of the whole, of today's and the last also each stage's: milliseconds."""
    found = [
        {n: w.ms(on) for n, w in stages(shape, tokens, wire, ratio, each).items()}
        for each in SCHEDULES
    ]
    ttft = [
        round(ttft_ms(ms, each, shape.layers), 1) for ms, each in zip(found, SCHEDULES, strict=True)
    ]
    first, last = (
        [round(value, 1) for value in ms.values()]
        for ms in (found[SCHEDULES.index(TODAY)], found[-1])
    )
    row = {
        "shape": shape.name,
        "device": on.name,
        "tokens": tokens,
        "wire": wire,
        "ratio": ratio,
        "ttft_ms": ttft,
    }
    return row | {
        "full_ms": round(full_prefill_ms(shape, tokens, on), 1),
        "stages_ms": first,
        "last_stages_ms": last,
    }


def main(out: Path = Path(__file__).parent / "results") -> None:
    predictions = [prediction(*each) for each in product(SHAPES, TOKENS, WIRES, RATIOS, DEVICES)]
    facts = {
        "measured": False,
        "schedules": [s.name for s in SCHEDULES],
        "devices": [asdict(d) for d in DEVICES],
    }
    facts["work"] = {
        name: asdict(work) for name, work in stages(SHAPES[0], 32768, "int8", 0.03).items()
    }
    rows = ",\n".join(map(json.dumps, predictions))
    (out / "roofline.json").write_text(
        f'{json.dumps(facts, indent=1)[:-2]},\n "predictions": [\n{rows}]\n}}\n'
    )


if __name__ == "__main__":
    main()
