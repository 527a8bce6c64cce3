"""Tools, agents and objects through LlamaIndex: the model's own head says the scripted answers; the engine reads and constrains them."""

import json
import threading
from typing import Any, Literal

import pytest
from kit import scripted, working_threads
from llama_index.core import ChatPromptTemplate, PromptTemplate, VectorStoreIndex
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel, field_validator
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.tools import FunctionTool, QueryEngineTool
from llama_index_kit import chunks, documents, make_llm, settings
from transformers import AutoTokenizer

from kvrag import ConfigError, InputError, TemplatePrefix, precompute_kv
from llama_index.llms.kvrag import KVRagLLM

pytestmark = pytest.mark.filterwarnings(
    "ignore:chunks were encoded behind another prefix", "ignore:no stored chunk"
)
K = 6


@pytest.fixture
def llm(tiny_dir, tmp_path):
    llm = make_llm(tiny_dir, tmp_path / "kv", max_new_tokens=250)
    with settings(llm):
        yield llm
    llm.engine.close()


@pytest.fixture
def index(llm):
    index = VectorStoreIndex.from_documents(documents(K))
    precompute_kv(index, llm=llm)
    return index


def search(query: str) -> str:
    """Find notes."""
    return f"Notes on {query}."


SEARCH = FunctionTool.from_defaults(search)
OTHER = FunctionTool.from_defaults(lambda: "noon", name="now", description="Tell the time.")


