"""What the golden stores hold, and how they were made.

    python tests/store/golden.py        # makes those of the present version that are missing; none is ever made again

``store-v<n>`` is a plain store; ``store-v<n>-<kind>`` has what else version ``n`` can write. All but the encrypted one are made to the
same bytes each time; that one has random salts, and can only be read.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from protected import config_of, identity_of, names_of

from kvrag.blend.quantise import pack
from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.store import DiskStore
from kvrag.testing.chunks import make_identity, make_kv, make_text
from kvrag.types import ChunkKV, LayerKV

PROMISED = ("format.json", "objects", "references")
"""What the format promises of a store."""

DATA = Path(__file__).parents[1] / "data"
FIRST = make_identity(1)
KINDS = ("", "dtypes", "secret", "mac", "encrypted")
PROTECTION = {"encrypted": "all"}
"""What a kind is called in ``protected``, where that is not the same."""

TOKENS, KEY_DIM, VALUE_DIM = 33, 6, 66
"""Two groups of tokens and three of channels for int4, an odd number of float32 scales, and keys unlike values."""


def folder(version, kind):
    """Place of a golden store."""
    return DATA / f"store-v{version}{kind and '-'}{kind}"


def store_of(root, kind):
    """Open a store with the keys of a kind."""
    return DiskStore(root, config_of(PROTECTION.get(kind, kind)))


def even_kv(identity):
    """KV of numbers that every dtype holds, made by whole numbers alone: the same on every machine and with every torch."""

    def tensor(seed, heads, dim):
        numbers = torch.arange(heads * TOKENS * dim) * (2 * seed + 37) % 101
        return ((numbers - 50) / 16).reshape(heads, TOKENS, dim)

    return ChunkKV(tuple(LayerKV(tensor(i, 2, KEY_DIM), tensor(i + 5, 1, VALUE_DIM)) for i in range(2)))


def chunks(kind):
    """Identities and KV of a kind's chunks."""
    if not kind:
        return [(FIRST, make_kv(FIRST))]
    me = identity_of(PROTECTION.get(kind, kind), 7, tokens=TOKENS)
    kv = even_kv(me)
    kept = {"dtypes": ("int8", "int4", "fp8"), "encrypted": ("int4",)}.get(kind, ("int8",))
    found = [(replace(me, kv_dtype=kv_dtype), pack(kv, kv_dtype)) for kv_dtype in kept]
    for number, dtype in enumerate((torch.bfloat16, torch.float16)) if kind == "dtypes" else ():
        half = identity_of("plain", 8 + number, tokens=TOKENS)
        found.append((half, even_kv(half).map(lambda x, dtype=dtype: x.to(dtype))))
    return found


def text_of(kind, number=0):
    """Entry of the text of a kind's chunk, as it is stored."""
    return names_of(PROTECTION.get(kind, kind)).hide(make_text(f"golden {number}" if kind else "golden"))


def fill(root, kind):
    """Write what the golden store of a kind holds."""
    store = store_of(root, kind)
    for number, (identity, kv) in enumerate(chunks(kind)):
        for doc_id in ("golden", "other"):
            store.put(identity, kv, text=text_of(kind, number), doc_id=doc_id)
    store.close()


def main():
    """Make what is missing."""
    for root in (folder(FORMAT_VERSION, kind) for kind in KINDS):
        if not root.exists():
            fill(root, root.name.partition("-")[2].partition("-")[2])
            for other in {*root.iterdir()} - {root / name for name in PROMISED}:
                shutil.rmtree(other) if other.is_dir() else other.unlink()


if __name__ == "__main__":
    main()
