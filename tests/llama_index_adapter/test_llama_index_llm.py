"""The contract of an LLM in LlamaIndex: there is no published suite for it, so this is ours."""

import asyncio
import copy
import json
import pickle
from typing import Any

import pytest
import torch
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index_kit import record_prompts, settings
from transformers import AutoTokenizer

import kvrag.engine
from kvrag import ConfigError, InputError, KVRagEngine, RepairConfig, StoreConfig
from kvrag.testing.models import tiny_model
from llama_index.llms.kvrag import KVPrecompute, KVRagLLM

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")
PROMPT = "Who keeps the copper ledger in the harbour?"
MESSAGES = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content=PROMPT),
]
METHODS = [
    f"{a}{stream}{kind}"
    for a in ("", "a")
    for stream in ("", "stream_")
    for kind in ("complete", "chat")
]


def run(llm: KVRagLLM, method: str, **kwargs: Any) -> list[Any]:
    """Call one of the eight methods and return all its responses."""
    argument = MESSAGES if method.endswith("chat") else PROMPT
    if not method.startswith("a"):
        out = getattr(llm, method)(argument, **kwargs)
        return list(out) if "stream" in method else [out]

    async def go() -> list[Any]:
        out = await getattr(llm, method)(argument, **kwargs)
        return [x async for x in out] if "stream" in method else [out]

    return asyncio.run(go())


def text_of(response: Any) -> str:
    return response.message.content if hasattr(response, "message") else response.text


# -- construction ------------------------------------------------------------------------------------------------------


def test_constructing_and_describing_load_nothing(make, monkeypatch):
    monkeypatch.setattr(kvrag.engine, "load", lambda source: pytest.fail("weights were loaded"))
    llm = make()
    assert isinstance(llm.engine, KVRagEngine)
    with settings(llm):
        assert Settings.llm is llm
    json.dumps(llm.to_payload())
    repr(llm)


def test_instances_with_the_same_options_share_an_engine(make):
    assert make().engine is make().engine
    assert make().engine is not make(namespace="other").engine
    assert make().engine is not make(system_prompt="Be brief.").engine


@pytest.mark.parametrize("name", ["model", "model_name", "model_id"])
def test_the_model_has_the_names_that_other_llms_use(tiny_dir, name):
    assert KVRagLLM(**{name: tiny_dir}).model == tiny_dir


def test_options_of_services_that_ask_for_nothing_in_process_are_taken(make):
    llm = make(
        max_retries=3,
        api_key="secret",
        reuse_client=True,
        default_headers={},
        timeout=None,
        api_base=None,
    )
    assert llm.to_dict() == make().to_dict()
    assert "secret" not in f"{llm!r} {llm.to_dict()}"
    assert make(additional_kwargs={"top_k": 3}, generate_kwargs={"top_p": 0.5}).generate_kwargs == {
        "top_p": 0.5,
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "x", "timeout": 60.0}, r"takes no timeout: use asyncio.wait_for\(llm.acomplete"),
        ({"model": "x", "additional_kwargs": {"max_token": 3}}, "max_token"),
        ({}, "no model"),
        ({"model": "x", "model_name": "y"}, "given twice"),
    ],
)
def test_impossible_options_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        KVRagLLM(**options)


def test_a_loaded_model_is_taken(tokenizer):
    llm = KVRagLLM.from_pretrained_model(tiny_model(), tokenizer, max_new_tokens=3)
    assert llm.complete(PROMPT).raw["usage"]["completion_tokens"] <= 3
    json.dumps(llm.to_dict(), default=str)
    assert len(repr(llm)) < 1500
    llm.engine.close()


def test_the_serialised_form_makes_the_same_llm(make):
    llm = make(
        top_p=0.5,
        repair=RepairConfig(recompute_ratio=0.5),
        stop=["x"],
        model_kwargs={"revision": "main"},
        prefix="Notes:",
        dtype=torch.float32,
    )
    again = KVRagLLM.from_dict(json.loads(llm.to_json()))
    assert again.engine is llm.engine
    assert (again.top_p, again.stop, again.repair) == (0.5, ["x"], llm.repair)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefix": PromptTemplate("Notes: {context_str}")},
            "pass its text, which is llm.engine.prefix_text",
        ),
        ({"model_kwargs": {"token": "secret"}}, "'token' in model_kwargs"),
        (
            {"model_kwargs": {"quantization_config": object()}},
            "'quantization_config' in model_kwargs",
        ),
    ],
)
def test_what_would_make_another_llm_is_not_serialised(make, options, message):
    llm = make(**options)
    with pytest.raises(ConfigError, match=message):
        llm.to_json()
    json.dumps(llm.to_payload())


