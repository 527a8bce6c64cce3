"""Where each row's KV came from, as the engine tells it: it adds up to the account, whatever was chosen, loaded and repaired."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import make_chunks

from kvrag import Chunk, KVRagEngine, RepairConfig, StoreConfig
from kvrag.blend.layout import Layout, Segment, place, sources_of
from kvrag.config import STRATEGIES
from kvrag.generate import pipeline

CHUNKS = make_chunks(4, words=30)
PREFIX = "Read this.\n"
PROMPT = [
    PREFIX,
    *(part for text in CHUNKS for part in (Chunk(text), "\n")),
    "Who built the tower?",
]


@pytest.fixture(scope="module")
def kept(tiny_dir, tmp_path_factory):
    engine = KVRagEngine.from_pretrained(
        tiny_dir, kv_dir=tmp_path_factory.mktemp("kv"), context=None, prefix=PREFIX
    )
    engine.precompute(CHUNKS)
    yield engine
    engine.close()


def rows(result):
    """The source of each row."""
    return [source for source, count in result.sources for _ in range(count)]


def check(result):
    """Compare the runs with the account, and return the rows' sources."""
    found = rows(result)
    assert len(found) == result.prompt_tokens
    assert found.count("exact") + found.count("reused") == result.cached_tokens
    assert found.count("repaired") == result.repaired_tokens
    assert found.count("computed") == result.computed_tokens
    assert all(count > 0 for _, count in result.sources)
    assert all(a != b for (a, _), (b, _) in itertools.pairwise(result.sources)), (
        "runs of the same source are one"
    )
    assert found[-1] == "computed"
    if result.exactness == "exact":
        assert "reused" not in found
    return found


@pytest.mark.parametrize("mode", ["auto", "full", "prefix", "stitch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sources_add_up_to_the_account(kept, mode, strategy):
    found = check(
        kept.prefill(PROMPT, mode=mode, repair=RepairConfig(strategy=strategy, recompute_ratio=0.2))
    )
    assert mode != "full" or set(found) == {"computed"}
    assert mode != "prefix" or set(found) == {"exact", "computed"}


def test_rows_are_chosen_whatever_room_the_answer_has(kept):
    """The probe writes behind the prompt, where the answer's rows will be."""
    answers = [
        kept.generate(
            PROMPT, mode="stitch", repair=RepairConfig(recompute_ratio=0.2), max_new_tokens=n
        )
        for n in (1, 64)
    ]
    assert answers[0].sources == answers[1].sources
    assert answers[0].token_ids == answers[1].token_ids[:1]


def test_each_row_is_named_by_what_happened_to_it(kept):
    result = kept.prefill(
        PROMPT, mode="stitch", repair=RepairConfig(strategy="first_k", recompute_ratio=0.01)
    )
    kinds = [source for source, _ in result.sources]
    assert kinds == ["exact", *["computed", "repaired", "reused"] * 3, "computed"]
    head = len(kept.tokenizer(PREFIX)["input_ids"]) + len(kept.tokenizer(CHUNKS[0])["input_ids"])
    assert abs(result.sources[0][1] - head) <= 1, "the prefix, and the first chunk behind it"


@pytest.mark.parametrize(
    "repair",
    [RepairConfig(recompute_ratio=0.2), RepairConfig(recompute_ratio=0.2, shift=0.0)],
    ids=repr,
)
def test_exact_rows_are_a_full_prefills_and_reused_ones_are_not(kept, repair, monkeypatch):
    seen, real = [], pipeline.prefill

    def noting(*args, **options):
        made = real(*args, **options)
        seen.append(
            [
                torch.cat([x[0, :, : len(made.token_ids)] for x in layer])
                for layer in made.buffer.layers
            ]
        )
        return made

    monkeypatch.setattr(pipeline, "prefill", noting)
    found = rows(kept.prefill(PROMPT, mode="stitch", repair=repair))
    kept.prefill(PROMPT, mode="full")
    change = torch.stack([(a - b).abs().amax(dim=(0, 2)) for a, b in zip(*seen, strict=True)]).amax(
        dim=0
    )
    by_source = {
        source: change[torch.tensor([each == source for each in found])] for source in set(found)
    }
    assert by_source["exact"].max() < 1e-4
    assert by_source["reused"].min() > 1e-4
    assert by_source.keys() == {"exact", "reused", "repaired", "computed"}


def test_chunks_without_kv_are_computed(kept):
    strange = make_chunks(1, words=30, seed=5)[0]
    found = check(kept.prefill([*PROMPT[:-1], Chunk(strange), "\nWho?"], mode="stitch"))
    assert found[-80:].count("computed") == 80
    assert "reused" in found


def test_chunks_that_can_not_be_loaded_are_computed(kept, monkeypatch):
    def fail(*_, **__):
        raise OSError("no disk")

    monkeypatch.setattr(kept.store, "get_many", fail)
    result = kept.prefill(PROMPT, mode="stitch")
    assert result.holes
    assert set(check(result)) == {"computed"}


def test_rounded_kv_is_never_called_exact(engine_of):
    engine = engine_of(prefix=PREFIX, store_config=StoreConfig(kv_dtype="int8"))
    engine.precompute(CHUNKS)
    found = check(engine.prefill(PROMPT, mode="stitch"))
    assert "exact" not in found
    assert "reused" in found


def test_answers_and_scores_tell_it_too(kept):
    assert "reused" in check(kept.generate(PROMPT, mode="stitch", max_new_tokens=2))
    assert "reused" in check(kept.score(PROMPT, "Nobody.", mode="stitch"))


def test_rows_of_an_earlier_turn_are_exact_as_far_as_they_are():
    after = Layout(
        (Segment(0, 10, "history"), Segment(10, 14, "chunk", source=0), Segment(14, 16, "live"))
    )
    runs = sources_of(after, torch.tensor([10]), num_exact=6)
    assert runs == (("exact", 6), ("reused", 4), ("repaired", 1), ("reused", 3), ("computed", 2))
    exact = Layout((Segment(0, 10, "history", exact=True), Segment(10, 12, "live")))
    assert sources_of(exact, torch.tensor([], dtype=torch.int64), num_exact=20) == (
        ("exact", 10),
        ("computed", 2),
    )


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["exact", "stale", "live"])), min_size=1),
    st.data(),
)
def test_every_layout_is_covered_once(segments, data):
    kinds = {"exact": ("chunk", True), "stale": ("chunk", False), "live": ("live", False)}
    layout = place(
        [
            (n, *kinds[kind], -1 if kind == "live" else at, False)
            for at, (n, kind) in enumerate(segments)
        ]
    )
    stale = [row for s in layout.stale for row in range(s.start, s.stop)]
    chosen = sorted(data.draw(st.sets(st.sampled_from(stale)) if stale else st.just(set())))
    want = ["computed"] * layout.num_tokens
    for segment in layout.reused:
        for row in range(segment.start, segment.stop):
            want[row] = "repaired" if row in chosen else "exact" if segment.exact else "reused"
    runs = sources_of(layout, torch.tensor(chosen, dtype=torch.int64))
    assert [source for source, count in runs for _ in range(count)] == want
