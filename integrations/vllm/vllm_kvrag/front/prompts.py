"""Bodies for vLLM: prompts as token ids, and the options of reuse as parameters of KV transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from kvrag import ConfigError, InputError
from kvrag.adapters import ReuseOptions, StorePlanner, UnreadableTextError
from kvrag_server.completions import chat_prompt, text_prompt
from kvrag_server.errors import APIError, refusal
from kvrag_server.fields import ALIASES, NEUTRAL, OF_PENALTY, REMEDIES, fault, understood
from kvrag_server.schema import AnswerOptions, Completion, Messages, Reuse, without_nulls

Body = dict[str, Any]
"""Body of a request, as JSON values."""
Tokenise = Callable[["StorePlanner", Body, Reuse, str], Body]
"""Returns the fields of a body that hold its prompt as token ids: none where vLLM renders it."""

_NEEDS_TEXT = (
    "echo",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "chat_template",
    "documents",
    "mm_processor_kwargs",
    "prompt_embeds",
    "suffix",
)
"""Fields that need vLLM's own rendering or tokenisation of the prompt."""
_VLLMS = (
    *_NEEDS_TEXT,
    "add_special_tokens",
    "cache_salt",
    "response_format",
    "skip_special_tokens",
    "structured_outputs",
)
"""Fields that vLLM honours, and kvrag's server refuses."""
_REFUSABLE = (
    *REMEDIES,
    *NEUTRAL,
    *ALIASES,
    *OF_PENALTY,
    "ban_eos_token",
    "best_of",
    "dry_multiplier",
    "dynatemp_range",
    "enable_thinking",
    "smoothing_factor",
    "xtc_probability",
)
"""Fields that kvrag's server refuses where they ask for something, and vLLM would ignore."""
_MESSAGES = TypeAdapter(Messages)


def planner_of(request: Request) -> StorePlanner:
    """Return the planner of a request's application."""
    return cast(StorePlanner, request.app.state.planner)


def object_of(body: Body, name: str) -> Body:
    """Return the object in a field of a body; an empty one if it is none."""
    given = body.get(name)
    return given if isinstance(given, dict) else {}


def renamed(body: Body, schema: type[Completion]) -> Body:
    """Return the body of a completion with vLLM's names of its fields.

    Raises ``APIError`` for a field that kvrag's server refuses by name, and vLLM would ignore.
    """
    try:
        given = understood(
            body,
            {*schema.model_fields, *_VLLMS, *(body.keys() - _REFUSABLE)},
            is_foreign=True,
        )
        thinks = given.pop("enable_thinking", None)
        if thinks not in (None, True, False):
            raise fault("invalid_value", "enable_thinking is true or false", "enable_thinking")
    except PydanticCustomError as error:
        raise APIError(
            400, error.message(), error.type, param=(error.context or {})["field"]
        ) from None
    if body.get("do_sample") is False:
        given.setdefault("temperature", 0)
    if thinks is not None:
        own = given.setdefault("chat_template_kwargs", {})
        if isinstance(own, dict):  # else vLLM says why
            own.setdefault("enable_thinking", thinks)
    # To vLLM, null is not always the default.
    return {**{name: value for name, value in body.items() if value is None}, **given}


def check_window(options: Reuse) -> None:
    """Raise ``APIError`` if a request wants a window that slides."""
    if options.max_context != "raise":
        raise APIError(
            400,
            "kvrag.max_context has no effect with vLLM, whose window does not slide; leave it out",
            "unsupported_parameter",
            param="kvrag.max_context",
        )


