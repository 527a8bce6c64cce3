"""LangChain's own contract for chat models."""

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvrag import ChatKVRag

FEW = 6
"""A random model says nothing worth more tokens."""


class Contract:
    """What both of LangChain's suites ask of a model."""

    @pytest.fixture(autouse=True)
    def _directories(self, tiny_dir, other_tiny_dir):
        self._tiny_dir, self._other = tiny_dir, other_tiny_dir

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVRag

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": self._tiny_dir, "max_retries": None, "api_key": None}  # which are refused

    has_tool_calling = has_structured_output = False


class TestChatKVRagUnit(Contract, ChatModelUnitTests):
    pass


class TestChatKVRagIntegration(Contract, ChatModelIntegrationTests):
    @property
    def standard_chat_model_params(self) -> dict[str, object]:
        return {**super().standard_chat_model_params, "max_tokens": FEW}

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
