"""The scanner finds what was registered, character for character, and nothing else."""

import threading
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import at_once

from kvrag.errors import InputError
from kvrag.identity.fingerprint import text_digest
from kvrag.prompt import spans
from kvrag.prompt.spans import ANCHOR_CHARS, SpanIndex, text_entry
from kvrag.types import Span

LOREM = "The reading room opens at nine; maps are brought up from the store twice a day, at ten and at two."
OTHER = "A shelf mark is written on the slip in pencil, never in ink, and the slip stays in the place of the book."


def index_of(*texts: str) -> SpanIndex:
    index = SpanIndex()
    index.add(entry for text in texts if (entry := text_entry(text)))
    return index


def found(index: SpanIndex, prompt: str) -> list[str]:
    result = index.scan(prompt)
    assert all(text_digest(prompt[span.start : span.stop]) == span.digest for span in result)
    assert all(a.stop <= b.start for a, b in pairwise(result))
    return [prompt[span.start : span.stop] for span in result]


def naive(prompt: str, texts: list[str]) -> list[Span]:
    """Slow reference: every place of every text, then the overlap rule by comparing all pairs."""
    stripped = {text.strip() for text in texts if len(text.strip()) >= ANCHOR_CHARS}
    places = [
        (i, i + len(t)) for t in stripped for i in range(len(prompt)) if prompt.startswith(t, i)
    ]
    kept: list[tuple[int, int]] = []
    for start, stop in sorted(places, key=lambda p: (p[0] - p[1], p[0])):
        if all(stop <= a or b <= start for a, b in kept):
            kept.append((start, stop))
    return [Span(a, b, text_digest(prompt[a:b])) for a, b in sorted(kept)]