def test_the_stores_config_is_a_field_and_survives_serialising(make, monkeypatch):
    monkeypatch.setenv("KVRAG_TEST_KEY", "ab" * 32)
    config = StoreConfig(ram_bytes=5 * 2**20, encryption_key="env:KVRAG_TEST_KEY", kv_dtype="int8")
    llm = make(store_config=config)
    assert llm.engine.store_config is llm.store_config is config
    again = KVRagLLM.from_dict(json.loads(llm.to_json()))
    assert again.store_config == config
    assert again.engine is llm.engine
    assert pickle.loads(pickle.dumps(llm)).store_config == config
    assert copy.deepcopy(llm).engine is llm.engine
    assert make().to_dict()["store_config"] is None


def test_the_stores_config_may_stand_among_the_models_options_but_not_twice(make):
    config = StoreConfig(ram_bytes=5)
    llm = make(model_kwargs={"store_config": config})
    assert llm.store_config is llm.engine.store_config is config
    assert KVRagLLM.from_dict(json.loads(llm.to_json())).store_config == config
    with pytest.raises(ConfigError, match="store_config was given twice"):
        make(store_config=config, model_kwargs={"store_config": config})


@pytest.mark.parametrize("name", ["encryption_key", "on_event"])
def test_a_config_with_a_function_is_not_left_out_of_a_copy(make, name):
    """LlamaIndex leaves out what it can't pickle: the copy would store plain."""
    llm = make(store_config=StoreConfig(**{name: lambda *_: b"k" * 32}))
    for form in (KVRagLLM.to_json, KVRagLLM.to_dict, pickle.dumps):
        with pytest.raises(ConfigError, match=f"function for {name}"):
            form(llm)
    with pytest.raises(Exception, match=f"function for {name}"):
        llm.model_dump()
    assert copy.deepcopy(llm).store_config is llm.store_config
    assert llm.model_copy().store_config is llm.store_config
    llm.to_payload()
    repr(llm)
    KVPrecompute(llm).to_dict()  # as a pipeline with a cache does
    KVRagLLM(llm.model, store_config=None)


def test_it_has_a_json_schema():
    assert "store_config" in KVRagLLM.model_json_schema()["properties"]
    assert KVRagLLM.model_json_schema(mode="serialization")["type"] == "object"


# -- metadata ----------------------------------------------------------------------------------------------------------


def test_metadata_comes_from_the_model(make, tiny_dir):
    metadata = make(max_new_tokens=None).metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 256)
    assert metadata.is_chat_model
    assert metadata.model_name == tiny_dir
    assert make(context_window=1000).metadata.context_window == 1000
    assert make(generate_kwargs={"max_new_tokens": 9}).metadata.num_output == 9


def test_the_generation_config_decides_the_answer_length(tokenizer):
    model = tiny_model()
    model.generation_config.max_new_tokens = 5
    llm = KVRagLLM.from_pretrained_model(model, tokenizer)
    assert llm.metadata.num_output == 5
    assert llm.complete(PROMPT).raw["usage"]["completion_tokens"] <= 5
    llm.engine.close()


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if "stream" in m])
def test_streams_carry_the_text_so_far_and_what_is_new(llm, method):
    responses = run(llm, method)
    assert len(responses) > 2
    so_far = ""
    for response in responses:
        so_far += response.delta
        assert text_of(response) == so_far
    assert all(response.raw is None for response in responses[:-1])


@pytest.mark.parametrize("method", METHODS)
def test_raw_is_a_small_dict_with_usage_and_accounting(llm, method):
    response = run(llm, method)[-1]
    usage, accounting = response.raw["usage"], response.raw["kvrag"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 1 <= usage["completion_tokens"] <= 6
    parts = ("cached_tokens", "repaired_tokens", "computed_tokens")
    assert sum(accounting[part] for part in parts) == usage["prompt_tokens"]
    assert accounting["exactness"] == "full"
    assert accounting["kv_reuse_ratio"] == 0
    assert accounting["ttft_ms"] > 0
    assert accounting["timings_ms"]
    assert "no stored KV" in accounting["fallback_reason"]
    assert response.additional_kwargs == usage
    if hasattr(response, "message"):
        assert response.message.additional_kwargs == {}
    json.dumps(response.raw)


@pytest.mark.parametrize("method", METHODS)
def test_the_token_counter_counts_right(make, method):
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 1000)
    llm = make(callback_manager=CallbackManager([counter]))
    usage = run(llm, method)[-1].raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_do_sample_of_transformers_is_a_temperature(make):
    greedy = text_of(make().complete(PROMPT))
    assert (
        text_of(make(temperature=5.0, generate_kwargs={"do_sample": False}).complete(PROMPT))
        == greedy
    )
    assert make(generate_kwargs={"do_sample": True})._defaults()["temperature"] == 1.0
    assert (
        make(generate_kwargs={"do_sample": True, "temperature": 0.5})._defaults()["temperature"]
        == 0.5
    )


