"""Tools: shown by any chat template, called in any of the usual forms, kept out of the text, and no label made worse."""

import copy
import json

import pytest
from kit import scripted
from texts import make_chunks

from kvrag import ConfigError, InputError, TemplatePrefix, ToolCall
from kvrag.generate.calls import TextCalls
from kvrag.prompt.template import PromptEncoder
from kvrag.prompt.tools import answer_form, calls_with_dicts

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find documents.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Who keeps the ledger?"}]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "led\\"ger"}'},
}
CALLED = [
    *ASK,
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "x", "content": "A keeper."},
]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are SmolLM"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    '{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (  # one call in a message, content as JSON
    "{{ bos_token }}{% if tools %}system: {% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}{% for m in messages %}"
    "{% if m.tool_calls is defined %}{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    'assistant: {"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}\n'
    "{% elif m.role == 'tool' %}ipython: {{ m.content | tojson }}\n{% else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"smollm2": SMOLLM2, "hermes": HERMES, "llama3": LLAMA3, "gemma": GEMMA}
RESPONSE = {  # as transformers writes Qwen's
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.fixture(params=TEMPLATES)
def encoder(request, tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATES[request.param]
    return PromptEncoder(tokenizer)


# -- the prompt ----------------------------------------------------------------------------------------------------------


def test_every_template_shows_tools_and_what_came_of_earlier_calls(encoder):
    text = encoder.render(ASK, tools=[TOOL])
    for part in ('"name": "search"', "Find documents.", ASK[0]["content"]):
        assert text.count(part) == 1
    history = encoder.render(CALLED, tools=[TOOL])
    assert history.count("A keeper.") == history.count('{"query": "led\\"ger"}') == 1
    assert history.index("Find documents.") < history.index("led\\") < history.index("A keeper.")
    without = encoder.render(CALLED)
    assert "A keeper." in without
    assert 'led\\"ger' in without
    assert "Find documents." not in without
    assert encoder.render(ASK) == encoder.tokenizer.apply_chat_template(
        ASK, tokenize=False, add_generation_prompt=True
    )


def test_calls_in_parallel_are_shown_by_templates_that_refuse_them(encoder):
    two = [
        {**CALL, "function": {"name": name, "arguments": {"query": name}}}
        for name in ("one", "two")
    ]
    results = [{"role": "tool", "content": f"result {n}"} for n in (1, 2)]
    text = encoder.render(
        [*ASK, {"role": "assistant", "content": "Let me see.", "tool_calls": two}, *results],
        tools=[TOOL],
    )
    for part in ('{"query": "one"}', '{"query": "two"}', "result 1", "result 2"):
        assert text.count(part) == 1
    assert (
        "<tool_response>\nresult 1\n</tool_response>\n<tool_response>" in text
        or encoder.tokenizer.chat_template == HERMES
    )


def test_a_system_message_stays_before_the_tools(encoder):
    if encoder.tokenizer.chat_template == GEMMA:
        with pytest.raises(InputError, match="refuses messages with roles"):
            encoder.render([{"role": "system", "content": "Be brief."}, *ASK], tools=[TOOL])
        return
    text = encoder.render([{"role": "system", "content": "Be brief."}, *ASK], tools=[TOOL])
    assert text.count("Be brief.") == text.count("Find documents.") == 1


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({"tools": "search"}, "type str; pass a list of tools"),
        ({"tools": [{"name": "search"}]}, "tools holds .*'search'.*pass dicts"),
        ({"tools": [{"function": {"name": "a b"}}]}, "a b.*letters, digits"),
        ({"tools": [{"function": {"name": "a", "parameters": [1]}}]}, "parameters"),
        ({"tools": [TOOL], "tool_choice": "find"}, r"tool_choice is 'find'.*\['search'\]"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice is {'type': 'any'}"),
        ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools; pass"),
        ({"response_format": "json"}, "response_format is json; pass None"),
        ({"response_format": {"type": "json_schema"}}, "response_format is .*JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format",
        ),
    ],
)
def test_malformed_requests_are_refused_before_anything_runs(form, named, engine):
    for ask in (engine.generate, engine.stream, engine.astream, engine.prefill, engine.explain):
        with pytest.raises(ConfigError, match=named):
            ask(ASK, **form)


def test_tools_with_a_prompt_that_is_no_chat_are_refused(engine):
    for prompt in ("text", ["one", "two"]):
        with pytest.raises(InputError, match=r"messages|a dict with 'role'"):
            engine.generate(prompt, tools=[TOOL])
    with pytest.raises(InputError, match="calls a tool by"):
        engine.generate([{"role": "assistant", "tool_calls": [{"name": "x"}]}])


def test_choice_none_leaves_the_tools_out_and_the_long_form_names_one():
    assert answer_form([TOOL], "none") == answer_form()
    assert (
        answer_form([TOOL], {"type": "function", "function": {"name": "search"}}).choice == "search"
    )
    assert answer_form(None, None, {"type": "text"}) == answer_form()


# -- the labels ----------------------------------------------------------------------------------------------------------


def test_chunks_behind_tools_are_exact_only_if_they_were_encoded_behind_them(engine):
    chunks = make_chunks(2, words=42)
    prompt = [{"role": "user", "content": "\n\n".join([*chunks, "Who?"])}]
    engine.precompute(chunks)
    assert engine.generate(prompt, mode="prefix", max_new_tokens=1).exactness == "exact"
    with pytest.warns(UserWarning, match="another prefix.*prefix="):
        result = engine.generate(prompt, tools=[TOOL], mode="stitch", max_new_tokens=1)
    assert (result.exactness, result.has_other_prefix) == ("repaired", True)
    assert not any(span.exact for span in engine.explain(prompt, tools=[TOOL]).spans)
    engine.precompute(
        chunks, prefix=TemplatePrefix([{"role": "user", "content": "{context}"}], tools=[TOOL])
    )
    result = engine.generate(prompt, tools=[TOOL], mode="prefix", max_new_tokens=1)
    assert (result.exactness, result.has_other_prefix) == ("exact", False)
    assert result.cached_tokens > 42
    with pytest.raises(ConfigError, match="tools holds"):
        engine.precompute(chunks, prefix=TemplatePrefix("{context}", tools=["search"]))
    assert engine.prefill(prompt, tools=[TOOL], mode="full").prompt_ids == result.prompt_ids


# -- the answer ----------------------------------------------------------------------------------------------------------

SAID_CALL = '{"name": "search", "arguments": {"query": "a"}}'
HERMES_CALL = f"<tool_call>\n{SAID_CALL}\n</tool_call>"
SEARCH_A = ("search", {"query": "a"})
ANSWERS = {
    "hermes": (f"Let me see.\n{HERMES_CALL}", "Let me see.", [SEARCH_A]),
    "two": (
        f"{HERMES_CALL}\n{HERMES_CALL.replace('search', 'now')}",
        "",
        [SEARCH_A, ("now", {"query": "a"})],
    ),
    "unclosed": (HERMES_CALL[:-13], "", [SEARCH_A]),
    "text behind": (f"{HERMES_CALL} Done.", "Done.", [SEARCH_A]),
    "broken": ("So: <tool_call>{'name': search</tool_call>", None, []),
    "half broken": (
        f"<tool_call>{{</tool_call>{HERMES_CALL}",
        "<tool_call>{</tool_call>",
        [SEARCH_A],
    ),
    "cut": ('<tool_call>{"name": "search", "argu', None, []),
    "bare": ('{"name": "search", "parameters": {"query": "a"}}', "", [SEARCH_A]),
    "arguments as text": (
        json.dumps({"name": "search", "arguments": '{"query": "a"}'}),
        "",
        [SEARCH_A],
    ),
    "fenced": (
        '```json\n{\n  "name": "search",\n  "arguments": {"query": "a"}\n}\n```',
        "",
        [SEARCH_A],
    ),
    "fenced list": (f"```\n[{SAID_CALL}]\n```\n", "", [SEARCH_A]),
    "fenced, and text": (f"```json\n{SAID_CALL}\n```\nDone.", None, []),
    "fenced, no call": ('```json\n{"a": 1}\n```', None, []),
    "fenced code": ("```python\nprint(1)\n```", None, []),
    "list": (f"[{SAID_CALL}]", "", [SEARCH_A]),
    "function": ('{"function": {"name": "now", "arguments": {}}}', "", [("now", {})]),
    "unknown": ('{"name": "other", "arguments": {}}', None, []),
    "no call": ('{"name": "search"}', None, []),
    "text": ("a < b, [1] and <tool", None, []),
}


PARSED = ("hermes", "two", "broken", "cut", "text")  # what a template of Hermes' form can read


@pytest.mark.parametrize(
    ("name", "parsed"), [*((n, False) for n in ANSWERS), *((n, True) for n in PARSED)]
)
def test_calls_are_read_and_never_shown(name, parsed, engine, monkeypatch):
    said, text, calls = ANSWERS[name]
    if parsed:
        monkeypatch.setattr(engine.tokenizer, "response_template", RESPONSE)
    scripted(monkeypatch, engine, said, said)
    options = {"tools": [TOOL, OTHER], "max_new_tokens": 200}
    result = engine.generate(ASK, **options)
    assert [(call.name, call.arguments) for call in result.tool_calls] == calls
    assert result.text == (said if text is None else text)
    assert result.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in result.tool_calls}) == len(calls)
    stream = engine.stream(ASK, **options)
    deltas = list(stream)
    assert "".join(deltas) == result.text
    shown = "".join(deltas[:-1])
    assert "<tool_call>" not in shown
    assert not shown.endswith(("<", "<tool", "\n"))
    assert [call.name for call in stream.result.tool_calls] == [name for name, _ in calls]


