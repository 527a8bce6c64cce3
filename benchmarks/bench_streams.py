"""Streams that decode together, prompts that come at once, and what a recorded forward takes beside a launched one.

On a CUDA device: an 8B shape with random weights, prompts of twelve chunks from the host's memory.

* Tokens a second together, of 1, 8 and 32 streams: those of long answers less those of short ones, so that prefills don't count.
* Time to first token of each of eight prompts that come at once.
* Milliseconds of a forward of every recorded number of rows, replayed and launched, and of the next rows of several requests.
* Number, seconds and bytes of recordings and of the pool.

``bench_ttft.py --shape`` has the time to first token of one prompt. Without a CUDA device, ``--dry-run`` checks this script on a tiny
shape, with replays that compute: no measurement.

    python benchmarks/bench_streams.py [--repeats 3] [--dry-run] [--out FOLDER]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_ttft import Shaped, orders, random_chunks, synchronise
from common import RESULTS, machine, parser, write_result

from kvrag import KVRagEngine
from kvrag.model import CausalLM
from kvrag.model.rows import Rows
from kvrag.model.shared import BUCKETS, LONGEST, Portion
from kvrag.model.steps import pool_of, scratch

SHAPE = "llama-3.1-8b"


class Sizes(NamedTuple):
    """What is measured: chunks of a prompt, streams, tokens of long and short answers, keys and rows of forwards."""

    chunks: int = 12
    streams: Sequence[int] = (1, 8, 32)
    long: int = 64
    short: int = 4
    at_once: int = 8
    keys: Sequence[int] = (6144, 30720)
    rows: Sequence[int] = BUCKETS


DRY = Sizes(2, (1, 3), 4, 2, 3, (512,), (16, 64))
DRY_SLOTS = 8192


def together(count: int, ask: Callable[[int], Any]) -> tuple[float, list[Any]]:
    """Let so many threads ask at the same time; return the seconds until all are answered, and the answers."""
    with ThreadPoolExecutor(count) as threads:
        start = time.perf_counter()
        answers = list(threads.map(ask, range(count)))
        return time.perf_counter() - start, answers


def decoding(
    engine: KVRagEngine, prompts: Iterator[Any], count: int, sizes: Sizes, repeats: int
) -> dict[str, Any]:
    """Measure tokens a second of so many streams together."""

    def answered(tokens: int) -> float:
        own = [next(prompts) for _ in range(count)]
        options: dict[str, Any] = {
            "mode": "stitch",
            "min_new_tokens": tokens,
            "max_new_tokens": tokens,
        }
        seconds, answers = together(count, lambda n: engine.generate(own[n], **options))
        assert all(len(answer.token_ids) == tokens for answer in answers)
        return seconds

    answered(sizes.short), answered(sizes.long)  # which make recordings
    runs = [
        {"short_s": answered(sizes.short), "long_s": answered(sizes.long)} for _ in range(repeats)
    ]
    more = count * (sizes.long - sizes.short)
    rates = [more / max(run["long_s"] - run["short_s"], 1e-9) for run in runs]
    return {
        "streams": count,
        "tokens": [sizes.short, sizes.long],
        "runs": runs,
        "tokens_per_s": statistics.median(rates),
        "with_prefills": statistics.median(count * sizes.long / run["long_s"] for run in runs),
    }


def at_once(
    engine: KVRagEngine, prompts: Iterator[Any], count: int, repeats: int
) -> dict[str, Any]:
    """Measure the time to first token of prompts that come at once, and of one that comes alone."""

    def run(number: int) -> list[float]:
        own = [next(prompts) for _ in range(number)]
        _, found = together(number, lambda n: engine.prefill(own[n], mode="stitch").ttft_ms)
        return sorted(found)

    run(1), run(count)
    alone = [run(1)[0] for _ in range(repeats)]
    runs = [run(count) for _ in range(repeats)]
    each = [statistics.median(times) for times in zip(*runs, strict=True)]
    return {
        "prompts": count,
        "alone_ms": statistics.median(alone),
        "each_ms": each,
        "last_to_first": each[-1] / each[0],
        "runs": {"alone": alone, "together": runs},
    }


def timed(action: Callable[[], Any], repeats: int) -> list[float]:
    """Return milliseconds of an action between two synchronisations, after two that don't count."""
    times = []
    for _ in range(repeats + 2):
        synchronise()
        start = time.perf_counter()
        action()
        synchronise()
        times.append((time.perf_counter() - start) * 1e3)
    return times[2:]


