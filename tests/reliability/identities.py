"""Everything that changes KV changes the key: what differs in one field is a miss, even under the other one's name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import pairwise, permutations
from pathlib import Path
from unittest.mock import patch

from kvrag.store.header import frame, split
from kvrag.store.keys import Keys
from kvrag.store.objects import place_of
from world import CONFIG, Outcome

from kvrag.config import KEY_OPTIONS, KV_DTYPES, StoreConfig
from kvrag.identity import fingerprint
from kvrag.identity.fingerprint import FORMAT_VERSION, ModelIdentity, chunk_key, ids_digest, namespace_digest
from kvrag.store import DiskStore
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
    known = {"model": _models, "namespace": _namespaces, "prefix": _prefixes, "token_ids": _ids, "kv_dtype": _kv_dtypes}
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
    # With other keys, the same namespace has another name; each kind of key alone makes one, and so does each key of a kind.
    for option in KEY_OPTIONS:
        for number in (1, 2):
            names = Keys.of(replace(CONFIG, **{option: lambda number=number: bytes([number]) * 32})).names
            yield f"{option} {number}", replace(identity(), namespace=names.namespace("mine"))


def _prefixes() -> Iterator[tuple[str, ChunkIdentity]]:
    for prefix in ((), (1, 2), (1, 2, 4), (1, 2, 3, 3), (3, 2, 1)):
        yield f"prefix {prefix}", identity(prefix=prefix)


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
    _other_keys(folder / "keys", outcome)
    _other_version(folder / "store", outcome)
    return outcome


def _protections() -> dict[str, StoreConfig]:
    """Configs of stores whose files none of the others may read."""
    options = [option for option in KEY_OPTIONS if option != "encryption_key" or find_spec("cryptography")]
    configs = {"no key": CONFIG}
    for option in options:
        for number in (1, 2):
            key = {option: lambda number=number: bytes([number]) * 32}
            configs[f"{option} {number}"] = replace(CONFIG, **key)
    configs["all keys"] = replace(CONFIG, **{option: lambda: bytes([3]) * 32 for option in options})
    return configs


def _other_keys(root: Path, outcome: Outcome) -> None:
    """Write with each protection and read with each other: under its own name, and under the one that the reader asks for."""
    configs = _protections()
    names = {kind: Keys.of(config).names.namespace("mine") for kind, config in configs.items()}
    for writer, reader in permutations(configs, 2):
        store = DiskStore(root / writer / reader, configs[writer])
        mine, asked = (replace(identity(), namespace=names[kind]) for kind in (writer, reader))
        store.put(mine, make_kv(mine), text=make_text("a"), doc_id="doc")
        path, wanted = (store.directory.root.joinpath(*place_of(chunk_key(me))) for me in (mine, asked))
        store.close()
        wanted.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(path, wanted)
        other = DiskStore(root / writer / reader, configs[reader])
        guarded = {kind for kind in (writer, reader) if kind.split()[0] in ("mac_key", "encryption_key", "all")}
        outcome.check(other.get(asked) is None, f"what was written with {writer} is read with {reader}")
        # A secret alone hides names and protects no file: who knows the name may read it.
        outcome.check(not guarded or other.get(mine) is None, f"{writer}: read under its own name with {reader}")
        other.close()
        again = DiskStore(root / writer / reader, configs[writer])
        outcome.check(
            same_bits(again.get(mine), make_kv(mine)), f"what was written with {writer} is gone after {reader}"
        )
        again.close()
        outcome.add("pairs_of_keys")


def _other_version(root: Path, outcome: Outcome) -> None:
    """Say another version, in a header that is in order: it is a miss, and another key."""
    me = identity()
    path = root.joinpath(*place_of(chunk_key(me)))
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for version in (
        FORMAT_VERSION - 1,
        FORMAT_VERSION + 1,
        10 * FORMAT_VERSION,
        f"0{FORMAT_VERSION}",
        f"{FORMAT_VERSION}.0",
    ):
        metadata, tensors = split(bytearray(raw[:start]))
        del metadata["header_digest"]
        path.write_bytes(frame(metadata | {"version": str(version)}, tensors) + raw[start:])
        store = DiskStore(root, CONFIG)
        outcome.check(store.get(me) is None and store.stream(me) is None, f"a file of version {version} was read")
        store.close()
        outcome.add("versions")
    path.write_bytes(raw)
    before = chunk_key(me)
    with patch.object(fingerprint, "FORMAT_VERSION", FORMAT_VERSION + 1):
        outcome.check(chunk_key(me) != before, "the next version has the same keys")
        outcome.check(MODEL.fingerprint != me.model, "the next version has the same models")
