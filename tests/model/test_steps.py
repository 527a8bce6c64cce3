"""Recorded forwards: the same logits as forwards that are launched, whoever shares them, and no slot of the pool is lost.

Here a replay runs the forward again, with the tensors that it was given when it was recorded.
"""

import gc
import random
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, install, move
from kit import lm_of, raising

import kvrag_kernels
from kvrag import ConfigError
from kvrag.blend.slide import SlidingWindow
from kvrag.generate.scheduler import Scheduler
from kvrag.kv.pool import ALIGNED, KVPool, pool_share
from kvrag.model import shared, steps
from kvrag.model.lm import CausalLM
from kvrag.model.rows import KVBuffer, Rows
from kvrag.model.shared import BUCKETS, Portion
from kvrag.model.steps import pool_of
from kvrag.testing.models import TINY, tiny_model

PROMPT = torch.arange(5, 45)
ANSWER = list(range(60, 72))
SLOTS = 1024
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


def replaying(compute):
    """Record a forward: it runs before, as on a device, and again at each replay."""
    compute()
    return compute


def recorded(name: str = "llama", num_slots: int = SLOTS, **options) -> CausalLM:
    model = CausalLM(tiny_model(name))
    model.record(num_slots, **{"record": replaying} | options)
    return model


def buffer_of(model: CausalLM, capacity: int):
    run = model.recorded.pool.take(capacity)
    return model.buffer(capacity, run=run)


def answered(model: CausalLM, kv) -> torch.Tensor:
    first = model.forward(PROMPT, Rows.span(0, len(PROMPT)), kv)[0][0]
    extend = model.extension(kv, len(PROMPT))
    return torch.cat([first, *(extend(torch.tensor([token])).clone() for token in ANSWER)])


@pytest.mark.parametrize("name", sorted(TINY))
def test_recorded_forwards_give_the_same_logits(name):
    if not lm_of(name).can_share_forwards:
        pytest.skip("it computes one request at a time, and is not recorded")
    model = recorded(name)
    want = answered(lm_of(name), lm_of(name).buffer(80))
    for kv in (buffer_of(model, 80), buffer_of(model, 80)):  # the second is not at the first slot
        torch.testing.assert_close(answered(model, kv), want, **CLOSE)
    assert len(model.recorded._made) == 2, "one for the prompt, one for all steps"
    assert model.recorded.seconds > 0


@pytest.mark.parametrize("bucket", range(len(BUCKETS)))
def test_each_shape_equals_the_launched_forward_bit_for_bit(bucket):
    """The spare rows change nothing, and a request's own launched forward differs by rounding alone."""
    mass_rows, logits = [(0, 1), (0, 3), (9, 0)][bucket % 3]
    size = BUCKETS[bucket] - (BUCKETS[bucket] - [0, *BUCKETS][bucket]) // 3 - mass_rows
    model = recorded(num_slots=4096)
    pool = model.recorded.pool
    other, kv, plain = buffer_of(model, 200), buffer_of(model, size), lm_of().buffer(size)
    for keys, values in other.layers:
        keys.normal_(), values.normal_()
    ids = torch.randint(1000, (size,), generator=torch.Generator().manual_seed(size)) % 200
    options = {"logits": logits, "mass_rows": mass_rows}
    piece = Portion(ids, Rows.span(0, size), kv, logits, mass_rows)
    if size > shared.LONGEST:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, "LONGEST", size)
            got = model.forward(ids, Rows.span(0, size), kv, **options)
    else:
        got = model.forward(ids, Rows.span(0, size), kv, **options)
    (shape,) = model.recorded._made
    assert shape.rows >= size
    assert shape.rows == BUCKETS[bucket] or mass_rows
    before = [(keys.clone(), values.clone()) for keys, values in kv.layers]
    _, places = shared.placed([piece], False)
    inputs = shared.inputs_of(shape, [piece], places, pool.num_slots)
    slots, positions, first = inputs[1:]
    rows = Rows(slots, pool.num_slots + 1, positions, first, is_fixed=True)
    again = model.launch(
        Portion(inputs[0], rows, KVBuffer(pool.layers), shape.logits, shape.mass_rows)
    )
    if logits:
        assert torch.equal(again[0][0, -logits:], got[0][0])
    else:
        assert torch.equal(again[1][kv.start : kv.start + size], got[1])
    torch.testing.assert_close([*kv.layers], before, rtol=0, atol=0)
    want = lm_of().forward(ids, Rows.span(0, size), plain, **options)
    torch.testing.assert_close(got[not logits], want[not logits], **CLOSE)