@torch.inference_mode()
def forward_of(lm: CausalLM, keys: int, count: int, repeats: int) -> dict[str, Any]:
    """Measure a forward of scattered rows, replayed and launched."""
    generator = torch.Generator().manual_seed(count)
    count = min(count, LONGEST)
    rows = torch.randperm(keys - 1, generator=generator)[: count - 1].sort().values
    rows = torch.cat([rows, torch.tensor([keys - 1])])
    ids = torch.randint(min(1000, lm.vocab_size), (count,), generator=generator)
    found: dict[str, Any] = {"keys": keys, "rows": count}
    with scratch(lm, keys) as kv:
        if kv.start is None:
            return found | {"failed": "the pool has no room for so many keys"}
        for sides in kv.layers:
            for side in sides:
                side.normal_()
        piece = Portion(ids, Rows.at(rows), kv, 1)
        replayed = timed(lambda: lm.forward(ids, Rows.at(rows), kv), repeats)
        launched = timed(lambda: lm.launch(piece), repeats)
    return found | {"replayed_ms": replayed, "launched_ms": launched}


@torch.inference_mode()
def step_of(lm: CausalLM, keys: int, count: int, repeats: int) -> dict[str, Any]:
    """Measure the next rows of so many requests, in one replay and launched one by one."""
    assert lm.recorded is not None
    found: dict[str, Any] = {"keys": keys, "requests": count}
    with ExitStack() as held:
        kvs = [held.enter_context(scratch(lm, keys)) for _ in range(count)]
        if any(kv.start is None for kv in kvs):
            return found | {"failed": "the pool has no room for so many requests"}
        rows = Rows.at(torch.tensor([keys - 1]))
        pieces = [Portion(torch.tensor([7]), rows, kv, 1) for kv in kvs]
        replayed = timed(partial(lm.recorded.compute, pieces), repeats)
        launched = timed(lambda: [lm.launch(piece) for piece in pieces], repeats)
    return found | {"replayed_ms": replayed, "launched_ms": launched}


def measure(
    shaped: Shaped, sizes: Sizes, repeats: int, folder: Path, tell: Callable[[str, Any], None]
) -> None:
    """Measure all; ``tell`` gets each result when it is there, and why one that fails did."""
    with closing(shaped.engine(folder, "auto")) as engine:
        chunks = random_chunks(engine.tokenizer, sizes.chunks, 500)
        assert not engine.precompute(chunks, batch_size=4).failed
        for tier in engine.store.tiers:
            tier.release()  # what is read from the disk lands in pinned memory, what was put may not
        lm = engine.loaded.reusable
        if torch.cuda.is_available():
            pool_of(lm)
        else:  # to check this script: replays compute
            lm.record(DRY_SLOTS, record=lambda compute: compute)
        most = 2 * (repeats + 1) * (sum(sizes.streams) + sizes.at_once + 1)
        prompts = iter(orders(engine.prefix_text, chunks, most))
        todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("streams", partial(decoding, engine, prompts, count, sizes, repeats))
            for count in sizes.streams
        ]
        todo.append(("at_once", partial(at_once, engine, prompts, sizes.at_once, repeats)))
        if lm.recorded is not None:
            for keys in sizes.keys:
                todo += [
                    ("forwards", partial(forward_of, lm, keys, rows, repeats))
                    for rows in sizes.rows
                    if rows <= keys
                ]
            todo += [
                ("steps", partial(step_of, lm, sizes.keys[0], count, repeats))
                for count in sizes.streams
            ]
        for kind, work in todo:
            try:
                found = work()
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            tell(kind, found | {"pool": engine.stats().get("pool")})


def main() -> int:
    """Measure, and write the JSON; returns 1 where something failed, 2 without a CUDA device."""
    made = parser(__doc__, repeats=3)
    made.add_argument("--dry-run", action="store_true", help="a tiny shape, to check this script")
    made.set_defaults(out=None)
    args = made.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not args.dry_run:
        print("torch sees no CUDA device here, so there is nothing to measure; see --dry-run")
        return 2
    out = args.out or (None if args.dry_run else RESULTS)
    shaped = Shaped.of(SHAPE, is_dry=args.dry_run)
    result: dict[str, Any] = {
        "machine": machine(),
        "model": f"{SHAPE} shape, random weights",
        "dtype": str(shaped.model.dtype),
        "measured": has_gpu and not args.dry_run,
        **{kind: list[Any]() for kind in ("streams", "at_once", "forwards", "steps")},
    }

    def tell(kind: str, found: dict[str, Any]) -> None:
        result["pool"] = found.pop("pool")
        result[kind].append(found)
        print(kind, {name: value for name, value in found.items() if name != "runs"}, flush=True)
        if out is not None:
            write_result(f"streams-{SHAPE}-{'cuda' if has_gpu else 'cpu'}", result, out)

    with tempfile.TemporaryDirectory(prefix="kvrag-bench-") as folder:
        sizes = DRY if args.dry_run else Sizes()
        measure(shaped, sizes, 1 if args.dry_run else args.repeats, Path(folder), tell)
    kinds = ("streams", "at_once", "forwards", "steps")
    return int(any("failed" in found for kind in kinds for found in result[kind]))


if __name__ == "__main__":
    sys.exit(main())