AWKWARD = {
    "quotes": "He said \"no\", then 'maybe', then ‘yes’ — and wrote «perhaps» in the margin.",
    "braces": 'Use {context} and {{escaped}} with {"json": [1, 2, {"deep": "er"}]} and %s and $name, please.',
    "crlf": "First line of the page\r\nsecond line of the page\r\n\r\nfourth line, after an empty one",
    "tabs": "shelf\tmark\tcolour\t\tyear\nA\t12\tgreen\t\t1911\nB\t13\tred\t\t1912",
    "nbsp": "The fee is 12\u00a0€ per day, or 60\u00a0€ per week; see\u00a0§\u202f4 of the rules.",
    "double spaces": "Two  spaces  after   every word,  and  three   after some,  as  typists did.",
    "emoji": "Opening day 🎉 was loud 👩‍👩‍👧‍👦 and long 🏳️‍🌈; the guests 🥂 stayed until midnight 🌙.",
    "cjk": "图书馆每天上午九点开门，下午六点关门；周末休息。地图室只在预约后开放，读者须出示证件，禁止使用墨水笔。",
    "combining": "Cafe\u0301 re\u0301sume\u0301, A\u030angstro\u0308m and Vie\u0323\u0302t Nam, decomposed.",
    "rtl": "ספר זה נמצא במחסן התחתון ואפשר להזמין אותו פעמיים ביום, בעשר ובשתיים בדיוק.",
    "nul and controls": "A text with a NUL \x00 and a bell \x07 and an escape \x1b[0m, copied from a terminal.",
    "control tokens": "<|im_start|>system\nThis is the plain text of a document<|im_end|></s>[INST] and no more.",
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_a_chunk_is_found_verbatim_whatever_it_holds(text):
    index = index_of(text)
    assert found(index, text) == [text]
    assert found(index, f"Context:\n\n{text}\n\nQuestion: {text[:31]}?") == [text]
    assert found(index, f"🙂{text}🙂") == [text]


def test_composed_and_decomposed_characters_are_different_texts():
    assert found(index_of("é" * 40), "e\u0301" * 40) == []


def test_the_ends_are_stripped_and_stay_outside_the_span():
    index = index_of(f" \n\t\u00a0{LOREM}\u2003\r\n")
    prompt = f"x \n{LOREM}\n\n y"
    assert index.scan(prompt) == [Span(3, 3 + len(LOREM), text_digest(LOREM))]


@pytest.mark.parametrize("size", [0, 1, ANCHOR_CHARS - 1])
def test_a_text_below_the_anchor_has_no_entry(size):
    assert text_entry("  " + "x" * size + "\n") is None


@pytest.mark.parametrize(
    "size", [ANCHOR_CHARS, ANCHOR_CHARS + 1, 2 * ANCHOR_CHARS - 1, 2 * ANCHOR_CHARS]
)
def test_the_shortest_texts_that_have_an_entry_are_found(size):
    text = (LOREM + OTHER)[:size].strip().ljust(size, ".")
    assert found(index_of(text), f"a {text} b {text}") == [text, text]


@pytest.mark.parametrize("text", ["short \ud800", LOREM + "\udfff"])
def test_a_lone_surrogate_is_refused_with_a_sentence_that_names_it(text):
    with pytest.raises(InputError, match=r"\\ud[8f].* UTF-8 can't encode; decode"):
        text_entry(text)


def test_a_lone_surrogate_in_the_prompt_hides_nothing_else():
    assert found(index_of(LOREM), f"\ud800 {LOREM} \udfff") == [LOREM]
    same_ends = LOREM[:40] + "\ud800" + LOREM[41:]
    assert index_of(LOREM).scan(same_ends) == []


@pytest.mark.parametrize("place", [0, 31, 32, len(LOREM) // 2, len(LOREM) - 33, len(LOREM) - 1])
def test_one_changed_character_means_not_found(place):
    changed = LOREM[:place] + chr(ord(LOREM[place]) ^ 1) + LOREM[place + 1 :]
    assert index_of(LOREM).scan(f"x {changed} y") == []


def test_texts_with_the_same_ends_and_length_are_told_apart():
    texts = [LOREM + str(n) * 5 + OTHER for n in range(10)]
    index = index_of(*texts[:5])
    assert found(index, "\n\n".join(texts)) == texts[:5]


@pytest.mark.parametrize("most", [spans.MIN_OVERFLOW, 0], ids=["small table", "large table"])
def test_adding_twice_changes_nothing(monkeypatch, most):
    monkeypatch.setattr(spans, "MIN_OVERFLOW", most)
    index = index_of(LOREM, OTHER)
    for _ in range(2):
        index.add([text_entry(LOREM), text_entry(LOREM)])
    assert len(index) == 2
    assert index.texts_like(LOREM, limit=9) == [text_entry(LOREM)]
    assert found(index, LOREM + OTHER) == [LOREM, OTHER]


def test_a_registered_text_takes_few_bytes():
    index, num = SpanIndex(), 20_000
    index.add([])  # nothing is imported from here on
    tracemalloc.start()
    try:
        for part in range(4):
            index.add(text_entry(f"{n}: {LOREM}") for n in range(part, num, 4))
        assert len(index) == num
        # The texts themselves have 100 characters and more.
        assert tracemalloc.get_traced_memory()[0] < 100 * num
    finally:
        tracemalloc.stop()
    assert found(index, f"77: {LOREM}") == [f"77: {LOREM}"]


@pytest.mark.parametrize("tolerated", [0, 3, 1000])
def test_any_order_of_adds_and_scans_gives_the_same(monkeypatch, tolerated):
    monkeypatch.setattr(spans, "MIN_OVERFLOW", tolerated)
    texts = [f"{n:03d} {LOREM}" for n in range(40)]
    prompt = "\n".join(texts)
    index = SpanIndex()
    for n, text in enumerate(texts):
        index.add([text_entry(text)])
        assert found(index, prompt) == texts[: n + 1]


def test_threads_may_add_while_others_scan():
    index = index_of(LOREM)
    fresh = [f"{n} {OTHER}" for n in range(2000)]
    failures: list[BaseException] = []
    done = threading.Event()

    def scan():
        try:
            while not done.is_set():
                assert LOREM in found(index, f"{LOREM}\n{fresh[-1]}")
        except BaseException as error:
            failures.append(error)

    def add():
        for text in fresh:
            index.add([text_entry(text)])
        done.set()

    at_once(scan, scan, add)
    assert failures == []
    assert found(index, f"{LOREM}\n{fresh[-1]}") == [LOREM, fresh[-1]]


@pytest.fixture
def counting(monkeypatch):
    """Make an index, and the lengths of the texts whose digest it takes."""

    def made(*texts: str) -> tuple[SpanIndex, list[int]]:
        hashed: list[int] = []
        index = index_of(*texts)
        monkeypatch.setattr(
            spans, "text_digest", lambda text: (hashed.append(len(text)), text_digest(text))[1]
        )
        return index, hashed

    return made


@pytest.mark.parametrize("footer", ["", " " + OTHER], ids=["own tails", "same tails"])
def test_of_ten_thousand_chunks_with_one_header_few_are_hashed(footer, counting):
    texts = [f"{LOREM} Page {n}: {'word ' * (n % 300)}end of {n}.{footer}" for n in range(10_000)]
    index, hashed = counting(*texts)
    wanted = texts[5::1000]
    assert found(index, "\n\n".join([*wanted, LOREM])) == wanted
    assert len(hashed) <= 20 * len(wanted)


def test_runs_of_one_character_are_scanned_within_bounds(counting):
    index, hashed = counting(*("a" * n for n in range(ANCHOR_CHARS, 1500)))
    result = found(index, "a" * 100_000)
    assert result[0] == "a" * 1499
    assert sum(map(len, result)) > 98_000
    assert sum(hashed) < 2 * 100_000, "nothing is hashed twice"
    index, hashed = counting(*("a" * n + "b" + "a" * 2000 for n in range(1000, 1020)), LOREM)
    index.scan("a" * 50_000 + LOREM + "a" * 50_000)
    assert sum(hashed) < spans.MAX_WASTED_CHARS + 10_000


def test_what_the_bounds_cut_off_is_missed_and_never_wrong(monkeypatch):
    monkeypatch.setattr(spans, "MAX_PAIRS", 0)
    monkeypatch.setattr(spans, "MAX_WASTED_CHARS", 0)
    index = index_of(*("a" * n for n in range(ANCHOR_CHARS, 200)), "a" * 50 + "b" + "a" * 100)
    for piece in found(index, "a" * 3000):
        assert set(piece) == {"a"}
        assert len(piece) < 200


runs = st.lists(st.tuples(st.sampled_from("ab é🙂\n"), st.integers(1, 40)), min_size=1, max_size=4)
chunk_texts = st.one_of(
    runs.map(lambda parts: "".join(char * count for char, count in parts)),
    st.text(min_size=ANCHOR_CHARS, max_size=48).filter(lambda t: t.isprintable()),
)


@st.composite
def cases(draw) -> tuple[list[str], str]:
    """Some texts, and a prompt made of them, of pieces of them and of noise."""
    texts = draw(st.lists(chunk_texts, min_size=1, max_size=5))
    prompt = ""
    for _ in range(draw(st.integers(0, 6))):
        text = draw(st.sampled_from(texts))
        cut = draw(st.integers(0, len(text)))
        prompt += draw(
            st.sampled_from(
                [text, text, text[:cut], text[cut:], text.strip(), "a" * cut, "\n\n", "x"]
            )
        )
    return texts, prompt


@settings(max_examples=300, deadline=None)
@given(cases())
def test_scan_agrees_with_a_naive_search(case):
    texts, prompt = case
    assert index_of(*texts).scan(prompt) == naive(prompt, texts)
