"""Which replica is asked first: pure functions, and the classes that Ray asks."""

import asyncio
from collections import Counter
from itertools import permutations
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

from kvrag_ray.router import FREE, ChunkRouter, by_owner, by_queue, ranked

REPLICAS = [f"replica{number}" for number in range(5)]
KEYS = [f"{number:064x}" for number in range(2000)]


def test_neither_the_order_of_the_chunks_nor_that_of_the_replicas_matters():
    expected = by_owner(KEYS[:4], REPLICAS)
    assert sorted(expected) == REPLICAS
    assert all(by_owner(keys, REPLICAS[::-1]) == expected for keys in permutations(KEYS[:4]))


def test_keys_are_spread_evenly():
    owners = Counter(by_owner([key], REPLICAS)[0] for key in KEYS)
    assert all(abs(count - 400) < 80 for count in owners.values())


def test_only_the_keys_of_a_replica_that_leaves_move():
    before = {key: by_owner([key], REPLICAS)[0] for key in KEYS}
    after = {key: by_owner([key], REPLICAS[:-1])[0] for key in KEYS}
    assert {before[key] for key in KEYS if before[key] != after[key]} == {REPLICAS[-1]}


def test_the_owner_of_most_chunks_is_first():
    owned = [key for key in KEYS if by_owner([key], REPLICAS)[0] == "replica3"][:3]
    others = [key for key in KEYS if by_owner([key], REPLICAS)[0] != "replica3"]
    one_each = [
        next(key for key in others if by_owner([key], REPLICAS)[0] == each)
        for each in ("replica0", "replica1")
    ]
    assert by_owner([*one_each, *owned], REPLICAS)[0] == "replica3"


def test_a_replica_with_too_much_to_do_comes_last():
    loads = dict.fromkeys(REPLICAS, 4)
    order = [replica for [replica] in ranked(KEYS[:1], loads)]
    assert order == by_owner(KEYS[:1], REPLICAS)
    hot = ranked(KEYS[:1], {**loads, order[0]: 9})
    assert hot == [*([replica] for replica in order[1:]), [order[0]]]


def test_a_replica_with_little_to_do_is_not_hot_because_the_others_have_nothing():
    loads = dict.fromkeys(REPLICAS, 0)
    first = by_owner(KEYS[:1], REPLICAS)[0]
    assert ranked(KEYS[:1], {**loads, first: FREE - 1})[0] == [first]


def test_without_chunks_all_are_equals():
    found = [ranked([], dict.fromkeys(REPLICAS, 1)) for _ in range(50)]
    assert all(len(ranks) == 1 and sorted(ranks[0]) == REPLICAS for ranks in found)
    assert {ranks[0][0] for ranks in found} == set(REPLICAS)
    assert ranked(KEYS[:1], {}) == []


def test_ray_is_given_the_replicas_in_that_order():
    # The base class wants a cluster; only its memory of loads is used.
    router = ChunkRouter.__new__(ChunkRouter)
    loads = {"replica1": 50}
    router._replica_queue_len_cache = SimpleNamespace(get=lambda each: loads.get(each.unique_id))
    candidates = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in REPLICAS]
    request = SimpleNamespace(
        kwargs={"keys": KEYS[:3]}, routing_context=SimpleNamespace(should_backoff=False)
    )
    found = asyncio.run(router.choose_replicas(candidates, request))
    expected = ranked(KEYS[:3], {**dict.fromkeys(REPLICAS, 0), **loads})
    assert [[each.replica_id.unique_id for each in rank] for rank in found] == expected
    assert expected[-1] == ["replica1"]
    assert request.routing_context.should_backoff  # or Ray asks again at once, and forever
    [equals] = asyncio.run(router.choose_replicas(candidates))
    assert sorted(map(id, equals)) == sorted(map(id, candidates))


@pytest.mark.parametrize(
    ("stats", "wanted"),
    [
        # Twice as many would run it all.
        ({"running": {"a": 4.0, "b": 4.0}, "waiting": {"a": 6.0, "b": 2.0}}, 4),
        # Ray's own policy: 8 of 16 that two take.
        ({"running": {"a": 4.0, "b": 4.0}, "waiting": {"a": 0.0, "b": 0.0}}, 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_what_waits_for_room_asks_for_replicas(stats, wanted):
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8)
    context = SimpleNamespace(
        current_num_replicas=2,
        target_num_replicas=2,
        total_num_requests=8.0,
        aggregated_metrics=stats,
        config=config,
    )
    context.policy_state = {}
    assert by_queue(context)[0] == wanted
