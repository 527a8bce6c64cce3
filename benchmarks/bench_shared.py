"""A shared store beside its server's own client: reading a chunk of 6 MB, and what a look-up of 20 chunks costs.

    python benchmarks/bench_shared.py

``redis``: a redis-server that this script starts; ``objects``: obstore on a directory, which is memory here; ``s3``: obstore on moto, a
server that answers as S3 does, if it is installed. The catalog of ``objects`` and ``s3`` is in that server, too. Each
round reads every chunk with the client alone (``GET``, ``obstore.get``), and as kvrag does: header, proof of every layer, tensors. They
take turns in a random order. The ratio is the median over rounds of the client's time ÷ kvrag's; the target is 0.7.

``catalog`` (``--only catalog``): the rows of many chunks, without blobs, in Redis: written by one machine in batches of
eight, then as many again by two machines at once; looked up and listed by another machine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench_store import chunk, timed
from common import machine, parser, write_result

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
from kvrag.store.catalog.ledger import record_of
from kvrag.testing.chunks import make_identity, make_text
from kvrag.types import ChunkKV

SIZE, CHUNKS, TARGET = 6_000_000, 20, 0.7


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a redis-server on a socket in a folder."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        sys.exit("neither redis-server nor valkey-server is installed")
    port = random.randrange(20_000, 60_000)
    server = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    time.sleep(1.0)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


@contextmanager
def s3() -> Iterator[str]:
    """Run moto, with a bucket."""
    port = random.randrange(20_000, 60_000)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    own = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    own |= {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "testing"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    time.sleep(5.0)
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    ).close()
    try:
        yield "s3://bucket/kv"
    finally:
        server.kill()
        server.wait()


def clients(url: str) -> Callable[[str], Any]:
    """Return what reads a blob with the client alone."""
    if url.startswith("redis"):
        import redis

        client = redis.Redis.from_url(url)
        return lambda key: client.get(f"kvrag:objects:{key}")
    import obstore

    store = obstore.store.from_url(
        url, **({"client_options": {"allow_http": True}} if url.startswith("s3") else {})
    )
    return lambda key: obstore.get(store, f"objects/{key}").bytes()


def measure(url: str, rounds: int, catalog: str | None = None) -> dict[str, Any]:
    """Read all chunks in both ways, by turns."""
    chunks = [chunk(SIZE, number) for number in range(CHUNKS)]
    raw = clients(url)
    found: dict[str, list[float]] = {"client": [], "kvrag": []}
    config = StoreConfig(ram_bytes=0, min_free_bytes=0, catalog=catalog)
    with closing(open_store(url, config)) as store:
        for identity, kv in chunks:
            store.put(identity, kv, text=None)
        keys = [chunk_key(identity) for identity, _ in chunks]

        def by_client() -> None:
            for key in keys:
                assert len(raw(key)) > SIZE * 0.9

        def by_kvrag() -> None:
            for identity, _ in chunks:
                assert isinstance(store.get(identity), ChunkKV)

        ways = {"client": by_client, "kvrag": by_kvrag}
        for each in ways.values():
            each()
        for _ in range(rounds):
            for name in random.sample(list(ways), 2):
                found[name].append(timed(ways[name]))
        lookups = [timed(lambda: store.known(keys)) for _ in range(200)]
    ratios = [client / own for client, own in zip(found["client"], found["kvrag"], strict=True)]
    per_s = {
        name: round(CHUNKS * SIZE / statistics.median(times) / 1e9, 3)
        for name, times in found.items()
    }
    return {
        "gb_per_s": per_s,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "lookup_ms": round(statistics.median(lookups) * 1e3, 3),
    }


def digest(text: str) -> str:
    """Return a key for a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def rows_of(number: int) -> Any:
    """Return what the catalog is told of a chunk: one of twenty of its document."""
    blank = record_of(make_identity(0), SIZE)
    made = replace(blank, key=digest(f"key {number}"), content=digest(f"content {number}"))
    return made, make_text(f"text {number}"), [f"document {number // 20}"], None