def put_options(body: Body, namespace: str) -> AnswerOptions:
    """Make the field ``kvrag`` of a body parameters of KV transfer, check it, and return it.

    The namespace is the key's, whatever the client sent: it could name others' chunks. vLLM would
    blend a prompt once for each of several answers.

    Raises ``APIError`` or ``ConfigError`` for an invalid value, or for an option without an effect.
    """
    given = body.pop("kvrag", None)
    try:
        options = AnswerOptions.model_validate({} if given is None else given)
    except ValidationError as error:
        raise refusal(
            [{**each, "loc": ("body", "kvrag", *each["loc"])} for each in error.errors()],
            {"kvrag": given},
        ) from None
    options.config  # noqa: B018 - raises
    check_window(options)
    params = object_of(body, "kv_transfer_params")
    if object_of(params, "kvrag").keys() - {"namespace"}:
        raise APIError(
            400,
            "kv_transfer_params.kvrag is the front's; send your options as the field kvrag",
            "unsupported_parameter",
            param="kv_transfer_params.kvrag",
        )
    mode = options.mode
    if mode == "auto" and body.get("n") not in (None, 1):
        mode = "prefix"
    body["kv_transfer_params"] = {
        **params,
        "kvrag": {
            "mode": mode,
            "namespace": namespace,
            "repair": options.repair,
            "trace": options.trace,
        },
    }
    return options


def tokenised_chat(planner: StorePlanner, body: Body, options: Reuse, namespace: str) -> Body:
    """Render chat messages; vLLM takes the ids of a chat in ``kv_transfer_params``."""
    params = body["kv_transfer_params"]
    if (
        not (body.get("add_generation_prompt", True) or body.get("continue_final_message"))
        or params.get("prompt_token_ids")
        or body.get("add_special_tokens")
    ):
        return left_to_vllm(options)
    try:
        # vLLM renders parts that name an image, be it null, and places no documents.
        messages = without_nulls(body.get("messages"), 2)
        ids = planner.plan(
            chat_prompt(_MESSAGES.validate_python(messages), options), namespace, chat_of(body)
        ).token_ids
    except ValidationError:
        return {}  # vLLM says why
    except (ConfigError, InputError) as error:
        if options.documents or isinstance(error, UnreadableTextError):
            raise
        return {}  # images, or a message that only vLLM knows how to show
    return {"messages": messages, "kv_transfer_params": {**params, "prompt_token_ids": ids}}


def tokenised_text(planner: StorePlanner, body: Body, options: Reuse, namespace: str) -> Body:
    """Tokenise the prompt or the prompts of a text completion."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    texts = [each for each in prompts if isinstance(each, str)]
    for each in (prompt, *prompts):
        planner.check_ids(each)
    if not texts or texts != prompts or not body.get("add_special_tokens", True):
        return left_to_vllm(options)
    try:
        ids = [planner.plan(text_prompt(each, options), namespace).token_ids for each in texts]
    except InputError as error:
        if options.documents or isinstance(error, UnreadableTextError):
            raise
        return {}
    return {"prompt": ids if isinstance(prompt, list) else ids[0]}


def tokenised(
    tokenise: Tokenise, planner: StorePlanner, body: Body, options: Reuse, namespace: str
) -> Body:
    """Return a body with its prompt as ids, unless it asks for what ids can't give."""
    if any(map(body.get, _NEEDS_TEXT)):
        return {**body, **left_to_vllm(options)}
    return {**body, **tokenise(planner, body, options, namespace)}


def chat_of(body: Body) -> Any:
    """Return the options for rendering a chat, with the variables that vLLM's template gets.

    Raises ``ConfigError`` for invalid tools or variables.
    """
    effort = body.get("reasoning_effort")
    named: Body = {}
    if effort is not None:
        named = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ReuseOptions(
        tools=body.get("tools"),
        chat_template_kwargs=body.get("chat_template_kwargs"),
        continue_final_message=bool(body.get("continue_final_message")),
    ).chat(named)


def left_to_vllm(options: Reuse) -> Body:
    """Return no fields; raise ``APIError`` if the prompt has documents, which vLLM can't place."""
    if options.documents:
        raise APIError(
            400,
            "kvrag.documents need a prompt of text or messages that kvrag renders; leave out "
            f"{', '.join(_NEEDS_TEXT)}, add_special_tokens and an adapter's name, or the documents",
            "unsupported_parameter",
            param="kvrag.documents",
        )
    return {}
