"""The store beside plain files: write, verified read, first layer, index look-up, opening; and the sizes of rounded KV.

A plain file holds the same bytes and makes the same promise: it is written with one ``write`` to a temporary name and renamed;
where the store is durable, it is synced before and its folder after that. It is read with one ``preadv`` into a buffer that is
there and of the same kind as the store's. All kinds take turns in an order that is drawn anew in each round. Ratios are medians
over rounds of plain time ÷ store time, so above 1 the store is quicker.

    python benchmarks/bench_store.py [--only blobs index opening sizes] [--folder DIR] [--rows 100000]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import machine, parser, write_result

from kvrag.config import StoreConfig
from kvrag.evaluate.estimate import PRESETS, ModelShape
from kvrag.identity.fingerprint import chunk_key
from kvrag.kv.buffers import Buffers
from kvrag.kv.format import Blob, Encoded
from kvrag.kv.quantise import pack
from kvrag.store import Catalog, ChunkRecord, TieredStore, open_store
from kvrag.store.blobs import OBJECTS, SUFFIX
from kvrag.testing.chunks import NAMESPACE, make_identity, make_text
from kvrag.types import ChunkIdentity, ChunkKey, ChunkKV, LayerKV

MB = 10**6
LAYERS, HEADS, DIM = 28, 8, 128
TARGETS = {"write": 0.85, "read": 0.75, "lookup_us": 50.0, "open_s": 0.5, "first_layer_ms": 2.0}
SIZE_TARGETS = {"int8": 0.53, "fp8": 0.53, "int4": 0.32}
SIZED = ("smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b", "llama-3.1-8b")
SIZED_TOKENS = 250
CONFIG = StoreConfig(min_free_bytes=0, ram_bytes=0)
OPEN_CHUNKS = 10_000
PARTS = ["blobs", "index", "sizes", "opening"]
SECTIONS = ("writes", "reads", "index", "sizes", "opening")


def chunk(num_bytes: int, number: int) -> tuple[ChunkIdentity, ChunkKV]:
    """Make bfloat16 KV of about this size."""
    tokens = num_bytes // (LAYERS * 2 * HEADS * DIM * 2)
    flat = torch.randn(LAYERS, 2, HEADS, tokens, DIM).to(torch.bfloat16)
    return make_identity(number, tokens=tokens), ChunkKV(
        tuple(LayerKV(layer[0], layer[1]) for layer in flat)
    )


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path, view: memoryview, *, durable: bool) -> None:
    """Write a file under a temporary name and rename it, as a careful program does."""
    draft = path.with_suffix(".tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    if durable:
        os.fdatasync(fd)
    os.close(fd)
    draft.rename(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def plain_read(path: Path, view: memoryview) -> None:
    """Read a file into a buffer that is there."""
    fd = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(view):
        done += os.preadv(fd, [view[done:]], done)
    os.close(fd)


def take_turns(
    works: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each work in each round; the first round, which fills caches, is left out."""
    times: dict[str, list[float]] = {name: [] for name in works}
    luck = random.Random(0)
    for _ in range(rounds + 1):
        for name in luck.sample(list(works), len(works)):
            before()
            times[name].append(timed(works[name]))
    return {name: values[1:] for name, values in times.items()}


def summary(times: dict[str, list[float]], plain: str, num_bytes: int) -> dict[str, float]:
    """Medians in milliseconds, and of the ratios to the plain file's."""
    ratios = {
        name: statistics.median(p / s for p, s in zip(times[plain], values, strict=True))
        for name, values in times.items()
        if name not in (plain, "first_layer")
    }
    return {
        "bytes": num_bytes,
        **{f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()},
        **{f"{name}_ratio": ratio for name, ratio in ratios.items()},
    }


def writes(folder: Path, size: int, rounds: int, config: StoreConfig) -> dict[str, float]:
    """Compare a chunk's file alone, and the whole put with its reference and rows, with a plain file."""
    store = open_store(folder / "store", config)
    identity, kv = chunk(size, 1)
    view, plain, key = contiguous(kv), folder / "plain", chunk_key(identity)
    text = make_text("a")

    def clear() -> None:
        plain.unlink(missing_ok=True)
        store.delete([key])

    works: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain_write(plain, view, durable=config.durability == "durable"),
        "file": lambda: store.blobs.write(key, Encoded(identity, kv)),
        "put": lambda: store.put(identity, kv, text=text, doc_id="doc"),
    }
    times = take_turns(works, rounds, clear)
    store.close()
    return summary(times, "plain", len(view))