def called(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = called("search", query="the ledger")
WAYS = [f"{a}{stream}chat_with_tools" for a in ("", "a") for stream in ("", "stream_")]


async def ask(llm: KVRagLLM, way: str, *tools: Any, **options: Any) -> list[Any]:
    """Call one of the four methods; return all its responses."""
    out = getattr(llm, way)(list(tools) or [SEARCH, OTHER], user_msg="Who?", **options)
    if way.startswith("a"):
        out = await out
        return [response async for response in out] if "stream" in way else [out]
    return list(out) if "stream" in way else [out]


# -- calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [2, 1])
@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_calls_tools_in_every_way_of_asking(llm, monkeypatch, caplog, way, allowed):
    assert llm.metadata.is_function_calling_model
    scripted(monkeypatch, llm.engine, f"Let me see.\n{CALL}\n{called('now')}")
    responses = await ask(llm, way, allow_parallel_tool_calls=allowed == 2)
    last = responses[-1]
    calls = llm.get_tool_calls_from_response(last)
    assert [(call.tool_name, call.tool_kwargs) for call in calls] == [
        ("search", {"query": "the ledger"}),
        ("now", {}),
    ][:allowed]
    assert len({call.tool_id for call in calls}) == allowed
    assert caplog.text.count("calls 2 tools; parallel calls are not allowed") == 2 - allowed
    assert last.message.content == "Let me see."
    assert last.raw["kvrag"]["finish_reason"] == "tool_calls"
    assert "".join(response.delta or "" for response in responses) in ("", "Let me see.")
    assert all(
        not llm.get_tool_calls_from_response(r, error_on_no_tool_call=False) for r in responses[:-1]
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", [{"tool_required": True}, {"tool_choice": "search"}])
async def test_a_call_that_is_required_comes_whatever_the_model_prefers(llm, way, choice):
    options = {"temperature": 5.0, "seed": 3, "max_tokens": 400}
    picked = FunctionTool.from_defaults(_open, name="search")
    (call,) = llm.get_tool_calls_from_response(
        (await ask(llm, way, picked, **choice, **options))[-1]
    )
    assert call.tool_name == "search"
    assert call.tool_kwargs["place"] in ("archive", "harbour")


def _open(place: Literal["archive", "harbour"]) -> str:
    """Open a place."""
    return place


def test_one_call_is_kept_where_parallel_ones_are_not_allowed_and_that_is_said(
    llm, monkeypatch, caplog
):
    scripted(monkeypatch, llm.engine, f"{CALL}\n{CALL}", "None.")
    response = llm.predict_and_call([SEARCH], "Who?")
    assert (response.response, len(response.sources)) == ("Notes on the ledger.", 1)
    assert "calls 2 tools; parallel calls are not allowed" in caplog.text
    with pytest.raises(InputError, match=r"calls no tool; pass tool_required=True.*'None.'"):
        llm.predict_and_call([SEARCH], "Who?")


def history(assistant: ChatMessage) -> list[ChatMessage]:
    result = ChatMessage(role="tool", content="A keeper.", additional_kwargs={"tool_call_id": "c1"})
    return [ChatMessage("Who?"), assistant, result]


OPENAI = {
    "id": "c1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "the ledger"}'},
}
BLOCK = ToolCallBlock(tool_call_id="c1", tool_name="search", tool_kwargs={"query": "the ledger"})
ASSISTANTS = {
    "blocks": ChatMessage(role="assistant", blocks=[TextBlock(text="So:"), BLOCK]),
    "another LLM's memory": ChatMessage(
        role="assistant", content="So:", additional_kwargs={"tool_calls": [OPENAI]}
    ),
}


@pytest.mark.parametrize("name", ASSISTANTS)
def test_calls_and_results_of_a_history_are_shown(llm, requests, name):
    llm.chat(history(ASSISTANTS[name]), max_tokens=1)
    llm.chat(history(ASSISTANTS[name]), tools=[SEARCH], max_tokens=1)
    for prompt in requests.prompts:
        shown = '{"name": "search", "arguments": {"query": "the ledger"}}'
        parts = ("Who?", "So:", shown, "A keeper.")
        assert [prompt.count(part) for part in parts] == [1] * 4
    assert ["Find notes." in prompt for prompt in requests.prompts] == [False, True]


def test_what_can_not_be_shown_is_refused(llm, tiny_dir, tmp_path):
    image = ChatMessage(role="tool", blocks=[ImageBlock(image=b"\x89PNG\r\n")])
    with pytest.raises(InputError, match="a tool message holds a image block"):
        llm.chat([ChatMessage("Who?"), image])
    with pytest.raises(ConfigError, match="tool_choice is 'find'"):
        llm.chat_with_tools([SEARCH], "Who?", tool_choice="find")
    with pytest.raises(
        InputError, match="tools need the model's chat template; leave messages_to_prompt out"
    ):
        make_llm(tiny_dir, None, messages_to_prompt=str).chat_with_tools([SEARCH], "Who?")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = None
    plain = make_llm(tiny_dir, None, tokenizer=tokenizer)
    assert not plain.metadata.is_function_calling_model
    with pytest.raises(InputError, match="calls tools, which a model without chat template"):
        plain.chat(history(ASSISTANTS["blocks"]))


def test_a_template_that_refuses_system_messages_shows_tools_with_the_first_question(
    tiny_dir, requests
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    llm = make_llm(tiny_dir, None, tokenizer=tokenizer)
    system = ChatMessage(role="system", content="Be brief.")
    llm.chat_with_tools([SEARCH], "Who?", chat_history=[system], max_tokens=1)
    (prompt,) = requests.prompts
    assert [prompt.count(part) for part in ("Find notes.", "Be brief.", "Who?")] == [1] * 3


def test_chunks_behind_tools_are_exact_where_the_prefix_has_the_tools(llm):
    template = ChatPromptTemplate.from_messages([("user", "{context_str}\n{query_str}")])
    text = chunks(1)[0]
    messages = template.format_messages(context_str=text, query_str="Who?")
    llm.precompute_kv([text], prefix=TemplatePrefix(template, "context_str", tools=[SEARCH]))
    assert llm.explain(messages, tools=[SEARCH]).spans[1].exact
    assert not llm.explain(messages).spans[1].exact


# -- agents --------------------------------------------------------------------------------------------------------------


def notes(index: Any, **options: Any) -> QueryEngineTool:
    engine = index.as_query_engine(similarity_top_k=K, **options)
    return QueryEngineTool.from_defaults(engine, name="notes", description="Notes on keepers.")


THOUGHT = (
    'Thought: I need the notes.\nAction: notes\nAction Input: {"input": "Who keeps the ledger?"}'
)
ANSWER = "Thought: I can answer without using any more tools.\nAnswer: The keeper."
AGENTS = {
    "FunctionAgent": (FunctionAgent, called("notes", input="Who keeps the ledger?"), "The keeper."),
    "ReActAgent": (ReActAgent, THOUGHT, ANSWER),
}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_asks_a_query_engine_and_answers(
    llm, index, requests, monkeypatch, name, streaming
):
    kind, first, last = AGENTS[name]
    scripted(monkeypatch, llm.engine, first, "A keeper keeps it.", last)
    agent = kind(tools=[notes(index)], llm=llm, streaming=streaming)
    handler = (agent if streaming else AgentWorkflow(agents=[agent])).run("Who keeps the ledger?")
    events = [event async for event in handler.stream_events()]
    output = await handler
    assert str(output) == "The keeper."
    assert requests.reused == [0, K, 0]
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert str(result.tool_output) == "A keeper keeps it."
    assert result.tool_output.raw_output.metadata["kvrag"]["exactness"] == "repaired"
    assert "A keeper keeps it." in requests.prompts[-1]
    assert output.raw["kvrag"]["finish_reason"] == "stop"
    shown = "".join(event.delta for event in events if isinstance(event, AgentStream))
    assert "tool_call" not in shown
    assert bool(shown) == streaming


async def test_tools_results_are_reused_where_they_hold_chunks(llm, index, requests, monkeypatch):
    """A tool that returns the retrieved texts themselves, as a retriever tool does."""
    find = FunctionTool.from_defaults(
        lambda query: "\n\n".join(chunks(K)), name="find", description="Find."
    )
    scripted(monkeypatch, llm.engine, called("find", query="x"), "The keeper.")
    output = await FunctionAgent(tools=[find], llm=llm).run("Who?")
    assert (str(output), requests.reused) == ("The keeper.", [0, K])


# -- objects -------------------------------------------------------------------------------------------------------------


class Place(BaseModel):
    """Where it is."""

    name: Literal["archive", "harbour"]
    is_open: bool

    @field_validator("is_open")
    @classmethod
    def _check(cls, value: bool) -> bool:
        if cls.__name__ == "Shut" and value:
            raise ValueError("it must be shut")
        return value


class Shut(Place):
    """A place that may not be open."""


PROMPT = PromptTemplate("Where is the {thing}? Think {{hard}}.")
PLACE = Place(name="harbour", is_open=True)


async def predicted(
    llm: KVRagLLM, way: str, output_cls: type[BaseModel] = Place, **options: Any
) -> list[Any]:
    out = getattr(llm, way)(output_cls, PROMPT, llm_kwargs=options, thing="ledger")
    if way.startswith("a"):
        out = await out
        return [each async for each in out] if "stream" in way else [out]
    return list(out) if "stream" in way else [out]


@pytest.mark.parametrize(
    "way", [f"{a}{stream}structured_predict" for a in ("", "a") for stream in ("", "stream_")]
)
@pytest.mark.parametrize("is_chat", [True, False])
async def test_objects_are_predicted_in_every_way_of_asking(
    tiny_dir, monkeypatch, requests, way, is_chat
):
    llm = make_llm(
        tiny_dir, None, max_new_tokens=120, system_prompt="Be brief.", is_chat_model=is_chat
    )
    scripted(monkeypatch, llm.engine, PLACE.model_dump_json().replace(":", ": ").replace(",", ", "))
    objects = await predicted(llm, way)
    assert objects[-1] == PLACE
    assert (len(objects) > 3) == ("stream" in way)
    prompt = requests.prompts[0]
    parts = ("Be brief.", "Where is the ledger?", "Where it is.")
    assert [prompt.count(part) for part in parts] == [1] * 3
    assert sorted(parts, key=prompt.index) == list(parts)
    assert PROMPT.output_parser is None


@pytest.mark.parametrize("way", ["astructured_predict", "astream_structured_predict"])
async def test_the_event_loop_does_not_load_the_model_of_an_object(llm, monkeypatch, way):
    seen = working_threads(monkeypatch)
    assert await predicted(llm, way)
    assert threading.get_ident() not in seen


def test_an_object_that_is_cut_or_not_valid_is_an_error_with_a_remedy(llm, monkeypatch):
    with pytest.raises(InputError, match="ends before its JSON does; raise max_new_tokens"):
        llm.structured_predict(Place, PROMPT, llm_kwargs={"max_tokens": 3}, thing="x")
    scripted(monkeypatch, llm.engine, '{"name": "harbour", "is_open": true}')
    with pytest.raises(ValueError, match="it must be shut"):
        llm.structured_predict(Shut, PROMPT, thing="x")


def test_objects_have_no_properties_but_their_classes_own(llm):
    class Both(BaseModel):
        places: list[Place]

    schema = llm._program(Both, PROMPT, None)[1]["response_format"]["json_schema"]["schema"]
    parts = (schema, schema["$defs"]["Place"])
    assert [part["additionalProperties"] for part in parts] == [False, False]


def test_another_program_of_the_users_is_used(llm, monkeypatch):
    llm.pydantic_program_mode = "function"
    scripted(monkeypatch, llm.engine, called("Place", **PLACE.model_dump()))
    monkeypatch.setattr(
        KVRagLLM,
        "_prepare_chat_with_tools",
        lambda self, tools, **kw: pytest.fail(tools[0].metadata.name),
    )
    with pytest.raises(pytest.fail.Exception, match="Place"):
        llm.structured_predict(Place, PROMPT, thing="x")


@pytest.mark.usefixtures("no_histories")
def test_a_query_engine_answers_with_an_object_and_reuses_as_without(
    llm, index, requests, monkeypatch
):
    index.as_query_engine(similarity_top_k=K).query("Who?")
    scripted(monkeypatch, llm.engine, '{"name": "harbour", "is_open": true}')
    response = index.as_query_engine(llm=llm.as_structured_llm(Place), similarity_top_k=K).query(
        "Who?"
    )
    assert response.response == PLACE
    assert requests.reused == [K, K]
    assert response.metadata["kvrag"]["exactness"] == "repaired"
    first, second = (prompt.partition(chunks(1)[0])[0] for prompt in requests.prompts)
    assert first == second


def test_a_router_chooses_by_a_call_that_is_required(llm, index, requests, monkeypatch):
    """LlamaIndex's own selector requires a call; what the model says here is what any model must say."""
    scripted(
        monkeypatch,
        llm.engine,
        json.dumps({"name": "SingleSelection", "arguments": {"index": 2, "reason": "a"}}),
        "It.",
    )
    engine = RouterQueryEngine.from_defaults([notes(index), notes(index)], llm=llm)
    response = engine.query("Who?")
    assert (str(response), requests.reused) == ("It.", [0, K])
    assert response.metadata["selector_result"].ind == 1
    assert len(response.metadata["kvrag"]["calls"]) == 2
