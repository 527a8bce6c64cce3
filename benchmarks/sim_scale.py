"""What a million chunks behind a hundred replicas would bring: hits per tier, bytes, times and costs, by simulation.

    python benchmarks/sim_scale.py

Requests are drawn, routed and looked up in LRU caches; what they take is arithmetic on :data:`CONSTANTS` and on the stages of
``roofline.py``: of the GPU's part nothing is measured. LRU stack distances (Mattson et al. 1970) tell the hits for every size of cache at
once. Writes ``results/scale.json``, which docs/scale.md explains. Two minutes of one core.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import roofline
from common import RESULTS, machine, parser, write_result
from numpy.typing import NDArray
from roofline import CHUNK, H100, SCHEDULES, SHAPES, TODAY, Device, Schedule, Shape

from kvrag.evaluate.estimate import ModelShape, kept_bytes_per_token

Ints = NDArray[np.int64]
Trace = tuple[Ints, Ints]
LLAMA_8B, QWEN_3B = SHAPES
LLAMA_70B = Shape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128)
MODELS = (
    (LLAMA_8B, 1),
    (LLAMA_70B, 4),
)  # GPUs of a replica; kvrag runs a model on one device today
KINDS = {"bf16": "auto", "int8": "int8", "int4": "int4"}
TIERS = ("gpu", "host", "disk", "redis", "objects")
WORKLOADS, ROUTINGS = ("zipf", "drift", "documents", "flat"), ("random", "rendezvous")
NEVER = 2**62  # the distance of what was never asked for before

STORE, SHARED = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("store", "shared"))
COLD, WARM, SERVER = (
    STORE["reads"]["disk/cold/64"],
    STORE["reads"]["memory/warm/64"],
    SHARED["tiers"]["redis"],
)
PROVEN, REDIS = WARM["bytes"] / WARM["get_ms"] / 1e6, SERVER["gb_per_s"]["kvrag"]
AWS = "AWS us-east-1, on demand"
CONSTANTS: dict[str, tuple[float, str, str, str]] = {  # name: value, unit, kind, source
    "tflops": (989.4, "TFLOP/s a GPU", "data sheet", "NVIDIA H100 SXM, dense bf16"),
    "utilisation": (
        0.5,
        "of that",
        "assumed",
        "TensorRT-LLM 1.0's published runs come to 0.43 (8B) and 0.46 (70B)",
    ),
    "gpu_gb": (
        20,
        "GB a GPU",
        "assumed",
        "a quarter of 80 GB; weights and running requests have the rest",
    ),
    "host_gb": (
        200,
        "GB a GPU",
        "assumed",
        "of 256 GiB in AWS's p5.4xlarge, and as many a GPU in p5.48xlarge",
    ),
    "disk_gb": (3500, "GB a GPU", "assumed", "of 3.84 TB of NVMe a GPU in the same"),
    "pcie": (
        H100.link,
        "GB/s a GPU",
        "assumed",
        "64 by data sheet (PCIe 5 x16), of which docs/gpu.md assumes 0.78",
    ),
    "nvme": (
        6.5,
        "GB/s a GPU",
        "data sheet",
        "Samsung PM9A3 (PCIe 4), sequential reads, as announced in 2020",
    ),
    "nvme_share": (
        COLD["get_ratio"],
        "of that",
        "measured",
        "store.json: 64 MB read cold, beside a plain file",
    ),
    "proof": (
        PROVEN,
        "GB/s a thread",
        "measured",
        "store.json: 64 MB from memory, proven; on two cores, no GPU",
    ),
    "readers": (4, "threads", "kvrag", "`READERS` in kvrag/store/memory.py"),
    "redis": (
        REDIS,
        "GB/s a thread",
        "measured",
        "shared.json: 6 MB from a redis-server on the same two cores",
    ),
    "redis_s": (
        SERVER["lookup_ms"] / 1e3,
        "s a request",
        "measured",
        "shared.json: a look-up of 20 chunks",
    ),
    "objects": (
        0.0875,
        "GB/s a thread",
        "vendor",
        "Amazon S3 User Guide, performance guidelines: 85 to 90 MB/s",
    ),
    "objects_s": (
        0.15,
        "s a request",
        "vendor",
        "Amazon S3 User Guide: roughly 100 to 200 ms to the first byte",
    ),
    "link": (12.5, "GB/s a GPU", "data sheet", "100 Gb/s, AWS's p5.4xlarge"),
    "gpu_hour": (
        6.88,
        "$ a GPU",
        "price",
        f"{AWS}, March 2026: p5.4xlarge; p5.48xlarge is 55.04 for eight",
    ),
    "redis_hour": (
        6.981 / 450,
        "$ a GB",
        "price",
        f"{AWS}, October 2026: cache.r7g.16xlarge, 6.981 for 419 GiB",
    ),
    "s3_month": (
        0.022,
        "$ a GB",
        "price",
        f"{AWS}, September 2026: S3 Standard, from 50 to 500 TB",
    ),
    "s3_get": (4e-7, "$ a read", "price", f"{AWS}: S3 Standard, 0.0004 for 1,000"),
    "zones": (
        0.02,
        "$ a GB",
        "price",
        f"{AWS}: between zones, 0.01 each way; within one zone none",
    ),
}
VALUES = {name: constant[0] for name, constant in CONSTANTS.items()}


@dataclass(frozen=True)
class Plan:  # what is asked, of how much: all assumed
    chunks: int = 1_000_000
    replicas: int = 100
    per_request: int = 5  # chunks
    requests: int = 8_000_000  # the first half fills the caches, the second counts
    looked_at: int = 12  # replicas whose caches are simulated; requests are routed over all
    skew: tuple[float, float] = (0.9, 0.6)  # exponent of Zipf's law; of the flat workload's
    epochs: int = 20  # drift: after each, this share of the ranks goes to other chunks
    dealt: float = 0.1
    document: int = 20  # documents: chunks of each; a request asks for chunks of one
    bound: float = 1.25  # a replica gets at most so many times the mean in a window of requests
    window: int = 2000
    seed: int = 0


def requests(plan: Plan, workload: str, rng: np.random.Generator) -> Ints:
    """Return the chunks of each request: different ones, the most relevant first."""

    def draw(items: int, *shape: int) -> Any:
        sums = np.cumsum(np.arange(1, items + 1) ** -plan.skew[workload == "flat"])
        return np.searchsorted(sums, rng.random(shape) * sums[-1])

    n, k = plan.requests, plan.per_request
    if workload == "documents":  # steps that share no factor with the length reach different chunks
        document: Ints = draw(plan.chunks // plan.document, n, 1)
        steps = [step for step in range(1, plan.document) if np.gcd(step, plan.document) == 1]
        places = rng.integers(plan.document, size=(n, 1)) + rng.choice(steps, (n, 1)) * np.arange(k)
        return document * plan.document + places % plan.document
    rows: Ints = draw(plan.chunks, n, k)
    while (twice := (np.diff(np.sort(rows, axis=1), axis=1) == 0).any(axis=1)).any():
        rows[twice] = draw(plan.chunks, int(twice.sum()), k)
    if workload == "drift":
        chunk_of = np.arange(plan.chunks)
        for part in np.array_split(rows, plan.epochs):
            part[:] = chunk_of[part]
            dealt = rng.choice(plan.chunks, int(plan.dealt * plan.chunks), replace=False)
            chunk_of[dealt] = chunk_of[rng.permutation(dealt)]
    return rows


def earlier(groups: Ints) -> Ints:
    """Return how many of the same group come before each element."""
    order = np.argsort(groups, kind="stable")
    return np.argsort(order) - np.searchsorted(groups[order], groups)


def route(plan: Plan, rows: Ints, routing: str, rng: np.random.Generator) -> Ints:
    """Return the replica of each request."""
    # Rendezvous: each chunk ranks the replicas by a hash, here at random. A request goes to the replica that most of its chunks rank
    # first (the most relevant one decides a tie); if that has its share, to the deciding chunk's second; then to any.
    to = rng.integers(plan.replicas, size=len(rows))
    if routing == "rendezvous":
        first = rng.integers(plan.replicas, size=plan.chunks)
        second = (first + rng.integers(1, plan.replicas, size=plan.chunks)) % plan.replicas
        owners = first[rows]
        votes = np.stack(
            [(owners == owners[:, [j]]).sum(axis=1) for j in range(rows.shape[1])], axis=1
        )
        deciding = rows[np.arange(len(rows)), votes.argmax(axis=1)]
        slots = (
            np.arange(len(rows)) // plan.window * plan.replicas
        )  # a counter for each window and replica
        taken, left = np.zeros(slots[-1] + plan.replicas, np.int64), np.arange(len(rows))
        for choice in (first[deciding], second[deciding]):
            slot = (slots + choice)[left]
            fits = taken[slot] + earlier(slot) < plan.bound * plan.window / plan.replicas
            to[left[fits]] = choice[left[fits]]
            taken += np.bincount(slot[fits], minlength=len(taken))
            left = left[~fits]
    return to


def stack_distances(ids: Ints) -> Ints:
    """Return how many other items were asked for since each was last: an LRU cache of more items than that has it."""
    # From the positions in between, subtract those whose own item was last seen in between. A merge sort counts them.
    n, order = len(ids), np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    last = np.full(n, -1)
    last[order[1:][again]] = order[:-1][again]
    size, half = 1 << max(0, n - 1).bit_length(), 1
    values, where, repeats = (
        np.append(last, np.full(size - n, -1)),
        np.arange(size),
        np.zeros(size, np.int64),
    )
    while half < size:
        order = np.argsort(values.reshape(-1, 2 * half), axis=1, kind="stable")
        values, where = (
            np.take_along_axis(a.reshape(-1, 2 * half), order, 1).ravel() for a in (values, where)
        )
        repeats[where] += np.where(order < half, 0, half - np.cumsum(order < half, axis=1)).ravel()
        half *= 2
    return np.where(last < 0, NEVER, np.arange(n) - last - 1 - repeats[:n])


def simulate(plan: Plan, workload: str, routing: str) -> Trace:
    """Return, of the chunks of requests that count, the distances in their replica's caches, and ranks by how often all are asked for."""
    rng = np.random.default_rng(
        [plan.seed, WORKLOADS.index(workload)]
    )  # both routings get the same requests
    rows = requests(plan, workload, rng)
    to, ranks, found = route(plan, rows, routing, rng), np.empty(plan.chunks, np.int64), []
    ranks[np.argsort(-np.bincount(rows.ravel(), minlength=plan.chunks))] = np.arange(plan.chunks)
    for replica in range(min(plan.looked_at, plan.replicas)):
        own, half = rows[to == replica], np.count_nonzero(to == replica) // 2
        found.append((stack_distances(own.ravel()).reshape(own.shape)[half:], ranks[own[half:]]))
    return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])