def test_long_prompts_are_computed_in_pieces(monkeypatch):
    monkeypatch.setattr(shared, "LONGEST", 16)
    model = recorded()
    got = answered(model, buffer_of(model, 80))
    torch.testing.assert_close(got, answered(lm_of(), lm_of().buffer(80)), **CLOSE)
    assert max(shape.rows for shape in model.recorded._made) == 16


@pytest.mark.parametrize(("error", "tries"), [(RuntimeError, 1), (torch.OutOfMemoryError, 2)])
def test_what_cannot_be_recorded_is_launched_and_said(caplog, error, tries):
    """Together with the rows of others, as a recording would. Other shapes are tried if memory was short."""
    model = recorded(record=raising(error, "operation not permitted"))
    want = answered(lm_of(), lm_of().buffer(80))
    for _ in range(2):
        torch.testing.assert_close(answered(model, buffer_of(model, 80)), want, **CLOSE)
    words = "a forward of this model can't be recorded (operation not permitted"
    assert [words in record.getMessage() for record in caplog.records] == [True] * tries


def test_a_function_is_recorded_for_each_shape_of_its_inputs():
    model, calls = recorded(), []

    def double(x):
        calls.append(len(x))
        return x.mul_(2)

    for size in (3, 3, 4):
        x = torch.arange(size)
        assert model.recorded.run(double, x).tolist() == [2 * n for n in range(size)]
        assert x.tolist() == [*range(size)], "its argument is a copy"
    assert calls == [3, 3, 3, 4, 4], "a run before each recording"
    model.recorded._record = raising(RuntimeError, "operation not permitted")
    assert model.recorded.run(double, torch.arange(5)).tolist() == [0, 2, 4, 6, 8]


def test_other_weights_drop_the_recordings():
    model = recorded()
    for weights, kept in (("a", 0), ("a", 2), ("b", 0)):
        model.recorded.hold_for(weights)
        assert len(model.recorded._made) == kept
        answered(model, buffer_of(model, 80))


def test_a_cpu_records_nothing():
    assert pool_of(lm_of("llama")) is None
    assert lm_of("llama").records is False


def test_a_pool_hands_out_runs_that_do_not_overlap():
    shapes = [(s.num_heads, s.key_dim, s.value_dim) for s in lm_of().shapes]
    pool = KVPool(shapes, 1000, dtype=torch.float32, device=torch.device("cpu"))
    draw, taken = random.Random(3), []
    for _ in range(500):
        if taken and draw.random() < 0.5:
            pool.give_back(taken.pop(draw.randrange(len(taken))))
        elif run := pool.take(draw.randint(1, 400)):
            assert run.start % ALIGNED == 0
            taken.append(run)
        slots = [slot for run in taken for slot in run]
        assert len(slots) == len(set(slots)) == pool.num_taken <= 1000
    assert pool.take(1001) is None
    assert pool.num_bytes == 1001 * lm_of().kv_bytes_per_token


def test_a_run_is_clean_whatever_was_there():
    model = recorded()
    pool = model.recorded.pool
    for keys, values in pool.layers:
        keys[:, :, :-1].fill_(torch.nan), values[:, :, :-1].fill_(torch.nan)
    kv = buffer_of(model, 200)
    assert all(side.isfinite().all() for pair in kv.layers for side in pair)
    assert kv.capacity == 200


# -- requests that share forwards ---------------------------------------------------------------------------------------