def opened(where: tuple[str, str | None]) -> Any:
    """Open a store at an address, with its catalog there or in another database."""
    return closing(open_store(where[0], StoreConfig(min_free_bytes=0, catalog=where[1])))


def fill(where: tuple[str, str | None], first: int, last: int) -> list[float]:
    """Write the rows of many chunks, and return when each tenth of them was begun, and the end."""
    times = [time.time()]
    with opened(where) as store:
        catalog = store.catalog
        for tenth in range(10):
            start, end = (first + (last - first) * part // 10 for part in (tenth, tenth + 1))
            for number in range(start, end, 8):
                rows = [rows_of(each) for each in range(number, min(number + 8, end))]
                begun = zip(rows, catalog.begin(rows), strict=True)
                catalog.confirm({row[0].key: note for row, note in begun if note is not None})
            times.append(time.time())
    return times


def look(where: tuple[str, str | None], chunks: int) -> dict[str, Any]:
    """Begin as another machine, in a process of its own."""
    keys = [rows_of(number)[0].key for number in range(0, chunks, chunks // 20)]
    with opened(where) as store:
        begin_s = timed(store.catalog.totals)
        assert store.catalog.totals()[0] == chunks
        lookups = [timed(lambda: store.known(keys)) for _ in range(200)]
        list_s = timed(store.catalog.keys)
    return {
        "begin_ms": round(begin_s * 1e3, 2),
        "lookup_ms": round(statistics.median(lookups) * 1e3, 3),
        "list_s": round(list_s, 2),
    }


def catalog(where: tuple[str, str | None], chunks: int) -> dict[str, Any]:
    """Measure a catalog of many chunks."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        times = pool.submit(fill, where, 0, chunks // 2).result()
        per_s = [chunks / 20 / (end - start) for start, end in pairwise(times)]
        halves = [(chunks // 2, chunks * 3 // 4), (chunks * 3 // 4, chunks)]
        both = [each.result() for each in [pool.submit(fill, where, *half) for half in halves]]
        took = max(times[-1] for times in both) - min(times[0] for times in both)
        return {
            "chunks_per_s": [round(each, 1) for each in per_s],
            "two_machines_chunks_per_s": round(chunks / 2 / took, 1),
            **pool.submit(look, where, chunks).result(),
        }


def catalogs(chunks: int, folder: Path) -> dict[str, Any]:
    """Measure a catalog in Redis."""
    import redis

    with redis_server(folder) as url:
        found = {"redis": catalog((url, None), chunks)}
        found["redis"]["bytes"] = redis.Redis.from_url(url).info("memory")["used_memory"]
    return {"chunks": chunks, "catalogs": found}


def main() -> None:
    """Measure, and write ``results/shared.json`` or ``results/shared_catalog.json``."""
    options = parser(__doc__, rounds=15, chunks=100_000)
    options.add_argument("--only", default="reads", choices=("reads", "catalog"))
    args = options.parse_args()
    if args.only == "catalog":
        with tempfile.TemporaryDirectory() as name:
            result = {"machine": machine(), **catalogs(args.chunks, Path(name))}
        print(result)
        print("written:", write_result("shared_catalog", result, args.out))
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        (folder / "bucket").mkdir()
        with redis_server(folder) as database:
            rows = {"redis": measure(database, args.rounds)}
            rows["objects"] = measure(f"file://{folder}/bucket", args.rounds, database)
            if importlib.util.find_spec("moto"):
                with s3() as url:
                    rows["s3"] = measure(url, args.rounds, database)
    for name, row in rows.items():
        print(
            name,
            row["gb_per_s"],
            "ratio",
            row["ratio"],
            "look-up of 20",
            row["lookup_ms"],
            "ms",
        )
    what = {"bytes": SIZE, "chunks": CHUNKS, "target": TARGET}
    print(
        "written:", write_result("shared", {"machine": machine(), **what, "tiers": rows}, args.out)
    )


if __name__ == "__main__":
    main()
