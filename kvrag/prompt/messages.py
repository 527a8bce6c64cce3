"""Normalise chat messages for chat templates: a known role, a single text, OpenAI's current calls.

No content of a message is dropped silently: if a template can't show it, it is written into the
text, or refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrag.errors import InputError
from kvrag.prompt.tools import JsonObject, Message, calls_with_dicts
from kvrag.types import Chunk

# Returns a message's text with placeholders: of a chunk, of control-token text in a string.
Hold = Callable[[str | Chunk], str]

# Roles of other providers and frameworks, and their names in most chat templates.
SYNONYMS = {
    "developer": "system",
    "function": "tool",
    "human": "user",
    "ai": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
}

# Types of content parts that hold text, in OpenAI's two APIs.
_CONTENT = ("text", "input_text", "output_text")
# Fields of such a part that need not be shown.
_BESIDE_TEXT = ("type", "annotations", "cache_control")
# Fields of a message with media that kvrag can't read.
_NOT_TEXT = ("audio", "images", "videos", "files")
# Types of blocks whose text is a document's.
_DOCUMENTS = frozenset({"document", "file", "search_result", "text-plain", "web_fetch_result"})
# Types of blocks that need not be shown.
_HINTS = ("cache_point", "cachePoint", "citation", "executable_code")
# Ends of types of calls of a provider's own tools, which need not be shown, but for results.
_OF_PROVIDER = ("_call", "_call_chunk", "_tool_use")
# Types of the model's own calls, which messages hold beside their content.
_OF_MODEL = (
    "custom_tool_call",
    "function_call",
    "invalid_tool_call",
    "tool_call",
    "tool_call_chunk",
)
_ABOUT = ("title", "context", "source", "url", "filename")
# Fields of such blocks, and of objects in them, with text.
_BODY = (
    "source",
    "text",
    "data",
    "content",
    "output",
    "outputs",
    "results",
    "logs",
    "stdout",
    "stderr",
    "code_execution_result",
    "error_code",
)
_THOUGHTS = ("reasoning", "redacted_thinking", "thinking")
_MEDIA = ("base64", "container_upload", "input_file", "media")
# Id of a call that has no id; some templates require nine letters and digits.
_CALL_ID = "call{:05}"


def plain_messages(
    messages: Sequence[Message], hold: Hold, roles: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return messages in the form that templates read; ``roles`` are the roles that they name.

    Raises
    ------
    InputError
        If a message is malformed, or holds content that can't be shown.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        made = _plain_message(message, hold)
        role = made["role"]
        if role not in roles:
            made["role"] = SYNONYMS.get(role, role)
        if "function_call" in made:
            function = made.pop("function_call")  # OpenAI's first format
            call_id = _CALL_ID.format(len(plain))
            made["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        if made["role"] == "tool" and "tool_call_id" not in made and plain:
            made |= _id_of(plain[-1])
        if made.get("tool_calls"):
            made = calls_with_dicts(made)
        plain.append(made)
    return plain


def check_chunk_text(text: object) -> str:
    """Return the text of a chunk; raise :class:`InputError` if it is no string, or blank."""
    if not isinstance(text, str):
        raise InputError(f"a chunk's text is {describe(text)}; it must be a string")
    if not text.strip():
        raise InputError("a chunk's text is empty or white space only; leave it out")
    return text


def describe(value: object) -> str:
    """Return a value's type in words."""
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    if isinstance(value, (list, tuple)):
        return (
            f"a {type(value).__name__} of "
            f"{' and '.join(sorted({type(item).__name__ for item in value}))}"
        )
    return f"of type {type(value).__name__}"


def _plain_message(message: Message, hold: Hold) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(
            f"a chat message is {describe(message)}; pass a dict with 'role' and 'content'"
        )
    if "role" not in message or not (
        message.keys() & {"content", "tool_calls", "function_call", "refusal"}
    ):
        raise InputError(
            f"a chat message has the keys {list(message)}; it needs 'role' and 'content'"
        )
    role = message["role"]
    if not isinstance(role, str):
        raise InputError(f"the role of a chat message is {role!r}; pass a string such as 'user'")
    # null is the same as absent
    made = {name: value for name, value in message.items() if value is not None}
    for name in _NOT_TEXT:
        if made.get(name):
            raise InputError(
                f"a {role} message holds {name}; kvrag reads text only, leave them out"
            )
    for name, value in made.items():
        if name != "content" and isinstance(value, Chunk):
            raise InputError(
                f"{name!r} of a {role} message is a kvrag.Chunk; put chunks into its content"
            )
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
    if made.get("reasoning"):  # vLLM's name; templates read the other
        made.setdefault("reasoning_content", made["reasoning"])
    refusal = made.pop("refusal", "")
    if not isinstance(refusal, str):
        raise InputError(f"the refusal of a {role} message is {describe(refusal)}; pass a string")
    texts = [_content_text(made.get("content"), role, hold), refusal]
    return {**made, "content": "\n\n".join(filter(None, texts))}


