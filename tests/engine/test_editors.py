"""Signatures as an editor reads them, from the source and at run time: the names of options, each with a type, and no ``**kwargs``."""

import inspect
from typing import Any

import jedi
import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM

import kvrag
from kvrag.config import SamplingConfig
from langchain_kvrag import ChatKVRag, KVRagLLM
from llama_index.llms.kvrag import KVRagLLM as LlamaIndexLLM

CLASSES = {"langchain_kvrag.ChatKVRag": ChatKVRag, "langchain_kvrag.KVRagLLM": KVRagLLM}
CLASSES["llama_index.llms.kvrag.KVRagLLM"] = LlamaIndexLLM
METHODS = ("precompute_kv", "delete_kv", "sync_kv", "explain")
_OURS = """
kv_dir prefix namespace mode repair store_config temperature top_p seed stop model_kwargs
"""
OURS = set(_OURS.split())


def shown(path: str) -> jedi.api.classes.Signature:
    """What an editor shows behind the opening parenthesis of a call."""
    module, _, name = path.rpartition(".")
    source = f"from {module} import {name}\n{name}("
    (signature,) = jedi.Script(source).get_signatures(2, len(name) + 1)
    return signature


@pytest.mark.parametrize("path", CLASSES)
def test_a_constructor_shows_its_fields_with_their_types(path):
    params = {param.name: param for param in shown(path).params}
    frameworks = {
        *BaseLLM.model_fields,
        *BaseChatModel.model_fields,
        *FunctionCallingLLM.model_fields,
    }
    own = CLASSES[path].model_fields.keys() - frameworks
    assert OURS <= own <= set(params)
    for name in OURS:
        assert ":" in params[name].to_string(), f"{name} has no type"
    assert not [
        name for name, param in params.items() if param.kind == inspect.Parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("path", CLASSES)
def test_a_constructor_has_the_same_names_at_run_time(path):
    params = inspect.signature(CLASSES[path]).parameters
    assert set(CLASSES[path].model_fields) <= set(params)
    assert not [
        name for name, param in params.items() if param.kind == inspect.Parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("path", CLASSES)
def test_a_method_names_its_options_with_their_types(path, name):
    params = inspect.signature(getattr(CLASSES[path], name)).parameters
    untyped = [each for each in params if params[each].annotation is inspect.Parameter.empty]
    assert untyped == ["self"]
    assert not [each for each in params if params[each].kind == inspect.Parameter.VAR_KEYWORD]
    if (
        name != "explain"
    ):  # no option of the function's is missing in the method, and its default is the same
        wanted = dict(inspect.signature(getattr(kvrag, name)).parameters)
        del wanted["llm"], wanted["server"]  # a model has no server
        defaults: dict[str, Any] = {
            each: param.default for each, param in params.items() if each != "self"
        }
        assert defaults == {each: param.default for each, param in wanted.items()}


def test_the_fields_of_sampling_are_those_of_its_config():
    """They are written down twice, for editors."""
    declared = SamplingConfig.__pydantic_fields__
    # Of other types in the adapters.
    names = declared.keys() - {"stop", "stop_token_ids", "max_new_tokens", "logit_bias"}
    for cls in CLASSES.values():
        for name in names & cls.model_fields.keys():
            field = cls.model_fields[name]
            assert (field.default, field.description) == (
                declared[name].default,
                declared[name].description,
            ), name
