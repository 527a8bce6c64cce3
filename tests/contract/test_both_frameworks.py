"""What every adapter promises, whichever framework asks: its options, one answer in every way of asking, and how it ends."""

import asyncio
import inspect
import threading
from functools import partial
from typing import Any

import pytest
from kit import Forwards, working_threads
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from pydantic import TypeAdapter, ValidationError
from texts import make_chunks

from kvrag import ConfigError, ContextLengthError, KVRagEngine, RepairConfig, StoreConfig
from kvrag.runtime import host_memory
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import ChatKVRag
from langchain_kvrag import KVRagLLM as LangChainLLM
from llama_index.llms.kvrag import KVRagLLM as LlamaIndexLLM

PROMPT = "Who keeps the copper ledger in the harbour?"
WAYS = {
    ChatKVRag: ("invoke", "stream", "ainvoke", "astream"),
    LangChainLLM: ("invoke", "stream", "ainvoke", "astream"),
    LlamaIndexLLM: (
        *("complete", "stream_complete", "acomplete", "astream_complete"),
        *("chat", "stream_chat", "achat", "astream_chat"),
    ),
}
"""The classes of both frameworks, and the ways to ask each."""
ALL = [(kind, way) for kind, ways in WAYS.items() for way in ways]
every_kind = pytest.mark.parametrize("kind", WAYS, ids=lambda kind: kind.__module__)
every_way = pytest.mark.parametrize(("kind", "way"), ALL)
every_async_way = pytest.mark.parametrize(
    ("kind", "way"), [each for each in ALL if each[1][0] == "a"]
)
accounting = pytest.mark.parametrize("kind", [ChatKVRag, LlamaIndexLLM])
"""Classes whose answers say how they were made."""


@pytest.fixture
def make(tiny_dir, tmp_path):
    """Make models with a store of their own; at the end their engines are closed."""
    made: list[Any] = []

    def make(kind: Any, **options: Any) -> Any:
        own = {"model": tiny_dir, "kv_dir": str(tmp_path / "kv"), "max_tokens": 8}
        made.append(kind(**{**own, **options}))
        return made[-1]

    yield make
    for model in made:
        model.engine.close()


async def opened(model: Any, way: str, **options: Any) -> Any:
    """Ask in one of the ways; return an answer, or a stream that nobody has read."""
    prompt = [ChatMessage(PROMPT)] if way.endswith("chat") else PROMPT
    out = getattr(model, way)(prompt, **options)
    return await out if inspect.isawaitable(out) else out


async def asked(model: Any, way: str, **options: Any) -> str:
    """Return the text of an answer, however it comes."""
    out = await opened(model, way, **options)
    if "astream" in way:
        pieces = [piece async for piece in out]
    else:
        pieces = list(out) if "stream" in way else [out]
    if isinstance(pieces[-1], ChatResponse):
        return str(pieces[-1].message.content)
    if isinstance(pieces[-1], CompletionResponse):
        return pieces[-1].text
    return "".join(piece if isinstance(piece, str) else piece.content for piece in pieces)


