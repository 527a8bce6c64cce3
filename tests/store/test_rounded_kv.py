"""Rounded KV in every tier: the same bits everywhere, proven like any other, and never taken for what was not rounded."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from stores import CHUNKS, EVERY_KEY, KVS, PATIENT_S, path_of

from kvrag.cli.check import copy, fsck
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import chunk_key, content_key
from kvrag.kv.quantise import pack
from kvrag.store import MemoryTier, on_accelerator
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


@pytest.mark.parametrize("budget", [0, 2**20])
def test_a_tier_above_gives_the_same_bits(store, kv_dtype, rounded, budget):
    store.memory.put_above(MemoryTier(budget, name="gpu"))
    identity = identity_of(kv_dtype)
    store.put(identity, rounded, text=None)
    for _ in range(3):
        assert same_bits(store.get(identity), rounded)
        assert same_bits(store.get_many([identity], timeout_s=PATIENT_S)[0], rounded)
    assert store.stats()["gpu"].num_bytes == (rounded.num_bytes if budget else 0)


def test_a_tier_on_an_accelerator_gives_kv_as_it_is_kept(store, kv_dtype, rounded):
    config = replace(store.config, gpu_bytes=2**20, gpu_fraction=1.0)
    on_accelerator(store, torch.device("meta"), config)
    store.put(identity_of(kv_dtype), rounded, text=None)
    found = store.get(identity_of(kv_dtype))
    for layer, given in zip(found.layers, rounded.layers, strict=True):
        for x, y in zip(layer.tensors, given.tensors, strict=True):
            assert (x.dtype, x.shape, x.device.type) == (y.dtype, y.shape, "meta")
    assert store.stats()["gpu"].num_bytes == rounded.num_bytes


def test_rounded_and_exact_kv_of_a_chunk_are_two_chunks(store, kv_dtype, rounded):
    other = identity_of(kv_dtype)
    store.put(ME, KV, text=make_text("a"), doc_id="doc")
    assert store.get(other) is None
    assert store.catalog.variants(content_key(other)) == []
    store.put(other, rounded, text=make_text("a"), doc_id="doc")
    assert same_bits(store.get(ME), KV)
    assert same_bits(store.get(other), rounded)
    assert store.forget(ME.namespace, "doc") == 2, (
        "a document holds on to its text, however that is kept"
    )


def test_kv_must_be_kept_as_its_identity_says(store, opened, kv_dtype, rounded):
    other = "int8" if kv_dtype != "int8" else "fp8"
    for identity, wrong in (
        (ME, rounded),
        (identity_of(kv_dtype), KV),
        (identity_of(other), rounded),
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
    layers = [
        LayerKV(torch.randn(1, 3, 2, generator=random), torch.randn(1, 3, 4, generator=random))
        for _ in range(3)
    ]
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
    assert copy(store, target) == (1, 0, 0, 0)
    assert same_bits(target.get(identity), rounded)
