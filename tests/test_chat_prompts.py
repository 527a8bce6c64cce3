"""What chat messages become: nothing vanishes, chunks stay apart, variables reach the template, and a prompt may be token ids."""

import pytest
from kit import lm_of

from kvrag import Chunk, ConfigError, InputError, KVRagEngine
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

ASK = [{"role": "user", "content": "Who keeps the archive?"}]


@pytest.fixture(scope="module")
def engine():
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer(), prove="off")
    yield engine
    engine.close()


# -- token ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[5], [17, 3, 250, 3], (1, 2, 9)])
def test_token_ids_are_the_prompt(ids, engine):
    result = engine.generate(ids, max_new_tokens=2)
    assert result.prompt_ids == list(ids)
    assert engine.prefill(ids).prompt_ids == engine.score(ids, " the").prompt_ids == list(ids)
    assert engine.explain(ids).prompt_tokens == len(ids)
    assert "token ids" in result.fallback_reason


def test_token_ids_of_a_text_answer_as_the_text(engine):
    asked = engine.generate(ASK, max_new_tokens=8)
    assert engine.generate(asked.prompt_ids, max_new_tokens=8).token_ids == asked.token_ids


@pytest.mark.parametrize("bad", [-1, 2**40])
def test_a_token_id_that_the_model_has_not_is_named(bad, engine):
    with pytest.raises(InputError, match=rf"token id {bad} at position 2 .* 0 to {lm_of().vocab_size - 1}"):
        engine.generate([5, 6, bad, -7])


@pytest.mark.parametrize("prompt", [[True], [1, "a"], [1.5], b"ab", [[1], [2]]])
def test_what_is_neither_text_nor_ids_is_refused(prompt, engine):
    with pytest.raises(InputError, match="token ids"):
        engine.generate(prompt)


@pytest.mark.parametrize("prompt", [[5, 6], "text", ["text", Chunk("more")]])
def test_a_prompt_without_messages_has_none_to_continue(prompt, engine):
    with pytest.raises(InputError, match="continue_final_message need"):
        engine.generate(prompt, continue_final_message=True)


# -- the last message is continued ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["The keeper", " The keeper is ", "a\n\nb"])
def test_the_last_message_is_continued_as_transformers_does(text, engine):
    messages = [*ASK, {"role": "assistant", "content": text}]
    rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    result = engine.generate(messages, continue_final_message=True, max_new_tokens=2)
    assert engine.tokenizer.decode(result.prompt_ids) == f"<s>{rendered}"
    stream = engine.stream(messages, continue_final_message=True, max_new_tokens=2)
    assert "".join(stream) == result.text
    assert stream.result.prompt_ids == result.prompt_ids


@pytest.mark.parametrize(
    "last",
    [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    ],
)
def test_what_can_not_be_continued_is_refused(last, engine):
    with pytest.raises(InputError, match="continue_final_message"):
        engine.generate([*ASK, last], continue_final_message=True)


@pytest.mark.parametrize("call", ["generate", "stream", "prefill", "explain"])
def test_a_flag_must_be_one(call, engine):
    with pytest.raises(ConfigError, match="continue_final_message is 'yes'"):
        getattr(engine, call)(ASK, continue_final_message="yes")
