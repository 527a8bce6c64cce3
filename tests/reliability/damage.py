"""Damage of stored bytes, hostile files, and values that must not be stored: all misses, nothing run, nothing slow."""

import itertools
import json
import os
import pickle
import random
import socket
import time
from functools import partial
from pathlib import Path

import torch
from world import PLAIN, Kind, Outcome, identity, key, path_of, put, state

from kvrag.kv.format import Blob, BlobRejected, Encoded, Header
from kvrag.kv.layers import MAX_LAYERS
from kvrag.types import ChunkKey

TRIES = 5
"""The best one counts: others may use processor and disk meanwhile."""

TOKENS = 40


def _blob(kind: Kind) -> bytearray:
    me = kind.identity(1, tokens=TOKENS)
    return bytearray().join(Encoded(me, kind.kv(me), kind.cipher))


def _is_miss(raw: bytearray, kind: Kind) -> bool:
    view = memoryview(raw)
    try:
        Blob(
            lambda start, length: view[start : start + length],
            kind.identity(1, tokens=TOKENS),
            kind.cipher,
        ).load()
    except BlobRejected:
        return True
    return False


def flips(
    folder: Path, *, count: int, seed: int = 0, kind: Kind = PLAIN, header_step: int = 1
) -> Outcome:
    """Flip one bit at a time: of the header every one, or one of ``header_step``, and random ones of the whole file."""
    outcome, rng = Outcome(skipped=kind.needs), random.Random(seed)
    if outcome.skipped:
        return outcome
    raw = _blob(kind)
    outcome.check(not _is_miss(raw, kind), "the undamaged blob is a miss")
    header = range(0, 8 * (8 + int.from_bytes(raw[:8], "little")), header_step)
    for bit in (*header, *(rng.randrange(8 * len(raw)) for _ in range(count))):
        raw[bit // 8] ^= 1 << bit % 8
        outcome.check(_is_miss(raw, kind), f"bit {bit} flipped: read")
        raw[bit // 8] ^= 1 << bit % 8
    outcome.check(not _is_miss(raw, kind), "the mended blob is a miss")
    outcome.counts |= {"random_flips": count, "header_flips": len(header)}
    return outcome


def _padded(head: bytes) -> bytes:
    head += b" " * (-(len(head) + 8) % 4096)
    return len(head).to_bytes(8, "little") + head


def _sparse(path: Path, length: int) -> None:
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(length + 8)


def _tensors(count: int) -> bytes:
    place = b'"data_offsets":[0,0],"dtype":"F32","shape":[1,1,1]'
    return b"{" + b",".join(b'"%d":{%s}' % (n, place) for n in range(count)) + b"}"


def _layers(count: int) -> bytes:
    """A file that is in order but for its last digest, with so many layers: the most that a reader can be made to work."""
    shape = (1, 3, 2)
    head = Header(identity(1), torch.float32, ((shape, shape),) * count, (bytes(16),) * count)
    return _padded(head.encode()) + bytes(head.num_bytes)


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def hostile(folder: Path) -> Outcome:
    """Plant files that want to be run, followed, waited for, or swallowed whole."""
    outcome, root = Outcome(), folder / "store"
    million = _tensors(10**6)
    secret, ran = folder / "secret", folder / "ran"
    plants = {
        "pickle": lambda p: p.write_bytes(pickle.dumps(Bomb(ran))),
        "torch file": lambda p: torch.save({"a": torch.zeros(3)}, p),
        "100 MB header": lambda p: _sparse(p, 100 * 2**20),
        "header of 2^63": lambda p: p.write_bytes((2**63).to_bytes(8, "little") * 1000),
        "as many tensors as fit": lambda p: p.write_bytes(_padded(_tensors(60_000))),
        "a million tensors": lambda p: p.write_bytes(_padded(million)),
        "as many layers as fit": lambda p: p.write_bytes(_layers(MAX_LAYERS)),
        "thousands of layers": lambda p: p.write_bytes(_layers(2600)),
        "deep JSON": lambda p: p.write_bytes(_padded(b"[" * 400_000)),
        "long number": lambda p: p.write_bytes(_padded(b'{"a":' + b"9" * 400_000 + b"}")),
        "link": lambda p: p.symlink_to(secret),
        "link to itself": lambda p: p.symlink_to(p),
        "hard link": lambda p: os.link(secret, p),
        "FIFO": os.mkfifo,
        "socket": _socket,
        "folder": Path.mkdir,
        "device": lambda p: p.symlink_to("/dev/zero"),
        "empty": lambda p: p.touch(),
    }
    secret.write_bytes(b"secret" * 1000)
    slowest = slowest_cpu = 0.0
    for name, plant in plants.items():
        store = PLAIN.open(root)
        path = path_of(root, key(1))
        walls, cpus = [], []
        for _ in range(TRIES):
            put(store, 1)
            path.unlink()
            plant(path)
            start, cpu = time.monotonic(), time.process_time()
            found = state(store, 1)
            cpus.append(time.process_time() - cpu)
            walls.append(time.monotonic() - start)
            outcome.check(found == "missing", f"{name}: {found}")
            if path.is_dir():  # neither an erasure nor a put removes a folder
                path.rmdir()
            store.delete([key(1)])
        slowest, slowest_cpu = max(slowest, min(walls)), max(slowest_cpu, min(cpus))
        outcome.check(put(store, 1) > 0 and state(store, 1) == "readable", f"{name}: does not heal")
        store.close()
        outcome.add("plants")
    outcome.check(not ran.exists(), "a pickle was run")
    outcome.check(secret.read_bytes() == b"secret" * 1000, "a file outside was written to")
    outcome.counts |= {
        "slowest_rejection_ms": round(slowest * 1e3, 2),
        "slowest_cpu_ms": round(slowest_cpu * 1e3, 2),
    }
    _hostile_names(folder, outcome)
    return outcome


def _hostile_names(folder: Path, outcome: Outcome) -> None:
    """Rows may name anything; nothing but blobs of the store is read or erased."""
    store = PLAIN.open(folder / "names")
    put(store, 1)
    victim = folder / "victim.safetensors"
    victim.write_text("x")
    rows, row = store.catalog._rows, json.loads(store.catalog._rows.get(f"c {key(1)}"))
    names = (
        "../victim",
        "../../victim",
        "/." + str(victim.with_suffix("")),
        "a" * 63 + "/",
        "A" * 64,
    )
    for name, value in itertools.product(names, (row, "of no form")):
        rows.change(partial(rows.set, f"c {name}", value))
        outcome.check(store.identity(ChunkKey(name)) is None, f"{name!r} is a chunk")
        store.delete([ChunkKey(name)])
        outcome.check(not store.known([ChunkKey(name)]), f"{name!r} is known after it was erased")
        outcome.add("planted_rows")
        rows.change(partial(rows.set, f"c {name}", value))
    store.clear()
    outcome.check(not store.catalog.present(), "there are rows after everything was erased")
    store.close()
    outcome.check(victim.read_text() == "x", "a file outside was erased")
