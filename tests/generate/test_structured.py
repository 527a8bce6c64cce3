"""Answers in a form: whatever a random model prefers, what it says is JSON of the schema, or a call of the tool."""

import asyncio
import json
import sys

import jsonschema
import llguidance.hf
import pytest
import torch
from kit import noted, raising, scripted
from schemas_kit import wanted
from test_tool_calls import ASK, OTHER, TOOL
from tokenizers_kit import tiny_sentencepiece_tokenizer

from kvrag import ConfigError, InputError, MissingDependencyError
from kvrag.config import SamplingConfig
from kvrag.generate import grammar
from kvrag.generate.sampling import Sampler
from kvrag.prompt.tools import answer_form
from kvrag.runtime import Runtime
from kvrag.testing.tokenizers import tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", 'b"ä']}, "at": {"$ref": "#/$defs/at"}},
    "required": ["kind", "at"],
    "additionalProperties": False,
    "$defs": {"at": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
}


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 5.0, "seed": 1}, {"temperature": 1.0, "top_k": 1, "seed": 2}]
)
@pytest.mark.parametrize("prompt", [ASK, "Who?"], ids=["chat", "text"])
def test_an_answer_has_its_schema(options, prompt, engine):
    result = engine.generate(prompt, response_format=wanted(SCHEMA), max_new_tokens=80, **options)
    value = json.loads(result.text)
    jsonschema.validate(value, SCHEMA)
    assert result.text == json.dumps(value, ensure_ascii=False)
    assert result.finish_reason == "stop"
    stream = engine.stream(prompt, response_format=wanted(SCHEMA), max_new_tokens=80, **options)
    assert "".join(list(stream)) == result.text


@pytest.mark.parametrize(
    "make",
    [
        tiny_tokenizer,
        *(lambda p=p: tiny_sentencepiece_tokenizer(p) for p in ("normalizer", "always", "never")),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_every_kind_of_tokenizer_and_a_wider_head(make, seed):
    tokenizer = make()
    constraint = grammar.constraint_of(
        answer_form(None, None, wanted(SCHEMA)), tokenizer, frozenset({2})
    )
    luck = torch.Generator().manual_seed(seed)
    sampler, ids = Sampler(SamplingConfig(), [], constraint=constraint), []
    while not sampler.is_complete:
        logits = torch.randn(len(tokenizer) + 57, generator=luck)
        logits[[2, -1]] = 1e4  # the end, and an id that is no token
        ids.append(sampler.next(logits))
    jsonschema.validate(json.loads(tokenizer.decode(ids)), SCHEMA)


def test_the_end_may_come_only_where_the_form_allows_it():
    number = answer_form(None, None, wanted({"type": "integer"}))
    constraint = grammar.constraint_of(number, tiny_tokenizer(), frozenset({0, 2}))
    for expected in ([False, False], [True, True]):
        allowed = constraint.masked(torch.zeros(1, 400))[0, [0, 2]] == 0
        assert allowed.tolist() == expected
        constraint.take(tiny_tokenizer()("7", add_special_tokens=False)["input_ids"][0])


def test_json_mode_and_a_budget_that_ends_first(engine, monkeypatch):
    scripted(monkeypatch, engine, '{"a": [1, "x"]}', '{"a": [1, "x"]}')
    json_mode = {"response_format": {"type": "json_object"}}
    result = engine.generate(ASK, max_new_tokens=60, **json_mode)
    assert (result.text, result.finish_reason) == ('{"a": [1, "x"]}', "stop")
    # Nothing is computed behind the form.
    assert len(result.token_ids) == len(engine.loaded.encoder.live_ids(result.text))
    cut = engine.generate(ASK, max_new_tokens=5, **json_mode)
    assert cut.finish_reason == "length"
    assert result.text.startswith(cut.text)


@pytest.mark.parametrize("choice", ["required", "now", {"function": {"name": "search"}}])
async def test_a_call_that_is_required_is_made(choice, engine):
    limits = {
        **TOOL["function"]["parameters"],
        "properties": {"query": {"type": "string", "maxLength": 3}},
    }
    tools = [{"function": {**TOOL["function"], "parameters": limits}}, OTHER]
    result = await engine.agenerate(ASK, tools=tools, tool_choice=choice, max_new_tokens=100)
    (call,) = result.tool_calls
    assert (result.text, result.finish_reason) == ("", "tool_calls")
    assert call.name in {"required": ("search", "now"), "now": ("now",)}.get(
        str(choice), ("search",)
    )
    jsonschema.validate(call.arguments, limits if call.name == "search" else {"maxProperties": 0})


def test_tools_and_a_schema_together_leave_both_open(engine, monkeypatch):
    options = {"tools": [OTHER], "response_format": wanted(SCHEMA), "max_new_tokens": 100}
    said = ['{"name": "now", "arguments": {}}', '{"kind": "a", "at": [true]}']
    scripted(monkeypatch, engine, *said, "I say now")
    assert [call.name for call in engine.generate(ASK, **options).tool_calls] == ["now"]
    result = engine.generate(ASK, **options)
    assert (result.text, result.tool_calls) == (said[1], ())
    assert json.loads(engine.generate(ASK, **options).text or "{}") != "I say now"


async def test_answers_at_once_keep_to_their_own_forms(engine):
    schemas = [{"const": n} for n in range(4)]
    answers = [
        engine.agenerate(ASK, response_format=wanted(schema), max_new_tokens=9)
        for schema in schemas
    ]
    assert [result.text for result in await asyncio.gather(*answers)] == ["0", "1", "2", "3"]


def test_what_cannot_be_compiled_is_refused_by_name(engine, monkeypatch):
    with pytest.raises(ConfigError, match=r"JSON schema.*simplify it.*strange"):
        engine.generate(ASK, response_format=wanted({"type": "strange"}))
    monkeypatch.setattr("llguidance.hf.from_tokenizer", raising(ValueError, "Only fast tokenizers"))
    with pytest.raises(ConfigError, match="need a fast tokenizer"):
        grammar.constraint_of(
            answer_form(None, None, {"type": "json_object"}), tiny_tokenizer(), frozenset({2})
        )
    constraint = grammar.constraint_of(
        answer_form(None, None, wanted({"const": 1})), engine.encoder.private, frozenset({2})
    )
    constraint.take(5)
    assert not constraint.is_complete
    with pytest.raises(InputError, match="can't go on in its form"):
        constraint.masked(torch.zeros(1, 400))


def test_without_llguidance_the_extra_is_named_and_other_answers_are_given(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvrag\[structured\]'"):
        engine.generate(ASK, response_format={"type": "json_object"})
    assert engine.generate(ASK, tools=[TOOL], max_new_tokens=2).finish_reason == "length"


def test_a_tokenizers_table_is_made_once(engine, monkeypatch):
    made = noted(monkeypatch, llguidance.hf, "from_tokenizer")
    monkeypatch.setattr(grammar, "RUNTIME", Runtime())
    for _ in range(2):
        engine.generate(ASK, response_format={"type": "json_object"}, max_new_tokens=2)
    assert len(made) == 1
