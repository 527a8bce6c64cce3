"""LangChain's standard integration tests: chat model, vector store, retriever."""

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)

from langchain_kvrag import ChatKVRag, KVRagVectorStore


class TestChatKVRag(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _directory(self, tiny_dir):
        self._tiny_dir = tiny_dir

    @property
    def chat_model_class(self):
        return ChatKVRag

    @property
    def chat_model_params(self):
        return {"model": self._tiny_dir, "max_retries": None, "api_key": None}

    @property
    def standard_chat_model_params(self):
        return {**super().standard_chat_model_params, "max_tokens": 6}

    has_tool_calling = has_structured_output = False


class TestKVRagVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tiny_dir):
        return KVRagVectorStore(embedding=self.get_embeddings(), llm=ChatKVRag(model=tiny_dir))


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self):
        store = KVRagVectorStore.from_texts(
            ["foo", "bar", "baz", "boo"], DeterministicFakeEmbedding(size=6)
        )
        return lambda k=2: store.as_retriever(search_kwargs={"k": k})

    @property
    def retriever_query_example(self):
        return "foo"
