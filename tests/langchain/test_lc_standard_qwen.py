"""LangChain's own contract for chat models, as it is, with a real model that can call tools: nothing is scripted.

It runs where ``KVRAG_EVAL_MODELS`` names a directory that holds ``qwen2.5-coder-1.5b`` (8 GB of memory, an hour on two cores).
"""

import os
from pathlib import Path

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_kvrag import ChatKVRag

MODEL = Path(os.environ.get("KVRAG_EVAL_MODELS", "."), "qwen2.5-coder-1.5b")
pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(),
        reason="no qwen2.5-coder-1.5b in the directory that KVRAG_EVAL_MODELS names",
    ),
]


class Qwen:
    """What both of LangChain's suites ask of a model; the suites' own standard parameters hold."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatKVRag

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": str(MODEL)}

    supports_json_mode = True
    # kvrag reads text only, and refuses other blocks by name.
    supports_image_inputs = supports_image_urls = supports_image_tool_message = False
    supports_pdf_inputs = supports_pdf_tool_message = supports_audio_inputs = (
        supports_video_inputs
    ) = False
    supports_anthropic_inputs = False  # its test sends images, too
    enable_vcr_tests = False  # they record what services answer, and none is asked


class TestQwenUnit(Qwen, ChatModelUnitTests):
    pass


class TestQwenIntegration(Qwen, ChatModelIntegrationTests):
    @property
    def model_override_value(self) -> str:
        return MODEL.name

    @pytest.fixture(autouse=True)
    def _names_are_paths(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(MODEL.parent)  # results name a path by its last part