@dataclass(frozen=True)
class Setup:  # a model, how its KV is kept, and where
    shape: Shape
    gpus: int = 1
    kind: str = "int8"
    ratio: float = 0.03  # of the loaded rows, repaired
    chunks: int = Plan.per_request
    rate: float = 2.0  # requests a second and replica
    redis_gb: float = 0.0  # for the chunks asked for most; the object store has all
    parts: int = 1  # of a chunk, read at the same time
    schedule: Schedule = TODAY
    utilisation: float = VALUES["utilisation"]

    @property
    def chunk_gb(self) -> float:
        model = ModelShape(self.shape.layers, self.shape.kv_heads, self.shape.dim)
        return CHUNK * kept_bytes_per_token(model, KINDS[self.kind], chunk_tokens=CHUNK) / 1e9  # type: ignore[arg-type]

    @property
    def device(self) -> Device:
        flop = VALUES["tflops"] * self.utilisation * self.gpus
        rates = [rate * self.gpus for rate in (H100.float32, H100.copy, H100.link)]
        return Device(
            f"{self.gpus} H100",
            flop,
            flop,
            flop,
            rates[0],
            rates[1],
            rates[2],
            "data sheet, utilisation assumed",
        )

    def sizes(self) -> list[int]:
        """Chunks that a replica's LRU caches hold; each tier holds what the one above holds, too."""
        return [int(VALUES[f"{tier}_gb"] * self.gpus / self.chunk_gb) for tier in TIERS[:3]]

    def wait_ms(self, tier: str, chunks: int) -> float:
        """Milliseconds until so many chunks of a tier are in memory."""
        if not chunks or tier in ("gpu", "host"):
            return 0.0
        device = VALUES["nvme"] * VALUES["nvme_share"] if tier == "disk" else VALUES["link"]
        threads = min(VALUES["readers"], chunks) * self.parts
        rate = min(device * self.gpus, threads * VALUES["proof" if tier == "disk" else tier])
        return (VALUES.get(f"{tier}_s", 0.0) + chunks * self.chunk_gb / rate) * 1e3

    def full_ms(self) -> float:
        """Milliseconds of a full prefill."""
        tokens = self.chunks * (CHUNK + roofline.GLUE) + roofline.SUFFIX
        return max(
            roofline.full_prefill_ms(self.shape, tokens, self.device),
            self.shape.layers * roofline.LAYER_MS,
        )

    def reuse_ms(self, on_gpu: int, in_memory: int) -> float:
        """Milliseconds from memory to the first token; the chunks that are in neither place are computed."""
        loaded = on_gpu + in_memory
        rows = (self.ratio * loaded + self.chunks - loaded) / self.chunks
        work = roofline.stages(self.shape, self.chunks * CHUNK, "device", rows, self.schedule)
        ms = {name: each.ms(self.device) for name, each in work.items()}
        ms["copy"] = in_memory * self.chunk_gb / self.device.link * 1e3
        return roofline.ttft_ms(ms, self.schedule, self.shape.layers)

    def ways(self, counts: list[int]) -> Iterator[tuple[float, float]]:
        """Yield the milliseconds to the first token, and the GPU's, for a full prefill and each depth of reading."""
        yield self.full_ms(), self.full_ms()
        for depth in range(1, len(TIERS) + 1):
            ms = self.reuse_ms(counts[0], sum(counts[1:depth]))
            yield ms + sum(map(self.wait_ms, TIERS[:depth], counts)), ms


