"""Stitching by the kernels' op gives what stitching with the model's own rotation gives, on every architecture that it can say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import lm_of, mapped
from torch.utils._python_dispatch import TorchDispatchMode

import kvrag.blend.stitch as module
import kvrag_kernels
from kvrag.blend.layout import Layout, place, rows_of
from kvrag.blend.stitch import move, ranges, stitch
from kvrag.kv import format as blobs
from kvrag.kv.layers import layer_of, own_kv, together
from kvrag.kv.quantise import pack
from kvrag.model import CausalLM
from kvrag.model.rows import KVBuffer, LayerShape
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.testing.chunks import make_identity
from kvrag.testing.models import TINY
from kvrag.types import ChunkKV, LayerKV

CHUNKS = [list(range(30, 42)), list(range(60, 69)), list(range(100, 117))]
NOT_SAID = {"bloom", "mpt", "hunyuan_v1_dense", "hunyuan_v1_moe"}
"""Keys that no layer turns, or that a norm scales after the rotation."""


def prompt_on(name: str = "llama") -> tuple[CausalLM, Layout, list[ChunkKV]]:
    """Live text around three chunks, the last of which gives up its last row to be computed."""
    model = lm_of(name)
    prefix, _ = encode_prefix(model, [1, 2, 3])
    segments = [
        (3, "live", -1),
        (17, "chunk", 2),
        (5, "live", -1),
        (12, "chunk", 0),
        (9, "chunk", 1),
    ]
    layout = place((n, kind, False, source, False) for n, kind, source in segments)
    return model, layout, encode_chunks(model, prefix, CHUNKS)


def filled(model: CausalLM, layout: Layout) -> KVBuffer:
    buffer = model.buffer(layout.num_tokens)
    for layer in range(model.num_layers):
        buffer.keys(layer).fill_(7.0), buffer.values(layer).fill_(7.0)
    return buffer


def stitched(model: CausalLM, layout: Layout, kvs: Sequence[ChunkKV], **options: Any) -> KVBuffer:
    buffer = filled(model, layout)
    stitch(buffer, layout, kvs, model.rotary(layout.num_tokens), **options)
    return buffer


Launches = list[dict[str, Any]]


@pytest.fixture
def launches(monkeypatch):
    """Let the op stitch, as on a CUDA device, and note what it is given; here its torch path computes."""
    noted: Launches = []
    real = kvrag_kernels.stitch

    def noting(*given, **options):
        noted.append({"keys": given[0], "layers": len(given[2]), "starts": given[4], **options})
        real(*given, **options)

    monkeypatch.setattr(kvrag_kernels, "stitch", noting)
    monkeypatch.setattr(module, "_has_kernel", lambda *_: True)
    return noted


def by_torch(model: CausalLM, layout: Layout, kvs: Sequence[ChunkKV]) -> KVBuffer:
    buffer = filled(model, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_has_kernel", lambda *_: False)
        stitch(buffer, layout, kvs, model.rotary(layout.num_tokens))
    return buffer


def assert_same(
    model: CausalLM, buffer: KVBuffer, expected: KVBuffer, rows: Any = slice(None)
) -> None:
    for layer in range(model.num_layers):
        torch.testing.assert_close(
            buffer.keys(layer)[:, :, rows], expected.keys(layer)[:, :, rows], atol=2e-6, rtol=1e-6
        )
        assert torch.equal(buffer.values(layer)[:, :, rows], expected.values(layer)[:, :, rows])


@pytest.mark.parametrize("name", sorted(TINY))
def test_both_ways_write_the_same_rows(name, launches):
    model, layout, kvs = prompt_on(name)
    buffer = stitched(model, layout, kvs)
    assert bool(launches) == (name not in NOT_SAID)
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gptj", "gpt_neox", "smollm3"])
def test_rounded_kv_travels_as_codes(name, kv_dtype, launches):
    model, layout, kvs = prompt_on(name)
    kvs = [pack(kv, kv_dtype) for kv in kvs]
    buffer = stitched(model, layout, kvs)
    assert {x.dtype for launch in launches for x in launch["keys"]} == {kvs[0].layers[0].keys.dtype}
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_long_chunks_of_int4_have_several_groups_of_tokens(launches):
    model = lm_of()
    prefix, _ = encode_prefix(model, [1, 2, 3])
    kvs = [
        pack(kv, "int4")
        for kv in encode_chunks(model, prefix, [list(range(30, 130)), list(range(40, 80))])
    ]
    segments = [
        (3, "live", False, -1, False),
        (70, "chunk", False, 0, False),
        (40, "chunk", False, 1, False),
    ]
    layout = place([*segments, (2, "live", False, -1, False)])
    buffer = stitched(model, layout, kvs)
    assert [x.shape[2] for x in launches[0]["key_scales"]] == [3, 2]
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_what_one_call_can_not_say_is_left_to_torch(launches):
    """Chunks of two kinds in one prompt, and groups of channels of which the last is shorter."""
    model, layout, kvs = prompt_on()
    mixed = [pack(kvs[0], "int8"), *kvs[1:]]
    buffer = stitched(model, layout, mixed)
    assert_same(model, buffer, by_torch(model, layout, mixed), rows_of(layout.reused))
    odd = pack(kvs[0], "int4")
    scales = odd.layers[0].scales
    assert scales is not None
    layers = tuple(
        replace(layer, scales=replace(scales, values=scales.values.expand(-1, -1, 3)))
        for layer in odd.layers
    )
    assert not module._is_uniform(buffer, layout.reused, [ChunkKV(layers)] * 3)
    assert launches == []


def test_a_launch_takes_several_layers(monkeypatch, launches):
    monkeypatch.setattr(module, "LAYERS_PER_LAUNCH", 3)
    model, layout, kvs = prompt_on()
    buffer = stitched(model, layout, kvs)
    assert [(x["layers"], x["starts"]) for x in launches] == [(3, [3, 25, 37]), (1, [3, 25, 37])]
    assert_same(model, buffer, by_torch(model, layout, kvs), rows_of(layout.reused))


def test_rows_that_will_be_computed_are_not_stitched(launches):
    model, layout, kvs = prompt_on()
    skipped = torch.tensor([3, 4, 30, 45])
    buffer = stitched(model, layout, kvs, skip=skipped)
    others = [i for i in rows_of(layout.reused).tolist() if i not in skipped.tolist()]
    assert_same(model, buffer, by_torch(model, layout, kvs), others)
    for layer in range(model.num_layers):
        assert bool((buffer.keys(layer)[:, :, skipped] == 7.0).all())
        assert bool((buffer.values(layer)[:, :, skipped] == 7.0).all())


META = torch.device("meta")


class Wire(TorchDispatchMode):
    """Notes the bytes of each copy from the host to a device, for which torch's ``meta`` stands."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if (
            isinstance(made, torch.Tensor)
            and made.device == META
            and given
            and given[-1].device != META
        ):
            self.sizes.append(given[-1].nbytes)
        return made


