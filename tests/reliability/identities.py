"""Everything that changes KV changes the key: what differs in one field is a miss, even under the other one's name."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise, permutations
from pathlib import Path
from unittest.mock import patch

import xxhash
from world import CONFIG, PLAIN, PROTECTED, Kind, Outcome, path_of

from kvrag.config import KV_DTYPES
from kvrag.identity import fingerprint
from kvrag.identity.fingerprint import (
    FORMAT_VERSION,
    ModelIdentity,
    chunk_key,
    ids_digest,
    namespace_digest,
)
from kvrag.kv.crypto import Keys
from kvrag.store import TieredStore
from kvrag.testing.chunks import make_kv, make_text, same_bits
from kvrag.types import ChunkIdentity

MODEL = ModelIdentity(
    *(f.name for f in fields(ModelIdentity) if f.name != "extra_keys"), extra_keys={"a": "b"}
)
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
    known = {"model": _models, "namespace": _namespaces, "prefix": _prefixes, "context": _contexts}
    known |= {"token_ids": _ids, "kv_dtype": _kv_dtypes}
    for each in fields(ChunkIdentity):
        # A field that is new, and for which nothing stands above, ends this: it must be told apart, and so must its values.
        yield from known.pop(each.name)()
    assert not known, f"identities have no field {list(known)}"


def _models() -> Iterator[tuple[str, ChunkIdentity]]:
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


def _namespaces() -> Iterator[tuple[str, ChunkIdentity]]:
    yield "namespace", identity(namespace="other")
    for name, config in KEYS.items():  # with another key, the same namespace has another name
        if config.encryption_key:
            yield name, replace(identity(), namespace=Keys.of(config).namespace("mine"))


def _prefixes() -> Iterator[tuple[str, ChunkIdentity]]:
    for prefix in ((), (1, 2), (1, 2, 4), (1, 2, 3, 3), (3, 2, 1)):
        yield f"prefix {prefix}", identity(prefix=prefix)


def _contexts() -> Iterator[tuple[str, ChunkIdentity]]:
    for context in ("other", ids_digest(PREFIX), identity().prefix + identity().prefix):
        yield f"context {context}", replace(identity(), context=context)
    yield "context in the prefix's place", replace(identity(), prefix="", context=identity().prefix)


def _ids() -> Iterator[tuple[str, ChunkIdentity]]:
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


def _kv_dtypes() -> Iterator[tuple[str, ChunkIdentity]]:
    for kv_dtype in KV_DTYPES:
        if kv_dtype != identity().kv_dtype:
            yield f"kv_dtype {kv_dtype}", replace(identity(), kv_dtype=kv_dtype)


def reads(store: TieredStore, wanted: ChunkIdentity) -> bool:
    """Whether a chunk is read, or adopted where its file lies."""
    return (
        store.get(wanted) is not None
        or store.link(wanted, text=None, doc_id=None)
        or store.get(wanted) is not None
    )


def run(folder: Path) -> Outcome:
    """Ask for each; and put the stored file under its name, as someone with access to the directory could."""
    outcome, root = Outcome(), folder / "store"
    store = PLAIN.open(root)
    me = identity()
    store.put(me, make_kv(me), text=make_text("a"), doc_id="doc")
    keys = {chunk_key(me)}
    for name, other in mutations():
        keys.add(chunk_key(other))
        outcome.check(not reads(store, other), f"{name}: read")
        path = path_of(root, chunk_key(other))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(path_of(root, chunk_key(me)), path)
        outcome.check(not reads(store, other), f"{name}: read from a file that was renamed")
        outcome.check(not path.exists(), f"{name}: a renamed file was left where it is")
        outcome.add("mutations")
    outcome.check(len(keys) == outcome.counts["mutations"] + 1, "two identities share a key")
    outcome.check(same_bits(store.get(me), make_kv(me)), "the chunk itself is gone")
    store.close()
    if not PROTECTED.needs:
        _other_keys(folder / "keys", outcome)
    _other_version(root, outcome)
    return outcome


KEYS = {"no key": CONFIG} | {
    f"key {n}": replace(CONFIG, encryption_key=lambda n=n: bytes([n]) * 32) for n in (1, 2)
}
"""Configs of stores whose files none of the others may read."""


def _other_keys(root: Path, outcome: Outcome) -> None:
    """Write with each key and read with each other: under its own name, and under the one that the reader asks for."""
    for writer, reader in permutations(KEYS, 2):
        place, names = (
            root / writer / reader,
            {kind: Keys.of(config) for kind, config in KEYS.items()},
        )
        mine, asked = (
            replace(identity(), namespace=names[kind].namespace("mine"))
            for kind in (writer, reader)
        )
        store = Kind(KEYS[writer]).open(place)
        store.put(mine, make_kv(mine), text=make_text("a"), doc_id="doc")
        store.close()
        wanted = path_of(place, chunk_key(asked))
        wanted.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(path_of(place, chunk_key(mine)), wanted)
        other = Kind(KEYS[reader]).open(place)
        outcome.check(
            not reads(other, asked), f"what was written with {writer} is read with {reader}"
        )
        outcome.check(not reads(other, mine), f"{writer}: read under its own name with {reader}")
        other.close()
        again = Kind(KEYS[writer]).open(place)
        outcome.check(
            same_bits(again.get(mine), make_kv(mine)), f"{writer}: its chunk is gone after {reader}"
        )
        again.close()
        outcome.add("pairs_of_keys")


def _other_version(root: Path, outcome: Outcome) -> None:
    """Say another version, in a header that is in order: it is a miss, and another key."""
    me = identity()
    path = path_of(root, chunk_key(me))
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8:start])
    metadata = tensors.pop("__metadata__")
    others = (
        FORMAT_VERSION - 1,
        FORMAT_VERSION + 1,
        10 * FORMAT_VERSION,
        f"0{FORMAT_VERSION}",
        f"{FORMAT_VERSION}.0",
    )
    for version in (FORMAT_VERSION, *others):
        path.write_bytes(_framed(metadata | {"version": str(version)}, tensors) + raw[start:])
        store = PLAIN.open(root)
        is_read = reads(store, me)
        store.close()
        outcome.check(
            is_read == (version == FORMAT_VERSION),
            f"a file of version {version}: read is {is_read}",
        )
        outcome.add("versions")
    path.write_bytes(raw)
    before = chunk_key(me)
    with patch.object(fingerprint, "FORMAT_VERSION", FORMAT_VERSION + 1):
        chunk_key.cache_clear()
        outcome.check(chunk_key(me) != before, "the next version has the same keys")
        outcome.check(MODEL.fingerprint != me.model, "the next version has the same models")
    chunk_key.cache_clear()


def _framed(metadata: dict[str, str], tensors: dict[str, object]) -> bytes:
    """Return a header, as docs/format.md has it."""
    zeros = "0" * 32
    whole = {"__metadata__": metadata | {"header_digest": zeros}, **tensors}
    text = json.dumps(whole, separators=(",", ":"))
    head = text.replace(zeros, xxhash.xxh3_128_hexdigest(text.encode()), 1).encode()
    head += b" " * (-(len(head) + 8) % 4096)
    return len(head).to_bytes(8, "little") + head
