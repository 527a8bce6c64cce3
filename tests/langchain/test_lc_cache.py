"""LangChain's response cache: every option that changes an answer is in the key."""

import copy

import pytest
import torch
from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import HumanMessage
from langchain_core.outputs import Generation
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrag import RepairConfig, StoreConfig
from langchain_kvrag import ChatKVRag, KVRagLLM
from langchain_kvrag._cache import LEFT_OUT

CLASSES = pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])


class Keys(BaseCache):
    """Records the keys that are asked for, and knows every answer."""

    def __init__(self):
        self.asked = []

    def lookup(self, prompt, llm_string):
        self.asked.append(llm_string)
        return [Generation(text="kept")]

    def update(self, prompt, llm_string, return_val):
        raise AssertionError

    def clear(self, **kwargs):
        raise AssertionError


def key(llm, *, ask="hi", **options):
    """Return the key of a call; ``None``: the cache was not asked."""
    llm = llm.model_copy(update={"cache": (keys := Keys())})
    llm.invoke(ask, **options)
    return (*keys.asked, None)[0]


OTHER = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "min_new_tokens": 1,
    "seed": 3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "prefix": "Other",
    "context": None,
    "logit_bias": {5: 1.0},
    "namespace": "other",
    "repair": RepairConfig(recompute_ratio=0.5),
    "store_config": StoreConfig(min_chunk_tokens=8),
    "mode": "full",
    "max_context": "slide",
    "chat_template_kwargs": {"date": "today"},
    "dtype": "float64",
    "device": "cpu",
    "prove": "off",
    "model_kwargs": {"attn_implementation": "eager"},
    "revision": "main",
    "max_tokens": 3,
    "stop": ["x"],
    "output_version": "v1",
}
"""A value of every field that changes answers, besides paths."""


@CLASSES
def test_every_option_is_in_the_key(options, cls, other_tiny_dir, tmp_path, tiny_dir):
    """A new field needs a value in ``OTHER``, or its name in ``LEFT_OUT``."""
    other = copy.deepcopy(AutoTokenizer.from_pretrained(tiny_dir))
    other.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert not OTHER.keys() & LEFT_OUT
    fields = cls.model_fields.keys() - LEFT_OUT
    values = {name: value for name, value in OTHER.items() if name in fields} | {
        "model": other_tiny_dir,
        "kv_dir": str(tmp_path / "other"),
        "tokenizer": other,
    }
    assert values.keys() == fields
    keys = [key(cls(**options))]
    keys += [key(cls(**{**options, name: value})) for name, value in values.items()]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(cls(**options)) == keys[0]
    shown = [str(cls(**{**options, n: v})._identifying_params) for n, v in values.items()]
    assert len({str(cls(**options)._identifying_params), *shown}) == len(keys)


@CLASSES
def test_every_option_of_a_call_is_in_the_key(options, cls):
    calls = [{}, {"max_tokens": 2}, {"max_tokens": 6}, {"stop": ["b"]}, {"seed": 4, "top_k": 2}]
    calls += [{"namespace": "tenant"}, {"mode": "full"}, {"repair": "careful"}]
    calls += [{"logit_bias": {4: 1.0}}, {"logit_bias": {40: 1.0}}, {"new_option": 1}]
    llm = cls(**options)
    assert len({key(llm, **call) for call in calls}) == len(calls)


def test_tools_and_schemas_are_in_the_key(chat):
    def look(word: str) -> str:
        """Look a word up."""

    def find(word: str) -> str:
        """Find a word."""

    keys = Keys()
    chat = chat.model_copy(update={"cache": keys})
    schema = {"title": "A", "type": "object", "properties": {"a": {"type": "integer"}}}
    for asked in (
        chat,
        chat.bind_tools([look]),
        chat.bind_tools([find]),
        chat.bind_tools([look], parallel_tool_calls=False),
        chat.with_structured_output(schema, include_raw=True),
        chat.with_structured_output({**schema, "properties": {}}, include_raw=True),
    ):
        asked.invoke("hi")
    assert len(set(keys.asked)) == 6


@CLASSES
def test_changes_of_the_loaded_model_are_in_the_key(cls, tiny_dir, tmp_path):
    def loaded():
        return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)

    def made(model):
        return cls.from_pretrained_model(model, tokenizer, kv_dir=tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    model = loaded()
    llm = made(model)
    keys = [key(llm)]
    assert key(made(loaded())) == keys[0], "the same weights"
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    keys.append(key(llm))
    model.generation_config.eos_token_id = [7]
    keys.append(key(llm))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}!{% endfor %}"
    keys.append(key(llm))
    tokenizer.add_tokens(["qqqq"])
    keys.append(key(llm))
    other = loaded()
    with torch.no_grad():
        other.lm_head.weight[5] += 1
    keys.append(key(made(other)))
    assert len(set(keys)) == len(keys)


@CLASSES
def test_another_model_of_a_call_is_in_the_key(options, cls, other_tiny_dir):
    llm = cls(**options)
    found = {key(llm, model=name) for name in (other_tiny_dir, options["model"])}
    assert found == {key(llm), key(llm, model_name=other_tiny_dir)}
    assert len(found) == 2


@CLASSES
async def test_answers_are_kept_and_told_apart(options, cls):
    """Through the whole way: in both kinds of calls, in a cache of its own or the global one."""
    text = lambda answer: getattr(answer, "content", answer)  # noqa: E731
    plain = cls(**options)
    whole = text(plain.invoke("hi"))
    right = {n: text(plain.invoke("hi", max_tokens=n)) for n in (2, 5)}
    own, shared = InMemoryCache(), InMemoryCache()
    set_llm_cache(shared)
    try:
        for llm, cache in ((cls(**options, cache=own), own), (cls(**options), shared)):
            for _ in range(2):
                got = {n: text(llm.invoke("hi", max_tokens=n)) for n in (2, 5)}
                assert got == right == {n: text(await llm.ainvoke("hi", max_tokens=n)) for n in got}
            assert text(await llm.ainvoke("hi")) == whole
            assert len(cache._cache) == 3
        cut = cls(**options, stop=[whole[2]], cache=own)
        assert text(cut.invoke("hi")) == text(plain.invoke("hi", stop=[whole[2]])) != whole
        assert len(own._cache) == 4
    finally:
        set_llm_cache(None)


@CLASSES
def test_an_option_of_unknown_content_is_not_cached(options, cls):
    """The repr of such an object may be its address, which another object gets later."""
    llm = cls(**options, chat_template_kwargs={"date": lambda: "today"})
    with pytest.warns(UserWarning, match="not cached: it has an object of type function, whose"):
        assert key(llm) is None
    assert repr(llm.cache) == "None"


def test_objects_in_messages_are_told_apart_or_not_cached(chat):
    ask = [HumanMessage([{"type": "text", "text": "hi", "cache_control": object()}])]
    with pytest.warns(UserWarning, match="not cached: it has an object of type object"):
        assert key(chat, ask=ask) is None


def test_traces_hold_no_secrets(options):
    llm = ChatKVRag(**options, model_kwargs={"token": "hf_secret"})
    assert "hf_secret" not in str(llm._identifying_params) + llm._get_llm_string()
