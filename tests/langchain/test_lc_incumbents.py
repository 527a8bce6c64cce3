"""What users of langchain-huggingface pass is understood, or refused with a sentence; nothing is dropped."""

import inspect
import warnings
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM
from transformers import pipeline

from kvrag import ConfigError
from langchain_kvrag import ChatKVRag, KVRagLLM

huggingface = pytest.importorskip("langchain_huggingface")
from transformers.pipelines.text_generation import TextGenerationPipeline  # noqa: E402


@pytest.fixture(scope="module")
def pipe(tiny_dir):
    return pipeline(
        "text-generation", tiny_dir, max_new_tokens=3, do_sample=True, return_full_text=False
    )


UNDERSTOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    # The value that is given, and the fields that say the same.
    "task": ("text-generation", {}),
    "backend": ("default", {}),
    "device": (-1, {"device": "cpu"}),
    "device_map": ("cpu", {"device": "cpu"}),
    "batch_size": (4, {}),
    "model_kwargs": (
        {"attn_implementation": "sdpa"},
        {"model_kwargs": {"attn_implementation": "sdpa"}},
    ),
    "pipeline_kwargs": ({"max_new_tokens": 7, "top_k": 3}, {"max_tokens": 7, "top_k": 3}),
    "generate_kwargs": (
        {"max_new_tokens": 7, "do_sample": False},
        {"max_tokens": 7, "temperature": 0.0},
    ),
    "temperature": (0.5, {"temperature": 0.5}),
    "stop": ("x", {"stop": ["x"]}),
    "stop_sequences": (["x"], {"stop": ["x"]}),
    "stop_sequence": ("x", {"stop": ["x"]}),
    "stop_strings": (["x"], {"stop": ["x"]}),
    "do_sample": (True, {"temperature": 1.0}),
    "max_tokens": (9, {"max_tokens": 9}),
    "max_new_tokens": (9, {"max_tokens": 9}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (5, {"top_k": 5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "logit_bias": ({5: 1.0}, {"logit_bias": {5: 1.0}}),
    "seed": (7, {"seed": 7}),
    "torch_dtype": ("float32", {"dtype": "float32"}),
    "streaming": (True, {"streaming": True}),
    "stream_usage": (True, {}),
    "return_full_text": (False, {}),
    "n": (1, {}),
    "num_beams": (1, {}),
    "use_cache": (True, {}),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "task": ("summarization", "only causal language models"),
    "backend": ("openvino", "run by torch"),
    "batch_size": (16, "answered together"),
    "logprobs": (True, r"engine.generate\(logprobs"),
    "top_logprobs": (3, r"engine.generate\(logprobs"),
    "n": (2, "one answer"),
    "num_beams": (4, "one answer"),
    "num_return_sequences": (2, "one answer"),
    "max_length": (100, "pass max_tokens"),
    "return_full_text": (True, "never hold the prompt"),
    "skip_prompt": (False, "never hold the prompt"),
    "stream_usage": (False, "always says"),
    "use_cache": (False, "always decoded"),
    "llm": (object(), "pass a HuggingFacePipeline"),
}
ONLY_IN_PIPELINES = [
    "return_tensors",
    "return_text",
    "return_type",
    "clean_up_tokenization_spaces",
    "prefix",
    "truncation",
]
ONLY_IN_PIPELINES += [
    "handle_long_generation",
    "continue_final_message",
    "skip_special_tokens",
    "tokenizer_encode_kwargs",
]
ONLY_IN_PIPELINES += ["tools", "documents", "generation_config", "typical_p", "min_p"]
BASES = {"llm", "pipeline", "tokenizer", "model_id", "kwargs", "generate_kwargs", "self"}
BASES |= {*BaseChatModel.model_fields, *BaseLLM.model_fields}
"""What has a test of its own below, or is a field of LangChain's base classes."""


def test_every_option_of_the_incumbents_is_looked_at():
    signature = inspect.signature(huggingface.HuggingFacePipeline.from_model_id).parameters
    theirs = {
        *huggingface.HuggingFacePipeline.model_fields,
        *huggingface.ChatHuggingFace.model_fields,
        *signature,
    }
    assert theirs <= {*UNDERSTOOD, *REFUSED, *BASES}
    generation = set(inspect.signature(TextGenerationPipeline._sanitize_parameters).parameters)
    assert generation <= {*UNDERSTOOD, *REFUSED, *BASES, *ONLY_IN_PIPELINES}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood(tiny_dir, name):
    given, expected = UNDERSTOOD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (
            ChatKVRag(model_id=tiny_dir, **{name: given}),
            KVRagLLM.from_model_id(tiny_dir, **{name: given}),
        ):
            plain = type(made)(model=tiny_dir)
            assert made.model_dump() == {**plain.model_dump(), **expected}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tiny_dir, name):
    given, remedy = REFUSED[name]
    with pytest.raises(ConfigError, match=remedy):
        ChatKVRag(model_id=tiny_dir, **{name: given})


@pytest.mark.parametrize("name", ONLY_IN_PIPELINES)
def test_what_only_a_pipeline_does_is_refused(tiny_dir, name):
    for made in ("pipeline_kwargs", "generate_kwargs"):
        with pytest.raises(ConfigError, match=f"in {made} has no option '{name}'"):
            ChatKVRag(model=tiny_dir, **{made: {name: 1}})


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 3, "max_new_tokens": 4},
        {"model_id": "other"},
        {"temperature": 0.5, "pipeline_kwargs": {"temperature": 0.7}},
        {"pipeline_kwargs": {"top_k": 3}, "generate_kwargs": {"top_k": 4}},
        {"stop": ["a"], "stop_sequences": ["b"]},
        {"do_sample": False, "temperature": 0.7},
        {"device": "cpu", "device_map": "cpu"},
    ],
)
def test_what_is_given_twice_is_refused(tiny_dir, options):
    with pytest.raises(ConfigError, match="pass one of them"):
        ChatKVRag(model=tiny_dir, **options)


