"""LangChain's standard unit tests."""

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvrag import ChatKVRag


class TestChatKVRag(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _directory(self, tiny_dir):
        self._tiny_dir = tiny_dir

    @property
    def chat_model_class(self):
        return ChatKVRag

    @property
    def chat_model_params(self):
        return {
            "model": self._tiny_dir,
            "max_retries": None,
            "api_key": None,
        }  # no service is asked

    has_tool_calling = has_structured_output = False  # of which a random model knows nothing
