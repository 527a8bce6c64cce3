"""A shared store beside its server's own client: reading a chunk of 6 MB, and what a look-up of 20 chunks costs.

    python tests/benchmarks/bench_shared.py

``redis``: a redis-server that this script starts; ``objects``: obstore on a directory, which is memory here; ``s3``: obstore on moto, a
server that answers as S3 does, if it is installed. Each round reads every chunk with the client alone
(``GET``, ``obstore.get``), and as kvrag does: header, proof of every layer, tensors. They take turns in a random order. The ratio is the
median over rounds of the client's time ÷ kvrag's; the target is 0.7.
"""

from __future__ import annotations

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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench_store import chunk, timed
from common import machine, parser, write_result

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key
from kvrag.store import open_store
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
        [program, "--port", str(port), "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
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
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    own = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    own |= {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "testing"}
    os.environ |= {f"AWS_{name}": value for name, value in own.items()}
    time.sleep(5.0)
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
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

    store = obstore.store.from_url(url, **({"client_options": {"allow_http": True}} if url.startswith("s3") else {}))
    return lambda key: obstore.get(store, f"objects/{key}").bytes()


def measure(url: str, rounds: int) -> dict[str, Any]:
    """Read all chunks in both ways, by turns."""
    chunks = [chunk(SIZE, number) for number in range(CHUNKS)]
    raw = clients(url)
    found: dict[str, list[float]] = {"client": [], "kvrag": []}
    with closing(open_store(url, StoreConfig(ram_bytes=0, min_free_bytes=0))) as store:
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
        time.sleep(1.1)  # the look-up has to ask whether something was erased
        lookups = [timed(lambda: store.known(keys)) for _ in range(50)]
    ratios = [client / own for client, own in zip(found["client"], found["kvrag"], strict=True)]
    per_s = {name: round(CHUNKS * SIZE / statistics.median(times) / 1e9, 3) for name, times in found.items()}
    return {
        "gb_per_s": per_s,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "lookup_first_ms": round(lookups[0] * 1e3, 3),
        "lookup_ms": round(statistics.median(lookups[1:]) * 1e3, 3),
    }


def main() -> None:
    """Measure both, and write ``results/shared.json``."""
    args = parser(__doc__, rounds=15).parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        with redis_server(folder) as url:
            rows = {"redis": measure(url, args.rounds)}
        (folder / "bucket").mkdir()
        rows["objects"] = measure(f"file://{folder}/bucket", args.rounds)
    if importlib.util.find_spec("moto"):
        with s3() as url:
            rows["s3"] = measure(url, args.rounds)
    for name, row in rows.items():
        print(
            name,
            row["gb_per_s"],
            "ratio",
            row["ratio"],
            "look-up of 20",
            row["lookup_first_ms"],
            row["lookup_ms"],
            "ms",
        )
    what = {"bytes": SIZE, "chunks": CHUNKS, "target": TARGET}
    print("written:", write_result("shared", {"machine": machine(), **what, "tiers": rows}, args.out))


if __name__ == "__main__":
    main()