def test_what_is_given_twice_and_says_the_same_is_fine(tiny_dir):
    made = ChatKVRag(
        model=tiny_dir, model_id=tiny_dir, temperature=0.5, pipeline_kwargs={"temperature": 0.5}
    )
    assert (made.model, made.temperature) == (tiny_dir, 0.5)


@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_a_pipeline_is_taken_with_what_it_was_told(pipe, cls):
    wrapped = huggingface.HuggingFacePipeline(pipeline=pipe)
    for made in (
        cls(pipeline=pipe),
        cls(llm=wrapped),
        cls(llm=huggingface.ChatHuggingFace(llm=wrapped).llm),
    ):
        assert made.engine.loaded.lm.model is pipe.model
        assert (made.max_tokens, made.temperature) == (3, 1.0)
        assert cls(pipeline=pipe, model_id=None, seed=1).invoke("Who?")
    with pytest.raises(
        ConfigError, match="max_tokens twice, as max_tokens and as max_new_tokens, of the pipeline"
    ):
        cls(max_tokens=5, pipeline=pipe)


def test_a_pipeline_that_repeats_prompts_is_refused(tiny_dir, pipe):
    repeating = pipeline(
        "text-generation", pipe.model, tokenizer=pipe.tokenizer, return_full_text=True
    )
    with pytest.raises(ConfigError, match="return_full_text=True: answers never hold the prompt"):
        KVRagLLM(llm=huggingface.HuggingFacePipeline(pipeline=repeating))
    padded = pipeline("text-generation", pipe.model, tokenizer=pipe.tokenizer, prefix="Always so: ")
    with pytest.raises(ConfigError, match="of the pipeline has no option 'prefix"):
        KVRagLLM(pipeline=padded)


def test_a_call_is_spelt_as_theirs(tiny_dir):
    llm = KVRagLLM(model=tiny_dir, max_tokens=8)
    expected = llm.invoke("Tell me.", max_tokens=2)
    assert (
        llm.bind(skip_prompt=True, pipeline_kwargs={"max_new_tokens": 2}).invoke("Tell me.")
        == expected
    )
    assert (
        llm.invoke("Tell me.", generate_kwargs={"max_new_tokens": 2, "do_sample": False})
        == expected
    )
    with pytest.raises(
        ConfigError, match="a call takes no skip_prompt=False: answers never hold the prompt"
    ):
        llm.invoke("Tell me.", skip_prompt=False)
    with pytest.raises(ConfigError, match="in pipeline_kwargs has no option 'typical_p'"):
        llm.invoke("Tell me.", pipeline_kwargs={"typical_p": 0.5})
