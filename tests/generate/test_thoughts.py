"""Thoughts before an answer: kept out of its text and its form, by every way to ask, with the tags of the chat template."""

import asyncio
import json
import random
from contextlib import closing

import pytest
from kit import scripted
from langchain_core.messages import AIMessage
from starlette.testclient import TestClient
from test_tool_calls import TOOL

from kvrag import KVRagEngine
from kvrag.generate.thoughts import Thoughts
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag_server import ServerConfig, create_app
from langchain_kvrag import ChatKVRag

THINK = ("<think>", "</think>")
TAGS = [
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
]
ASK = [{"role": "user", "content": "How many?"}]
THOUGHT = "Ten, and two: {"
OBJECT = {"type": "json_object"}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "ten"}}</tool_call>'


def template(tags, *, opens):
    """A template that drops earlier thoughts, and may close an empty thought, or leave one open."""
    opening, shutting = tags
    end = f"{opening}\n" if opens else ""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '').split('"
        + shutting
        + "')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
        + f"{opening}\n\n{shutting}\n\n"
        + "{% else %}"
        + end
        + "{% endif %}{% endif %}"
    )


def engine_of(tags=THINK, *, opens=True, special=None):
    tokenizer = tiny_tokenizer()
    if special is not None:
        tokenizer.add_tokens([*tags], special_tokens=special)
    tokenizer.chat_template = template(tags, opens=opens)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer))
    return KVRagEngine.from_pretrained(model, tokenizer=tokenizer, prove="off", context=None)


@pytest.fixture(params=[True, False], ids=["opened by the prompt", "opened by the model"])
def opens(request):
    return request.param


@pytest.fixture
def engine(opens):
    with closing(engine_of(opens=opens)) as made:
        yield made


def spoken(answer, *, opens, tags=THINK, thought=THOUGHT, gap="\n\n"):
    """What the model says: its thought, and the answer."""
    opening = "" if opens else tags[0] + "\n"
    return f"{opening}{thought}\n{tags[1]}{gap}{answer}"


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "added", "special"])
@pytest.mark.parametrize("tags", TAGS)
def test_the_text_is_the_answer_alone(monkeypatch, tags, special, opens):
    with closing(engine_of(tags, opens=opens, special=special)) as engine:
        scripted(monkeypatch, engine, spoken("Twelve.", opens=opens, tags=tags))
        got = engine.generate(ASK, max_new_tokens=200, logprobs=0)
        assert (got.reasoning_content, got.text, got.finish_reason) == (THOUGHT, "Twelve.", "stop")
        assert 0 < got.reasoning_tokens < len(got.token_ids) == len(got.logprobs)


@pytest.mark.parametrize("special", [False, True])
def test_an_end_token_that_has_no_name_is_not_shown(monkeypatch, special, opens):
    with closing(engine_of(("<think>", "<|over|>"), opens=opens, special=special)) as engine:
        engine.tokenizer.chat_template = template(THINK, opens=opens)
        end = engine.tokenizer.convert_tokens_to_ids("<|over|>")
        assert end not in engine.tokenizer.all_special_ids
        monkeypatch.setattr(engine.loaded.lm.model.generation_config, "eos_token_id", end)
        scripted(monkeypatch, engine, spoken("Twelve.<|over|>", opens=opens))
        assert engine.generate(ASK, max_new_tokens=200).text == "Twelve."


@pytest.mark.parametrize(
    ("text", "is_open", "want"),
    [
        ("<think>\na b\n</think>\n\nThe answer ", False, ("a b", "The answer ")),
        ("a < b </thin k\n</think>x", True, ("a < b </thin k", "x")),
        (" plain <think>x", False, ("", " plain <think>x")),
        ("cut </thi", True, ("cut </thi", "")),
        ("<thi", False, ("", "<thi")),
        ("</think>hi", True, ("", "hi")),
        ("<think></think>{}", False, ("", "{}")),
    ],
)
def test_no_part_of_a_tag_is_shown_however_text_comes(text, is_open, want):
    for seed in range(100):
        cuts = random.Random(seed)
        parser = Thoughts(THINK, is_open=is_open)
        shown, left = [], text
        while left:
            size = cuts.randint(1, 5)
            shown.append(parser.push(left[:size]))
            left = left[size:]
        shown.append(parser.push("", is_last=True))
        assert tuple("".join(part) for part in zip(*shown, strict=True)) == want


