from llama_index.core.base.llms.base import BaseLLM

from llama_index.llms.kvrag import KVRagLLM


def test_class():
    assert BaseLLM.__name__ in [each.__name__ for each in KVRagLLM.__mro__]