def test_thoughts_are_filed_by_the_tokenizers_own_template(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "response_template", RESPONSE)
    scripted(monkeypatch, engine, f"<think>Which?</think>I search.{HERMES_CALL}")
    result = engine.generate(ASK, tools=[TOOL], max_new_tokens=120)
    assert (result.text, len(result.tool_calls)) == ("I search.", 1)


def test_marks_that_are_control_tokens_are_read_and_never_shown(engine, monkeypatch):
    calls = {**RESPONSE["fields"]["tool_calls"], "open": "<s>", "close": "<pad>"}
    del calls["open_pattern"]
    template = {**RESPONSE, "fields": {**RESPONSE["fields"], "tool_calls": calls}}
    monkeypatch.setattr(engine.tokenizer, "response_template", template)
    scripted(monkeypatch, engine, 'I look. <s>{"name": "search", "arguments": {"query": "a"}}<pad>')
    result = engine.generate(ASK, tools=[TOOL], max_new_tokens=120)
    assert (result.text, result.tool_calls[0].arguments) == ("I look. ", {"query": "a"})


def test_text_that_nests_too_deeply_is_no_json():
    deep = '[{"a":' * 10**5
    assert TextCalls(()).push(deep, deep, is_last=True) == deep
    call = {"function": {"name": "a", "arguments": deep}}
    assert calls_with_dicts({"tool_calls": [call]})["tool_calls"] == [call]


def test_an_answer_without_tools_is_not_read(engine, monkeypatch):
    scripted(monkeypatch, engine, HERMES_CALL, "So: " + HERMES_CALL)
    result = engine.generate(ASK, max_new_tokens=120)
    assert (result.text, result.tool_calls, result.finish_reason) == (HERMES_CALL, (), "stop")
    cut = engine.generate(ASK, tools=[TOOL], max_new_tokens=16)
    assert cut.finish_reason == "length"
    assert cut.text.startswith("So: <tool_call>")
    assert isinstance(ToolCall("1", "n", {}).arguments, dict)
