"""Two ranks of a split model, as threads over a recording of vLLM's group: what rank 0 does, the other one does, too."""

import importlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

WAIT_S = 20.0
LAYERS, HEADS, WIDTH = 3, 2, 4


class Wire:
    """What two ranks exchange, in order; a rank that is alone in an exchange fails."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.parts: list[Any] = [None, None]
        self.wait_s = WAIT_S

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self.parts[rank] = part
        self.barrier.wait(self.wait_s)
        found = list(self.parts)
        self.barrier.wait(self.wait_s)
        return found


class Group:
    """vLLM's group, of one rank; it stands for its process groups, too."""

    world_size, first_rank = 2, 0

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank_in_group, self.is_first_rank, self.wire = rank, rank == 0, wire
        self.cpu_group = self

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.wire.exchange(self.rank_in_group, x), dim=dim)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self.wire.exchange(self.rank_in_group, x.clone())[0])


def broadcast(x: torch.Tensor, _: int, group: Group) -> None:
    group.broadcast(x)


def broadcast_object_list(box: list[Any], _: int, group: Group) -> None:
    box[:] = [group.wire.exchange(group.rank_in_group, box[0])[0]]


class Own:
    """vLLM's part: layers whose keys, values and queries tell rank, layer and token."""

    fails_in = -1

    def compute(self, ids: torch.Tensor, rows: Any, logits: int) -> torch.Tensor:
        found = []
        for layer in range(LAYERS):
            if layer == self.fails_in:
                raise ValueError("in a layer")
            first = 10 * layer + self.rank * HEADS
            heads = torch.arange(first, first + HEADS).float()[None, :, None]
            x = heads.expand(ids.numel(), HEADS, WIDTH) + 100 * ids.view(-1, 1, 1)
            rows.write(layer, x, -x)
            found.append(rows.attend(layer, x, {}))
        return torch.stack(found)

    def check(self, ids: torch.Tensor) -> None:
        pass

    def write(self, layer: int, *given: torch.Tensor) -> None:
        self.written = layer, *given


class Rows:
    """Rows of rank 0, which attend by returning the queries, and may end the forward."""

    def __init__(self, last: int = LAYERS) -> None:
        self.positions, self.last = torch.arange(2), last
        self.keys: list[torch.Tensor] = []

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert torch.equal(keys, -values)
        self.keys.append(keys)

    def attend(self, layer: int, query: torch.Tensor, scores: Any) -> torch.Tensor:
        if layer == self.last:
            raise KeyError("not needed")
        return query


@pytest.fixture
def ranks(connector, monkeypatch):
    """Both ranks' models, of the same key heads in turn."""
    module = importlib.import_module("vllm_kvrag.ranks")
    monkeypatch.setattr(module, "broadcast", broadcast)
    monkeypatch.setattr(module, "broadcast_object_list", broadcast_object_list)
    wire = Wire()
    made = []
    for rank in range(2):
        share = type("Split", (module.SplitLM,), {})
        lm = share.__new__(share)
        common = {"device": "cpu", "dtype": torch.float32, "lock": nullcontext(), "replicas": 1}
        vars(lm).update(common, rank=rank, group=Group(rank, wire), leads=rank == 0)
        vars(lm).update(is_busy=False, is_lost=False)
        made.append(lm)
    for name, method in vars(Own).items():
        if not name.startswith("__"):
            monkeypatch.setattr(module.VllmLM, name, method, raising=False)
    return made


def following(lm: Any) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    turn = pool.submit(lm.end_turn, is_busy=False)
    pool.shutdown(wait=False)
    return turn


def test_rank_0_attends_over_the_heads_of_all_ranks(ranks):
    turn = following(ranks[1])
    rows = Rows()
    ids = torch.tensor([[1, 2]])
    found = ranks[0].compute(ids, rows, 0)
    assert [each[0, :, 0].tolist() for each in rows.keys] == [
        [100 + 10 * layer + head for head in range(4)] for layer in range(LAYERS)
    ]
    assert found[:, 0, :, 0].tolist() == [[100, 101], [110, 111], [120, 121]]
    ranks[0].end_turn(is_busy=True)
    turn.result(WAIT_S)
    assert [lm.is_busy for lm in ranks] == [True, True]


def test_a_forward_that_rank_0_ends_is_over_everywhere_and_others_follow(ranks):
    turn = following(ranks[1])
    ids = torch.tensor([[1, 2]])
    for last in (0, 2):
        with pytest.raises(KeyError, match="not needed"):
            ranks[0].compute(ids, Rows(last), 0)
    assert len(ranks[0].compute(ids, Rows(), 0)) == LAYERS
    ranks[0].end_turn(is_busy=False)
    turn.result(WAIT_S)
    assert not ranks[1].is_busy


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_rank_writes_its_own_heads(ranks, replicas):
    for lm in ranks:
        lm.replicas = replicas
    turn = following(ranks[1])
    rows = Rows()
    ranks[0].compute(torch.tensor([[1, 2]]), rows, 0)
    assert rows.keys[0][0, :, 0].tolist() == [100.0, 101.0, 102.0, 103.0][::replicas]
    keys = torch.arange(6.0).view(3, 2, 1) if replicas == 1 else torch.arange(3.0).view(3, 1, 1)
    slots = torch.tensor([4, 5, 9])
    ranks[0].write(1, keys, keys + 0.5, slots)
    ranks[0].end_turn(is_busy=False)
    turn.result(WAIT_S)
    for rank, lm in enumerate(ranks):
        layer, own_keys, own_values, own_slots = lm.written
        assert layer == 1
        assert torch.equal(own_slots, slots)
        wanted = keys[:, rank : rank + 1] if replicas == 1 else keys
        assert torch.equal(own_keys, wanted)
        assert torch.equal(own_values, wanted + 0.5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rank_that_fails_in_vllms_layers_ends_its_process(ranks, layer):
    """On rank 0 at the next order, so that no step is let go; on another one at once."""
    ranks[0].group.wire.wait_s = 2.0
    type(ranks[1]).fails_in = layer
    turn = following(ranks[1])
    with pytest.raises(threading.BrokenBarrierError):
        ranks[0].compute(torch.tensor([[1, 2]]), Rows(), 0)
    with pytest.raises(SystemExit, match="ValueError: in a layer"):
        turn.result(WAIT_S)
    for order in (
        lambda: ranks[0].end_turn(is_busy=False),
        lambda: ranks[0].write(0, *3 * [torch.zeros(1, 2)]),
    ):
        with pytest.raises(SystemExit, match="start vLLM anew"):
            order()