def loaded(kvs: Sequence[ChunkKV], kv_dtype: Any, layers_per_read: int = 99) -> Iterator[ChunkKV]:
    """The chunks as the store gives them: as bytes of a blob, some layers of which are read at once."""
    for kv in kvs:
        packed = pack(mapped(kv, torch.Tensor.bfloat16), kv_dtype)
        identity = replace(make_identity(tokens=kv.num_tokens), kv_dtype=kv_dtype)
        data = bytearray().join(blobs.Encoded(identity, packed))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blobs, "STEP_BYTES", layers_per_read * packed.layers[0].num_bytes)
            yield blobs.Blob(
                lambda start, length, data=data: memoryview(data)[start : start + length]
            ).load()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_a_stored_chunk_moves_with_one_copy_per_launch(kv_dtype, monkeypatch, launches):
    """All bytes once, and codes as codes; each tensor by itself would be four or ten copies a layer and chunk."""
    monkeypatch.setattr(module, "LAYERS_PER_LAUNCH", 2)
    model = lm_of()
    prefix, _ = encode_prefix(model, [1, 2, 3])
    layout = place(
        [
            (64, "chunk", False, 0, False),
            (32, "chunk", False, 1, False),
            (1, "live", False, -1, False),
        ]
    )
    kvs = [*loaded(encode_chunks(model, prefix, [[*range(30, 94)], [*range(40, 72)]]), kv_dtype)]
    arena = KVBuffer.empty(model.shapes, layout.num_tokens, dtype=torch.bfloat16, device=META)
    table, wire = model.rotary(layout.num_tokens), Wire()
    with pytest.MonkeyPatch.context() as patch, wire:
        patch.setattr(module, "_angles", lambda *_: [angles] * 2)
        angles = module.Angles(
            *(torch.empty(1, layout.num_tokens, 8, device=META) for _ in range(2)), [0] * 2, False
        )
        stitch(arena, layout, kvs, table)
    assert len(launches) == 2
    assert len(wire.sizes) == 2 * len(kvs)
    assert sum(wire.sizes) == sum(kv.num_bytes for kv in kvs)