def answered(model: Any, prompt: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Return how many tokens an answer has, and how it was made."""
    if isinstance(model, LlamaIndexLLM):
        raw = model.complete(prompt, **options).raw
        return raw["usage"]["completion_tokens"], raw["kvrag"]
    message = model.invoke(prompt, **options)
    return message.usage_metadata["output_tokens"], message.response_metadata["kvrag"]


# -- chats ---------------------------------------------------------------------------------------------------------------

TURNS = [("human", PROMPT), ("ai", "The keeper does."), ("human", "Who says so?")]
ROLES = {"human": "user", "ai": "assistant"}


def turn(model: Any, count: int, **options: Any) -> tuple[str, int]:
    """Answer the first turns of a chat; return the text, and the tokens from earlier requests."""
    if isinstance(model, LlamaIndexLLM):
        messages = [ChatMessage(text, role=ROLES[role]) for role, text in TURNS[:count]]
        response = model.chat(messages, **options)
        return str(response.message.content), response.raw["kvrag"]["history_tokens"]
    message = model.invoke(TURNS[:count], **options)
    return message.content, message.response_metadata["kvrag"]["history_tokens"]


@accounting
def test_the_next_turn_of_a_chat_goes_on_with_the_last(kind, make, tmp_path):
    """By default, for a chat's own namespace, until documents are erased; without, the same is answered."""
    model = make(kind)
    off = make(kind, kv_dir=str(tmp_path / "off"), store_config={"history_bytes": 0})
    for count in (1, 3):
        text, known = turn(model, count)
        assert (text, 0) == turn(off, count)
        assert bool(known) is (count == 3)
    assert turn(model, 3, namespace="another tenant")[1] == 0
    model.precompute_kv(make_chunks(1), ids=["a"])
    assert turn(model, 3)[1] > 0
    model.delete_kv(["a"])
    assert turn(model, 3)[1] == 0
    assert model.engine.stats()["histories"]["bytes"] > 0
    assert "histories" not in off.engine.stats()


@accounting
@pytest.mark.parametrize("given", [None, {"history_bytes": "64MB"}])
def test_a_check_measures_reuse_although_the_prompt_was_answered_exactly(
    kind, given, make, monkeypatch
):
    """Chats beside it keep their KV."""
    model, chunks = make(kind, store_config=given), make_chunks(3)
    real = model.engine.prefill

    def beside_a_chat(*args: Any, **options: Any) -> Any:
        assert model.engine.history_bytes > 0
        return real(*args, **options)

    monkeypatch.setattr(model.engine, "prefill", beside_a_chat)
    model.precompute_kv(chunks)
    asked = [{"role": "user", "content": "\n\n".join([*chunks[::-1], PROMPT])}]
    first = model.engine.verify([asked], mode="stitch").rows
    assert model.engine.generate(asked, mode="prefix").exactness in ("exact", "full")
    assert model.engine.generate(asked, mode="prefix").history_tokens > 100
    assert model.engine.verify([asked], mode="stitch").rows == first
    assert first[0].exactness == "repaired"


@every_kind
def test_what_chats_keep_is_bounded_and_the_engine_is_shared(kind, make):
    model = make(kind, max_tokens=2)
    alone = KVRagEngine.from_pretrained(model.model)
    alone.generate(PROMPT, max_new_tokens=2)
    assert "histories" not in alone.stats(), "an engine keeps none unless it is asked to"
    alone.close()
    assert 0 < model.engine.history_bytes <= min(2**30, host_memory() / 16)
    given = make(kind, store_config=StoreConfig(history_bytes="1MB", min_chunk_tokens=8))
    asked = getattr(given, WAYS[kind][0])
    asked(PROMPT)
    assert given.engine._query_side.histories.max_bytes == 10**6
    assert make(kind).engine is model.engine


# -- options -------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fast"}, "mode is 'fast'"),
    ({"temperature": -1}, "temperature"),
    ({"stop": [""]}, "non-empty string"),
    ({"repair": "cacheblend"}, "repair"),
    ({"repair": {"recompute_ration": 0.5}}, "did you mean 'recompute_ratio'"),
    ({"tempreature": 1.0}, r"'tempreature'; did you mean 'temperature'\?"),
    ({"kvdir": "./kv"}, "did you mean 'kv_dir'"),
    ({"generate_kwargs": {"max_token": 3}}, "max_token"),
    ({"base_url": "http://a"}, "takes no base_url.*: the model runs in this process"),
    ({"api_base": "http://a"}, "takes no api_base.*: the model runs in this process"),
    ({"store_config": {"encription_key": "env:KK"}}, "did you mean 'encryption_key'"),
    ({"store_config": {"encryption_key": "ab" * 32}}, "encryption_key is of type str"),
    ({"model_kwargs": {"kv_dir": "x"}}, r"holds 'kv_dir'.*pass \w+\(kv_dir="),
    ({"model_kwargs": {"namespace": "x"}}, r"holds 'namespace'.*pass \w+\(namespace="),
]
OF_THE_STORE = ("encryption_key", "encription_key", "disk_bytes", "kv_dtype")


