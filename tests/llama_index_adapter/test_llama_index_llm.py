"""The contract of an LLM in LlamaIndex: there is no published suite for it, so this is ours."""

import asyncio
import copy
import json
import pickle
import threading
from typing import Any

import pytest
from kit import Forwards, working_threads
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index_kit import record_prompts, settings
from transformers import AutoTokenizer

import kvrag.engine
from kvrag import (
    ConfigError,
    ContextLengthError,
    InputError,
    KVRagEngine,
    RepairConfig,
    StoreConfig,
)
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
        (
            {"model": "x", "api_base": "http://a"},
            "takes no api_base: the model runs in this process",
        ),
        ({"model": "x", "timeout": 60.0}, r"takes no timeout: use asyncio.wait_for\(llm.acomplete"),
        ({"model": "x", "additional_kwargs": {"max_token": 3}}, "max_token"),
        ({}, "no model"),
        ({"model": "x", "model_name": "y"}, "given twice"),
        ({"model": "x", "kvdir": "y"}, "did you mean 'kv_dir'"),
        ({"model": "x", "temperature": -1}, "temperature"),
        ({"model": "x", "mode": "fast"}, "mode is 'fast'"),
        ({"model": "x", "generate_kwargs": {"max_token": 3}}, "max_token"),
        (
            {"model": "x", "encryption_key": "env:KK"},
            r"'encryption_key'.*store_config=StoreConfig\(",
        ),
        (
            {"model": "x", "model_kwargs": {"disk_bytes": 5}},
            r"'disk_bytes'.*store_config=StoreConfig\(",
        ),
        (
            {"model": "x", "model_kwargs": {"kv_dir": "y"}},
            r"holds 'kv_dir'.*pass KVRagLLM\(kv_dir=",
        ),
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


def test_configs_in_dicts_are_read_by_the_same_rules():
    assert KVRagLLM("x", store_config={"ram_bytes": 5}).store_config == StoreConfig(ram_bytes=5)
    with pytest.raises(ConfigError, match="did you mean 'encryption_key'"):
        KVRagLLM("x", store_config={"encription_key": "env:KK"})
    with pytest.raises(ConfigError, match="did you mean 'recompute_ratio'"):
        KVRagLLM("x", repair={"recompute_ration": 0.5})


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


@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_all_ways_of_asking_give_the_same_answer(llm, kind):
    answers = {method: text_of(run(llm, method)[-1]) for method in METHODS if method.endswith(kind)}
    assert len(answers) == 4
    assert len(set(answers.values())) == 1
    assert answers[kind]


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


@pytest.mark.parametrize("method", METHODS)
def test_options_of_a_call_are_honoured(llm, method):
    assert run(llm, method, max_tokens=2)[-1].raw["usage"]["completion_tokens"] <= 2
    sampled = [text_of(run(llm, method, temperature=5.0, seed=seed)[-1]) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("method", METHODS)
def test_unknown_options_of_a_call_are_refused_by_name(llm, method):
    with pytest.raises(ConfigError, match=r"max_new_token'.*did you mean 'max_new_tokens'"):
        run(llm, method, max_new_token=2)


def test_mode_repair_and_namespace_of_a_call_are_honoured(llm):
    text = (
        "The keeper brings the box to the table by the window, and the reader answers with a letter in winter. "
        * 2
    )
    llm.precompute_kv([text], prefix="")

    def accounting(**options):
        return llm.complete(f"Notes:\n{text}\n{PROMPT}", **options).raw["kvrag"]

    assert accounting()["exactness"] == "repaired"
    assert accounting(mode="full")["exactness"] == "full"
    assert accounting(namespace="other")["cached_tokens"] == 0
    whole = accounting(repair=RepairConfig(strategy="all"))
    assert whole["repaired_tokens"] > accounting()["repaired_tokens"]
    with pytest.raises(ConfigError, match="repair is 'all'"):
        llm.complete(PROMPT, repair="all")


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


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_ends_the_answer_and_is_not_shown(llm, method):
    whole = text_of(run(llm, method, max_tokens=24)[-1])
    stop = whole[len(whole) // 2 :][:3]
    assert text_of(run(llm, method, max_tokens=24, stop=[stop])[-1]) == whole[: whole.index(stop)]


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
    with pytest.raises(InputError, match="image block; kvrag reads text only"):
        llm.chat([message])


# -- threads and faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("a")])
async def test_the_event_loop_neither_loads_nor_computes(make, monkeypatch, method):
    seen = working_threads(monkeypatch)
    out = await getattr(make(), method)(MESSAGES if method.endswith("chat") else PROMPT)
    if "stream" in method:
        assert [response async for response in out]
    assert seen
    assert threading.get_ident() not in seen


@pytest.mark.parametrize("method", METHODS)
def test_a_fault_of_the_model_reaches_the_caller(llm, monkeypatch, method):
    Forwards(monkeypatch, error=RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(llm, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_is_too_long_is_refused(llm, method):
    with pytest.raises(ContextLengthError, match="context window of 4096"):
        run(llm, method, max_tokens=5000)


@pytest.mark.parametrize(
    "handlers", [[], [LlamaDebugHandler(print_trace_on_end=False)]], ids=["", "debugging"]
)
def test_leaving_a_stream_stops_the_decoding(make, monkeypatch, handlers):
    llm = make(callback_manager=CallbackManager(handlers))
    llm.complete(PROMPT)
    forwards = Forwards(monkeypatch, seconds=0.01)
    for _ in llm.stream_complete(PROMPT, max_tokens=500):
        break
    for response in llm.stream_chat(MESSAGES, max_tokens=500):
        assert response.delta is not None
        break
    llm.stream_complete(PROMPT, max_tokens=500)  # never read at all
    assert forwards.settled() < 60


@pytest.mark.parametrize(
    "handlers", [[], [LlamaDebugHandler(print_trace_on_end=False)]], ids=["", "debugging"]
)
async def test_leaving_an_async_stream_stops_the_decoding(make, monkeypatch, handlers):
    llm = make(callback_manager=CallbackManager(handlers))
    await llm.acomplete(PROMPT)
    forwards = Forwards(monkeypatch, seconds=0.01)
    stream = await llm.astream_complete(PROMPT, max_tokens=500)
    async for _ in stream:
        break
    await stream.aclose()
    task = asyncio.create_task(llm.achat(MESSAGES, max_tokens=500))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(forwards.settled) < 100


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
