"""Time the span scanner and print JSON: ``python tests/benchmarks/bench_spans.py --chunks 100000``."""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator

from kvrag.prompt.spans import SpanIndex, TextEntry, text_entry

WORDS = ["".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=3 + n % 8)) for n in range(5000)]


def chunk_text(seed: int, chars: int, header: str = "") -> str:
    """A pseudo-random text of about ``chars`` characters; the same seed gives the same text."""
    return (header + " ".join(random.Random(seed).choices(WORDS, k=chars // 7)))[:chars].strip()


def prompt_of(chunks: list[str], chars: int) -> str:
    """The chunks with live text around them, ``chars`` characters in all."""
    filler = max(0, (chars - sum(map(len, chunks))) // (len(chunks) + 1))
    return "".join(f"{chunk_text(10**9 + n, filler)}\n\n{chunk}\n\n" for n, chunk in enumerate(chunks))


def milliseconds(call: Callable[[], object], repeat: int) -> dict[str, float]:
    """Median and best of several calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return {"median_ms": round(statistics.median(times), 3), "best_ms": round(min(times), 3)}


def entries(first: int, stop: int, chars: int, header: str = "") -> Iterator[TextEntry]:
    """Entries of the pseudo-random texts with these seeds."""
    for seed in range(first, stop):
        entry = text_entry(chunk_text(seed, chars, header))
        assert entry is not None
        yield entry


def main() -> None:
    """Build an index, scan prompts, add a few more, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--chunk-chars", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    index, build_s = SpanIndex(), 0.0
    for first in range(0, args.chunks, 1000):  # in blocks: not all texts are kept, nor is making them timed
        texts = [chunk_text(seed, args.chunk_chars) for seed in range(first, min(first + 1000, args.chunks))]
        start = time.perf_counter()
        index.add(entry for text in texts if (entry := text_entry(text)))
        build_s += time.perf_counter() - start
    start = time.perf_counter()
    index.scan("x" * 64)  # the table is sorted by the first scan
    report: dict[str, object] = {
        "chunks": len(index),
        "index_s": round(build_s, 3),
        "first_scan_s": round(time.perf_counter() - start, 3),
    }
    for chars in (10_000, 40_000):
        size = min(args.chunk_chars, chars // 12)
        known = [chunk_text(seed, args.chunk_chars) for seed in range(0, args.chunks, args.chunks // 10)][:10]
        if size < args.chunk_chars:  # ten chunks and live text must fit: register shorter ones
            known = [text[:size].strip() for text in known]
            index.add(entry for text in known if (entry := text_entry(text)))
            index.scan("x" * 64)
        prompt = prompt_of(known, chars)
        assert len(index.scan(prompt)) == len(known)
        timing = milliseconds(lambda prompt=prompt: index.scan(prompt), args.repeat)
        report[f"scan_{chars // 1000}k"] = {"chars": len(prompt), "found": len(known), **timing}
    few = list(entries(args.chunks, args.chunks + args.repeat * 5, args.chunk_chars))

    def add_five() -> None:
        index.add([few.pop() for _ in range(5)])
        index.scan("x" * 64)

    report["add_5_then_scan"] = milliseconds(add_five, args.repeat)
    header = chunk_text(0, 200) + "\n"
    index.add(entries(0, 10_000, args.chunk_chars, header))
    prompt = prompt_of([chunk_text(seed, args.chunk_chars, header) for seed in range(0, 10_000, 1000)], 12_000)
    assert len(index.scan(prompt)) == 10
    report["scan_shared_header_10k_chunks"] = milliseconds(lambda: index.scan(prompt), args.repeat)
    prompt = "a" * 100_000
    index.add(entry for n in range(32, 1500) if (entry := text_entry("a" * n)))
    report["scan_100k_of_one_character"] = milliseconds(lambda: index.scan(prompt), 3)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