def moved_bytes(kvs: Sequence[ChunkKV], layers: range, rows: Sequence[int]) -> list[int]:
    layout = place(
        [
            *((n, "chunk", False, i, False) for i, n in enumerate(rows)),
            (1, "live", False, -1, False),
        ]
    )  # type: ignore[list-item]
    with Wire() as wire:
        move(layers, layout.reused, kvs, META)
    return wire.sizes


def chunk_of(tokens: int) -> ChunkKV:
    x = torch.randn(4, 2, 2, tokens, 32)
    return ChunkKV(tuple(LayerKV(*each) for each in x))


def test_copies_are_as_few_as_memory_allows():
    """A blob is read in pieces, and a layer of an odd length leaves the next one where no wide access can begin."""
    kv = chunk_of(16)
    assert [len(moved_bytes([*loaded([kv], "int8", n)], range(4), [16])) for n in (4, 2, 1)] == [
        1,
        2,
        4,
    ]
    assert len(moved_bytes([*loaded([chunk_of(15)], "int8")], range(4), [15])) == 4
    apart = [mapped(kv, torch.clone)]
    assert len(moved_bytes(apart, range(4), [16])) == 8


def test_what_is_cut_short_is_not_moved_whole():
    kv = chunk_of(40)
    assert sum(moved_bytes([kv], range(4), [30])) == kv.num_bytes
    assert sum(moved_bytes([kv], range(4), [10])) == kv.num_bytes // 4
    with Wire() as wire:  # the same chunk twice
        first, second = (module.Segment(n, n + 40, "chunk", False, 0) for n in (0, 40))
        move(range(4), [first, second], [kv], META)
    assert sum(wire.sizes) == kv.num_bytes


def test_neighbours_in_two_memories_are_two_copies():
    """As two pinned blocks may be by chance, which no copy can span."""
    memory = memoryview(bytearray(64))
    halves = [
        torch.frombuffer(memory[i : i + 32], dtype=torch.int8).view(1, 1, 32) for i in (0, 32)
    ]
    assert halves[0].data_ptr() + 32 == halves[1].data_ptr()
    with Wire() as wire:
        together([LayerKV(*halves)], META)
    assert wire.sizes == [32, 32]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_layers_come_together_with_their_values(kv_dtype):
    (kv,) = loaded([chunk_of(15)], kv_dtype, 3)
    one = together(kv.layers, "cpu", copy=True)
    for i, layer in enumerate(kv.layers):
        for whole, part in zip(one.tensors, layer.tensors, strict=True):
            assert torch.equal(whole[i].float(), part.float())
    assert all(
        x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in one.tensors
    )
    again = together([layer_of(one.dtype, [x[i] for x in one.tensors]) for i in range(4)], "cpu")
    assert [(x.data_ptr(), x.stride()) for x in again.tensors] == [
        (x.data_ptr(), x.stride()) for x in one.tensors
    ]


