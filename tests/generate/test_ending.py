"""Where an answer ends: at every end token that the model's config, its tokenizer, or its chat template names."""

import logging
import os
from copy import deepcopy
from pathlib import Path

import pytest

from kvrag import KVRagEngine
from kvrag.generate.defaults import end_ids, turn_end
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.models import tiny_model

PAD, BOS, END, START = range(4)
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}CLOSE{% endif %}{% endfor %}"
)
REFUSING = "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m['content'] }}{% endfor %}"


def engine_of(tokenizer, eos_token_id, **changes) -> KVRagEngine:
    model, own = deepcopy(tiny_model("llama")), deepcopy(tokenizer)
    model.generation_config.eos_token_id = eos_token_id
    for name, value in changes.items():
        setattr(own, name, value)
    return KVRagEngine.from_pretrained(model, tokenizer=own)


@pytest.mark.parametrize(
    ("eos_token_id", "changes", "wanted"),
    [
        (None, {}, {END}),
        (END, {}, {END}),
        ([END, PAD], {}, {END, PAD}),
        (PAD, {}, {PAD, END}),  # the tokenizer ends elsewhere
        (PAD, {"eos_token": "<pad>"}, {PAD, END}),  # the template alone knows
        (
            PAD,
            {"eos_token": "<pad>", "chat_template": TURNS.replace("CLOSE", " \n<|im_start|>")},
            {PAD, START},
        ),
        (PAD, {"eos_token": "<pad>", "chat_template": TURNS.replace("CLOSE", "")}, {PAD}),
        (PAD, {"eos_token": "<pad>", "chat_template": TURNS.replace("CLOSE", "\nUser:")}, {PAD}),
        (PAD, {"eos_token": "<pad>", "chat_template": REFUSING}, {PAD}),
        (PAD, {"eos_token": "<pad>", "chat_template": None}, {PAD}),
    ],
)
def test_an_answer_ends_at_every_token_that_anything_calls_an_end(
    eos_token_id, changes, wanted, tokenizer, caplog
):
    engine = engine_of(tokenizer, eos_token_id, **changes)
    with caplog.at_level(logging.WARNING):
        assert end_ids(engine.loaded) == wanted
        assert end_ids(engine.loaded) == wanted
    own = (
        set()
        if eos_token_id is None
        else {*(eos_token_id if isinstance(eos_token_id, list) else [eos_token_id])}
    )
    said = [message for message in caplog.messages if "answers of this model end at" in message]
    assert len(said) == int(bool(own) and wanted > own)
    for token in wanted:
        result = engine.generate("hello", max_new_tokens=4, logit_bias={token: 100.0})
        assert (result.token_ids, result.finish_reason) == ([token], "stop")
        assert engine.tokenizer.decode([token]) not in result.text


def test_ends_follow_what_is_changed_on_a_loaded_model(tokenizer):
    engine = engine_of(tokenizer, PAD)
    assert end_ids(engine.loaded) == {PAD, END}
    engine.loaded.lm.model.generation_config.eos_token_id = [START]
    assert end_ids(engine.loaded) == {START, END}
    engine.tokenizer.eos_token = "<s>"
    assert end_ids(engine.loaded) == {START, END, BOS}


MODELS = Path(os.environ.get("KVRAG_EVAL_MODELS", ""))


@pytest.mark.parametrize(
    ("name", "end"), [("smollm2-135m-instruct", "<|im_end|>"), ("qwen2.5-coder-0.5b", "<|im_end|>")]
)
def test_the_turns_of_real_chat_templates_end_at_their_own_token(name, end):
    if not (MODELS / name / "tokenizer.json").is_file():
        pytest.skip("this needs real tokenizers: $KVRAG_EVAL_MODELS")
    from transformers import AutoTokenizer

    encoder = PromptEncoder(AutoTokenizer.from_pretrained(MODELS / name))
    assert turn_end(encoder) == encoder.tokenizer.convert_tokens_to_ids(end)