def reads(folder: Path, size: int, rounds: int, *, warm: bool) -> dict[str, float]:
    """Compare verified reads, layer by layer and of the whole chunk, with a plain file."""
    store = open_store(folder / "store", CONFIG)
    identity, kv = chunk(size, 1)
    view, plain, key = contiguous(kv), folder / "plain", chunk_key(identity)
    plain_write(plain, view, durable=True)
    store.put(identity, kv, text=make_text("a"), doc_id="doc")
    files = [plain, file_of(folder / "store", key)]
    buffer = Buffers().take(len(view))
    works: dict[str, Callable[[], Any]] = {
        "plain": lambda: plain_read(plain, buffer),
        "layers": lambda: list(blob_of(store, identity).layers()),
        "get": lambda: store.get(identity),
        "first_layer": lambda: next(blob_of(store, identity).layers()),
    }

    def before() -> None:
        if not warm:
            drop(files)

    times = take_turns(works, rounds, before)
    before()
    store.close()
    return summary(times, "plain", len(view))


def contiguous(kv: ChunkKV) -> memoryview:
    """Return the bytes of all tensors, one after the other."""
    flat = torch.cat(
        [torch.cat([layer.keys.flatten(), layer.values.flatten()]) for layer in kv.layers]
    )
    return flat.view(torch.uint8).numpy().data


def drop(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def blob_of(store: TieredStore, identity: ChunkIdentity) -> Blob:
    """Open a chunk's blob."""
    return Blob(partial(store.blobs.read, chunk_key(identity)), identity)


def file_of(root: Path, key: ChunkKey) -> Path:
    """Path of a chunk's file."""
    return root / OBJECTS / key[:2] / (key + SUFFIX)


def lookups(folder: Path, rows: int) -> dict[str, float]:
    """Fill a catalog, and look up random keys."""
    catalog = Catalog(folder / "catalog")
    records = [record(number) for number in range(rows)]
    start = time.perf_counter()
    for number, each in enumerate(records):
        [revision] = catalog.begin([(each, make_text(str(number)), [f"doc {number}"], None)])
        catalog.confirm({each.key: revision})
    filled = time.perf_counter() - start
    keys = [records[number * 7919 % rows].key for number in range(2000)]
    times = [timed(lambda key=key: catalog.get(key)) for key in keys]  # type: ignore[misc]
    known = timed(lambda: catalog.known(keys)) / len(keys)
    catalog.close()
    return {
        "rows": rows,
        "insert_us": filled / rows * 1e6,
        "lookup_us": statistics.median(times) * 1e6,
        "lookup_p99_us": statistics.quantiles(times, n=100)[98] * 1e6,
        "known_us": known * 1e6,
    }


def record(number: int) -> ChunkRecord:
    """Row of a chunk that is nowhere."""
    return ChunkRecord(
        chunk_key(make_identity(number)),
        f"content {number}",
        "model",
        "namespace",
        "prefix",
        "",
        512,
        10**6,
    )


def opening(folder: Path, chunks: int) -> dict[str, float]:
    """Open a store of many small chunks, for writing and for reading only; list its texts and documents, and rank its chunks."""
    config = replace(CONFIG, durability="cache")
    store = open_store(folder / "many", config)
    row = torch.ones(1, 3, 2)
    for number in range(chunks):
        kv = ChunkKV((LayerKV(row, row),))
        store.put(make_identity(number), kv, text=make_text(str(number)), doc_id=f"doc {number}")
    store.close()
    times = [timed(lambda: open_store(folder / "many", config).close()) for _ in range(3)]
    read_only = timed(lambda: open_store(folder / "many", replace(config, read_only=True)).close())
    store = open_store(folder / "many", config)
    texts = timed(lambda: store.catalog.texts(NAMESPACE, 0))
    documents = timed(lambda: store.catalog.documents(NAMESPACE))
    usages = timed(store.catalog.usages)
    store.close()
    return {
        "chunks": chunks,
        "open_s": statistics.median(times),
        "read_only_s": read_only,
        "texts_s": texts,
        "documents_s": documents,
        "usages_s": usages,
    }


def sizes(folder: Path) -> dict[str, dict[str, float]]:
    """Bytes on disk of one chunk's file, header included, and as a share of bfloat16's, for the shapes of known models."""
    store = open_store(folder / "sizes", replace(CONFIG, durability="cache"))
    found: dict[str, dict[str, float]] = {}
    for name in SIZED:
        shape = PRESETS[name]
        identity = make_identity(1, model=name, tokens=SIZED_TOKENS)
        row = {"auto": float(size_on_disk(store, identity, shape))}
        for kv_dtype in SIZE_TARGETS:
            rounded = replace(identity, kv_dtype=kv_dtype)  # type: ignore[arg-type]
            row[kv_dtype] = size_on_disk(store, rounded, shape) / row["auto"]
        found[name] = row
    store.close()
    return found


def size_on_disk(store: TieredStore, identity: ChunkIdentity, shape: ModelShape) -> int:
    """Bytes of the file of a chunk of a model."""
    flat = torch.randn(2, shape.num_kv_heads, len(identity.token_ids), shape.head_dim).to(
        torch.bfloat16
    )
    kv = ChunkKV(
        (LayerKV(flat[0], flat[1]),) * shape.num_layers
    )  # the size does not depend on the values
    store.put(identity, pack(kv, identity.kv_dtype), text=make_text("a"), doc_id="doc")
    blob = store.blobs.read(chunk_key(identity))
    assert blob is not None
    return len(blob)


def measure_blobs(result: dict[str, Any], places: dict[str, Path], rounds: int) -> None:
    """Measure writes and reads of 8 and 64 MB in each place."""
    result["writes"], result["reads"] = {}, {}
    for place, parent in places.items():
        for size in (8, 64):
            for durability in ("durable", "cache"):
                with tempfile.TemporaryDirectory(dir=parent) as folder:
                    row = writes(
                        Path(folder), size * MB, rounds, replace(CONFIG, durability=durability)
                    )
                result["writes"][f"{place}/{durability}/{size}"] = row
                print(
                    place,
                    durability,
                    size,
                    {name: round(value, 2) for name, value in row.items()},
                    flush=True,
                )
            for state in ("warm",) if place == "memory" else ("warm", "cold"):
                with tempfile.TemporaryDirectory(dir=parent) as folder:
                    row = reads(Path(folder), size * MB, rounds, warm=state == "warm")
                result["reads"][f"{place}/{state}/{size}"] = row
                print(
                    place,
                    state,
                    size,
                    {name: round(value, 2) for name, value in row.items()},
                    flush=True,
                )


def main() -> None:
    """Measure what is asked for, write the result beside what was measured before, and say which targets are missed."""
    options = parser(__doc__, rows=100_000, rounds=31)
    options.add_argument(
        "--folder", type=Path, help="on another file system; default: in memory, and on the disk"
    )
    options.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="keep the others as they were measured",
    )
    args = options.parse_args()
    torch.set_num_threads(1)
    places = (
        {"given": args.folder}
        if args.folder
        else {"memory": Path("/dev/shm"), "disk": Path(tempfile.gettempdir())}
    )
    before = args.out / "store.json"
    known = json.loads(before.read_text()) if before.exists() and args.only != PARTS else {}
    result: dict[str, Any] = {part: known[part] for part in SECTIONS if part in known}
    result |= {"machine": machine(), "targets": TARGETS}
    if "blobs" in args.only:
        measure_blobs(result, places, args.rounds)
    with tempfile.TemporaryDirectory(dir=next(iter(places.values()))) as folder:
        if "index" in args.only:
            result["index"] = {"diskcache": lookups(Path(folder), args.rows)}
            print(result["index"], flush=True)
        if "sizes" in args.only:
            result["sizes"] = {
                "machine": machine(),
                "targets": SIZE_TARGETS,
                "shares": sizes(Path(folder)),
            }
        if "opening" in args.only:
            result["opening"] = opening(Path(folder), OPEN_CHUNKS)
            print(result["opening"], flush=True)
    write_result("store", result, args.out)
    report(misses(result))


