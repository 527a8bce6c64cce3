"""Precomputing with Ray Data: what a second worker gives, and 10,000 chunks with workers that are killed.

    python benchmarks/bench_ray.py --only scale,kill

``scale``: SmolLM2 and chunks of 250 tokens, one thread for each worker, one worker and two by turns, each into an empty store;
throughput is chunks over the time from the first batch's begin to the last one's end, so that the start of processes doesn't count. One
worker runs with one core for all of Ray, as the two have two, and with both cores, of which Ray's own processes then have one for
themselves.
``kill``: a tiny model, a store in Redis, and two workers, one of which gets SIGKILL from time to time. All chunks must be there once,
with the bits that a single process gives; what was stored before a kill is skipped by who takes the batch again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_shared import redis_server
from common import items, machine, parser, pids, small_engine, small_model, write_result

from kvrag import KVRagEngine, precompute_dataset
from kvrag.store import TieredStore
from kvrag.testing.models import save_tiny_model
from kvrag_ray.dataset import Workers

WORDS = [
    "key",
    "value",
    "cache",
    "chunk",
    "token",
    "layer",
    "head",
    "prompt",
    "prefix",
    "store",
    "blob",
    "index",
    "query",
]


def run(
    rows: list[dict[str, str]], model: str, kv_dir: str, workers: int, batch_size: int
) -> list[dict[str, Any]]:
    """Precompute on so many workers, and return the report."""
    import ray

    ds = ray.data.from_items(rows, override_num_blocks=max(8, len(rows) // 32))
    own, how = {"batch_size": batch_size}, Workers(workers, num_cpus=0.5)
    return list(
        precompute_dataset(
            ds, model, kv_dir=kv_dir, dtype="float32", workers=how, run=own
        ).take_all()
    )


@contextmanager
def cluster(cores: int) -> Iterator[None]:
    """Run Ray, with all of its processes, on so many cores."""
    import ray

    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:cores])
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()
        os.sched_setaffinity(0, all_cores)


def throughput(report: list[dict[str, Any]]) -> float:
    """Chunks per second while workers worked."""
    begun = min(row["ended"] - row["seconds"] for row in report)
    return float(
        sum(row["chunks"] for row in report) / (max(row["ended"] for row in report) - begun)
    )


def scale(count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure one worker and two."""
    engine = small_engine(1)
    texts = [
        text for item in items(engine.tokenizer, count=-(-count // 10)) for text in item.chunks
    ][:count]
    rows, found = (
        [{"id": str(number), "text": text} for number, text in enumerate(texts)],
        dict[str, list[float]](),
    )
    for number in range(3 * rounds):
        workers, cores = ((1, 1), (2, 2), (1, 2))[(number + number // 3) % 3]
        kv_dir = folder / f"kv{number}"
        with cluster(cores):
            report = run(rows, small_model(), str(kv_dir), workers, 8)
        assert sum(row["stored"] for row in report) == len(set(texts))
        found.setdefault(f"{workers} on {cores}", []).append(throughput(report))
        print(f"{workers} workers on {cores} cores: {throughput(report):.2f} chunks/s", flush=True)
        shutil.rmtree(kv_dir)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "chunks": len(rows),
        "chunks_per_s": found,
        "ratio": medians["2 on 2"] / medians["1 on 1"],
        "ratio_same_cores": medians["2 on 2"] / medians["1 on 2"],
    }


class Killer(threading.Thread):
    """Sends SIGKILL to a worker from time to time."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self._rng, self._over, self.kills = random.Random(seed), threading.Event(), 0

    def run(self) -> None:
        while not self._over.wait(self._rng.uniform(4, 12)):
            if workers := [
                pid for pid in pids("ray::MapWorker") if cpu_seconds(pid) > 8
            ]:  # it has begun to work
                os.kill(self._rng.choice(workers), signal.SIGKILL)
                self.kills += 1
                print(f"killed a worker ({self.kills})", flush=True)

    def stop(self) -> None:
        self._over.set()
        self.join()


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def blobs(store: TieredStore) -> dict[str, bytes]:
    """Return the digests of all blobs."""
    import hashlib

    return {key: hashlib.sha256(store.blobs.read(key) or b"").digest() for key in store.listed()}


def kill(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Precompute while workers are killed, and compare with a single process."""
    torch.set_num_threads(
        1
    )  # as the workers have: with another number, sums are made in another order
    rng, model = random.Random(seed), save_tiny_model(folder / "tiny")
    texts = [
        f"Chunk {number}: {' '.join(rng.choices(WORDS, k=rng.randint(16, 32)))}."
        for number in range(count)
    ]
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    with redis_server(folder) as url:
        killer, start = Killer(seed), time.perf_counter()
        killer.start()
        report = run(
            rows, model, url, 2, 1
        )  # alone in its forward, a chunk has the same bits whatever its batch is
        killer.stop()
        seconds = time.perf_counter() - start
        with closing(KVRagEngine.from_pretrained(model, kv_dir=url, dtype="float32")) as engine:
            theirs, known = blobs(engine.store), len(engine.store.catalog.present())
            documents = len(engine.document_ids())
    with closing(
        KVRagEngine.from_pretrained(model, kv_dir=folder / "single", dtype="float32")
    ) as engine:
        start = time.perf_counter()
        engine.precompute(texts, ids=[row["id"] for row in rows], batch_size=1)
        single_s, mine = time.perf_counter() - start, blobs(engine.store)
    sums = {what: sum(row[what] for row in report) for what in ("chunks", "stored", "skipped")}
    return {
        "kills": killer.kills,
        **sums,
        "failed": sum(len(row["failed"]) for row in report),
        "workers": len({row["worker"] for row in report}),
        "in_store": len(theirs) - 1,  # the prefix's own
        "in_catalog": known - 1,
        "documents": documents,
        "other_bits": sum(mine.get(key) != theirs.get(key) for key in mine.keys() | theirs.keys()),
        "seconds": seconds,
        "single_process_seconds": single_s,
    }


def main() -> None:
    """Run the parts, and write ``results/ray.json``."""
    options = parser(__doc__, chunks=10_000, scale_chunks=256, rounds=3, seed=0)
    options.add_argument("--only", default="scale,kill")
    args = options.parse_args()
    import ray

    for part in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if part == "scale":
                result = scale(args.scale_chunks, args.rounds, Path(folder))
            elif part == "kill":
                with cluster(2):
                    result = kill(args.chunks, args.seed, Path(folder))
            else:
                sys.exit(f"--only {part}: there are scale and kill")
        print(result)
        write_result(
            f"ray_{part}",
            {"machine": machine(), "ray": ray.__version__, "seed": args.seed, **result},
            args.out,
        )


if __name__ == "__main__":
    main()