def test_ordinary_text_is_shown_with_its_token():
    parser = Thoughts(THINK, is_open=False)
    assert [parser.push(text)[1] for text in ("A", " <", "think>")] == ["A", " <", "think>"]


def test_an_answer_cut_inside_its_thought_is_empty(monkeypatch, engine, opens):
    scripted(monkeypatch, engine, spoken("Twelve.", opens=opens, thought="x " * 200))
    got = engine.generate(ASK, max_new_tokens=40)
    assert (got.text, got.finish_reason, got.reasoning_tokens) == ("", "length", 40)
    assert got.reasoning_content.startswith("x x x")


def test_a_closed_thought_in_the_prompt_leaves_the_answer_alone(monkeypatch, engine):
    scripted(monkeypatch, engine, "A </think> B")
    got = engine.generate(ASK, max_new_tokens=40, chat_template_kwargs={"enable_thinking": False})
    assert (got.reasoning_content, got.text) == (None, "A </think> B")


@pytest.mark.parametrize("prompt", ["How many?<think>\n", ["How many?<think>\n"]])
def test_other_prompts_than_chats_are_continued_as_they_are(monkeypatch, engine, prompt):
    scripted(monkeypatch, engine, "Ten</think>Twelve")
    got = engine.generate(prompt, max_new_tokens=40)
    assert (got.reasoning_content, got.text) == (None, "Ten</think>Twelve")


@pytest.mark.parametrize(
    ("begun", "want"), [("<think>It is", ("so", "Yes.")), ("It is", (None, "so</think>Yes."))]
)
def test_a_continued_message_may_stop_inside_its_thought(monkeypatch, engine, begun, want):
    scripted(monkeypatch, engine, "so</think>Yes.")
    messages = [*ASK, {"role": "assistant", "content": begun}]
    got = engine.generate(messages, max_new_tokens=40, continue_final_message=True)
    assert (got.reasoning_content, got.text) == want


@pytest.mark.parametrize("end", ["", "<|im_end|>"], ids=["whole", "would end"])
def test_a_form_begins_behind_the_thought(monkeypatch, engine, opens, end):
    scripted(monkeypatch, engine, spoken('{"a": 1}', opens=opens, gap="", thought=THOUGHT + end))
    got = engine.generate(ASK, max_new_tokens=200, response_format=OBJECT)
    assert got.reasoning_content[: len(THOUGHT) if end else None] == THOUGHT
    assert json.loads(got.text) == {"a": 1}


def test_a_form_needs_no_thought(monkeypatch):
    with closing(engine_of(opens=False)) as engine:
        scripted(monkeypatch, engine, '{"a": 1}')
        got = engine.generate(ASK, max_new_tokens=200, response_format=OBJECT)
        assert (got.reasoning_content, json.loads(got.text)) == (None, {"a": 1})