def report(missed: list[str]) -> None:
    """Say which targets are missed, in words and by the exit status."""
    print("missed: " + "; ".join(missed) if missed else "all targets are met")
    sys.exit(1 if missed else 0)


def misses(result: dict[str, Any]) -> list[str]:
    """Targets that were missed; that of the first layer is for warm reads."""
    found = [
        f"{name}: write {row['file_ratio']:.2f}"
        for name, row in result["writes"].items()
        if row["file_ratio"] < TARGETS["write"]
    ]
    for name, row in result["reads"].items():
        if row["layers_ratio"] < TARGETS["read"]:
            found.append(f"{name}: read {row['layers_ratio']:.2f}")
        if "/warm/" in name and row["first_layer_ms"] > TARGETS["first_layer_ms"]:
            found.append(f"{name}: first layer after {row['first_layer_ms']:.2f} ms")
    found += [
        f"{kind}: {row['lookup_us']:.0f} µs"
        for kind, row in result["index"].items()
        if row["lookup_us"] > TARGETS["lookup_us"]
    ]
    found += size_misses(result)
    if result["opening"]["open_s"] > TARGETS["open_s"]:
        found.append(f"opening took {result['opening']['open_s']:.2f} s")
    return found


def size_misses(result: dict[str, Any]) -> list[str]:
    """Shares of bfloat16's size that are too large."""
    return [
        f"{name} as {kv_dtype}: {row[kv_dtype]:.3f} of bfloat16"
        for name, row in result["sizes"]["shares"].items()
        for kv_dtype, limit in SIZE_TARGETS.items()
        if row[kv_dtype] > limit
    ]


if __name__ == "__main__":
    main()
