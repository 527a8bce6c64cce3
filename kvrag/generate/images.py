"""Prompts with images: the model's own processor renders them, and nothing is reused.

Images come as data, never as a path or an address, so that no prompt makes kvrag open a file or a
connection.
"""

from __future__ import annotations

import base64
import inspect
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvrag.errors import InputError, MissingDependencyError
from kvrag.generate.request import Request
from kvrag.model.lm import LoadedModel
from kvrag.prompt.jinja import facts_of
from kvrag.prompt.marks import Marks
from kvrag.prompt.messages import describe, plain_messages
from kvrag.prompt.plan import Plan, PlannedPiece
from kvrag.prompt.tokenizer import Piece
from kvrag.types import Chunk

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
_INPUTS = {"images", "image", "videos", "video", "audio", "audios", "text", "processor_kwargs"}
"""Names of a processor's inputs, which the prompt gives."""
MAX_IMAGES = 64  # of a prompt
MAX_PIXELS = 2**26  # of all images of a prompt: 200 MB of RGB
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
    _check_variables(request, processor)
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


def _check_variables(request: Request, processor: Any) -> None:
    """Raise ``InputError`` for a variable that the chat template does not read.

    The processor would take it as an option of its own, such as a path or an address of an image.
    """
    facts = facts_of(str(getattr(processor, "chat_template", None) or ""))
    known = frozenset() if facts is None else facts.variables
    taken = inspect.signature(processor.apply_chat_template).parameters.keys() | _INPUTS
    for name in request.variables:
        if name not in known or name in taken:
            raise InputError(
                f"chat_template_kwargs has {name!r}, which the chat template of the model's "
                "processor does not read; leave it out of prompts with images"
            )


def _rendered(request: Request, loaded: LoadedModel) -> list[dict[str, Any]]:
    """Return the messages as processors take them: contents are lists of texts and images."""
    marks = Marks()
    images: dict[int, Any] = {}

    def held(part: Any) -> Any:
        if not is_image(part):
            return part
        images[len(marks.texts)] = _next_image(part, list(images.values()))
        return marks.add("")

    given = [
        {**message, "content": [held(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in request.prompt
    ]
    plain = plain_messages(cast(Any, given), marks.add, loaded.encoder.roles)
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
                shown = _plain(marks.texts[int(text)], loaded) if at % 2 else text
                parts.append({"type": "text", "text": shown})
        message["content"] = [part for part in parts if part.get("text") != ""]
    return plain


def _next_image(part: Mapping[str, Any], before: Sequence[Any]) -> Any:
    """Return the image of a content part, if the prompt's earlier images leave room for it."""
    if len(before) == MAX_IMAGES:
        raise InputError(f"the prompt holds more than {MAX_IMAGES} images; leave some out")
    return image_of(part, MAX_PIXELS - sum(image.width * image.height for image in before))


def _plain(text: str, loaded: LoadedModel) -> str:
    """Return the text of a chunk; raise ``InputError`` if it holds a control token's."""
    if any(isinstance(segment, Chunk) for segment in loaded.encoder.guarded(text)):
        raise InputError(
            "a Chunk holds the text of a control token, and beside images a processor would "
            "read it as one; leave that text or the images out"
        )
    return text


def image_of(part: Mapping[str, Any], max_pixels: int = MAX_PIXELS) -> Any:
    """Return the image of a content part as a PIL image of at most ``max_pixels``.

    Raises
    ------
    InputError
        If the part holds no data of an image, but a path or an address, for example, or an image
        that is too large.
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
        return _bounded(given, max_pixels).convert("RGB")
    if isinstance(given, str):
        given = _decoded(given)
    if not isinstance(given, bytes):
        raise InputError(f"the image of a content part is {describe(given)}; {_AS_DATA}")
    try:
        found = Image.open(io.BytesIO(given), formats=_FORMATS)
        return _bounded(found, max_pixels).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"the image of a content part can't be read ({error}); "
            f"kvrag reads {', '.join(_FORMATS)}"
        ) from error


def _bounded(image: Any, max_pixels: int) -> Any:
    """Return an image whose pixels are not decoded yet; raise ``InputError`` if it is too large."""
    if image.width * image.height > max_pixels:
        raise InputError(
            f"the images of the prompt have more than {MAX_PIXELS:,} pixels; make them smaller"
        )
    return image


def _decoded(text: str) -> bytes:
    """Return the bytes of a data: URL, or of base64 text."""
    try:
        return base64.b64decode(_DATA_URL.sub("", text), validate=True)
    except ValueError as error:
        raise InputError(
            f"the image of a content part is {text[:40]!r}, and kvrag opens no files or "
            f"addresses; {_AS_DATA}"
        ) from error
