"""A prompt longer than the context window, in both frameworks: refused by default, and answered in a sliding window on request."""

import pytest
from llama_index_kit import make_llm, settings

from kvrag import ContextLengthError
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import ChatKVRag

PROMPT = (
    "The keeper of the ledger walks to the harbour at dawn, and counts the ships that came by night. "
    * 6
)
SLIDE = {"max_context": "slide"}


@pytest.fixture(scope="module")
def window_of_128(tmp_path_factory):
    model, where = tiny_model("llama"), str(tmp_path_factory.mktemp("small-window"))
    model.config.max_position_embeddings = 128
    model.save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


def test_langchain(window_of_128, tmp_path):
    chat = ChatKVRag(model=window_of_128, kv_dir=str(tmp_path), max_tokens=8)
    with pytest.raises(ContextLengthError, match="context window of 128"):
        chat.invoke(PROMPT)
    for message in (
        chat.invoke(PROMPT, **SLIDE),
        ChatKVRag(**{**dict(chat), **SLIDE}).invoke(PROMPT),
    ):
        assert message.response_metadata["kvrag"]["evicted_tokens"] > 0
    chat.engine.close()


def test_llama_index(window_of_128, tmp_path):
    with settings():
        llm = make_llm(window_of_128, tmp_path, max_new_tokens=8)
        with pytest.raises(ContextLengthError, match="context window of 128"):
            llm.complete(PROMPT)
        found = [
            llm.complete(PROMPT, **SLIDE),
            make_llm(window_of_128, tmp_path, **SLIDE).complete(PROMPT),
        ]
        assert all(answer.raw["kvrag"]["evicted_tokens"] > 0 for answer in found)
        llm.engine.close()
