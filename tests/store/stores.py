"""What the tests of the store share."""

import base64
import importlib.util
import json
import os
import struct
import threading

import pytest
import xxhash

from kvrag.config import StoreConfig
from kvrag.identity.fingerprint import chunk_key, ids_bytes
from kvrag.kv.format import Encoded
from kvrag.store import Catalog, FileBlobs, Keys, MemoryTier, TieredStore
from kvrag.store.eviction import Budget
from kvrag.testing.chunks import make_identity, make_kv, make_text

PATIENT_S = 30.0
CHUNKS = [make_identity(number) for number in range(12)]
KEYS = [chunk_key(identity) for identity in CHUNKS]
KVS = [make_kv(identity) for identity in CHUNKS]
SIZE = KVS[0].num_bytes

SECRETS = {
    name: bytes([number]) * 16 + bytes(range(16))
    for number, name in enumerate(("cipher", "wrong"), 1)
}
"""Encryption keys of the tests; each of their halves can be searched for."""

needs_cryptography = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="cryptography is not installed"
)
EVERY_KEY = [None, pytest.param("cipher", marks=needs_cryptography)]
"""Without a key, and with one."""


def config_of(key=None, **options):
    """Config of a store that is quick to write to, with a key or without."""
    sources = {} if key is None else {"encryption_key": lambda: SECRETS[key]}
    return StoreConfig(**{"min_free_bytes": 0, "durability": "cache", **sources, **options})


def other_handle(root, *, key=None, ram=2**20, gpu=None, budget=None, **options):
    """Open a store that shares nothing with others of this process."""
    config = config_of(key, **options)
    keys = Keys.of(config)
    folder = root / (f"catalog-{keys.id}" if keys.id else "catalog")
    catalog = Catalog(folder, keys, may_have_blobs=(root / "objects").is_dir)
    tiers = [MemoryTier(gpu, name="gpu")] if gpu is not None else []
    blobs = FileBlobs(root, durable=False)
    return TieredStore([*tiers, MemoryTier(ram)], blobs, catalog, config, keys=keys, budget=budget)


def exactly(chunks):
    """Budget of so many small chunks."""
    return Budget(chunks * SIZE)


def put(store, number, *, doc=True, retention=None):
    """Store a chunk with a text and, unless ``doc`` is false, a document of its own."""
    me, doc_id = make_identity(number), f"doc {number}" if doc else None
    text = make_text(f"text {number}")
    return store.put(me, make_kv(me), text=text, doc_id=doc_id, retention=retention)


def fill(store, *numbers, **options):
    """Store some chunks."""
    for number in numbers:
        assert put(store, number, **options) > 0
    return store


def present(store):
    """Numbers of the chunks that a store knows."""
    return [number for number, key in enumerate(KEYS) if store.known([key])]


def held(tier):
    """Numbers of the chunks that a memory tier holds."""
    return [number for number, key in enumerate(KEYS) if key in tier.keys()]  # noqa: SIM118 - a tier is no dict


def files(root):
    """Numbers of the chunks that have a file; anything else as its path."""
    found = {path.stem: path for path in (root / "objects").rglob("*") if path.suffix}
    return sorted(
        (KEYS.index(key) if key in KEYS else str(path) for key, path in found.items()), key=str
    )


def path_of(root, identity):
    """Place of a chunk's file."""
    key = chunk_key(identity)
    return root / "objects" / key[:2] / f"{key}.safetensors"


def blob_of(identity, kv, cipher=None):
    """The bytes of a chunk's blob."""
    return b"".join(Encoded(identity, kv, cipher))


def flip(path, place, mask=1):
    """Change a byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= mask
    path.write_bytes(raw)


def head_of(raw):
    """Length and header of a blob, of all its bytes."""
    return raw[: 8 + struct.unpack("<Q", raw[:8])[0]]


def in_order(fields):
    """Bytes of a header that says this, its digest and padding put in order; ``header_digest`` must come first."""
    fields = {**fields, "__metadata__": {**fields["__metadata__"], "header_digest": "0" * 32}}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text


def listing(root):
    """All that can be seen of a directory's files without reading them."""
    return {
        str(p): (s.st_mtime_ns, s.st_size, s.st_mode)
        for p in sorted(root.rglob("*"))
        for s in [p.lstat()]
    }


def forms_of(value):
    """How bytes may be written down: as they are, in hex, in base64 at any offset."""
    inner = [base64.b64encode(b"\0" * pad + value)[4:-4] for pad in range(3)]
    return [value, value.hex().encode(), *(form for form in inner if len(form) >= 12)]


def everything_in(root):
    """Names and bytes of all files below a directory."""
    paths = sorted(root.rglob("*"))
    return b"\n".join(
        str(p.relative_to(root)).encode() + (p.read_bytes() if p.is_file() else b"") for p in paths
    )


def traces_of(identity, kv, text, doc_id):
    """What a stored document could be recognised by, in all forms."""
    names = [
        doc_id,
        text.digest,
        identity.namespace.partition(":")[2],
        str(text.head),
        str(text.tail),
    ]
    data = [ids_bytes(identity.token_ids), kv.layers[0].keys.numpy().tobytes()[:24]]
    return [
        *(name.encode() for name in names),
        *(form for value in data for form in forms_of(value)),
    ]


class Killed(BaseException):
    """Stands for the death of a process: nothing of the store catches it."""


def failing(number, after=0):
    """Make a stand-in for a function that raises an ``OSError`` from some call on."""

    def make(real):
        calls = iter(range(10**9))

        def call(*args, **kwargs):
            if next(calls) >= after:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call

    return make


def in_child(work):
    """Run ``work`` in a forked child, and return its process id; it exits with 0 if it returned something true."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return pid


def ended(pid):
    """Exit status of a child, which is killed if it hangs."""
    timer = threading.Timer(PATIENT_S, os.kill, (pid, 9))
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    timer.cancel()
    return status
