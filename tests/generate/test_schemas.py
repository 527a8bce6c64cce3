"""Keywords of JSON schemas: enforced token by token, or named as not enforced; refused is what no answer could have."""

import contextlib
import json
import re

import jsonschema
import pytest
from schemas_kit import EOS, constraint, said, wanted
from test_tool_calls import ASK

from kvrag import ConfigError
from kvrag.generate import grammar
from kvrag.prompt.tools import answer_form
from kvrag.testing.tokenizers import tiny_tokenizer

NUMBER, TWO = {"type": "integer"}, {"a": {"type": "integer"}, "b": {"type": "boolean"}}
LETTERS = {"$defs": {"letter": {"enum": ["a", "b"]}}}
ENFORCED = {
    "uniqueItems false": {"type": "array", "items": NUMBER, "uniqueItems": False},
    "format path": {"type": "string", "format": "path"},
    "format password": {"type": "string", "format": "password", "writeOnly": True},
    "format binary": {"type": "string", "format": "binary"},
    "format uuid4": {"type": "string", "format": "uuid4"},
    "format date-time": {"type": "string", "format": "date-time"},
    "annotations": {
        **NUMBER,
        "default": 1,
        "examples": [2],
        "deprecated": True,
        "x-own": 1,
        "title": "T",
    },
    "propertyNames enum": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": NUMBER,
    },
    "propertyNames $ref": {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/letter"},
        **LETTERS,
    },
    "minProperties": {"type": "object", "minProperties": 2, "additionalProperties": NUMBER},
    "maxProperties": {"type": "object", "maxProperties": 1, "additionalProperties": NUMBER},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a": NUMBER},
        "additionalProperties": False,
    },
    "pattern of a decimal": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 1},
    "oneOf told apart": {"oneOf": [{"const": "a"}, {"const": 1}]},
    "allOf": {
        "allOf": [
            {"type": "object", "required": ["a"]},
            {"properties": TWO, "additionalProperties": False},
        ]
    },
    "recursive": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}},
    },
    "$ref to the root": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    "$ref to an anchor": {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "boolean"}}},
    "$id": {"$id": "https://a.example/b", "$ref": "#/$defs/letter", **LETTERS},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": NUMBER},
        "$ref": "#/definitions/a",
    },
    "names of keywords as properties": {
        "type": "object",
        "properties": {
            "format": NUMBER,
            "pattern": NUMBER,
            "propertyNames": {"enum": ["x"]},
            "$ref": NUMBER,
        },
        "required": ["format", "pattern", "propertyNames", "$ref"],
        "additionalProperties": False,
    },
    "keywords in values": {
        "enum": [{"$ref": "#/x", "format": "path"}, {"propertyNames": {"enum": ["a"]}}]
    },
}
"""Each answer has what the keyword asks for."""

NAMED = {
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems"),
    "unknown format": ({"type": "string", "format": "iri"}, "iri"),
    "format base64": ({"type": "string", "format": "base64"}, "base64"),
    "format beside pattern": ({"type": "string", "format": "own", "pattern": "^a$"}, "own"),
    "if": ({**NUMBER, "if": {"minimum": 3}, "then": {"maximum": 5}, "else": {}}, "if.*then"),
    "not": ({**NUMBER, "not": {"const": 3}}, "not"),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        "dependentRequired",
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        "dependentSchemas",
    ),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "contains": (
        {"type": "array", "contains": {"const": 1}, "minContains": 2},
        "contains.*minContains",
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [NUMBER], "unevaluatedItems": False},
        "unevaluatedItems",
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": TWO}], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    "propertyNames beside properties": (
        {"type": "object", "properties": TWO, "propertyNames": {"maxLength": 3}},
        "Names",
    ),
    "minProperties of optional": (
        {"type": "object", "properties": TWO, "minProperties": 1},
        "minProperties",
    ),
    "oneOf not told apart": ({"oneOf": [NUMBER, {"type": "number"}]}, "oneOf"),
    "look-around": ({"type": "string", "pattern": "^(?!a).*$"}, r"pattern '\^\(\?!a\)"),
    "reference to a group": ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern"),
    "$dynamicRef": ({"$dynamicRef": "#x"}, "dynamicRef"),
}
"""Decoding can't enforce them; a warning says so."""

REFUSED = {
    "no type": ({"type": "strange"}, "strange"),
    "elsewhere": ({"$ref": "https://a.example/b.json"}, "a.example"),
    "nowhere": ({"$ref": "#/$defs/none"}, "none"),
    "no number": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    "no value": ({"enum": []}, "empty"),
    "$id in a $ref": (
        {"$id": "https://a.example/b", "$ref": "https://a.example/b#/$defs/letter", **LETTERS},
        "a.example",
    ),
    "look-around of names": (
        {"type": "object", "patternProperties": {"^(?=a)": NUMBER}},
        "look-ahead",
    ),
    "no pattern": ({"type": "string", "pattern": "["}, "regex"),
    "closed": (
        {"properties": {}, "required": ["b"], "additionalProperties": False, "type": "object"},
        "'b'",
    ),
}


@pytest.fixture(autouse=True)
def _warned_of_nothing():
    grammar._warn_once.cache_clear()


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_enforced_holds_in_every_answer_and_nothing_is_said_of_it(name, caplog):
    answers = [said(ENFORCED[name], seed) for seed in range(5)]
    for answer in answers:
        jsonschema.validate(answer, ENFORCED[name])
    assert caplog.records == []


