"""No message vanishes: whatever the chat template does with a role or a field, it is shown, said, or refused by name."""

import warnings

import pytest
from chat_templates import CALL, TEMPLATES, encoder_of, outcome

from kvrag import InputError
from kvrag.prompt.messages import SYNONYMS

ASK = [{"role": "user", "content": "Who keeps the archive?"}]


ROLES = [*SYNONYMS, "system", "user", "assistant", "tool", "narrator", "asistant", "User"]
KNOWN_BY_ALL = ("user", "assistant", "human", "ai", "model", "chatbot")


def shown(encoder, messages, marks=("Quokka seven", "Numbat eight")):
    text = encoder.render(messages)
    return [mark.lower() in text.lower() for mark in marks]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_message_is_shown_or_refused_by_name(template, role):
    name = {"name": "look"} if role == "function" else {}
    messages = [
        {"role": "user", "content": "Quokka seven"},
        {"role": role, "content": "Numbat eight", **name},
    ]
    encoder = encoder_of(template)
    made = outcome(lambda: encoder.render(messages))
    if isinstance(made, InputError):
        assert role not in KNOWN_BY_ALL
        assert repr(SYNONYMS.get(role, role)) in str(made)
    else:
        assert shown(encoder, messages) == [True, True]


@pytest.mark.parametrize("role", ["narrator", "asistant", "User"])
def test_a_role_that_leaves_no_trace_is_named_with_those_that_do(role):
    with pytest.raises(
        InputError,
        match=f"leaves out message 1 of 2, whose role is '{role}'.*assistant, system, tool, user",
    ):
        encoder_of("qwen2.5").render([{"role": role, "content": "x"}, *ASK])
    if role != "narrator":
        with pytest.raises(InputError, match="did you mean"):
            encoder_of("qwen2.5").render([{"role": role, "content": "x"}, *ASK])


@pytest.mark.parametrize("template", TEMPLATES)
def test_short_texts_are_not_taken_for_others(template):
    """A text that stands by chance elsewhere in the rendering proves nothing."""
    made = outcome(
        lambda: encoder_of(template).render([{"role": "narrator", "content": "s"}, *ASK])
    )
    assert isinstance(made, InputError) or "narrator" in made.lower()


@pytest.mark.parametrize("synonym", SYNONYMS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_synonym_is_shown_as_what_it_stands_for(template, synonym):
    def rendered(role):
        return str(
            outcome(lambda: encoder_of(template).render([{"role": role, "content": "Who?"}, *ASK]))
        )

    assert rendered(synonym) == rendered(SYNONYMS[synonym])


def test_a_template_that_knows_developers_keeps_them():
    known = "{% for m in messages %}{% if m.role in ['developer', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    assert encoder_of(known).render([{"role": "developer", "content": "x"}]) == "<developer>x"
    with pytest.raises(InputError, match="'system'"):
        encoder_of(known).render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_beside_a_call_is_shown(template):
    messages = [
        *ASK,
        {"role": "assistant", "content": "Quokka seven", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "Numbat eight"},
    ]
    encoder = encoder_of(template)
    assert shown(encoder, messages) == [True, True]
    assert "look" in encoder.render(messages).lower()


@pytest.mark.parametrize("template", TEMPLATES)
def test_functions_of_openais_first_form_are_calls_of_tools(template):
    function = CALL["function"]
    old = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "look", "content": "Numbat eight"},
    ]
    encoder = encoder_of(template)
    text = encoder.render(old)
    assert "numbat eight" in text.lower()
    assert "look" in text.lower()
    new = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "Numbat eight"},
    ]
    assert text == encoder.render(new)


def test_fields_that_say_nothing_are_accepted(recwarn):
    empty = {
        "tool_calls": None,
        "function_call": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
        "name": None,
    }
    encoder = encoder_of("llama3.2").with_variables({"date_string": "1 May"})
    said = [*ASK, {"role": "assistant", "content": "No."}, *ASK]
    assert encoder.render([*ASK, {**said[1], **empty}, *ASK]) == encoder.render(said)
    assert not recwarn.list


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "I can't."},
        {"content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
def test_a_refusal_is_what_was_said(message):
    encoder = encoder_of("qwen2.5")
    said = encoder.render([*ASK, {"role": "assistant", "content": "I can't."}])
    assert encoder.render([*ASK, {"role": "assistant", **message}]) == said


@pytest.mark.parametrize("name", ["audio", "images"])
def test_what_is_not_text_is_refused(name):
    with pytest.raises(InputError, match=f"holds {name}; kvrag reads text only"):
        encoder_of("qwen2.5").render([{"role": "user", "content": "x", name: ["data"]}])


@pytest.mark.parametrize("field", ["name", "mood"])
def test_a_field_that_the_template_does_not_read_is_named_once(field):
    encoder, messages = encoder_of("qwen2.5"), [{"role": "user", "content": "x", field: "Ann"}]
    with pytest.warns(
        UserWarning, match=f"the field '{field}', which the model's chat template does not read"
    ):
        encoder.render(messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.render(messages)


def test_an_earlier_answers_thoughts_may_be_left_out():
    thinking = [
        *ASK,
        {
            "role": "assistant",
            "content": "<think>deep</think>\n\nYes.",
            "reasoning_content": "deep",
        },
        *ASK,
    ]
    assert "deep" not in encoder_of("qwen3").render(thinking)
