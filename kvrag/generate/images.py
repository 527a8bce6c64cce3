"""Prompts with images: the model's own processor renders them, and nothing is reused.

Images come as data, never as a path or an address, so that no prompt makes kvrag open a file or a
connection.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvrag.errors import InputError, MissingDependencyError
from kvrag.generate.request import Request
from kvrag.model.lm import LoadedModel
from kvrag.prompt.marks import Marks
from kvrag.prompt.messages import describe, plain_messages
from kvrag.prompt.plan import Plan, PlannedPiece
from kvrag.prompt.tokenizer import Piece

REASON = (
    "the prompt holds an image: its tokens attend in both directions, or have positions of their "
    "own, so nothing was reused"
)
_KINDS = ("image", "image_url", "input_image")
"""Types of content parts with an image, of OpenAI's APIs, LangChain and transformers."""
_HOLDERS = ("image_url", "image", "source", "url", "base64", "data")
"""Fields of such a part that may hold the image, or the mapping that does."""
_DATA_URL = re.compile(r"\Adata:[^,]*;base64,")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow runs other programs for some others
_AS_DATA = "pass it as a data: URL, base64 text, bytes or a PIL image"


def shows_images(loaded: LoadedModel, prompt: object) -> bool:
    """Whether a prompt holds images, and the model takes them."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    has_images = any([is_image(part) for c in contents if isinstance(c, list) for part in c])
    return has_images and "pixel_values" in inspect.signature(loaded.lm.model.forward).parameters


def is_image(part: object) -> bool:
    """Whether a content part is an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def plan_images(request: Request, loaded: LoadedModel) -> Plan:
    """Plan a prompt of chat messages with images, by the model's processor.

    Raises
    ------
    InputError
        If an image can't be read, the request has tools, or the processor refuses the messages or
        can't be loaded.
    MissingDependencyError
        If reading images needs a package that is not installed.
    """
    if loaded.processor is None:
        raise InputError(
            "the prompt holds an image, and a loaded model comes without its processor; "
            "pass the processor as the tokenizer: tokenizer=AutoProcessor.from_pretrained(...)"
        )
    processor = loaded.processor()
    messages = _rendered(request, loaded)
    options = {**request.variables, "add_generation_prompt": True}
    try:
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", **options
        ).to(loaded.lm.device, loaded.lm.dtype)
    except Exception as error:  # jinja's and the processors' errors share no useful base class
        raise InputError(f"the model's processor refuses these messages: {error}") from error
    seen = {name: value for name, value in inputs.items() if name != "attention_mask"}
    ids = tuple(seen.pop("input_ids")[0].tolist())
    text = str(loaded.encoder.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
    piece = PlannedPiece(Piece(text), ids)
    return Plan((piece,), loaded.encoder, refusal=REASON, seen=seen)


def _rendered(request: Request, loaded: LoadedModel) -> list[dict[str, Any]]:
    """Return the messages as processors take them: contents are lists of texts and images."""
    marks = Marks()
    images: dict[int, Any] = {}

    def held(part: Any) -> Any:
        if not is_image(part):
            return part
        images[len(marks.texts)] = image_of(part)
        return marks.add("")

    given = [
        {**message, "content": [held(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in request.prompt
        if isinstance(message, Mapping)
    ]
    plain = plain_messages(given, marks.add, loaded.encoder.roles)
    is_called = any([m["role"] == "tool" or m.get("tool_calls") for m in plain])
    if request.chat.tools or request.continues or is_called:
        raise InputError(
            "a prompt with images can have no tools, calls of tools or continue_final_message; "
            "leave them or the images out"
        )
    for message in plain:
        parts: list[dict[str, Any]] = []
        for at, text in enumerate(marks.split(message["content"])):
            if at % 2 and int(text) in images:
                parts.append({"type": "image", "image": images[int(text)]})
            else:
                parts.append({"type": "text", "text": marks.texts[int(text)] if at % 2 else text})
        message["content"] = [part for part in parts if part.get("text") != ""]
    return plain


def image_of(part: Mapping[str, Any]) -> Any:
    """Return the image of a content part as a PIL image.

    Raises
    ------
    InputError
        If the part holds no data of an image, but a path or an address, for example.
    MissingDependencyError
        If Pillow is not installed.
    """
    given: Any = part
    while isinstance(given, Mapping):
        given = next((given[name] for name in _HOLDERS if given.get(name) is not None), None)
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("reading images needs Pillow: pip install pillow") from error
    if isinstance(given, Image.Image):
        return given.convert("RGB")
    if isinstance(given, str):
        given = _decoded(given)
    if not isinstance(given, bytes):
        raise InputError(f"the image of a content part is {describe(given)}; {_AS_DATA}")
    try:
        return Image.open(io.BytesIO(given), formats=_FORMATS).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"the image of a content part can't be read ({error}); "
            f"kvrag reads {', '.join(_FORMATS)}"
        ) from error


def _decoded(text: str) -> bytes:
    """Return the bytes of a data: URL, or of base64 text."""
    try:
        return base64.b64decode(_DATA_URL.sub("", text), validate=True)
    except binascii.Error as error:
        raise InputError(
            f"the image of a content part is {text[:40]!r}, and kvrag opens no files or "
            f"addresses; {_AS_DATA}"
        ) from error