@every_kind
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_impossible_options_are_refused_at_once(kind, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        kind(**{"model": "x", **options})
    assert "abab" not in str(caught.value)


WRONG: dict[str, Any] = {
    "max_tokens": 0,
    "max_new_tokens": 0,
    "temperature": -1,
    "top_p": 2,
    "top_k": -5,
    "min_p": "a lot",
    "repetition_penalty": -1.0,
    "min_new_tokens": -1,
    "seed": 2**64,
    "frequency_penalty": 3.0,
    "presence_penalty": "low",
    "logit_bias": 3,
    "stop": [1],
    "stop_token_ids": "x",
}
"""Invalid values of the options of an answer."""
FOREIGN = ("KVRagEngine", "SamplingConfig", "KVRagModel", "EngineFields", "pydantic.dev")


@every_kind
def test_errors_have_the_names_of_the_class_that_was_called(kind, make):
    """At construction and at a call, for every option misspelt, and with a wrong value."""
    of, model = kind.__name__, make(kind)
    made, asked = partial(kind, model="x"), partial(getattr(model, WAYS[kind][0]), PROMPT)

    def refused(action: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            action(**options)
        assert not [name for name in FOREIGN if name in str(caught.value)]
        return str(caught.value)

    for name in kind.model_fields:
        said = refused(made, **{f"{name}q": 1})
        assert said.endswith(f"{of} has no option '{name}q'; did you mean {name!r}?")
    own = "max_tokens" if "max_tokens" in kind.model_fields else "max_new_tokens"
    for name in (*WRONG, "mode", "tools", "response_format", "repair", "namespace", "max_context"):
        meant = own if name in ("max_tokens", "max_new_tokens") else name
        said = refused(asked, **{f"{name}q": 1})
        assert said == f"{of} has no option '{name}q'; did you mean {meant!r}?"
    for name, value in WRONG.items():
        named = own if name in ("max_tokens", "max_new_tokens") else name
        assert refused(asked, **{name: value}).startswith(f"{of}.{named} ")
        if named in kind.model_fields:
            assert refused(made, **{name: value}).startswith(f"{of}.{named} ")
    assert refused(asked, device="cpu") == f"'device' is no option of a call; pass {of}(device=...)"
    for name in ("explain", "precompute_kv", "sync_kv", "delete_kv"):
        method = partial(getattr(model, name), PROMPT)
        said = refused(method, namespac="b")
        assert said == f"{of} has no option 'namespac'; did you mean 'namespace'?"


@every_kind
@pytest.mark.parametrize("name", OF_THE_STORE)
def test_options_of_the_store_are_refused_wherever_they_stand(kind, name):
    for options in ({name: "env:KK"}, {"model_kwargs": {name: "env:KK"}}):
        with pytest.raises(ConfigError, match=rf"no option '{name}'.*store_config=StoreConfig\("):
            kind(model="x", **options)


@every_kind
def test_a_config_may_be_a_dict(kind):
    assert kind(model="x", store_config={"ram_bytes": 5}).store_config == StoreConfig(ram_bytes=5)
    with pytest.raises(ValidationError, match="ram_byte"):
        TypeAdapter(StoreConfig).validate_python({"ram_byte": 5})


@every_way
async def test_options_of_a_call_are_honoured(make, kind, way):
    model = make(kind)
    plain, *sampled = [
        await asked(model, way, temperature=heat, seed=seed)
        for heat, seed in ((None, 1), (5.0, 1), (5.0, 1), (5.0, 2))
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert plain == await asked(model, way)
    dropped = ({"logprobs": 2}, {"prompt_logprobs": 1})
    for option in ({"temprature": 1.0}, {"repair": "all"}, *dropped):
        with pytest.raises(ConfigError, match=r"did you mean 'temperature'|repair|logprobs"):
            await asked(model, way, **option)


@accounting
def test_a_calls_mode_repair_and_namespace_are_honoured(make, kind):
    model, chunks = make(kind), make_chunks(3, words=42)
    model.precompute_kv(chunks)
    prompt = "\n\n".join([*chunks, "Who?"])

    def account(**options: Any) -> dict[str, Any]:
        return answered(model, prompt, **options)[1]

    assert account()["exactness"] == "repaired"
    assert account(mode="full")["exactness"] == "full"
    assert account(mode="prefix")["repaired_tokens"] == 0
    assert account(repair=RepairConfig(strategy="none"))["repaired_tokens"] == 0
    assert account(namespace="another")["cached_tokens"] == 0
    for name in ("max_tokens", "max_new_tokens"):
        assert answered(model, prompt, **{name: 2})[0] == 2


# -- answers -------------------------------------------------------------------------------------------------------------


@every_kind
async def test_all_ways_of_asking_give_the_same_answer(make, kind):
    model = make(kind)
    answers = {way: await asked(model, way) for way in WAYS[kind]}
    assert len(set(answers.values())) == 1, answers
    assert all(answers.values())


@every_way
async def test_a_stop_string_ends_the_answer_and_is_not_shown(make, kind, way):
    whole = await asked(make(kind), way, max_tokens=12)
    stop = whole[len(whole) // 2 :][:4]  # of several tokens: the tiny vocabulary has few words
    expected = whole[: whole.index(stop)]
    assert await asked(make(kind), way, max_tokens=12, stop=[stop]) == expected
    configured = make(kind, stop=[stop])
    assert await asked(configured, way, max_tokens=12) == expected
    assert await asked(configured, way, max_tokens=12, stop=[]) == whole


@accounting
def test_a_prompt_beyond_the_window_is_refused_or_slides_on_request(make, kind, tmp_path):
    model = tiny_model("llama")
    model.config.max_position_embeddings = 128
    model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    small, slide = str(tmp_path / "small"), {"max_context": "slide"}
    prompt = "The keeper of the ledger walks to the harbour at dawn, and counts the ships. " * 8
    with pytest.raises(ContextLengthError, match="context window of 128"):
        answered(make(kind, model=small), prompt)
    assert answered(make(kind, model=small), prompt, **slide)[1]["evicted_tokens"] > 0
    assert answered(make(kind, model=small, **slide), prompt)[1]["evicted_tokens"] > 0


# -- threads and faults --------------------------------------------------------------------------------------------------


@every_async_way
async def test_the_event_loop_neither_loads_nor_computes(make, monkeypatch, kind, way):
    seen = working_threads(monkeypatch)
    assert await asked(make(kind), way)
    assert seen
    assert threading.get_ident() not in seen


@every_way
async def test_a_fault_reaches_the_caller(make, monkeypatch, kind, way):
    model = make(kind)
    with pytest.raises(ContextLengthError, match="context window of 4096"):
        await asked(model, way, max_tokens=5000)
    Forwards(monkeypatch, error=RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        await asyncio.wait_for(asked(model, way), 20)


WATCHED = {"callback_manager": CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])}
"""LlamaIndex's callbacks wrap streams."""
STREAMS = [(kind, way, {}) for kind, way in ALL if "stream" in way]
STREAMS += [(kind, way, WATCHED) for kind, way, _ in STREAMS if kind is LlamaIndexLLM]


@pytest.mark.parametrize(("kind", "way", "options"), STREAMS)
async def test_leaving_a_stream_stops_the_decoding(make, monkeypatch, kind, way, options):
    model = make(kind, **options)
    await asked(model, way)
    forwards = Forwards(monkeypatch, seconds=0.01)
    stream = await opened(model, way, max_tokens=500)
    if "astream" in way:
        async for _ in stream:
            break
        await stream.aclose()
    else:
        for _ in stream:
            break
        del stream
        await opened(model, way, max_tokens=500)  # never read at all
    assert await asyncio.to_thread(forwards.settled) < 60


@every_async_way
async def test_cancelling_stops_the_decoding(make, monkeypatch, kind, way):
    model = make(kind)
    await asked(model, way)
    forwards = Forwards(monkeypatch, seconds=0.01)
    task = asyncio.ensure_future(asked(model, way, max_tokens=500))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(forwards.settled) < 100
