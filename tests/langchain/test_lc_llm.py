"""KVRagLLM: raw strings, chat prompts through the chat template, accounting, streams."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import Forwards
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from kvrag import InputError
from kvrag.testing.models import tiny_model
from langchain_kvrag import KVRagLLM

CHAT = ChatPromptTemplate.from_messages(
    [("system", "Be brief."), ("human", "{context}\n\n{question}")]
)
TEXT = PromptTemplate.from_template("Read this.\n{context}\n{question}")


class Recorder(BaseCallbackHandler):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[LLMResult] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.results.append(response)


def test_strings_stay_raw(llm):
    result = llm.generate(["Tell me."])
    assert result.generations[0][0].generation_info["usage_metadata"][
        "input_tokens"
    ] == 1 + llm.get_num_tokens("Tell me.")
    assert result.generations[0][0].text == llm.engine.generate("Tell me.", max_new_tokens=8).text


@pytest.mark.parametrize(
    "call", ["invoke", "stream", "batch", "generate_prompt", "ainvoke", "astream", "abatch"]
)
async def test_chat_prompts_go_through_the_chat_template(llm, call):
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "some\n\nWho?"},
    ]
    expected = llm.engine.generate(asked, max_new_tokens=8).text
    value = CHAT.invoke({"context": "some", "question": "Who?"})
    answers: dict[str, Callable[[], Any]] = {
        "invoke": lambda: llm.invoke([SystemMessage("Be brief."), HumanMessage("some\n\nWho?")]),
        "stream": lambda: "".join(llm.stream(value)),
        "batch": lambda: llm.batch([value])[0],
        "generate_prompt": lambda: llm.generate_prompt([value]).generations[0][0].text,
        "ainvoke": lambda: llm.ainvoke(value),
        "abatch": lambda: llm.abatch([value]),
    }
    if call == "astream":
        answer: Any = "".join([piece async for piece in llm.astream(value)])
    else:
        answer = answers[call]()
        answer = (await answer) if call.startswith("a") else answer
    assert (answer[0] if call == "abatch" else answer) == expected


def test_a_model_without_a_chat_template_gets_plain_lines(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    llm = KVRagLLM.from_pretrained_model(tiny_model(seed=5), tokenizer, max_tokens=4)
    assert llm.invoke([HumanMessage("Who?")]) == llm.invoke("Human: Who?")
    llm.engine.close()


def test_generation_info_and_llm_output(llm, chunks):
    llm.precompute_kv(chunks[:2], prefix=TEXT)
    prompt = TEXT.format(context=chunks[0], question="Who?")
    result = llm.generate([prompt, "Tell me."])
    first, second = (generations[0].generation_info for generations in result.generations)
    assert first["kvrag"]["exactness"] == "exact"
    assert (
        first["kvrag"]["cached_tokens"]
        == first["usage_metadata"]["input_token_details"]["cache_read"]
        > 0
    )
    assert second["kvrag"]["exactness"] == "full"
    assert first["finish_reason"] == "length"
    assert (first["model_name"], first["model_provider"]) == (llm.model_name, "kvrag")
    assert json.loads(json.dumps(result.llm_output)) == result.llm_output
    assert json.dumps(first)
    usage = result.llm_output["token_usage"]
    assert usage["completion_tokens"] == 16
    assert usage["prompt_tokens"] == sum(
        info["usage_metadata"]["input_tokens"] for info in (first, second)
    )
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_streaming_equals_invoke_and_tells_callbacks(llm):
    recorder = Recorder()
    pieces = list(llm.stream("Tell me.", max_tokens=20, config={"callbacks": [recorder]}))
    text = llm.invoke("Tell me.", max_tokens=20)
    assert "".join(pieces) == "".join(recorder.tokens) == text
    assert len(recorder.tokens) > 3
    generation = recorder.results[0].generations[0][0]
    assert generation.text == text
    assert generation.generation_info["usage_metadata"]["output_tokens"] == 20


async def test_async_streaming_tells_callbacks(llm):
    recorder = Recorder()
    pieces = [piece async for piece in llm.astream("Tell me.", config={"callbacks": [recorder]})]
    assert "".join(pieces) == "".join(recorder.tokens) == await llm.ainvoke("Tell me.")
    assert recorder.results[0].generations[0][0].generation_info["kvrag"]["exactness"] == "full"


def test_another_model_for_one_call(llm, other_tiny_dir):
    result = llm.generate(["Tell me."], model=other_tiny_dir)
    assert result.llm_output["model_name"] == Path(other_tiny_dir).name
    assert result.generations[0][0].text == KVRagLLM(model=other_tiny_dir, max_tokens=8).invoke(
        "Tell me."
    )
    assert llm._get_ls_params(model="x") == {
        **llm._get_ls_params(),
        "ls_provider": "kvrag",
        "ls_model_name": "x",
        "ls_model_type": "llm",
    }


# -- many prompts ---------------------------------------------------------------------------------------------------------

PROMPTS = ["Who?", "Who keeps the ledger?", "Tell me. " * 20, "Why?", "Who?"]


async def together(llm, way: str, prompts: list[str] = PROMPTS, **options: Any) -> list[Any]:
    """Answer prompts in one call, in one of the ways."""
    if way.startswith("a"):
        found = await getattr(llm, way)(prompts, **options)
    else:
        found = await asyncio.to_thread(getattr(llm, way), prompts, **options)
    return found if "batch" in way else [each[0].text for each in found.generations]


ways = pytest.mark.parametrize("way", ["batch", "abatch", "generate", "agenerate"])


@ways
async def test_prompts_share_decode_steps_and_answer_as_alone(llm, way, abreast):
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
    alone = [llm.invoke(prompt, **options) for prompt in PROMPTS]
    sizes = abreast(len(PROMPTS))
    assert await together(llm, way, **options) == alone
    assert sum(sizes) == len(PROMPTS) * 4, "the steps of every prompt after its first token"
    assert max(sizes) > 3, "in forwards for several prompts"


@ways
async def test_a_prompt_that_fails_ends_the_call_and_the_other_answers(llm, way, monkeypatch):
    llm.invoke("Who?")
    forwards = Forwards(monkeypatch, seconds=0.01)
    prompts = ["Who?", "", *["Who? " * 5] * 3]
    with pytest.raises(InputError, match="the prompt is empty"):
        await together(llm, way, prompts, max_tokens=300)
    assert forwards.settled() < 600, "the first is answered, and the others are not waited for"


@pytest.mark.parametrize("way", ["batch", "abatch"])
async def test_exceptions_are_returned_for_their_own_prompts(llm, way, abreast):
    prompts = ["Who?", "", "Why?"]
    alone = [llm.invoke(prompts[0]), llm.invoke(prompts[2])]
    abreast(2)
    first, fault, last = await together(llm, way, prompts, return_exceptions=True)
    assert [first, last] == alone
    assert isinstance(fault, InputError)


@pytest.mark.parametrize("way", ["batch", "abatch"])
async def test_a_batch_keeps_to_its_limit_and_tells_callbacks(llm, way, abreast):
    alone = [llm.invoke(prompt) for prompt in PROMPTS]
    recorders = [Recorder() for _ in PROMPTS]
    sizes = abreast(1)
    configs = [{"callbacks": [each], "max_concurrency": 2} for each in recorders]
    assert await together(llm, way, config=configs) == alone
    assert max(sizes) <= 2
    assert [each.results[0].generations[0][0].text for each in recorders] == alone


async def test_a_time_limit_of_a_batch_begins_with_it(llm, monkeypatch):
    llm.invoke("Who?")
    monkeypatch.setattr("langchain_kvrag.llms.KVRagLLM.max_running", 2)
    forwards = Forwards(monkeypatch, seconds=0.01)
    with pytest.raises(TimeoutError, match=r"timeout=0.2 s"):
        await together(llm, "batch", max_tokens=400, timeout=0.2)
    assert forwards.settled() < 400