# -- what the model reads ----------------------------------------------------------------------------------------------


def test_a_raw_prompt_is_one_user_message(llm, monkeypatch):
    seen = record_prompts(monkeypatch)
    llm.complete(PROMPT)
    list(llm.stream_complete(PROMPT))
    llm.chat([ChatMessage(role="user", content=PROMPT)])
    assert len(set(seen)) == 1
    assert seen[0] == f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


def test_a_formatted_prompt_stays_as_it_is(llm, monkeypatch):
    seen = record_prompts(monkeypatch)
    llm.complete(PROMPT, formatted=True)
    assert seen == [PROMPT]


def test_bos_stands_exactly_once(llm):
    plain = llm.complete("Hello there", formatted=True).raw["usage"]["prompt_tokens"]
    assert llm.complete("<s>Hello there", formatted=True).raw["usage"]["prompt_tokens"] == plain
    assert llm.engine.prefill("<s>Hello there").prompt_ids.count(1) == 1
    assert llm.engine.prefill("Hello there").prompt_ids.count(1) == 1


def test_the_system_prompt_is_said_once(make, monkeypatch):
    seen = record_prompts(monkeypatch)
    llm = make(system_prompt="You are a keeper.")
    llm.complete(PROMPT)
    llm.predict(PromptTemplate("{question}"), question=PROMPT)
    assert seen[0] == seen[1]
    assert seen[0].startswith("<|im_start|>system\nYou are a keeper.<|im_end|>\n<|im_start|>user\n")


def test_several_system_messages_are_joined(llm, monkeypatch):
    seen = record_prompts(monkeypatch)
    llm.chat(
        [
            ChatMessage(role="developer", content="One."),
            *MESSAGES,
            ChatMessage(role="chatbot", content="Well"),
        ]
    )
    assert seen[0].startswith("<|im_start|>system\nOne.\n\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert "<|im_start|>assistant\nWell<|im_end|>" in seen[0]


def test_a_template_without_system_messages_gets_it_in_the_first_user_message(
    tiny_dir, make, monkeypatch
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    seen = record_prompts(monkeypatch)
    make(tokenizer=tokenizer).chat(MESSAGES)
    assert seen[0].startswith(f"<|im_start|>user\nBe brief.\n\n{PROMPT}<|im_end|>\n")


def test_a_model_without_chat_template_reads_plain_lines(tiny_dir, make, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    tokenizer.chat_template = None
    llm = make(tokenizer=tokenizer)
    assert not llm.metadata.is_chat_model
    seen = record_prompts(monkeypatch)
    llm.complete(PROMPT)
    llm.chat(MESSAGES)
    assert seen == [PROMPT, f"system: Be brief.\nuser: {PROMPT}\nassistant: "]


def test_images_are_refused(llm):
    message = ChatMessage(
        role="user", blocks=[TextBlock(text="See:"), ImageBlock(image=b"\x89PNG\r\n")]
    )
    with pytest.raises(InputError, match="holds a image block; kvrag reads text only"):
        llm.chat([message])


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_take_the_llm_and_its_tokenizer(llm, tokenizer):
    with settings(llm):
        assert Settings.llm is llm
        assert (
            Settings.tokenizer("a copper lamp")
            == tokenizer("a copper lamp", add_special_tokens=False)["input_ids"]
        )
    with settings():
        Settings.llm = llm
        assert Settings.llm is llm


def test_explain_tells_what_is_known(llm):
    text = (
        "The keeper brings the box to the table by the window, and the reader answers with a letter in winter. "
        * 2
    )
    assert llm.explain(f"{text}\n\n{PROMPT}").hits == 0
    assert llm.precompute_kv([text]).stored == 1
    assert llm.explain(f"{text}\n\n{PROMPT}").hits == 1
    assert llm.explain([ChatMessage(role="user", content=f"{text}\n\n{PROMPT}")]).hits == 1
    assert llm.explain(f"{text}\n\n{PROMPT}", namespace="other").hits == 0
