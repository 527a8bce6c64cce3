"""What stands in a request's messages and documents: all of it is shown, said to be nothing, or refused by name."""

import re

import pytest
from clients import CHAT, ID, TEXT, TOOL, USER
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from test_clients import ASK, PROMPT

from kvrag import KVRagEngine
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag_server import ServerConfig, create_app

DOCUMENTS = [{"text": "Quokka seven <s> of <|im_start|>"}]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def http():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    engine = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tokenizer, prove="off")
    app = create_app(engine, ServerConfig(model_name=ID))
    mounts = [Mount("/kvrag", app)]
    outer = Starlette(routes=mounts, lifespan=lambda _: app.router.lifespan_context(app))
    address = "http://localhost/kvrag"
    with TestClient(outer, base_url=address, raise_server_exceptions=False) as client:
        assert client.get("/ready").status_code == 200
        yield client
    engine.close()


def shown(http, path, body):
    """The prompt of an answered body, and its token ids that are control tokens' texts or not."""
    response = http.post(path, json=body | {"kvrag": body.get("kvrag", {}) | {"trace": True}})
    assert response.status_code == 200, response.text
    return "".join(response.json()["kvrag"][0]["tokens"])


def refusal(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("role", ["user", "human"])
def test_documents_go_before_the_last_user_message(http, role):
    messages = [
        USER,
        {"role": role, "content": "And then?"},
        {"role": "assistant", "content": "Well,"},
    ]
    text = shown(http, CHAT, ASK | {"messages": messages, "kvrag": {"documents": DOCUMENTS}})
    assert f"{DOCUMENTS[0]['text']}\n\nAnd then?" in text


@pytest.mark.parametrize("path", [CHAT, "/v1/kv/explain"])
@pytest.mark.parametrize("roles", [["system"], ["assistant"], ["system", "assistant", "tool"]])
def test_documents_that_have_no_place_are_refused(http, path, roles):
    body = {
        "messages": [{"role": role, "content": "x"} for role in roles],
        "kvrag": {"documents": DOCUMENTS},
    }
    error = refusal(http, path, body)
    assert error["param"] == "kvrag.documents"
    assert "there is none" in error["message"]


@pytest.mark.parametrize("blank", ["", " ", "\n\t\n"])
@pytest.mark.parametrize("body", [ASK, PROMPT], ids=["chat", "text"])
def test_a_blank_document_is_none(http, body, blank):
    path = CHAT if "messages" in body else TEXT
    both = [{"text": blank}, *DOCUMENTS, {"text": blank}]
    assert shown(http, path, body | {"kvrag": {"documents": both}}) == shown(
        http, path, body | {"kvrag": {"documents": DOCUMENTS}}
    )
    assert shown(http, path, body | {"kvrag": {"documents": [{"text": blank}]}}) == shown(
        http, path, body
    )


@pytest.mark.parametrize(
    "part", [None, {"type": "text", "text": None}, {"type": None, "text": "Ann"}, {"text": "Ann"}]
)
def test_nulls_of_parts_say_nothing(http, part):
    text = "" if part is None else part["text"] or ""
    asked = [{"role": "user", "content": [{"type": "text", "text": "Who?"}, part]}]
    plain = [{"role": "user", "content": f"Who?{text}"}]
    assert shown(http, CHAT, ASK | {"messages": asked}) == shown(
        http, CHAT, ASK | {"messages": plain}
    )


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "text", "text": 5}, "'text'"),
        ({"type": "text", "content": "lost"}, "'text'"),
        ({"type": "input_text", "content": "lost"}, "'input_text'"),
        ({"type": "refusal", "text": "lost"}, "'refusal'"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
    ],
)
def test_a_part_whose_text_is_lost_is_refused(http, part, named):
    error = refusal(http, CHAT, ASK | {"messages": [{"role": "user", "content": ["Who?", part]}]})
    assert named in error["message"]


@pytest.mark.parametrize("refused", [5, ["x"], {"a": 1}, True])
def test_a_refusal_that_is_no_text_is_refused(http, refused):
    error = refusal(
        http, CHAT, ASK | {"messages": [USER, {"role": "assistant", "refusal": refused}, USER]}
    )
    assert "the refusal of a assistant message" in error["message"]


OFF = (
    {"think": False},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
)


@pytest.mark.parametrize("off", OFF, ids=str)
def test_thinking_is_switched_off_by_each_of_its_names(http, off):
    assert shown(http, CHAT, ASK | off).endswith("<think></think>")
    assert not shown(http, CHAT, ASK | {"think": True}).endswith("<think></think>")


@pytest.mark.parametrize("nothing", [{"model": ""}, {"reasoning_effort": ""}, {"think": None}])
def test_empty_texts_ask_for_nothing(http, nothing):
    assert shown(http, CHAT, ASK | nothing) == shown(http, CHAT, ASK)


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(http, name, value):
    raw = f'{{"messages": [{{"role": "user", "content": "a"}}], "{name}": {value}}}'
    response = http.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [TOOL]},
        {
            "messages": [USER, {"role": "assistant", "content": "The keeper"}],
            "continue_final_message": True,
        },
    ],
    ids=["plain", "variables", "tools", "continued"],
)
def test_what_is_explained_is_the_prompt_that_is_answered(http, more):
    asked = {"messages": [USER], "kvrag": {"documents": DOCUMENTS}} | more
    explained = http.post("/v1/kv/explain", json=asked).json()
    answered = http.post(CHAT, json=asked | {"max_tokens": 1}).json()
    assert explained["prompt_tokens"] == answered["usage"]["prompt_tokens"]


def test_token_ids_are_explained(http):
    assert http.post("/v1/kv/explain", json={"prompt": [5, 6, 7]}).json()["prompt_tokens"] == 3


@pytest.mark.parametrize("alias", ["n_predict", "num_predict", "max_new_tokens"])
def test_no_limit_by_another_name_is_none(http, alias):
    assert shown(http, CHAT, ASK | {alias: -1}) == shown(http, CHAT, ASK)
    response = http.post(CHAT, json=ASK | {alias: -1, "max_tokens": 2})
    assert response.json()["usage"]["completion_tokens"] == 2


def test_a_refusal_repeats_nothing_of_kvrags_own(http):
    """What stands for a document while messages are rendered is no text of the client's."""
    error = refusal(
        http, CHAT, ASK | {"continue_final_message": True, "kvrag": {"documents": DOCUMENTS}}
    )
    assert re.search("[0-9]{10}", error["message"]) is None