@pytest.mark.parametrize("name", NAMED)
def test_what_is_not_enforced_is_named_once_and_the_rest_holds(name, caplog):
    schema, named = NAMED[name]
    plain = {key: schema[key] for key in ("type", "items") if key in schema}
    jsonschema.validate(said(schema), plain)
    constraint(schema)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(
        f"more than decoding can enforce .*{named}.*validate them", record.getMessage()
    )


COUNTS = (
    {"minProperties": 1},
    {"minProperties": 2, "additionalProperties": False},
    {"minProperties": 1, "maxProperties": 3},
    {"required": ["a"], "minProperties": 2, "additionalProperties": NUMBER},
    {"minProperties": 1, "patternProperties": {"^x": NUMBER}, "additionalProperties": False},
)


@pytest.mark.parametrize("counts", COUNTS)
def test_a_count_of_properties_keeps_none_that_has_a_name_out(counts):
    """llguidance alone counts those without a name, and then takes no answer of known properties."""
    grammar_of_it = constraint({"type": "object", "properties": TWO, **counts})
    tokens = tiny_tokenizer().encode('{"a": 1, "b": true}', add_special_tokens=False)
    assert grammar_of_it._matcher.try_consume_tokens(tokens) == len(tokens)
    assert grammar_of_it._matcher.is_accepting()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_answer_could_have_is_refused_by_name(name):
    schema, named = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s)JSON schema.*simplify it.*{named}"):
        constraint(schema)


_KEYWORDS = """
$id $ref $defs type enum const allOf anyOf not if properties required items additionalProperties
patternProperties propertyNames unevaluatedProperties minProperties maxProperties format pattern
uniqueItems prefixItems contains minLength multipleOf
"""
KEYWORDS = _KEYWORDS.split()


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_value_of_the_wrong_type_is_never_more_than_a_refusal(keyword):
    around = {
        "type": "object",
        "properties": {"a": NUMBER},
        "propertyNames": {"minLength": 1},
        "maxProperties": 3,
    }
    for value in (None, True, -1, 1.5, "a", [], [[]], [{}], {}, {"a": [1]}, [None, 2]):
        for schema in (
            {keyword: value},
            {**around, keyword: value},
            {"allOf": [{"pattern": "(?!a)", keyword: value}]},
        ):
            with contextlib.suppress(ConfigError):
                constraint(schema)


N = {"n": {"$ref": "#/$defs/n"}}
NAMES = {
    "a": {"properties": {"child": {"$ref": "#"}, **N}, "$defs": {"n": {"const": 1}}},
    "b": {"properties": N, "$defs": {"n": {"const": 2}}},
    "c": {
        "$ref": "#/$defs/c",
        "$defs": {"c": {"properties": {"child": {"$ref": "#/$defs/c"}, **N}}, "n": {"const": 3}},
    },
    "d": {"anyOf": [{"required": ["n"], "properties": N}], "$defs": {"n": {"const": 4}}},
}


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("a", '{"child": {"n": 1}}', True),
        ("a", '{"child": {"name": "a"}}', False),
        ("a", '{"n": 2}', False),
        ("b", '{"n": 2}', True),
        ("c", '{"child": {"n": 3}, "n": 3}', True),
        ("c", '{"n": 2}', False),
        ("d", '{"n": 4}', True),
    ],
)
def test_references_and_unions_start_in_the_schema_of_their_tool(name, arguments, fits):
    tools = [{"function": {"name": each, "parameters": NAMES[each]}} for each in NAMES]
    form = answer_form(tools, "required", None)
    made = grammar.constraint_of(form, tiny_tokenizer(), frozenset({EOS}))
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert (made._matcher.try_consume_tokens(ids) == len(ids)) == fits


@pytest.mark.parametrize("own", ["item.json", "/properties/n", "https://example.org/n"])
def test_a_part_of_a_schema_may_have_a_name_of_its_own(own):
    schema = {
        "type": "object",
        "properties": {"n": {"$id": own, "type": "integer"}, "m": {"$ref": own}},
        "required": ["n"],
    }
    made = constraint(schema)
    ids = tiny_tokenizer().encode('{"n": 1, "m": 2}', add_special_tokens=False)
    assert made._matcher.try_consume_tokens(ids) == len(ids)


def test_tools_take_the_same_schemas(engine, caplog):
    given = {
        "type": "object",
        "properties": {"tags": NAMED["uniqueItems"][0]},
        "required": ["tags"],
    }
    names = {
        "type": "object",
        "patternProperties": {"^a$": {"const": 1}},
        "minProperties": 1,
        "additionalProperties": False,
    }
    for parameters, check in ((given, "uniqueItems"), (names, "")):
        tool = {"type": "function", "function": {"name": "keep", "parameters": parameters}}
        (call,) = engine.generate(
            ASK, tools=[tool], tool_choice="keep", max_new_tokens=200, temperature=3.0, seed=1
        ).tool_calls
        jsonschema.validate(call.arguments, parameters | {"uniqueItems": False})
        assert check in caplog.text


def test_an_answer_that_breaks_what_is_not_enforced_is_given_all_the_same(engine):
    result = engine.generate(
        ASK, response_format=wanted({"const": 3, "not": {"const": 3}}), max_new_tokens=9
    )
    assert (json.loads(result.text), result.finish_reason) == (3, "stop")
