"""Waiting is never silent: a bar on a terminal, lines elsewhere, and nothing where nothing is wanted."""

import io
import logging
import subprocess
import sys
import threading

import pytest

from kvrag import ConfigError, precompute_kv, progress, sync_kv
from kvrag.progress import Progress

TEXTS = [
    f"chunk number {i}: the quick brown fox jumps over the lazy dog, again and again and again" * 3
    for i in range(3)
]


class Stream(io.StringIO):
    """A standard error that says when something is written to it."""

    def __init__(self, *, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal
        self.has_text = threading.Event()

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        done = super().write(text)
        self.has_text.set()
        return done


@pytest.fixture
def stderr_of(monkeypatch):
    """Replace standard error, let nothing wait, and leave logging as a program has it that configures none."""

    def replace(*, is_terminal, has_handlers=False):
        stream = Stream(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        for name in ("BAR_AFTER_S", "BAR_S", "FIRST_LINE_S", "LINE_S"):
            monkeypatch.setattr(progress, name, 0.001)
        monkeypatch.setattr(progress.logger, "hasHandlers", lambda: has_handlers)
        return stream

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    return replace


def test_a_terminal_gets_a_bar(stderr_of):
    stream = stderr_of(is_terminal=True)
    with Progress("computing KV", 4, unit="chunks", done=1) as bar:
        bar.advance(2)
        assert stream.has_text.wait(30)
    assert "computing KV" in stream.getvalue()
    assert "3/4" in stream.getvalue()


def test_a_wait_without_a_total_shows_a_clock(stderr_of):
    stream = stderr_of(is_terminal=True)
    with Progress("loading a model"):
        assert stream.has_text.wait(30)
    assert "loading a model: 00:0" in stream.getvalue()


def test_elsewhere_there_are_lines_with_what_is_left(stderr_of):
    stream = stderr_of(is_terminal=False)
    with Progress("computing KV", 4, unit="chunks") as bar:
        bar.advance(3)
        assert stream.has_text.wait(30)
        bar.advance(1)
    lines = stream.getvalue().splitlines()
    assert "computing KV: 3 of 4 chunks after 0 s, about 0 s left" in lines
    assert lines[-1] == "computing KV: 4 of 4 chunks after 0 s"
    assert "\r" not in stream.getvalue()


def test_what_fails_says_where_it_ended(stderr_of):
    stream = stderr_of(is_terminal=False)

    def fail():
        with Progress("computing KV", 4, unit="chunks"):
            assert stream.has_text.wait(30)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (
        stream.getvalue().splitlines()[-1] == "computing KV: 0 of 4 chunks after 0 s, ended early"
    )


def test_configured_logging_gets_the_lines(stderr_of, caplog):
    stream = stderr_of(is_terminal=False, has_handlers=True)
    written = threading.Event()
    with caplog.at_level(logging.INFO, logger="kvrag.progress"), Progress("loading a model"):
        while not caplog.messages and not written.wait(0.001):
            pass
    assert caplog.messages[0] == "loading a model: 0 s so far"
    assert caplog.messages[-1] == "loading a model: 0 s done"
    assert stream.getvalue() == ""


@pytest.mark.parametrize("how", ["show_progress=False", "TQDM_DISABLE", "logging without INFO"])
def test_nothing_is_shown_where_nothing_is_wanted(how, stderr_of, monkeypatch):
    stream = stderr_of(is_terminal=how != "logging without INFO", has_handlers=True)
    if how == "TQDM_DISABLE":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    started = []
    monkeypatch.setattr(progress.POOL, "submit", lambda *args, **_: started.append(args))
    with Progress("computing KV", 4, show=False if how == "show_progress=False" else None) as bar:
        bar.advance(4)
    assert (stream.getvalue(), started) == ("", [])


def test_a_bar_that_is_asked_for_is_there_at_once(stderr_of):
    stream = stderr_of(is_terminal=False, has_handlers=True)
    with Progress("computing KV", 4, unit="chunks", show=True) as bar:
        assert "0/4" in stream.getvalue()
        bar.advance(4)
    assert "4/4" in stream.getvalue()


def test_a_short_wait_shows_nothing(stderr_of, monkeypatch):
    stream = stderr_of(is_terminal=True)
    monkeypatch.setattr(progress, "BAR_AFTER_S", 60.0)
    with Progress("computing KV", 4) as bar:
        bar.advance(4)
    assert stream.getvalue() == ""


def test_many_threads_lose_no_count(stderr_of):
    stream = stderr_of(is_terminal=False, has_handlers=True)
    with Progress("computing KV", 800, unit="chunks", show=True) as bar:
        threads = [
            threading.Thread(target=lambda: [bar.advance() for _ in range(100)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "800/800" in stream.getvalue()


def test_a_program_that_configures_no_logging_sees_lines():
    code = """if True:
        import time
        from kvrag import progress
        progress.FIRST_LINE_S = 0.01
        with progress.Progress("computing KV", 2, unit="chunks") as bar:
            bar.advance()
            while not bar._has_line:
                time.sleep(0.001)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert "computing KV: 1 of 2 chunks" in done.stderr
    assert done.stdout == ""


def _langchain_store(engine, show, **options):
    from langchain_core.embeddings import DeterministicFakeEmbedding

    from langchain_kvrag import KVRagVectorStore

    return KVRagVectorStore(
        embedding=DeterministicFakeEmbedding(size=8),
        llm=engine,
        show_progress=show,
        on_error="raise",
    )


def _from_documents(engine, show):
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding

    from langchain_kvrag import KVRagVectorStore

    documents = [Document(text) for text in TEXTS]
    KVRagVectorStore.from_documents(
        documents, DeterministicFakeEmbedding(size=8), llm=engine, show_progress=show
    )


def _langchain_transform(engine, show):
    from langchain_core.documents import Document

    from langchain_kvrag import KVPrecompute

    KVPrecompute(engine, show_progress=show, on_error="raise").transform_documents(
        [Document(text) for text in TEXTS]
    )


def _nodes():
    from llama_index.core.schema import TextNode

    return [TextNode(text=text, embedding=[1.0, float(i)]) for i, text in enumerate(TEXTS)]


def _llama_index_store(engine, show):
    from llama_index.vector_stores.kvrag import KVRagVectorStore

    KVRagVectorStore(llm=engine, show_progress=show, on_error="raise").add(_nodes())


def _llama_index_transform(engine, show):
    from llama_index.llms.kvrag import KVPrecompute

    KVPrecompute(engine, show_progress=show, on_error="raise")(_nodes())


WAYS = {
    "engine.precompute": lambda engine, show: engine.precompute(TEXTS, show_progress=show),
    "precompute_kv": lambda engine, show: precompute_kv(TEXTS, llm=engine, show_progress=show),
    "sync_kv": lambda engine, show: sync_kv(
        TEXTS, ids=["a", "b", "c"], llm=engine, show_progress=show
    ),
    "LangChain add_texts": lambda engine, show: _langchain_store(engine, show).add_texts(TEXTS),
    "LangChain from_documents": _from_documents,
    "LangChain KVPrecompute": _langchain_transform,
    "LlamaIndex add": _llama_index_store,
    "LlamaIndex KVPrecompute": _llama_index_transform,
}


@pytest.mark.parametrize("show", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_an_index_shows_progress(way, show, engine, monkeypatch):
    pytest.importorskip("langchain_kvrag")
    pytest.importorskip("llama_index.vector_stores.kvrag")
    seen = []

    def watched(what, total, **options):
        seen.append((total, options["unit"], options["show"]))
        return Progress(what, total, **{**options, "show": False})

    monkeypatch.setattr("kvrag.precompute.run.Progress", watched)
    WAYS[way](engine, show)
    assert seen == [(3, "chunks", show)]


@pytest.mark.parametrize("way", WAYS)
def test_another_value_is_refused(way, engine):
    with pytest.raises((ConfigError, ValueError), match="show_progress"):
        WAYS[way](engine, "perhaps")