class _Request:
    """What a request asks of a model, drawn at random, and the logits of its run alone."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.ids = torch.tensor([draw.randrange(5, 200) for _ in range(draw.randint(1, 120))])
        self.answer = [draw.randrange(5, 200) for _ in range(draw.randint(1, 30))]
        self.slides, self.fails = draw.random() < 0.3, draw.random() < 0.2
        self.repaired = draw.random() < 0.3
        self.window = draw.randint(40, 60)
        self.capacity = self.window if self.slides else len(self.ids) + len(self.answer)

    def run(self, model: CausalLM, kv) -> torch.Tensor:
        found = []
        if self.slides:
            extend = SlidingWindow(model, kv)
            found.append(extend.prefill(self.ids)[None])
        else:
            found.append(model.forward(self.ids, Rows.span(0, len(self.ids)), kv)[0][0])
            if self.repaired:  # rows in between, once more
                at = torch.arange(0, len(self.ids), 3)
                found.append(model.forward(self.ids[at], Rows.at(at), kv)[0][0])
                last = torch.arange(len(self.ids) - 1, len(self.ids))
                _, mass = model.forward(self.ids[-1:], Rows.at(last), kv, logits=0, mass_rows=1)
                found.append(torch.nn.functional.pad(mass, (0, 256 - len(mass)))[None])
            extend = model.extension(kv, len(self.ids))
        for at, token in enumerate(self.answer):
            if self.fails and at == len(self.answer) // 2:
                raise ZeroDivisionError
            found.append(extend(torch.tensor([token])).clone())
        return torch.cat([x.flatten(1)[:, :200] for x in found])


def test_requests_that_come_and_go_compute_what_they_compute_alone(monkeypatch):
    """They come, decode, end, slide and fail; some are cancelled as they wait. Their logits are those of a run alone."""
    monkeypatch.setattr(shared, "LONGEST", 48)  # several pieces
    model, turns = recorded(num_slots=512), Scheduler(6, 0)  # the pool decides
    pool, sizes, real = model.recorded.pool, [], model.recorded.compute

    def compute(pieces):
        sizes.append([len(piece.token_ids) for piece in pieces])
        return real(pieces)

    monkeypatch.setattr(model.recorded, "compute", compute)
    requests = [_Request(seed) for seed in range(40)]
    want = [
        None if each.fails else each.run(lm_of(), lm_of().buffer(each.capacity))
        for each in requests
    ]

    def ask(number: int):
        cancel = threading.Event()
        if number % 9 == 8:
            cancel.set()
        request = requests[number]
        with turns.reservation(1, cancel, pool=pool, slots=request.capacity) as run:
            return request.run(model, model.buffer(request.capacity, run=run))

    with ThreadPoolExecutor(12) as threads:
        works = [threads.submit(ask, number) for number in range(len(requests))]
    for number, (work, expected) in enumerate(zip(works, want, strict=True)):
        error = work.exception()
        if error is not None:
            assert isinstance(error, CancelledError if number % 9 == 8 else ZeroDivisionError)
            assert expected is None or number % 9 == 8
        else:
            torch.testing.assert_close(work.result(), expected, atol=1e-5, rtol=1e-4)
    assert pool.num_taken == 0
    assert turns.load == (0, 0, 0)
    together = [size for size in sizes if len(size) > 1]
    assert any(max(size) > 1 for size in together), "a prompt's rows and next rows of others"


def test_a_request_that_a_pool_cannot_hold_runs_alone_in_its_own_memory():
    model, turns = recorded(num_slots=128), Scheduler(6, 10**9)
    with turns.reservation(1, pool=model.recorded.pool, slots=500) as run:
        assert run is None
        kv = model.buffer(500, run=run)
        want = answered(lm_of(), lm_of().buffer(500))
        torch.testing.assert_close(answered(model, kv), want, **CLOSE)


def test_no_request_waits_for_ever_behind_smaller_ones():
    model, turns, order = recorded(num_slots=1024), Scheduler(16, 10**9), []
    pool = model.recorded.pool

    def ask(name, slots):
        with turns.reservation(1, pool=pool, slots=slots):
            order.append(name)

    with ThreadPoolExecutor(8) as threads:
        with turns.reservation(1, pool=pool, slots=600):
            works = [threads.submit(ask, "large", 700)]
            while turns.load.waiting < 1:
                pass
            works += [threads.submit(ask, name, 10) for name in "abc"]
            while turns.load.waiting < 4:
                pass
            assert order == [], "they would fit"
        assert all(work.result(10) is None for work in works)
    assert order[0] == "large"
    assert pool.num_taken == 0


def test_what_is_not_finite_stays_with_its_request(monkeypatch):
    """Rows of several requests share a tile, where a hidden NaN times zero would be a NaN."""
    model = recorded()
    bad, good = buffer_of(model, 80), buffer_of(model, 80)
    want = answered(lm_of(), lm_of().buffer(80))
    weight = model.text_model.get_input_embeddings().weight
    with torch.no_grad():
        weight[3] = torch.nan
    broken = model.forward(torch.tensor([3, 3]), Rows.span(0, 2), bad)[0]
    assert not broken.isfinite().all()
    assert all(side.isfinite().all() for pair in bad.layers for side in pair)
    torch.testing.assert_close(answered(model, good), want, **CLOSE)


def test_the_latest_recordings_are_kept(monkeypatch):
    monkeypatch.setattr(steps, "MOST", 2)
    model = recorded()
    kv = buffer_of(model, 200)
    for size in (5, 40, 100, 5):
        model.forward(PROMPT.repeat(3)[:size], Rows.span(0, size), kv)
    assert [form.rows for form in model.recorded._made] == [128, 16]


# -- CUDA graphs and pools, on a device that isn't there -----------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch):
    """Note captures: their memory, and whether a collection of garbage could come in between."""
    made, numbers = [], count()

    @contextmanager
    def capture(graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        assert stream is torch.cuda.current_stream()
        made.append((pool, gc.isenabled()))
        yield

    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=next(numbers)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


def test_a_failed_capture_leaves_nothing_behind(captures):
    graphs, values = steps.Graphs(CUDA), count()
    before = torch.cuda.current_stream()
    assert graphs(lambda: next(values))() == 1, "the second run is captured"
    graphs(lambda: next(values))
    runs = iter([True])
    with pytest.raises(StopIteration):
        graphs(lambda: next(runs))
    graphs(lambda: next(values))
    assert captures == [(0, False), (0, False), (0, False), (1, False)], (
        "its memory is not used again"
    )
    assert gc.isenabled()
    assert torch.cuda.current_stream() is before


@pytest.mark.parametrize("free", [2**20, 2**30, None])
def test_a_pool_takes_its_share_of_the_free_memory(captures, monkeypatch, caplog, free):
    """None is allocated where it would be small, or where that fails; what torch keeps is free."""
    model, freed = CausalLM(tiny_model("llama")), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(free or 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (sum(freed), 2**40))
    monkeypatch.setattr(kvrag_kernels, "tier", lambda *_: "mma")
    monkeypatch.setenv("KVRAG_POOL_SHARE", "0.25")
    monkeypatch.setattr(
        model, "record", raising(RuntimeError, "out of memory") if free is None else model.record
    )
    with FakeCuda():
        move(model)
        model.records = None
        pool = pool_of(model)
        if free == 2**30:
            assert pool.num_slots == 2**28 // model.kv_bytes_per_token // ALIGNED * ALIGNED
            assert pool_of(model) is pool
        else:
            assert pool is pool_of(model) is None
            assert caplog.text.count("no pool of KV can be allocated (") == 1


@pytest.mark.parametrize("share", ["1.5", "-1", "half", "nan"])
def test_a_share_that_is_none_is_refused_in_a_sentence(monkeypatch, share):
    monkeypatch.setenv("KVRAG_POOL_SHARE", share)
    words = f"KVRAG_POOL_SHARE is '{share}'; set it to a number from 0"
    with pytest.raises(ConfigError, match=words):
        pool_share()