def test_a_form_holds_at_once_where_the_thought_is_closed(engine):
    got = engine.generate(
        ASK,
        max_new_tokens=60,
        response_format=OBJECT,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert got.text.startswith("{")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_behind_a_thought_are_read_and_calls_inside_it_are_not(
    monkeypatch, engine, opens, choice
):
    said = CALL if choice == "auto" else CALL[11:-12]
    thought = f"I could {CALL.replace('ten', 'none')}"
    gap = "\n\n" if choice == "auto" else ""  # a form has no white space before it
    scripted(monkeypatch, engine, spoken(said, opens=opens, thought=thought, gap=gap))
    got = engine.generate(ASK, max_new_tokens=300, tools=[TOOL], tool_choice=choice)
    assert [call.arguments for call in got.tool_calls] == [{"query": "ten"}]
    assert (got.text, got.finish_reason, got.reasoning_content) == ("", "tool_calls", thought)


def test_streams_give_the_thought_first(monkeypatch, engine, opens):
    scripted(monkeypatch, engine, spoken("Twelve it is.", opens=opens))
    deltas = [*engine.stream(ASK, max_new_tokens=200)]
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert ("".join(thoughts), "".join(deltas)) == (THOUGHT, "Twelve it is.")
    assert not any(thoughts[[bool(delta) for delta in deltas].index(True) :])
    assert sum(map(bool, thoughts)) > 1


@pytest.fixture
def http(engine):
    app = create_app(engine, ServerConfig(model_name="m"))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def test_the_server_gives_the_thought_beside_the_content(monkeypatch, http, engine, opens):
    scripted(monkeypatch, engine, spoken("Twelve.", opens=opens))
    body = {"model": "m", "messages": ASK, "max_tokens": 200}
    whole = http.post("/v1/chat/completions", json=body).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "Twelve."
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Twelve."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
    again = [*ASK, message, *ASK]
    assert http.post("/v1/chat/completions", json={**body, "messages": again}).status_code == 200


def test_langchain_has_a_block_of_reasoning(monkeypatch, engine, opens):
    lm = engine.loaded.lm.model
    llm = ChatKVRag.from_pretrained_model(lm, engine.tokenizer, context=None, max_tokens=200)
    scripted(monkeypatch, llm.engine, spoken("Twelve.", opens=opens))

    async def streamed():
        return [chunk async for chunk in llm.astream("How many?")]

    chunks = [*llm.stream("How many?")]
    achunks = asyncio.run(streamed())
    for message in (
        llm.invoke("How many?"),
        sum(chunks[1:], chunks[0]),
        sum(achunks[1:], achunks[0]),
    ):
        assert message.content == "Twelve."
        assert message.additional_kwargs == {"reasoning_content": THOUGHT}
        kinds = {block["type"]: block for block in message.content_blocks}
        assert kinds["reasoning"]["reasoning"] == THOUGHT
        assert kinds["text"]["text"] == "Twelve."
    before = AIMessage(content="Twelve.", additional_kwargs=message.additional_kwargs)
    assert llm.invoke([("user", "How many?"), before, ("user", "Sure?")]).content == "Twelve."


def test_llama_index_has_a_thinking_block(monkeypatch, engine, opens):
    types = pytest.importorskip("llama_index.core.base.llms.types")
    from llama_index.llms.kvrag import KVRagLLM

    lm = engine.loaded.lm.model
    llm = KVRagLLM.from_pretrained_model(lm, engine.tokenizer, context=None, max_new_tokens=200)
    scripted(monkeypatch, llm.engine, spoken("Twelve.", opens=opens))
    asked = [types.ChatMessage(role="user", content="How many?")]
    streamed = [*llm.stream_chat(asked)]
    for message in (llm.chat(asked).message, streamed[-1].message):
        assert message.content == "Twelve."
        assert message.blocks[0] == types.ThinkingBlock(content=THOUGHT)
        assert message.additional_kwargs == {"reasoning_content": THOUGHT}
    newest = [response.additional_kwargs.get("thinking_delta", "") for response in streamed]
    assert "".join(newest) == THOUGHT
    done = llm.complete("How many?")
    assert (done.text, done.additional_kwargs["reasoning_content"]) == ("Twelve.", THOUGHT)
    assert llm.chat([*asked, message, *asked]).message.content == "Twelve."


def test_the_command_shows_a_thought_beside_the_answer(monkeypatch, engine, opens):
    from typer.testing import CliRunner

    from kvrag.cli.app import app
    from kvrag.cli.options import EngineGroup

    scripted(monkeypatch, engine, spoken("Twelve.", opens=opens))
    monkeypatch.setattr(EngineGroup, "open", lambda *given, **options: engine)
    ran = CliRunner().invoke(app, ["ask", "How many?", "-m", "m", "--max-new-tokens", "200"])
    assert ran.stdout == "Twelve.\n"
    assert ran.stderr.startswith(THOUGHT)