def test_layers_that_are_not_equally_far_apart_are_copied():
    x = torch.randn(8, 1, 2, 4)
    for picked in ((0, 1, 3), (3, 2, 1), (0, 0, 0)):
        one = together([LayerKV(x[i], x[i] + 1) for i in picked], "cpu")
        assert torch.equal(one.keys, x[list(picked)])
    assert (
        together([LayerKV(x[i], x[i + 1]) for i in (0, 2, 4)], "cpu").keys.data_ptr()
        == x.data_ptr()
    )


def test_a_chunk_of_the_accelerator_lies_as_a_launch_reads_it():
    """In one memory, so that nothing is moved when it is stitched; layers of two shapes in a memory each."""
    (kv,) = loaded([chunk_of(16)], "auto")
    with Wire() as wire:
        own = own_kv(kv, META)
    assert wire.sizes == [kv.num_bytes]
    assert [x.shape for layer in own.layers for x in layer.tensors] == [
        x.shape for y in kv.layers for x in y.tensors
    ]
    other = LayerKV(*(torch.zeros(2, 16, 64).bfloat16() for _ in range(2)))
    mixed = own_kv(ChunkKV((*kv.layers[:2], other, *kv.layers[2:])), META)
    steps = [layer.keys.untyped_storage().nbytes() for layer in mixed.layers]
    assert (
        steps
        == [2 * kv.layers[0].num_bytes] * 2 + [other.num_bytes] + [2 * kv.layers[0].num_bytes] * 2
    )


def test_layers_of_one_shape_are_placed_together(monkeypatch):
    shapes = [LayerShape(2, dim, dim) for dim in (16, 16, 16, 32, 16)]
    arena = KVBuffer.empty(shapes, 5, dtype=torch.bfloat16, device=torch.device("cpu"))
    monkeypatch.setattr(module, "LAYERS_PER_LAUNCH", 2)
    assert ranges(arena) == [range(2), range(2, 3), range(3, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("device", "key_dim", "value_dim", "width", "found"),
    [
        ("cuda", 64, 64, 32, True),
        ("cuda", 512, 512, 128, True),
        ("cuda", 64, 32, 32, False),
        ("cuda", 72, 72, 32, False),
        ("cuda", 64, 64, 24, False),
        ("cpu", 64, 64, 32, False),
    ],
)
def test_the_op_stitches_where_it_has_a_kernel(
    device, key_dim, value_dim, width, found, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    first, x, y = (
        SimpleNamespace(
            device=torch.device(device),
            is_cuda=device == "cuda",
            shape=(1, 2, 9, dim),
            dtype=torch.float16,
        )
        for dim in (64, key_dim, value_dim)
    )
    buffer: Any = SimpleNamespace(layers=[(first, first), (x, y)])
    rotary: Any = [SimpleNamespace(width=0), SimpleNamespace(width=width)]
    assert module._has_kernel(buffer, rotary) is found


@pytest.mark.parametrize(
    ("name", "is_neighbours"), [("llama", False), ("gptj", True), ("cohere", True), ("phi", False)]
)
def test_pairs_are_read_off_the_rotation(name, is_neighbours):
    pairs = lm_of(name).rotary(9)[0].pairs()
    assert pairs is not None
    cos, sin, found = pairs
    assert found is is_neighbours
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_a_rotation_of_another_kind_is_left_to_torch():
    rotation = lm_of().traits[0].rotation
    odd = replace(
        rotation, apply=lambda keys, cos, sin: keys * cos[:, None] + keys.flip(-1) * sin[:, None]
    )
    inner = replace(rotation, start=1, width=rotation.width - 2)
    positions = torch.arange(9)
    assert rotation.at(positions).pairs() is not None
    assert odd.at(positions).pairs() is None
    assert inner.at(positions).pairs() is None
