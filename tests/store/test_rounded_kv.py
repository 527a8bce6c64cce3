"""Rounded KV in every tier: the same bits everywhere, proven like any other, and never taken for what was not rounded."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from stores import CHUNKS, EVERY_KEY, KVS, PATIENT_S, config_of, path_of

from kvrag.blend.quantise import convert, pack
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.store import open_store
from kvrag.store.check import copy, fsck
from kvrag.testing.chunks import make_text, same_bits
from kvrag.types import ChunkKV, LayerKV

NAMES = ("keys", "values", "key_scales", "key_zeros", "value_scales")
ME, KV = CHUNKS[1], KVS[1]


def identity_of(kv_dtype):
    return replace(ME, kv_dtype=kv_dtype)


@pytest.fixture(params=["int8", "int4", "fp8"])
def kv_dtype(request):
    return request.param


@pytest.fixture
def rounded(kv_dtype):
    return pack(KV, kv_dtype)


@pytest.fixture
def kept(root):
    """Opens stores that may change how memory keeps chunks."""
    stores = []

    def open_(directory=root, **options):
        stores.append(open_store(directory, config_of(**options), convert=convert))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("key", EVERY_KEY)
def test_what_was_put_comes_back_bit_for_bit(opened, root, kv_dtype, rounded, in_memory, key):
    store = opened(None if in_memory else root, key=key)
    identity = identity_of(kv_dtype)
    assert store.put(identity, rounded, text=make_text("a"), doc_id="doc") == rounded.num_bytes
    for _ in range(2):
        assert same_bits(store.get(identity), rounded)
    assert store.catalog.get(chunk_key(identity)).num_bytes == rounded.num_bytes
    store.close()
    if not in_memory:
        again = opened(key=key, ram_bytes=0)
        assert same_bits(again.get_many([identity], timeout_s=PATIENT_S)[0], rounded)


def test_rounded_and_exact_kv_of_a_chunk_are_two_chunks(store, kv_dtype, rounded):
    other = identity_of(kv_dtype)
    store.put(ME, KV, text=make_text("a"), doc_id="doc")
    assert store.get(other) is None
    assert store.catalog.variants(content_key(other)) == []
    store.put(other, rounded, text=make_text("a"), doc_id="doc")
    assert same_bits(store.get(ME), KV)
    assert same_bits(store.get(other), rounded)
    assert store.forget(ME.namespace, "doc") == 2, "a document holds on to its text, however that is kept"


def test_kv_must_be_kept_as_its_identity_says(store, opened, kv_dtype, rounded):
    other = "int8" if kv_dtype != "int8" else "fp8"
    for identity, wrong in (
        (ME, rounded),
        (identity_of(kv_dtype), KV),
        (identity_of(other), rounded),
        (identity_of(other), ChunkKV(rounded.layers, other)),
        (identity_of(kv_dtype), convert(rounded, "auto")),
        (ME, ChunkKV(rounded.layers)),
    ):
        for each in (store, opened(None)):
            with pytest.raises(StoreError):
                each.put(identity, wrong, text=None)
            assert each.blobs.keys() == set()


def test_a_blob_opens_as_a_plain_safetensors_file(store, root, kv_dtype, rounded):
    store.put(identity_of(kv_dtype), rounded, text=None)
    with safe_open(path_of(root, identity_of(kv_dtype)), framework="pt") as file:
        assert set(file.keys()) == {f"layer.{i:03d}.{name}" for i in range(2) for name in NAMES}
        for i, layer in enumerate(rounded.layers):
            for name, tensor in zip(NAMES, layer.tensors, strict=True):
                found = file.get_tensor(f"layer.{i:03d}.{name}")
                assert found.dtype == tensor.dtype
                assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert (file.metadata()["kv_dtype"], file.metadata()["dtype"]) == (kv_dtype, "F32")


def test_scales_behind_an_odd_number_of_codes_are_read(store):
    random = torch.Generator().manual_seed(0)
    layers = [LayerKV(torch.randn(1, 3, 2, generator=random), torch.randn(1, 3, 4, generator=random)) for _ in range(3)]
    kv = pack(ChunkKV(tuple(layers)), "int4")
    assert sum(t.nbytes for t in kv.layers[0].tensors[:2]) % 2 == 1
    store.put(identity_of("int4"), kv, text=None)
    assert same_bits(store.get(identity_of("int4")), kv)


def test_a_blob_under_the_key_of_another_type_is_a_miss(store, root):
    store.put(identity_of("int8"), pack(KV, "int8"), text=None)
    store.put(ME, KV, text=None)
    os.rename(path_of(root, identity_of("int8")), path_of(root, ME))
    assert store.get(ME) is None
    assert store.stats()["disk"].rejected == 1


def test_scales_that_are_not_finite_are_refused(store, kv_dtype):
    for index in range(len(NAMES)):
        kv = pack(KV, kv_dtype)
        changed = kv.layers[-1].tensors[index]
        if changed.dtype == torch.float16:
            changed.view(torch.int16)[0, 0, 0] = 0x7C00
        elif kv_dtype == "fp8":
            changed.view(torch.uint8)[0, 0, 0] = 0xFF
        else:
            continue
        with pytest.raises(StoreError, match="not finite"):
            store.put(identity_of(kv_dtype), kv, text=None)


def test_the_tools_know_rounded_chunks(store, opened, tmp_path, kv_dtype, rounded):
    identity = identity_of(kv_dtype)
    store.put(identity, rounded, text=make_text("a"), doc_id="doc")
    report = fsck(store, verify_data=True)
    assert (report.checked, report.verified, report.rejected) == (1, 1, [])
    target = opened(tmp_path / "target")
    assert copy(store, target) == (1, 0, 0)
    assert same_bits(target.get(identity), rounded)


# -- memory tiers that keep chunks otherwise -----------------------------------------------------------------------------


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_memory_may_keep_what_was_read_from_codes(kept, kv_dtype, rounded, ram_bytes):
    store = kept(ram_dtype="auto", kv_dtype=kv_dtype, ram_bytes=ram_bytes)
    store.put(identity_of(kv_dtype), rounded, text=None)
    for _ in range(3):
        found = store.get(identity_of(kv_dtype))
        assert same_bits(found, convert(rounded, "auto"))
        assert found.kv_dtype == kv_dtype, "what was rounded stays so, however it is kept"


@pytest.mark.parametrize("ram_bytes", [0, 2**20])
def test_memory_may_round_what_stays_exact_on_disk(kept, kv_dtype, rounded, ram_bytes):
    """Every read gives the same bits, from whichever tier: what is read from disk is rounded too."""
    store = kept(ram_dtype=kv_dtype, ram_bytes=ram_bytes)
    assert store.put(ME, KV, text=None) == KV.num_bytes
    for _ in range(3):
        assert same_bits(store.get(ME), rounded)
        assert same_bits(store.get_many([ME], timeout_s=PATIENT_S)[0], rounded)
    assert store.stats()["host"].num_bytes == (rounded.num_bytes if ram_bytes else 0)
    store.close()
    assert same_bits(kept().get(ME), KV)


def test_a_store_in_memory_alone_says_that_it_does_not_round(kept, kv_dtype, caplog):
    store = kept(None, ram_dtype=kv_dtype)
    store.put(ME, KV, text=None)
    assert same_bits(store.get(ME), KV)
    assert "ram_dtype changes nothing" in caplog.text


def test_what_memory_can_not_round_is_given_as_it_is(kept):
    huge = ChunkKV((LayerKV(*(torch.tensor([1e30, -1e30, 1.0]).reshape(1, 3, 1),) * 2),))
    store = kept(ram_dtype="int8")
    assert store.put(ME, huge, text=None) == huge.num_bytes
    for _ in range(2):
        assert same_bits(store.get(ME), huge)
    assert store.stats()["host"].chunks == 0


def test_a_store_that_can_not_convert_says_so(opened):
    with pytest.raises(StoreError, match="convert="):
        opened(ram_dtype="int8")
