"""Everything that changes KV changes the key: what differs in one field is a miss, even under the other one's name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from world import CONFIG, Outcome

from kvrag.fingerprint import ModelIdentity, chunk_key, ids_digest, namespace_digest
from kvrag.store import DiskStore
from kvrag.store.objects import place_of
from kvrag.testing.chunks import make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity

MODEL = ModelIdentity(*(f.name for f in fields(ModelIdentity) if f.name != "extra_keys"), extra_keys={"a": "b"})
PREFIX, IDS = (1, 2, 3), (10, 11, 12)


def identity(
    model: ModelIdentity = MODEL,
    *,
    namespace: str = "mine",
    prefix: tuple[int, ...] = PREFIX,
    ids: tuple[int, ...] = IDS,
) -> ChunkIdentity:
    """Identity of the chunk as the engine makes it."""
    return ChunkIdentity(model.fingerprint, namespace_digest(namespace), ids_digest(prefix), ids)


def mutations() -> Iterator[tuple[str, ChunkIdentity]]:
    """Name each field, and give the identity that differs in it alone; neighbours that swap their values, too."""
    names = [f.name for f in fields(ModelIdentity) if f.name != "extra_keys"]
    for name in names:
        yield name, identity(replace(MODEL, **{name: "other"}))
        yield f"{name}, one character longer", identity(replace(MODEL, **{name: name + "\0"}))
        yield f"{name}, empty", identity(replace(MODEL, **{name: ""}))
    for one, other in pairwise(names):
        yield f"{one} and {other} swapped", identity(replace(MODEL, **{one: other, other: one}))
        yield f"{one} moved into {other}", identity(replace(MODEL, **{one: "", other: one + other}))
    for extra in ({}, {"a": "c"}, {"b": "b"}, {"a": "b", "c": ""}, {"ab": ""}):
        yield f"extra keys {extra}", identity(replace(MODEL, extra_keys=extra))
    for kv_dtype in ("int8", "int4", "fp8"):
        yield f"kv_dtype {kv_dtype}", replace(identity(), kv_dtype=kv_dtype)
    yield "namespace", identity(namespace="other")
    for prefix in ((), (1, 2), (1, 2, 4), (1, 2, 3, 3), (3, 2, 1)):
        yield f"prefix {prefix}", identity(prefix=prefix)
    for ids in (
        (10,),
        (10, 11),
        (10, 11, 13),
        (12, 11, 10),
        (10, 11, 12, 0),
        (10 + 2**16, 11, 12),
        (10, 11, 12 + 2**31),
    ):
        yield f"token ids {ids}", identity(ids=ids)


def run(folder: Path) -> Outcome:
    """Ask for each; and put the stored file under its name, as someone with access to the directory could."""
    outcome = Outcome()
    store = DiskStore(folder / "store", CONFIG)
    me = identity()
    store.put(me, make_kv(me), text=make_text("a"), doc_id="doc")
    mine = store.directory.root.joinpath(*place_of(chunk_key(me)))
    keys = {chunk_key(me)}
    for name, other in mutations():
        keys.add(chunk_key(other))
        outcome.check(store.get(other) is None and store.stream(other) is None, f"{name}: read")
        path = store.directory.root.joinpath(*place_of(chunk_key(other)))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(mine, path)
        outcome.check(store.get(other) is None, f"{name}: read from a file that was renamed")
        outcome.check(not path.exists(), f"{name}: a renamed file was left where it is")
        outcome.add("mutations")
    outcome.check(len(keys) == outcome.counts["mutations"] + 1, "two identities share a key")
    outcome.check(same_bits(store.get(me), make_kv(me)), "the chunk itself is gone")
    store.close()
    return outcome
