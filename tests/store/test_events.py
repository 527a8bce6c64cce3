"""What is stored, evicted, erased and rejected is told, with vLLM's names; a fault of who listens costs nothing."""

import json
import stat
import time

import pytest
from stores import CHUNKS, KEYS, SIZE, fill, path_of


@pytest.fixture
def make(opened):
    return lambda **options: opened(disk_bytes=4 * SIZE, ram_bytes=0, **options)


def test_events_are_named_after_vllms(make, root, tmp_path):
    events, begin = [], time.time()
    store = make(on_event=events.append, event_log=str(tmp_path / "events.jsonl"))
    fill(store, *range(6))
    store.delete([KEYS[5]])
    path_of(root, CHUNKS[4]).write_bytes(b"x")
    store.get(CHUNKS[4])
    store.clear()
    kinds = [(event.type, event.reason) for event in events if event.medium == "disk"]
    assert kinds == [
        *[("BlockStored", "put")] * 4,
        *[("BlockRemoved", "evicted"), ("BlockStored", "put")] * 2,
        ("BlockRemoved", "deleted"),
        ("BlockRemoved", "rejected"),
        ("AllBlocksCleared", "cleared"),
    ]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["type"], line["medium"]) for line in lines] == [
        (event.type, event.medium) for event in events
    ]
    times = [line.pop("ts") for line in lines]
    stored = {
        "type": "BlockStored",
        "medium": "disk",
        "block_hashes": [KEYS[0]],
        "reason": "put",
        "block_size": 3,
    }
    assert lines[0] == {**stored, "num_bytes": SIZE}
    assert all(begin - 1 < moment < time.time() + 1 for moment in times), (
        "clocks may be set back a little"
    )
    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600


def test_stores_that_share_memory_hear_of_it_each_once_until_they_are_closed(opened):
    mine, theirs = [], []
    one, _, third = (opened(on_event=log.append) for log in (mine, mine, theirs))
    for number, heard in ((0, True), (1, False)):
        fill(one, number)
        host = [[e.block_hashes for e in log if e.medium == "host"] for log in (mine, theirs)]
        assert [log.count((KEYS[number],)) for log in host] == [1, heard]
        third.close()


@pytest.mark.parametrize("event_log", [".", "absent/log"])
def test_a_listener_that_fails_costs_nothing_but_one_warning(make, caplog, tmp_path, event_log):
    store = make(on_event=lambda event: 1 / 0, event_log=str(tmp_path / event_log))
    fill(store, 0, 1)
    assert [
        record.message for record in caplog.records if "could not be reported" in record.message
    ] == ["an event of the KV store could not be reported: division by zero"]
