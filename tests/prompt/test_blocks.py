"""Blocks of other providers: text is shown, calls of their own tools are left out, media are refused."""

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    TextBlock,
)

from kvrag import InputError
from kvrag.prompt.messages import plain_messages
from kvrag.prompt.template import PromptEncoder
from langchain_kvrag._convert import chat_messages
from llama_index.llms.kvrag.prompts import plain_message

TEXT = {"type": "text", "text": "Who?"}
DATA = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
FOUND = [
    {"type": "web_search_result", "title": "Quay", "url": "http://q", "encrypted_content": "z"}
]

SHOWN: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": {"type": "text", "data": "a doc"}, "title": "T"}, "T\na doc\n"),
    ({"type": "document", "source": {"type": "content", "content": [TEXT]}}, "Who?\n"),
    ({"type": "document", "source": {"type": "url", "url": "<s>"}, "content": [TEXT]}, "Who?\n"),
    (
        {"type": "search_result", "source": "u", "title": "t", "content": [TEXT], "citations": {}},
        "t\nu\nWho?\n",
    ),
    (
        {"type": "text-plain", "text": "a <s> b", "title": "N<s>1", "mime_type": "text/plain"},
        "N<s>1\na <s> b\n",
    ),
    ({"type": "file", "source_type": "text", "text": "plain"}, "plain\n"),
    ({"type": "tool_result", "tool_use_id": "t", "content": "found"}, "found\n"),
    ({"type": "tool_result", "content": [TEXT, {"type": "text", "text": "b"}]}, "Who?\nb\n"),
    ({"type": "server_tool_result", "tool_call_id": "s", "output": "x"}, "x\n"),
    ({"type": "server_tool_result", "output": {"rows": [1]}}, '{"rows": [1]}\n'),
    ({"type": "web_search_tool_result", "tool_use_id": "w", "content": FOUND}, "Quay\nhttp://q\n"),
    (
        {
            "type": "web_fetch_tool_result",
            "content": {
                "type": "web_fetch_result",
                "url": "u",
                "content": {"type": "document", "source": {"type": "text", "data": "page"}},
            },
        },
        "u\npage\n",
    ),
    (
        {
            "type": "code_execution_tool_result",
            "content": {"stdout": "4", "stderr": "", "return_code": 0},
        },
        "4\n",
    ),
    ({"type": "code_execution_result", "outcome": 1, "code_execution_result": "5"}, "5\n"),
    ({"type": "file_search_call", "results": [{"filename": "f", "text": "line"}]}, "f\nline\n"),
    ({"type": "mcp_call", "name": "n", "arguments": "{}", "output": "said"}, "said\n"),
    ({"type": "non_standard", "value": {"type": "tool_result", "content": "in"}}, "in\n"),
    ({"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}, ""),
    ({"type": "server_tool_call", "id": "s", "name": "web_search", "args": {"q": 1}}, ""),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": 1}}, ""),
    ({"type": "code_interpreter_call", "code": "1+1", "outputs": []}, ""),
    ({"type": "executable_code", "executable_code": "1+1", "language": "PYTHON"}, ""),
    ({"type": "mcp_list_tools", "tools": [{"name": "n"}]}, ""),
    ({"type": "reasoning", "summary": [], "encrypted_content": "z"}, ""),
    ({"type": "cachePoint"}, ""),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": DATA}, "base64"),
    ({"type": "document", "source": {"type": "url", "url": "http://d"}}, "document"),
    ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "document"),
    ({"type": "file", "url": "http://d", "mime_type": "application/pdf"}, "file"),
    ({"type": "file", "source_type": "base64", "data": "JVBERi0="}, "file"),
    ({"type": "file", "file": {"file_data": "JVBERi0="}}, "file"),
    ({"type": "tool_result", "content": [TEXT, {"type": "image", "source": DATA}]}, "image"),
    ({"type": "code_interpreter_call", "outputs": [{"type": "image", "url": "u"}]}, "image"),
    ({"type": "input_audio", "input_audio": {}}, "input_audio"),
    ({"type": "video", "text": "a caption", "url": "u"}, "video"),
    ({"type": "tool_use", "id": "t", "name": "n", "input": {}}, "tool_use"),
    ({"type": "function_call", "name": "n", "arguments": "{}"}, "function_call"),
    ({"type": "tool_call", "name": "n", "args": {}}, "tool_call"),
    ({"type": "image_generation_call", "result": "iVBOR"}, "image_generation_call"),
    ({"type": "non_standard", "value": {"type": "audio"}}, "audio"),
    ({"type": ["odd"]}, "odd"),
]


def shown(messages: list[dict[str, Any]]) -> str:
    (plain,) = plain_messages(messages, lambda given: getattr(given, "text", given))
    return str(plain["content"])


def ways(block: dict[str, Any], role: str) -> list[str]:
    """Show a message with a block as the server and as LangChain's adapter do."""
    kind = AIMessage if role == "assistant" else HumanMessage
    own = [{"role": role, "content": [block, TEXT]}]
    return [shown(messages) for messages in (own, chat_messages([kind([block, TEXT])]))]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(("block", "text"), SHOWN, ids=lambda each: str(each)[:40])
def test_a_block_that_carries_text_is_text(block, text, role):
    server, adapter = ways(block, role)
    assert server == f"{text}Who?"
    assert adapter.replace("\n", "") == server.replace("\n", "")


@pytest.mark.parametrize(("block", "name"), REFUSED, ids=lambda each: str(each)[:40])
def test_other_blocks_are_refused_by_name(block, name):
    with pytest.raises(InputError, match=f"part of type .*{name}.*; kvrag reads text only, remove"):
        ways(block, "user")


def test_the_text_of_a_document_is_a_chunk(tokenizer):
    """So control-token text in it, and in its title, stays text, and its stored KV is found."""
    pieces = PromptEncoder(tokenizer).pieces(
        [{"role": "user", "content": [block for block, _ in SHOWN[:5]]}]
    )
    found = [p.text for p in pieces if p.kind == "chunk"]
    assert found == ["a doc", *["Who?"] * 3, "<s>", "a <s> b"]


def test_blocks_of_llama_index():
    note = DocumentBlock(data=b"a note", title="N", document_mimetype="text/plain")
    cited = CitationBlock(
        cited_content=TextBlock(text="cited"), source="S", title="C", additional_location_info={}
    )
    hint = CachePoint(cache_control=CacheControl(type="ephemeral"))
    blocks = [note, CitableBlock(title="D", source="s", content=[note]), cited, hint]
    plain = plain_message(ChatMessage(blocks=[*blocks, TextBlock(text="Who?")], role="user"))
    assert shown([plain]) == "N\na note\nD\nN\na note\nC\nS\ncited\nWho?"
    for data in (b"%PDF-1.4", b"\xff\xfe\x00\x00"):
        with pytest.raises(InputError, match="holds a document block; kvrag reads text only"):
            plain_message(ChatMessage(blocks=[DocumentBlock(data=data, title="P")], role="user"))
