"""Tools and objects of a given class: LlamaIndex's interface of a function-calling LLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import PydanticProgramMode
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import DictSchema, ModelSchema, SetSchema

from kvrag import InputError
from llama_index.llms.kvrag.options import Options
from llama_index.llms.kvrag.prompts import tool_dicts
from llama_index.llms.kvrag.serialised import SerialisedLLM


class ToolCallingLLM(SerialisedLLM):
    """Calls tools and predicts objects.

    The chat template shows tools at the head of the prompt; the schema of an object is shown at its
    end. Required calls, and objects, are decoded under their schema and can't be malformed (extra
    ``structured``).
    """

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> Options:
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None) or ("required" if tool_required else None)
        return {
            "messages": messages,
            "tools": tool_dicts(tools) or None,
            "tool_choice": choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of an answer (of a stream: of its last response).

        Raises :class:`~kvrag.InputError` if there is no call but a call is required.
        """
        calls = [each for each in response.message.blocks if isinstance(each, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise InputError(
                "the answer calls no tool; pass tool_required=True, or raise max_new_tokens: "
                f"{response.message.content!r}"
            )
        return [
            ToolSelection.model_validate(
                {
                    "tool_id": c.tool_call_id or "",
                    "tool_name": c.tool_name,
                    "tool_kwargs": c.tool_kwargs,
                }
            )
            for c in calls
        ]

    # -- objects: pydantic models ----------------------------------------------------------------

    def structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        """Predict an object.

        Raises :class:`~kvrag.InputError` if ``max_new_tokens`` cuts off the answer's JSON.
        """
        program, options = self._program(output_cls, prompt, llm_kwargs)
        return program(llm_kwargs=options, **prompt_args)

    async def astructured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        """Predict an object without blocking the event loop (see :meth:`structured_predict`)."""
        program, options = await asyncio.to_thread(self._program, output_cls, prompt, llm_kwargs)
        return await program.acall(llm_kwargs=options, **prompt_args)

    def _structured_stream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        program, options = self._program(output_cls, prompt, llm_kwargs)
        return program.stream_call(llm_kwargs=options, **prompt_args)

    async def _structured_astream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **prompt_args: Any
    ) -> Any:
        program, options = await asyncio.to_thread(self._program, output_cls, prompt, llm_kwargs)
        return await program.astream_call(llm_kwargs=options, **prompt_args)

    def _program(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: Options | None,
    ) -> tuple[Any, Options]:
        """Return LlamaIndex's program and the LLM's options.

        The options hold the response format, unless the user chose a program.
        """
        self.metadata  # noqa: B018 - loads the model; the program would in an event loop
        options = llm_kwargs or {}
        if self.pydantic_program_mode != PydanticProgramMode.DEFAULT:
            return get_program_for_llm(
                output_cls, prompt, self, self.pydantic_program_mode
            ), options
        form = {
            "type": "json_schema",
            "json_schema": {
                "name": output_cls.__name__,
                "schema": output_cls.model_json_schema(schema_generator=_Closed),
            },
        }
        # A copy: the program puts its parser into the prompt.
        program = LLMTextCompletionProgram(
            _SchemaAtTheEnd(output_cls), output_cls, prompt.model_copy(), self
        )
        return program, {**options, "response_format": form}


class _Closed(GenerateJsonSchema):
    """Allows only the properties of the class; a small model would add further properties."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return {"additionalProperties": False, **super().model_schema(schema)}

    def dict_schema(self, schema: DictSchema) -> JsonSchemaValue:
        """Allow only keys that match the dict's pattern, if it has a pattern."""
        made = super().dict_schema(schema)
        if "patternProperties" in made:
            return {"additionalProperties": False, **made}
        return made

    def set_schema(self, schema: SetSchema) -> JsonSchemaValue:
        """Allow duplicate items: a set drops them, and decoding can't prevent them."""
        made = super().set_schema(schema)
        del made["uniqueItems"]
        return made

    frozenset_schema: Any = set_schema


class _SchemaAtTheEnd(PydanticOutputParser[Any]):
    """Shows the schema behind the prompt.

    LlamaIndex's own parser shows it in a system message, where it would change the prefix of
    chunks.
    """

    def format(self, query: str) -> str:
        return query + self.get_format_string(escape_json=False)

    def format_messages(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        *before, last = messages
        return [
            *before,
            last.model_copy(update={"blocks": [*last.blocks, TextBlock(text=self.format(""))]}),
        ]

    def parse(self, text: str) -> Any:
        try:
            return self.output_cls.model_validate_json(text)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise
            raise InputError(
                f"the answer ends before its JSON does; raise max_new_tokens: {text!r}"
            ) from None
