"""A tokenizer that the application uses as well: neither side changes what the other one gets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from texts import make_chunks
from tokenizers_kit import tiny_sentencepiece_tokenizer
from transformers import AddedToken, ByT5Tokenizer

from kvrag import KVRagEngine
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import ChatKVRag
from llama_index.llms.kvrag import KVRagLLM as LlamaIndexLLM

TEXTS = make_chunks(6, words=40)
PROMPT = f"{TEXTS[0]}\n\n{TEXTS[1]}\n\nWho keeps the ledger?"
SETTINGS = {
    "truncates": {"truncation": True, "max_length": 8},
    "pads": {"padding": "max_length", "max_length": 512},
    "splits special tokens": {"split_special_tokens": True},
}
"""What the application asks for, which the backend keeps as state."""


def with_template() -> Any:
    """Return a tokenizer of SentencePiece's kind that knows chats."""
    tokenizer = tiny_sentencepiece_tokenizer()
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


every_tokenizer = pytest.mark.parametrize(
    "make", [tiny_tokenizer, with_template], ids=["bytes", "sentencepiece"]
)


def seen_by_kvrag(model: Any, tokenizer: Any, kv_dir: Any) -> list[Any]:
    """Return all that kvrag counts and encodes, by every way in."""
    options = {"kv_dir": kv_dir, "context": None}
    chat = ChatKVRag.from_pretrained_model(model, tokenizer, max_tokens=2, **options)
    index = LlamaIndexLLM(model=model, tokenizer=tokenizer, **options)
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, **options)
    stored = engine.precompute(TEXTS)
    made = engine.generate(PROMPT, max_new_tokens=2, mode="full")
    return [
        (stored.stored, stored.failed),
        made.prompt_ids,
        made.text,
        engine.prefill([{"role": "user", "content": PROMPT}], mode="stitch").prompt_ids,
        engine.score(PROMPT, " Nobody does").logits.shape,
        chat.get_num_tokens(PROMPT),
        chat.get_num_tokens_from_messages([HumanMessage(PROMPT)]),
        chat.invoke(PROMPT).usage_metadata,
        index._token_ids(PROMPT),
        index.complete(PROMPT, max_tokens=2).text,
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@contextmanager
def application(tokenizer: Any, **settings: Any) -> Iterator[None]:
    """A thread calls the tokenizer over and over until the block ends."""
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            tokenizer(TEXTS, **settings)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hurried(tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Return the tokenizer; the application's settings come between each call's own and its end."""
    kind = type(tokenizer)
    backend = tokenizer.backend_tokenizer

    class Hurried(kind):  # type: ignore[misc, valid-type]
        def set_truncation_and_padding(self, *args: Any, **options: Any) -> None:
            super().set_truncation_and_padding(*args, **options)
            if "truncation" in settings:
                backend.enable_truncation(settings["max_length"])
            if "padding" in settings:
                backend.enable_padding(length=settings["max_length"])

    tokenizer.__class__ = Hurried
    return tokenizer


@every_tokenizer
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_other_threads_ask_of_the_tokenizer_changes_nothing(model, make, setting, tmp_path):
    expected = seen_by_kvrag(model, make(), tmp_path / "alone")
    left = make()
    left(TEXTS, **SETTINGS[setting])
    assert seen_by_kvrag(model, left, tmp_path / "left") == expected
    tokenizer = hurried(make(), SETTINGS[setting])
    assert seen_by_kvrag(model, tokenizer, tmp_path / "hurried") == expected
    shared = make()
    with application(shared, **SETTINGS[setting]):
        assert seen_by_kvrag(model, shared, tmp_path / "shared") == expected


@every_tokenizer
def test_the_application_gets_what_it_asks_for_while_kvrag_encodes(model, make, tmp_path):
    """kvrag calls nothing that changes the application's backend, or keeps it borrowed."""
    tokenizer = make()
    backend = tokenizer.backend_tokenizer
    tokenizer(TEXTS, truncation=True, max_length=8, split_special_tokens=True)
    before = backend.truncation, backend.padding, backend.encode_special_tokens
    seen_by_kvrag(model, tokenizer, tmp_path)
    assert (backend.truncation, backend.padding, backend.encode_special_tokens) == before


@every_tokenizer
def test_tokens_that_are_added_later_are_known(make, tmp_path):
    tokenizer, model = make(), tiny_model()
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)
    before = engine.encoder.live_ids("a <note> b")
    tokenizer.add_tokens(["<note>"])
    model.resize_token_embeddings(len(tokenizer))
    after = engine.encoder.live_ids("a <note> b")
    assert after != before
    assert tokenizer.convert_tokens_to_ids("<note>") in after


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tokenizer_in_python_gives_the_same_whatever_is_asked_of_it(setting, tmp_path):
    """ByT5's needs no files."""
    model = tiny_model()
    model.resize_token_embeddings(len(spelling()))
    expected = seen_by_kvrag(model, spelling(), tmp_path / "alone")
    shared = spelling()
    with application(shared, **SETTINGS[setting]):
        assert seen_by_kvrag(model, shared, tmp_path / "shared") == expected


def spelling() -> Any:
    """Return a tokenizer in Python that knows chats."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = tiny_tokenizer().chat_template
    return tokenizer


class Wrapper:
    """What an application puts around a tokenizer: it hands on all that it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)

    def __len__(self) -> int:
        return len(self.inner)


@every_tokenizer
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrapped_tokenizer_is_as_private(model, make, setting, tmp_path):
    expected = seen_by_kvrag(model, make(), tmp_path / "alone")
    wrapped = Wrapper(hurried(make(), SETTINGS[setting]))
    assert seen_by_kvrag(model, wrapped, tmp_path / "wrapped") == expected
    engine = KVRagEngine.from_pretrained(model, tokenizer=wrapped, kv_dir=tmp_path / "wrapped")
    assert engine.tokenizer is wrapped


@every_tokenizer
def test_a_token_that_is_marked_as_special_later_is_known(model, make, tmp_path):
    tokenizer = make()
    engine = KVRagEngine.from_pretrained(model, tokenizer=tokenizer, kv_dir=tmp_path, context=None)
    known = tokenizer.get_vocab()
    words = [word for word in sorted(known) if word.isalpha() and len(word) > 2]
    whole = next(word for word in words if word[:2] in known)
    before = engine.encoder.live_ids(whole)
    tokenizer.add_special_tokens({"additional_special_tokens": [whole[:2]]})
    after = engine.encoder.live_ids(whole)
    assert len(tokenizer) == len(known)  # the vocabulary has it already
    assert after[0] == known[whole[:2]] != before[0]


@every_tokenizer
def test_a_copy_has_the_backend_of_the_tokenizer_and_reads_no_vocabulary(make, monkeypatch):
    tokenizer = make()
    tokenizer.add_tokens(["<note>", AddedToken("<mark>", lstrip=True, special=True)])
    expected = tokenizer.backend_tokenizer.to_str()
    tokenizer(TEXTS, padding=True, truncation=True, max_length=8)
    monkeypatch.setattr("copy.deepcopy", lambda *_: pytest.fail("a vocabulary is copied"))
    assert PromptEncoder(tokenizer).private.backend_tokenizer.to_str() == expected
