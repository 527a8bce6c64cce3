"""Tools, structured output and agents through LangChain; what the model says is scripted, all else is real."""

import json
from typing import Annotated, TypedDict

import pytest
from kit import scripted
from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import InjectedToolArg, StructuredTool, create_retriever_tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, Field

from kvrag import ConfigError, TemplatePrefix
from langchain_kvrag import ChatKVRag, KVRagLLM, KVRagVectorStore


class Weather(BaseModel):
    """The weather of a place."""

    place: str = Field(description="Where.", max_length=4)
    days: int = Field(default=1, ge=1, le=9)


class WeatherDict(TypedDict):
    """The weather of a place."""

    place: Annotated[str, ..., "Where."]


def weather(place: str, days: int = 1) -> str:
    """The weather of a place.

    Args:
        place: Where.
        days: How many days.
    """
    return f"Sun in {place}."


class Shelf(BaseModel):
    shelves: list["Shelf"]


def with_hidden(kind):
    def weather(place: Annotated[str, "Where."], hidden: kind) -> str:
        """The weather of a place."""

    return tool(weather)


DESCRIBED = {"parse_docstring": True}
FORMS = [
    Weather,
    WeatherDict,
    weather,
    tool(**DESCRIBED)(weather),
    StructuredTool.from_function(weather, **DESCRIBED),
    Weather.model_json_schema(),
    with_hidden(ToolRuntime),
    with_hidden(Annotated[Shelf, InjectedToolArg]),
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo – \\"x\\"", "days": 2}}\n</tool_call>'
ARGS = {"place": 'Oslo – "x"', "days": 2}


@pytest.fixture
def chat(options):
    return ChatKVRag(**{**options, "max_tokens": 120})


# -- calls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_tools_of_every_form_are_shown_and_can_be_called(form, chat):
    bound = chat.bind_tools([form], tool_choice=True)
    (shown,) = bound.kwargs["tools"]
    message = bound.invoke("Oslo?", stop=['": "'])
    name, properties = shown["function"]["name"], shown["function"]["parameters"]["properties"]
    assert name.lower().startswith("weather")
    assert properties["place"]["description"] == "Where."
    assert properties.keys() <= {"place", "days"}
    assert message.content == '{"name'  # as far as it goes to where it was stopped
    explained = chat.explain("Oslo?", tools=[form])
    assert name in explained.spans[0].text
    assert message.usage_metadata["input_tokens"] == explained.prompt_tokens


def test_calls_are_the_messages_streamed_or_not(chat, monkeypatch):
    scripted(monkeypatch, chat.engine, f"Let me see.\n{CALL}\n{CALL}")
    bound = chat.bind_tools([weather])
    message = bound.invoke("Oslo?", max_tokens=240)
    chunks = list(bound.stream("Oslo?", max_tokens=240))
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    for each in (message, whole):
        assert each.content == "Let me see."
        assert [(call["name"], call["args"]) for call in each.tool_calls] == [("weather", ARGS)] * 2
        assert len({call["id"] for call in each.tool_calls}) == 2
        assert each.invalid_tool_calls == []
        assert each.response_metadata["finish_reason"] == "tool_calls"
    assert all("tool_call" not in str(chunk.content) for chunk in chunks)
    assert [c["index"] for c in whole.tool_call_chunks] == [0, 1]


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_several_calls_are_kept_unless_they_are_not_allowed(
    parallel, count, chat, monkeypatch, caplog
):
    scripted(monkeypatch, chat.engine, f"{CALL}\n{CALL}")
    bound = chat.bind_tools([weather], parallel_tool_calls=parallel)
    chunks = list(bound.stream("Oslo?", max_tokens=240))
    for message in (bound.invoke("Oslo?", max_tokens=240), sum(chunks[1:], chunks[0])):
        assert len(message.tool_calls) == count
    assert ("the first is kept" in caplog.text) == (parallel is False)


async def test_what_cannot_be_read_is_an_invalid_call(chat, monkeypatch):
    scripted(monkeypatch, chat.engine, "<tool_call>{'place': Oslo</tool_call>")
    bound = chat.bind_tools([weather], tool_choice="auto")
    message, whole = await bound.ainvoke("Oslo?"), None
    async for chunk in bound.astream("Oslo?"):
        whole = chunk if whole is None else whole + chunk
    for each in (message, whole):
        assert each.tool_calls == []
        assert [call["args"] for call in each.invalid_tool_calls] == [
            "<tool_call>{'place': Oslo</tool_call>"
        ]
        assert each.content == "<tool_call>{'place': Oslo</tool_call>"
    assert chat.invoke("Oslo?").invalid_tool_calls == []  # without tools it is text


@pytest.mark.usefixtures("no_histories")
def test_choices_of_langchains_forms(chat):
    forms = [(None, None), ("auto", "auto"), ("any", "required"), (True, "required"), (False, None)]
    for given, known in forms:
        assert chat.bind_tools([weather], tool_choice=given).kwargs["tool_choice"] == known
    with pytest.raises(ConfigError, match=r"tool_choice is 'wether'.*\['weather'\]"):
        chat.bind_tools([weather], tool_choice="wether").invoke("Oslo?")
    assert chat.bind_tools([weather], tool_choice="none").invoke(
        "Oslo?", max_tokens=1
    ).usage_metadata == (chat.invoke("Oslo?", max_tokens=1).usage_metadata)


def test_histories_with_calls_reach_the_prompt(chat):
    call = {"name": "weather", "args": ARGS, "id": "c1", "type": "tool_call"}
    blocks = [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": ARGS},
    ]
    for content in ("I look.", blocks):
        history = [
            HumanMessage("Oslo?"),
            AIMessage(content, tool_calls=[call]),
            ToolMessage("Sun.", tool_call_id="c1"),
        ]
        text = chat.bind_tools([weather]).bound.explain(history, tools=None).spans[0].text
        assert text.count(f"I look.\n{CALL}") == 1
        assert text.count("<tool_response>\nSun.\n</tool_response>") == 1


# -- structured output ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "strict"),
    # "json_schema" that is not strict is left out: a random answer to an open schema never ends.
    [
        ("json_schema", None),
        ("json_schema", True),
        ("function_calling", None),
        ("function_calling", True),
        ("function_calling", False),
    ],
)
def test_an_answer_of_a_class_needs_no_luck(method, strict, chat):
    """The random model says it itself: the schema leaves it no choice."""

    class Shape(BaseModel):
        """A shape."""

        sides: int = Field(ge=3, le=5)
        name: str = Field(max_length=3, pattern="^[a-z]+$")

    found = chat.with_structured_output(Shape, method=method, strict=strict).invoke(
        "Which?", temperature=2.0, seed=1
    )
    assert isinstance(found, Shape)
    raw = chat.with_structured_output(Shape, method=method, strict=strict, include_raw=True).invoke(
        "Which?"
    )
    assert isinstance(raw["raw"], AIMessage)
    assert isinstance(raw["parsed"], Shape)
    assert raw["parsing_error"] is None


