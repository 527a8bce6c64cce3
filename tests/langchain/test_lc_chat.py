"""ChatKVRag beside LangChain's own contract: options, accounting, streams, prompts, errors."""

import copy
import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumps, loads
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField

from kvrag import ConfigError, KVRagEngine, ModelError, RepairConfig, StoreConfig
from kvrag.testing.models import tiny_model
from langchain_kvrag import ChatKVRag, KVRagLLM

# -- construction --------------------------------------------------------------------------------------------------------


def test_construction_loads_nothing(tmp_path):
    llm = ChatKVRag(model="no/such-model", kv_dir=tmp_path / "kv")
    assert not (tmp_path / "kv").exists()
    assert llm.model_name == "no/such-model"
    with pytest.raises(ModelError, match="no/such-model"):
        llm.invoke("hi")


@pytest.mark.parametrize("name", ["model", "model_id", "model_name"])
@pytest.mark.parametrize("limit", ["max_tokens", "max_new_tokens"])
def test_other_spellings(tiny_dir, name, limit):
    llm = ChatKVRag(**{name: tiny_dir, limit: 3})
    assert (llm.model, llm.max_tokens) == (tiny_dir, 3)
    assert llm.invoke("hi").usage_metadata["output_tokens"] == 3


def test_unknown_options_of_the_constructor_are_named(tiny_dir):
    with pytest.warns(UserWarning, match=r"no option 'organization'.*ignored"):
        ChatKVRag(model=tiny_dir, organization="x")
    with pytest.raises(ConfigError, match=r"'tempreature'; did you mean 'temperature'\?"):
        ChatKVRag(model=tiny_dir, tempreature=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatKVRag(model=tiny_dir, timeout=3, streaming=True, cache=False, verbose=False)


def test_options_of_the_class_are_refused_among_those_of_the_model(tiny_dir):
    with pytest.raises(ConfigError, match=r"holds 'store_config'.*pass ChatKVRag\(store_config="):
        ChatKVRag(model=tiny_dir, model_kwargs={"store_config": "x"})
    llm = ChatKVRag(model=tiny_dir)
    llm.model_kwargs["kv_dir"] = "x"
    with pytest.raises(ConfigError, match="holds 'kv_dir'"):
        _ = llm.engine


def test_ready_objects_are_used_and_survive_a_copy(tokenizer):
    model = tiny_model()
    llm = ChatKVRag.from_pretrained_model(model, tokenizer, max_tokens=2)
    assert llm.engine.loaded.lm.model is model
    assert llm.model_copy().engine is llm.engine
    assert len(repr(llm)) < 2000
    other = llm.configurable_fields(temperature=ConfigurableField(id="t"))
    assert other.with_config(configurable={"t": 0.5}).invoke("hi").content
    llm.engine.close()


def test_configurable_fields_share_one_engine(options, chunks):
    before = list(KVRagEngine._shared.values())  # held, so that none of them goes meanwhile
    llm = ChatKVRag(**{**options, "kv_dir": None}).configurable_fields(
        temperature=ConfigurableField(id="temperature"), max_tokens=ConfigurableField(id="limit")
    )
    llm.default.precompute_kv(chunks[:1])
    for limit in (1, 2, 3):
        message = llm.with_config(configurable={"limit": limit}).invoke(f"{chunks[0]}\n\nWho?")
        assert message.usage_metadata["output_tokens"] == limit
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    added = [engine for engine in KVRagEngine._shared.values() if engine not in before]
    assert len(added) <= 1, "another test may have left the one that all share"


# -- accounting ----------------------------------------------------------------------------------------------------------


def test_usage_and_metadata(chat, chunks):
    chat.precompute_kv(chunks)
    message = chat.invoke("\n\n".join(chunks) + "\n\nWho?")
    usage, made = message.usage_metadata, message.response_metadata["kvrag"]
    assert usage is not None
    assert usage["output_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"] == {"cache_read": made["cached_tokens"]}
    assert (
        made["cached_tokens"] + made["repaired_tokens"] + made["computed_tokens"]
        == usage["input_tokens"]
    )
    assert made["exactness"] == "repaired"
    assert made["kv_reuse_ratio"] == made["cached_tokens"] / usage["input_tokens"] > 0.5
    assert made["fallback_reason"] is None
    assert made["ttft_ms"] > 0
    assert made["timings_ms"]["decode"] > 0
    assert message.response_metadata["model_name"] == Path(chat.model).name
    assert message.response_metadata["model_provider"] == "kvrag"
    assert message.response_metadata["finish_reason"] == "length"
    assert json.loads(json.dumps(message.response_metadata)) == message.response_metadata
    assert "prompt_ids" not in str(message.response_metadata)


@pytest.mark.usefixtures("no_histories")
def test_the_output_of_several_answers_tells_their_sum(chat):
    told = chat.generate([[HumanMessage("one")], [HumanMessage("two words")]])
    usages = [generation[0].message.usage_metadata for generation in told.generations]
    assert told.llm_output["model_name"] == Path(chat.model).name
    usage = told.llm_output["token_usage"]
    assert usage["prompt_tokens"] == sum(each["input_tokens"] for each in usages)
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == sum(each["total_tokens"] for each in usages)
    assert usage["cached_tokens"] == 0
    assert chat.invoke("one").response_metadata["token_usage"]["completion_tokens"] == 8
    assert chat.generate([]).llm_output == {}


def test_usage_handlers_see_all_calls(chat):
    handler = UsageMetadataCallbackHandler()
    messages = chat.batch(["one", "two words"], config={"callbacks": [handler]})
    streamed = list(chat.stream("three", config={"callbacks": [handler]}))
    total = handler.usage_metadata[chat.model_name]
    parts = [message.usage_metadata for message in (*messages, streamed[-1])]
    assert total["total_tokens"] == sum(part["total_tokens"] for part in parts)


def test_the_answer_is_the_engines(chat):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    message = chat.invoke([SystemMessage("Be brief."), HumanMessage("Who?")])
    result = chat.engine.generate(asked, max_new_tokens=8)
    assert message.content == result.text
    assert message.usage_metadata["input_tokens"] == result.prompt_tokens
    assert result.prompt_ids.count(1) == 1  # BOS stands once


# -- streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_histories")
def test_streaming_equals_invoke(chat, chunks):
    chat.precompute_kv(chunks[:2])
    prompt = f"{chunks[1]}\n\n{chunks[0]}\n\nWho?"
    message = chat.invoke(prompt, max_tokens=24)
    pieces = list(chat.stream(prompt, max_tokens=24))
    whole = sum(pieces[1:], pieces[0])
    assert len(pieces) > 3
    assert whole.content == message.content
    assert whole.usage_metadata == message.usage_metadata
    assert whole.response_metadata["finish_reason"] == "length"
    assert (
        whole.response_metadata["kvrag"]["cached_tokens"]
        == message.response_metadata["kvrag"]["cached_tokens"]
    )
    assert [piece.chunk_position for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_streaming_callbacks_get_every_piece(chat):
    tokens: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token, **kwargs):
            tokens.append(token)

    for piece in chat.stream("Tell me.", config={"callbacks": [Handler()]}):
        assert piece is not None
    assert "".join(tokens) == chat.invoke("Tell me.").content
    tokens.clear()
    streaming = ChatKVRag(model=chat.model, kv_dir=chat.kv_dir, max_tokens=8, streaming=True)
    message = streaming.invoke("Tell me.", config={"callbacks": [Handler()]})
    assert "".join(tokens) == message.content
    assert message.usage_metadata["output_tokens"] == 8


# -- identity ------------------------------------------------------------------------------------------------------------


def test_the_response_cache_tells_models_apart(options):
    cache = InMemoryCache()
    base = ChatKVRag(**options, cache=cache)
    variants = [
        base,
        ChatKVRag(**{**options, "max_tokens": 3}, cache=cache),
        ChatKVRag(**options, mode="full", cache=cache),
        ChatKVRag(**options, repair=RepairConfig(recompute_ratio=0.5), cache=cache),
        ChatKVRag(**options, dtype="float32", cache=cache),
        ChatKVRag(**options, prefix="Other", cache=cache),
    ]
    keys = {llm._get_llm_string() for llm in variants}
    assert len(keys) == len(variants)
    assert base.invoke("hi").content == base.invoke("hi").content
    assert len(cache._cache) == 1
    assert json.dumps(base._identifying_params)


@pytest.mark.parametrize("cls", [ChatKVRag, KVRagLLM])
def test_copies_and_pickles_are_the_same_model(options, cls):
    llm = cls(
        **options,
        repair=RepairConfig(recompute_ratio=0.5),
        store_config=StoreConfig(ram_bytes=5),
        stop=["x"],
    )
    for other in (
        copy.copy(llm),
        copy.deepcopy(llm),
        llm.model_copy(deep=True),
        pickle.loads(pickle.dumps(llm)),
    ):
        assert other.model_dump() == llm.model_dump()
        assert other._identifying_params == llm._identifying_params
        assert other.engine is llm.engine
    assert not llm.is_lc_serializable()
    dumped = dumps(llm)
    # As for other local models: weights have no such form.
    assert json.loads(dumped)["type"] == "not_implemented"
    with pytest.raises(NotImplementedError):
        loads(dumped, allowed_objects="core")


def test_copies_share_a_loaded_model_and_pickles_refuse_it(tokenizer):
    llm = ChatKVRag.from_pretrained_model(tiny_model(), tokenizer)
    for other in (copy.deepcopy(llm), llm.model_copy(deep=True)):
        assert (other.model, other.tokenizer) == (llm.model, tokenizer)
    with pytest.raises(
        ConfigError, match="given a loaded model can't be pickled; name it by its path"
    ):
        pickle.dumps(llm)
    with pytest.raises(ConfigError, match="encryption_key is a function can't be pickled"):
        pickle.dumps(
            ChatKVRag(model="x", store_config=StoreConfig(encryption_key=lambda: b"k" * 32))
        )


# -- profile -------------------------------------------------------------------------------------------------------------


def test_the_profile_is_read_from_the_models_files(tiny_dir, tmp_path, tokenizer):
    profile = ChatKVRag(model=tiny_dir).profile
    config = json.loads(Path(tiny_dir, "config.json").read_text())
    assert profile["max_input_tokens"] == config["max_position_embeddings"]
    assert (profile["text_inputs"], profile["text_outputs"], profile["image_inputs"]) == (
        True,
        True,
        False,
    )
    calls = ChatKVRag.bind_tools is not BaseChatModel.bind_tools
    assert profile["tool_calling"] is calls
    # Else an agent with tools would bind the schema to every call.
    assert profile["structured_output"] is False
    plain = Path(shutil.copytree(tiny_dir, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatKVRag(model=plain).profile["tool_calling"] is False
    assert ChatKVRag(model=plain, tokenizer=tiny_dir).profile["tool_calling"] is calls
    loaded = ChatKVRag.from_pretrained_model(tiny_model(), tokenizer).profile
    assert loaded["max_input_tokens"] == tiny_model().config.max_position_embeddings
    assert loaded["tool_calling"] is calls
    unknown = ChatKVRag(model="no/such-model").profile  # nothing is asked for in the network
    assert unknown["text_inputs"]
    assert not {"max_input_tokens", "tool_calling"} & set(unknown)
    mine = {"max_input_tokens": 77}
    assert ChatKVRag(model=tiny_dir, profile=mine).profile == mine
    # It changes no answer of a call.
    assert (
        ChatKVRag(model=tiny_dir, profile=mine)._get_llm_string()
        == ChatKVRag(model=tiny_dir)._get_llm_string()
    )


# -- keeping KV ----------------------------------------------------------------------------------------------------------


def test_kv_is_made_kept_in_step_and_deleted(chat, chunks):
    report = chat.precompute_kv(chunks[:3], ids=["a", "b", "c"])
    assert (report.stored, report.failed) == (3, [])
    assert chat.precompute_kv(chunks[:3], ids=["a", "b", "c"]).skipped == 3
    assert chat.delete_kv(["a"]) == 1
    report = chat.sync_kv([chunks[4], chunks[2]], ids=["b", "c"])
    assert (report.added, report.removed) == (1, 0)
    assert [chat.explain(f"{chunk}\n?").hits for chunk in chunks[:5]] == [0, 0, 1, 0, 1]
