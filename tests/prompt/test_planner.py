"""The planner needs a store and a tokenizer: without weights it plans as the engine does."""

from contextlib import closing

from kit import raising, request_of
from texts import asking, make_chunks

from kvrag import KVRagEngine
from kvrag.identity.fingerprint import context_digest
from kvrag.precompute.library import Library
from kvrag.prompt.planner import KnownTexts, PromptPlanner
from kvrag.prompt.template import PromptEncoder
from kvrag.runtime import Deadline
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

CHUNKS = make_chunks(3, words=30, seed=4)


def test_a_library_and_a_tokenizer_plan_as_the_engine_does(tmp_path):
    tokenizer = tiny_tokenizer()
    engine = KVRagEngine.from_pretrained(
        tiny_model(), tokenizer=tokenizer, kv_dir=tmp_path, context=None
    )
    with closing(engine), closing(Library(tmp_path)) as library:
        engine.precompute(CHUNKS[:2], ids=["a", "b"])
        encoder = PromptEncoder(tokenizer)
        texts = KnownTexts(library.store.catalog)
        planner = PromptPlanner(library.store, library.store_config, texts, encoder)
        space = library.space_of(None)
        for prompt in (asking(CHUNKS, 1, 2), f"{CHUNKS[0]} Who?", [*encoder.head_ids(CHUNKS[1])]):
            lookup = planner.lookup(space, engine.loaded.fingerprint, context_digest(()))
            plan = planner.plan(prompt, lookup, (engine.prefix_text,))
            assert plan.pieces == engine._answering.plan(request_of(engine, prompt)).pieces
            assert plan.identities
        assert library.document_ids() == ["a", "b"]
        assert library.delete(["a"]) == 1
        assert engine.document_ids() == ["b"]


def test_a_namespace_without_texts_is_not_remembered(tmp_path):
    """A request may name any namespace, as often as it likes."""
    with closing(Library(tmp_path)) as library:
        known = KnownTexts(library.store.catalog)
        assert len(known.of("none", Deadline(5))) == 0
        assert known._indexes == {}


def test_what_a_store_did_not_tell_is_asked_again(tmp_path, monkeypatch):
    engine = KVRagEngine.from_pretrained(
        tiny_model(), tokenizer=tiny_tokenizer(), kv_dir=tmp_path, context=None
    )
    with closing(engine):
        engine.precompute(CHUNKS)
        known, space = KnownTexts(engine.store.catalog), engine.space_of(None)
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.store.catalog), "texts", raising(OSError, "gone"))
            deadline = Deadline(5)
            assert len(known.of(space, deadline)) == 0
            assert "gone" in str(deadline.fault)
        assert len(known.of(space, Deadline(5))) == len(CHUNKS)