@pytest.mark.parametrize("strict", [None, True, False])
def test_a_class_is_all_that_an_object_of_it_may_hold(strict, chat):
    class Trip(BaseModel):
        """A trip."""

        legs: list[Weather]
        notes: dict[str, str] = {}

    asked = chat.with_structured_output(Trip, strict=strict).first.kwargs["response_format"][
        "json_schema"
    ]["schema"]
    leg = asked["properties"]["legs"]["items"]
    assert {asked.get("additionalProperties"), leg.get("additionalProperties")} == {
        None if strict is False else False
    }
    given = Trip.model_json_schema()
    shown = chat.with_structured_output(given).first.kwargs["response_format"]
    assert shown["json_schema"]["schema"] == given


def test_schemas_of_the_other_forms_give_dicts_and_json_mode_any(chat, monkeypatch):
    said = '{"place": "Oslo"}'
    scripted(monkeypatch, chat.engine, said)
    plain = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    for schema in (
        WeatherDict,
        plain,
        {"title": "where", **plain},
        {"name": "where", "parameters": plain},
    ):
        assert chat.with_structured_output(schema).invoke("Where?") == json.loads(said)
    for schema, found in ((None, json.loads(said)), (Weather, Weather(place="Oslo"))):
        asking = chat.with_structured_output(schema, method="json_mode")
        assert asking.invoke("Where?") == found
    *_, last = chat.with_structured_output(Weather).stream("Where?")
    assert last == Weather(place="Oslo")
    with pytest.raises(ConfigError, match="method is 'magic'"):
        chat.with_structured_output(Weather, method="magic")
    with pytest.raises(ConfigError, match="needs a schema"):
        chat.with_structured_output()