def _content_text(content: object, role: str, hold: Hold) -> str:
    if content is None or isinstance(content, (str, Chunk)):
        return _part_text(content, hold)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InputError(f"the content of a {role} message is {describe(content)}; pass a string")
    return "".join([_part_text(part, hold) for part in content])


def _part_text(part: object, hold: Hold) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Chunk):
        return hold(part)
    if part is None:
        return ""
    if not isinstance(part, Mapping):
        raise _unshowable(type(part).__name__)
    kind = part.get("type") or "text"
    if kind in (*_CONTENT, "refusal"):
        field = "refusal" if kind == "refusal" else "text"
        says_nothing = not any([value for name, value in part.items() if name not in _BESIDE_TEXT])
        text = "" if says_nothing else part.get(field)
        if isinstance(text, str):
            return text
        raise InputError(
            f"the {field!r} of a content part of type {kind!r} is {describe(part.get(field))}; "
            "pass a string"
        )
    if isinstance(kind, str):
        if kind == "non_standard":
            return _part_text(part.get("value"), hold)
        if kind in _DOCUMENTS or kind.endswith(("_result", "_output")) or _is_unshown(kind):
            return _block_text(part, kind, hold)
    raise _unshowable(kind)


def _unshowable(kind: object) -> InputError:
    return InputError(
        f"a message holds a content part of type {kind!r}; kvrag reads text only, remove the part"
    )


def _is_unshown(kind: str) -> bool:
    is_foreign = kind.endswith(_OF_PROVIDER) and kind not in _OF_MODEL
    return is_foreign or kind in (*_HINTS, *_THOUGHTS) or kind.startswith("mcp_")


def _block_text(block: JsonObject, kind: str, hold: Hold) -> str:
    """Return the text of a document, of a result, or of a call with results; a line per text.

    The text of a document is a chunk; control-token text before it, as in its title, stays text.
    """
    is_document = kind in _DOCUMENTS
    about, body = _about_and_body(block, kind, hold if is_document else None)
    if is_document and not body:
        raise _unshowable(kind)
    if not body and _is_unshown(kind):
        return ""
    return "".join([f"{text}\n" for text in (*about, *body)])


def _about_and_body(block: JsonObject, kind: str, hold: Hold | None) -> tuple[list[str], list[str]]:
    """Return the texts that describe a block, and the texts in it.

    Raises :class:`InputError` for media.
    """
    inner = str(block.get("type") or kind)
    if inner in _MEDIA or any([word in inner for word in ("image", "audio", "video", "screen")]):
        raise _unshowable(inner)
    if inner in _THOUGHTS:
        return [], []
    about = [block[name] for name in _ABOUT if isinstance(block.get(name), str)]
    body: list[str] = []
    for name in _BODY:
        value = block.get(name)
        is_plain = name not in ("data", "source") or not isinstance(value, str)
        if is_plain or (name == "data" and "text" in (inner, block.get("source_type"))):
            body += _texts(value, kind, hold)
    if not body and block.get("output"):
        # An object of any form.
        body = _texts(json.dumps(block["output"], ensure_ascii=False), kind, hold)
    # What stands without a body is left out.
    return [*map(hold, about)] if hold and body else about, body


def _texts(value: object, kind: str, hold: Hold | None) -> list[str]:
    if isinstance(value, str):
        if not value.strip():
            return []
        return [hold(Chunk(value)) if hold else value]
    if isinstance(value, Mapping):
        about, body = _about_and_body(value, kind, hold)
        return about + body if body or hold is None else []  # an address alone is no document
    if isinstance(value, Sequence):
        return [text for each in value for text in _texts(each, kind, hold)]
    return []


def _id_of(message: Message) -> dict[str, str]:
    """Return the id of a message's call for its result, if exactly a single call has an id."""
    calls = message.get("tool_calls") or ()
    ids = [call["id"] for call in calls if call.get("id")]
    if len(ids) == 1:
        return {"tool_call_id": ids[0]}
    return {}