def tiers_of(trace: Trace, setup: Setup) -> Ints:
    """Return the index of the tier that has each chunk, the first that does."""
    tier = np.searchsorted(setup.sizes(), trace[0], side="right")
    return np.where(tier < 3, tier, np.where(trace[1] < setup.redis_gb / setup.chunk_gb, 3, 4))


def outcome(trace: Trace, setup: Setup, plan: Plan) -> dict[str, Any]:
    """Return hits, bytes, times, and dollars for 1,000 requests; those of shared tiers are apart."""
    # fastest: a tier is read only where that makes the first token earlier, and the GPU waits meanwhile. least_gpu: whatever saves the
    # GPU time is read, and the GPU (on_gpu) works for others meanwhile.
    tier, base = tiers_of(trace, setup), setup.chunks + 1
    mixes, times = np.unique((base**tier).sum(axis=1), return_counts=True)
    share, counts = (
        times / times.sum(),
        [[int(mix // base**t % base) for t in range(len(TIERS))] for mix in mixes],
    )
    ways = [list(setup.ways(each)) for each in counts]
    least, on_gpu = share @ [min(each, key=lambda way: way[1]) for each in ways]
    ms = {"full": setup.full_ms(), "fastest": share @ [min(each)[0] for each in ways]}
    ms |= {"least_gpu": least, "on_gpu": on_gpu}
    a_second, thousands = (
        setup.gpus * VALUES["gpu_hour"] / 3600,
        setup.rate * plan.replicas * 30 * 86.4,
    )  # a month
    hits = {name: float((tier == t).mean()) for t, name in enumerate(TIERS)}
    fetched_gb = (hits["redis"] + hits["objects"]) * setup.chunks * setup.chunk_gb  # a request
    corpus = plan.chunks * (
        ms["full"] / setup.chunks / 1e3 * a_second + setup.chunk_gb * VALUES["s3_month"]
    )
    dollars = {
        name: time * a_second for name, time in ms.items()
    }  # 1,000 requests of a millisecond are a second
    dollars["objects"] = (
        corpus / thousands + hits["objects"] * setup.chunks * 1000 * VALUES["s3_get"]
    )
    dollars["redis"] = setup.redis_gb * VALUES["redis_hour"] * 720 / thousands
    dollars["zones"] = fetched_gb * 1000 * VALUES["zones"]
    about = {
        "model": setup.shape.name,
        "kind": setup.kind,
        "hits": hits,
        "network_gb_s": setup.rate * fetched_gb,
    }
    return about | {"ms": ms, "dollars": dollars}


CHANGES: dict[str, dict[str, Any]] = {
    "as above": {},
    "15% of the rows repaired": {"ratio": 0.15},
    "GPUs at 40% of their peak": {"utilisation": 0.4},
    "GPUs at 60% of their peak": {"utilisation": 0.6},
    "all changes of docs/gpu.md": {"schedule": SCHEDULES[-1]},
    "chunks read in 16 parts at a time": {"parts": 16},
    "1 TB of Redis before the object store": {"redis_gb": 1000},
    "1 TB of Redis, and 16 parts at a time": {"parts": 16, "redis_gb": 1000},
    "2 requests a second, not 200": {"rate": 0.02},
}


def loading(setup: Setup) -> dict[str, Any]:
    """Sizes of chunks, and the time of loading all of a request beside computing them, for each."""
    compute, rates = (
        setup.full_ms() / setup.chunks,
        {"host": setup.device.link, "10 Gb/s": 1.25, "100 Gb/s": 12.5},
    )
    load = {name: setup.chunk_gb * 1e3 / rate for name, rate in rates.items()}
    load |= {tier: setup.wait_ms(tier, setup.chunks) / setup.chunks for tier in TIERS[2:]}
    about = {
        "model": setup.shape.name,
        "kind": setup.kind,
        "chunk_gb": setup.chunk_gb,
        "sizes": setup.sizes(),
    }
    even = setup.chunk_gb * 1e3 / compute
    return about | {"compute_ms": compute, "break_even_gb_s": even, "load_ms": load}


def main() -> None:
    """Simulate each workload and routing once, and write all."""
    args = parser(__doc__, seed=0).parse_args()
    plan, prompts, runs, changes = Plan(seed=args.seed), list[Any](), list[Any](), list[Any]()
    setups = [Setup(shape, gpus, kind) for (shape, gpus), kind in product(MODELS, KINDS)]
    for workload, routing in product(WORKLOADS, ROUTINGS):
        trace = simulate(plan, workload, routing)
        for each in setups:
            runs.append({"workload": workload, "routing": routing} | outcome(trace, each, plan))
        if (workload, routing) == ("zipf", "rendezvous"):
            for (shape, gpus), (name, change) in product(MODELS, CHANGES.items()):
                changes.append(
                    {"change": name} | outcome(trace, Setup(shape, gpus, **change), plan)
                )
    for setup in (
        Setup(*model, chunks=chunks) for model, chunks in product(((QWEN_3B, 1), *MODELS), (5, 20))
    ):
        cases = [
            replace(setup, ratio=r, schedule=s)
            for s, r in product((TODAY, SCHEDULES[-1]), (0.03, 0.15))
        ]
        about = {"model": setup.shape.name, "chunks": setup.chunks, "full_ms": setup.full_ms()}
        prompts.append(about | {"from_host_ms": [case.reuse_ms(0, case.chunks) for case in cases]})
    result = {"machine": machine(), "measured": False, "plan": asdict(plan) | {"rate": Setup.rate}}
    result |= {
        "constants": [[name, *constant] for name, constant in CONSTANTS.items()],
        "prompts": prompts,
    }
    result |= {"loading": [loading(setup) for setup in setups], "runs": runs, "changes": changes}
    short = json.loads(json.dumps(result), parse_float=lambda number: float(f"{float(number):.4g}"))
    print("written:", write_result("scale", short, args.out))


if __name__ == "__main__":
    main()
