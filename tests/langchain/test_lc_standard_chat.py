"""LangChain's own contract for chat models.

The tiny model is random. Where a test asks for an answer that makes sense, the model's own head is made to say the tokens of one
(:func:`kit.scripted`): all that comes after it, the mask of the schema, the parser of calls and the adapter, is what users run.
"""

import json
from pathlib import Path

import pytest
from kit import scripted
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvrag import ChatKVRag

FEW = 6
"""A random model says nothing worth more tokens."""


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


JOKE = json.dumps(
    {"setup": "Why do cats sit on keyboards?", "punchline": "To keep an eye on the mouse."}
)
MAGIC = call("magic_function", input=3)
SCRIPTS = {
    "test_tool_calling": [MAGIC],
    "test_tool_calling_async": [MAGIC],
    "test_tool_choice": [call("get_weather", location="Oslo"), MAGIC],
    "test_tool_calling_with_no_arguments": [call("magic_function_no_args")],
    "test_bind_runnables_as_tools": [call("greeting_generator", answer_style="pirate")],
    "test_unicode_tool_call_integration": [
        call("unicode_customer", customer_name=name, description="a company")
        for name in ("你好啊集团", "こんにちは株式会社")
    ],
    "test_structured_output": [JOKE],
    "test_structured_output_async": [JOKE],
    "test_structured_output_pydantic_2_v1": [JOKE],
    "test_structured_output_optional_param": ['{"setup": "Why?"}', JOKE],
    "test_json_mode": [JOKE],
    "test_agent_loop": [
        f"Let me see. <tool_call>{call('get_weather', location='San Francisco, CA')}</tool_call>",
        "Sun.",
    ],
}
"""What the model says in tests that ask for sense; where a call or a schema is asked for, the mask must let it pass."""


class Contract:
    """What both of LangChain's suites ask of a model; their own standard parameters hold."""

    @pytest.fixture(autouse=True)
    def _directories(self, tiny_dir, other_tiny_dir, monkeypatch):
        self._tiny_dir, self._other = (
            tiny_dir,
            Path(other_tiny_dir).name,
        )  # results name a path by its last part
        monkeypatch.chdir(Path(other_tiny_dir).parent)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVRag

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": self._tiny_dir}

    # has_tool_calling, has_tool_choice and has_structured_output are True without a word: they look for the methods.
    supports_json_mode = True
    # kvrag reads text only, and refuses other blocks by name.
    supports_image_inputs = supports_image_urls = supports_image_tool_message = False
    supports_pdf_inputs = supports_pdf_tool_message = supports_audio_inputs = (
        supports_video_inputs
    ) = False
    supports_anthropic_inputs = False  # its test sends images, too
    enable_vcr_tests = False  # they record what services answer, and none is asked


class TestChatKVRagUnit(Contract, ChatModelUnitTests):
    pass


class TestChatKVRagIntegration(Contract, ChatModelIntegrationTests):
    _max_tokens = FEW

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {**super().chat_model_params, "max_tokens": self._max_tokens}

    @pytest.fixture(autouse=True)
    def _script(self, request, monkeypatch):
        if answers := SCRIPTS.get(request.node.originalname):
            self._max_tokens = 150
            scripted(monkeypatch, ChatKVRag(model=self._tiny_dir).engine, *answers)

    @property
    def model_override_value(self) -> str:
        return self._other

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatKVRag(model=self._tiny_dir, max_tokens=FEW, kv_dir=None, namespace="cache-read")
        text = "The keeper brings the box to the table by the window. " * 5
        llm.precompute_kv([text])
        prompt = f"{text}\n\nWho brings the box?"
        if not stream:
            return llm.invoke(prompt)
        full = None
        for chunk in llm.stream(prompt):
            full = chunk if full is None else full + chunk
        assert full is not None
        assert full.usage_metadata is not None
        assert full.usage_metadata["input_token_details"]["cache_read"] > 0
        return full
