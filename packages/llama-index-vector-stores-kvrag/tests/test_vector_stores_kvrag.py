from llama_index.core.vector_stores.types import BasePydanticVectorStore

from llama_index.vector_stores.kvrag import KVRagVectorStore


def test_class():
    assert BasePydanticVectorStore.__name__ in [each.__name__ for each in KVRagVectorStore.__mro__]
