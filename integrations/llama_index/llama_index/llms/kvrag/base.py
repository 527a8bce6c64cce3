"""LlamaIndex LLM that answers through kvrag's engine."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core import Settings
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import ConfigDict, Field
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from kvrag import (
    Explanation,
    KVRagEngine,
)
from kvrag.adapters import PromptEncoder
from llama_index.llms.kvrag.accounting import account_for_responses
from llama_index.llms.kvrag.options import (
    ALIASES,
    Options,
    constructor_options,
    request_options,
    short_name,
)
from llama_index.llms.kvrag.prompts import (
    calls_tools,
    chat_prompt,
    completion_text,
    engine_prefix,
    is_chat,
    tool_dicts,
)
from llama_index.llms.kvrag.responses import (
    AsyncResponseStream,
    ResponseStream,
    Shape,
    as_chat,
    as_completion,
    whole,
)
from llama_index.llms.kvrag.tools import ToolCallingLLM


class KVRagLLM(ToolCallingLLM):
    """Hugging Face model that answers from the precomputed KV of the retrieved chunks.

    Weights load at first use. All instances of this process with the same source share them.
    ``model_name`` and ``model_id`` are aliases of ``model``, and ``max_tokens`` is an alias of
    ``max_new_tokens``. Options of ``HuggingFaceLLM`` are understood, or refused with the option to
    pass instead. All request options can be given per call, too. The LLM's responses say in
    ``raw["kvrag"]`` how an answer was made; responses of query engines and chat engines say it in
    ``metadata["kvrag"]`` (streams: once they have ended).

    Parameters
    ----------
    model
        Hub id, local directory, ``.gguf`` file, or a loaded ``PreTrainedModel`` (see
        :meth:`from_pretrained_model`).
    **options
        The fields below, and the fields of LlamaIndex's ``LLM``: ``system_prompt``,
        ``messages_to_prompt``, ``completion_to_prompt``, ``callback_manager`` and so on.

    Raises
    ------
    ConfigError
        If an option does not exist or has an impossible value.

    Examples
    --------
    >>> Settings.llm = KVRagLLM(model="Qwen/Qwen2.5-7B-Instruct", kv_dir="./kv")  # doctest: +SKIP
    >>> Settings.llm.precompute_kv(index)  # doctest: +SKIP
    >>> index.as_query_engine(similarity_top_k=8).query("What changed in 2024?")  # doctest: +SKIP
    """

    model_config = ConfigDict(
        protected_namespaces=("pydantic_model_",), arbitrary_types_allowed=True
    )

    aliases: ClassVar[Mapping[str, str]] = ALIASES

    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="For from_pretrained; also revision.", exclude=True
    )
    max_new_tokens: int | None = Field(
        default=None,
        description=(
            "Upper bound of answer tokens; default: what the context window leaves, up to the "
            "model's own limit or 1,024."
        ),
    )
    stop: str | list[str] | None = Field(
        default=None, description="Strings that end the answer; not part of it."
    )
    stop_token_ids: list[int] | None = Field(
        default=None, description="Tokens that end the answer, besides the model's."
    )
    context_window: int | None = Field(
        default=None, description="At most the model's, which is the default.", gt=0
    )
    is_chat_model: bool | None = Field(
        default=None,
        description="Whether prompts are chat messages; default: if the model has a chat template.",
    )
    generate_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Request options in another place, as other Hugging Face LLMs take them.",
    )

    if not TYPE_CHECKING:  # editors would show **options in place of the fields

        def __init__(self, model: Any = None, **options: Any) -> None:
            super().__init__(**constructor_options({"model": model, **options}, type(self)))
            self.check_call(self._defaults())
            account_for_responses()

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in serialised form."""
        return "KVRagLLM"

    # -- the engine and its KV -------------------------------------------------------------------

    @property
    def engine(self) -> KVRagEngine:
        """Engine that all LLMs of this process with the same options share.

        Its weights load at first use.
        """
        return self.open_engine(prefix=engine_prefix(self.prefix, self))

    def _explained(self, prompt: str | Sequence[ChatMessage], options: Options) -> Explanation:
        formatted = bool(options.pop("formatted"))
        if isinstance(prompt, str):
            engine, asked, given = self._of_prompt(prompt, formatted, options)
        else:
            engine, asked, given, _ = self._of_chat(prompt, options)
        return engine.explain(asked, **{name: given[name] for name in options if name in given})

    def apply_settings(self) -> KVRagLLM:
        """Make this LlamaIndex's default LLM, and count lengths with its tokenizer.

        Returns the LLM.
        """
        Settings.llm = self
        Settings.tokenizer = self._token_ids
        return self

    def _token_ids(self, text: str) -> list[int]:
        return list(_ids_of(self.engine.encoder, text))

    def own_prefix(self, prefix: Any) -> Any:
        """Return a prefix as the engine takes it; ``None``: the engine's own."""
        if prefix is None:
            return None
        return engine_prefix(prefix, self)

    # -- LlamaIndex's LLM interface --------------------------------------------------------------

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, answer length and kind of the model; loads the model."""
        engine = self.engine
        loaded = engine.loaded
        window = loaded.lm.context_window
        if self.context_window and self.context_window > window:
            warnings.warn(
                f"context_window is {self.context_window}, and the model's, which holds, is "
                f"{window}",
                stacklevel=2,
            )
        return LLMMetadata(
            context_window=min(self.context_window or window, window),
            num_output=_num_output(self._defaults(), engine),
            is_chat_model=is_chat(self, loaded.encoder),
            is_function_calling_model=calls_tools(self, loaded.encoder),
            model_name=engine.source.name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe the LLM for observability without loading the model.

        LlamaIndex calls this for every call in an event loop.
        """
        return {
            "class_name": self.class_name(),
            "model_name": short_name(self.model),
            **self._defaults(),
        }

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show a loaded model by its name."""
        yield "model", short_name(self.model)
        yield from super().__repr_args__()

    # -- requests ----------------------------------------------------------------------------------

    def _defaults(self) -> Options:
        return request_options(self.request_options(), self.generate_kwargs)

    def _request(self, overrides: Options) -> tuple[KVRagEngine, Options]:
        options = request_options(self._defaults(), overrides)
        if isinstance(options.get("tools"), (list, tuple)):
            options["tools"] = tool_dicts(options["tools"])
        self.check_call(options)
        return self.engine, options

    def _of_prompt(
        self, prompt: str, formatted: bool, overrides: Options
    ) -> tuple[KVRagEngine, Any, Options]:
        engine, options = self._request(overrides)
        return (
            engine,
            prompt if formatted else completion_text(self, prompt, _encoder(engine, options)),
            options,
        )

    def _of_chat(
        self, messages: Sequence[ChatMessage], overrides: Options
    ) -> tuple[KVRagEngine, Any, Options, Shape[ChatResponse]]:
        shape = partial(as_chat, one_call=overrides.pop("parallel_tool_calls", None) is False)
        engine, options = self._request(overrides)
        shown = self.check_call(options).form.tools
        return (
            engine,
            chat_prompt(
                self,
                messages,
                _encoder(engine, options),
                shown,
                continues=bool(options.get("continue_final_message")),
            ),
            options,
            shape,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        ``formatted=False`` makes it a user message where the model has a chat template.
        """
        engine, text, options = self._of_prompt(prompt, formatted, kwargs)
        return whole(engine.generate(text, **options), as_completion)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Stream the answer to a prompt (see :meth:`complete`).

        The last response holds the accounting.
        """
        engine, text, options = self._of_prompt(prompt, formatted, kwargs)
        return ResponseStream(engine.stream(text, **options), as_completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages."""
        engine, text, options, shape = self._of_chat(messages, kwargs)
        return whole(engine.generate(text, **options), shape)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to chat messages; the last response holds the accounting."""
        engine, text, options, shape = self._of_chat(messages, kwargs)
        return ResponseStream(engine.stream(text, **options), shape)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a prompt without blocking the event loop; cancelling stops the decoding."""
        engine, text, options = await asyncio.to_thread(self._of_prompt, prompt, formatted, kwargs)
        return whole(await engine.agenerate(text, **options), as_completion)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Stream the answer to a prompt without blocking the event loop."""
        engine, text, options = await asyncio.to_thread(self._of_prompt, prompt, formatted, kwargs)
        return AsyncResponseStream(engine.astream(text, **options), as_completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages without blocking the event loop; cancelling stops the decoding."""
        engine, text, options, shape = await asyncio.to_thread(self._of_chat, messages, kwargs)
        return whole(await engine.agenerate(text, **options), shape)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Stream the answer to chat messages without blocking the event loop."""
        engine, text, options, shape = await asyncio.to_thread(self._of_chat, messages, kwargs)
        return AsyncResponseStream(engine.astream(text, **options), shape)


def _encoder(engine: KVRagEngine, options: Options) -> PromptEncoder:
    """Return the encoder that renders the prompts of a call."""
    return engine.encoder.with_variables(options.get("chat_template_kwargs"))


def _num_output(options: Options, engine: KVRagEngine) -> int:
    """Return how many tokens LlamaIndex reserves for an answer when it packs nodes into a prompt.

    A longer answer may use the rest of the context window.
    """
    given = options.get("max_new_tokens")
    if given is None:
        given = getattr(engine.loaded.lm.model.generation_config, "max_new_tokens", None)
    return DEFAULT_NUM_OUTPUTS if given is None else given


# For one question LlamaIndex counts the tokens of the same context four times.
@lru_cache(maxsize=8)
def _ids_of(encoder: PromptEncoder, text: str) -> tuple[int, ...]:
    return encoder.text_ids(text)