def test_an_answer_that_is_cut_is_a_parsing_error(chat):
    short = chat.model_copy(update={"max_tokens": 3})
    cut = short.with_structured_output(Weather, include_raw=True).invoke("Where?")
    assert cut["parsed"] is None
    assert cut["parsing_error"] is not None
    assert cut["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_that_is_cut_in_a_number_or_a_list_is_no_value(method, chat, monkeypatch):
    class Bill(BaseModel):
        """A bill."""

        total: float
        lines: list[str] = []

    said = '{"total": 1234.5, "lines": ["ink", "pens"]}'
    if method == "function_calling":
        said = f'{{"name": "Bill", "arguments": {said}}}'
    scripted(monkeypatch, chat.engine, said)
    asking = chat.with_structured_output(Bill, method=method)
    assert asking.invoke("Which?") == Bill(total=1234.5, lines=["ink", "pens"])
    lengths = [len(chat.get_token_ids(said[: said.index(part)])) for part in ("34", "pens")]
    for cut in (*[{"max_tokens": num} for num in lengths], {"stop": ["pens"]}):
        with pytest.raises(OutputParserException, match="the answer ends before its JSON"):
            asking.invoke("Which?", **cut)


def test_the_llm_takes_a_format_per_call(options):
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "maxProperties": 0}},
    }
    assert KVRagLLM(**options).invoke("Which?", response_format=wanted) == "{}"


# -- agents --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(chat, embedding, chunks):
    return KVRagVectorStore.from_documents([Document(text) for text in chunks], embedding, llm=chat)


def retrieval_tool(store, kind):
    retriever = store.as_retriever(search_kwargs={"k": 3})
    if kind == "create_retriever_tool":
        return create_retriever_tool(
            retriever, "archive", "Search the archive.", document_separator="\n\n"
        )

    @tool(response_format="content_and_artifact")
    def archive(query: str) -> tuple[str, list[Document]]:
        """Search the archive."""
        found = retriever.invoke(query)
        return "\n\n".join(document.page_content for document in found), found

    return archive


SEARCH = '<tool_call>\n{"name": "archive", "arguments": {"query": "ledger"}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["create_retriever_tool", "content_and_artifact"])
def test_an_agents_retrieved_chunks_are_reused(kind, chat, store, monkeypatch):
    scripted(monkeypatch, chat.engine, SEARCH, "A keeper.")
    agent = create_agent(chat.model_copy(update={"mode": "stitch"}), [retrieval_tool(store, kind)])
    messages = agent.invoke({"messages": [HumanMessage("Who keeps the ledger?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    made = messages[-1].response_metadata["kvrag"]
    assert messages[-1].content == "A keeper."
    assert made["exactness"] == "repaired"
    assert chat.explain(messages[:-1]).hits == 3
    assert made["cached_tokens"] > 3 * 42
    # The question stands before the chunks, and they were encoded without it.
    assert made["has_other_prefix"]


async def test_a_graph_of_langgraph_runs_the_same_loop(chat, store, monkeypatch):
    scripted(monkeypatch, chat.engine, SEARCH, "A keeper.")
    tools = [retrieval_tool(store, "create_retriever_tool")]
    llm = chat.bind_tools(tools)

    async def answer(state: MessagesState) -> dict[str, object]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    done = await graph.compile().ainvoke({"messages": [HumanMessage("Who keeps the ledger?")]})
    assert done["messages"][-1].content == "A keeper."
    assert chat.explain(done["messages"][:-1]).hits == 3


def test_an_agent_with_a_response_format_ends_in_an_object(chat, store, monkeypatch):
    scripted(
        monkeypatch,
        chat.engine,
        SEARCH[12:-13],
        '{"name": "Weather", "arguments": {"place": "Oslo", "days": 2}}',
    )
    agent = create_agent(
        chat, [retrieval_tool(store, "content_and_artifact")], response_format=Weather
    )
    done = agent.invoke({"messages": [HumanMessage("Who keeps the ledger?")]})
    assert done["structured_response"] == Weather(place="Oslo", days=2)


def test_a_prefix_with_tools_makes_the_first_chunk_exact(options, chunks):
    prompt = ChatPromptTemplate([("system", "Answer."), ("human", "{context}\n\n{question}")])
    llm = ChatKVRag(**options, prefix=TemplatePrefix(prompt, tools=[weather]), context=None)
    llm.precompute_kv(chunks[:1])
    chain = prompt | llm.bind_tools([weather]).bind(mode="stitch")
    made = chain.invoke({"context": chunks[0], "question": "Who?"}).response_metadata["kvrag"]
    assert (made["exactness"], made["has_other_prefix"]) == ("exact", False)
    assert made["cached_tokens"] > 42
