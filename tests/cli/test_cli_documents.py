"""Documents of the command line: how files are read, and split into chunks."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrag.cli.documents import read_documents, split_documents, split_text
from kvrag.errors import ConfigError


def count_words(text: str) -> int:
    return len(text.split())


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab .!?\n#\t ", max_size=400), size=st.integers(1, 40))
def test_chunks_are_verbatim_in_order_and_lose_nothing(text, size):
    chunks = split_text(text, count_words, chunk_tokens=size)
    at = 0
    for chunk in chunks:
        assert chunk
        assert chunk == chunk.strip()
        at = text.index(chunk, at) + len(chunk)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_paragraphs_are_packed_to_about_the_size_asked_for():
    text = "\n\n".join(" ".join(f"w{i}-{j}" for j in range(20)) for i in range(12))
    sizes = [count_words(chunk) for chunk in split_text(text, count_words, chunk_tokens=60)]
    assert sizes == [60] * 4


def test_a_heading_stays_with_the_paragraph_below_it():
    body = "word " * 20
    chunks = split_text(
        f"# Title\n\n## One\n\n{body}\n\n## Two\n\n{body}", count_words, chunk_tokens=20
    )
    assert [chunk.split("\n")[0] for chunk in chunks] == ["# Title", "## Two"]


def test_a_long_paragraph_is_cut_at_sentences_and_a_long_sentence_at_words():
    sentences = " ".join("one two three four five six seven eight nine ten." for _ in range(8))
    chunks = split_text(sentences, count_words, chunk_tokens=20)
    assert all(chunk.endswith("ten.") and count_words(chunk) == 20 for chunk in chunks)
    endless = " ".join(f"w{i}" for i in range(100))
    assert (
        max(count_words(chunk) for chunk in split_text(endless, count_words, chunk_tokens=10)) <= 11
    )


def test_sizes_below_one_are_refused():
    with pytest.raises(ConfigError, match="chunk_tokens"):
        split_text("text", count_words, chunk_tokens=0)


def test_a_folder_is_read_below_too_and_chunks_are_named_by_path_and_number(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.md").write_text("one two three\n\nfour five six")
    (tmp_path / "b.txt").write_text("seven")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "empty.md").write_text(" \n")
    documents = read_documents([tmp_path])
    assert [Path(path).name for path in documents] == ["b.txt", "a.md"]
    chunks = split_documents(documents, count_words, chunk_tokens=3)
    assert [(Path(chunk.id).name, chunk.text, chunk.num_tokens) for chunk in chunks] == [
        ("b.txt#0", "seven", 1),
        ("a.md#0", "one two three", 3),
        ("a.md#1", "four five six", 3),
    ]
