"""What the golden stores hold, and how they were made.

    python tests/store/golden.py        # makes those of the present version that are missing; none is ever made again

``store-v<n>`` is a plain store of all types of KV; ``store-v<n>-encrypted`` has random salts, and can only be read.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from stores import CHUNKS, KVS, config_of

from kvrag.identity.fingerprint import FORMAT_VERSION
from kvrag.kv.quantise import pack
from kvrag.store import Keys, open_store
from kvrag.testing.chunks import make_identity, make_text
from kvrag.types import ChunkKV, LayerKV

DATA = Path(__file__).parents[1] / "data"
KINDS = {"": None, "encrypted": "cipher"}
"""Kinds of golden stores, and their keys."""

KEPT = ("format.json", "objects", "catalog")
TOKENS, KEY_DIM, VALUE_DIM = 33, 6, 66
"""Two groups of tokens and three of channels for int4, an odd number of float32 scales, and keys unlike values."""


def folder(version, kind):
    """Place of a golden store."""
    return DATA / f"store-v{version}{kind and '-'}{kind}"


def even_kv():
    """KV of numbers that every dtype holds, made by whole numbers alone: the same on every machine and with every torch."""

    def tensor(seed, heads, dim):
        numbers = torch.arange(heads * TOKENS * dim) * (2 * seed + 37) % 101
        return ((numbers - 50) / 16).reshape(heads, TOKENS, dim)

    return ChunkKV(
        tuple(LayerKV(tensor(i, 2, KEY_DIM), tensor(i + 5, 1, VALUE_DIM)) for i in range(2))
    )


def chunks(kind):
    """Identities and KV of a kind's chunks."""
    namespace = Keys.of(config_of(KINDS[kind])).namespace("default")
    me, kv = make_identity(7, namespace=namespace, tokens=TOKENS), even_kv()
    found = [(replace(me, kv_dtype="int4"), pack(kv, "int4"))]
    if not kind:
        found += [(CHUNKS[1], KVS[1]), (replace(CHUNKS[1], context="behind"), KVS[1])]
        found += [
            (replace(me, kv_dtype=kv_dtype), pack(kv, kv_dtype)) for kv_dtype in ("int8", "fp8")
        ]
        for number, dtype in enumerate((torch.bfloat16, torch.float16)):
            half = make_identity(8 + number, tokens=TOKENS)
            found.append(
                (
                    half,
                    ChunkKV(
                        tuple(
                            LayerKV(each.keys.to(dtype), each.values.to(dtype))
                            for each in kv.layers
                        )
                    ),
                )
            )
    return found


def fill(root, kind):
    """Write what the golden store of a kind holds."""
    store = open_store(root, config_of(KINDS[kind]))
    for number, (identity, kv) in enumerate(chunks(kind)):
        for doc_id in ("golden", "other"):
            store.put(identity, kv, text=make_text(f"golden {number}"), doc_id=doc_id)
    store.close()


def main():
    """Make what is missing."""
    for kind in KINDS:
        root = folder(FORMAT_VERSION, kind)
        if not root.exists():
            fill(root, kind)
            for other in root.iterdir():
                if not other.name.startswith(KEPT):
                    shutil.rmtree(other) if other.is_dir() else other.unlink()


if __name__ == "__main__":
    main()
