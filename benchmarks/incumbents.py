"""Faults of ``langchain-huggingface`` and ``llama-index-llms-huggingface`` with local models, looked for in them and in kvrag's adapters.

Each fault is one function of a side: the classes of one package on a tiny random Llama, whose chat template writes BOS and tools as those
of current models do. What the model was shown is read at its embedding, the same way for both sides. A fault that is no longer there is
printed as such. Two of them wait for a minute, the time after which a streamer gives up.

    python benchmarks/incumbents.py [--quick]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import machine, parser, write_result

from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

TOKENS = 24
QUESTION = "Who keeps the ledger of the archive?"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
)
GIVES_UP_S = 60.0
"""Seconds after which the streamer of ``HuggingFacePipeline`` raises."""


class Seen(NamedTuple):
    """What was observed, in words, and whether it is the fault that was looked for."""

    what: str
    is_fault: bool


@dataclass(frozen=True)
class Side:
    """The classes of one package: a chat model and an LLM (of LlamaIndex one object is both), and the model behind them."""

    chat: Any
    llm: Any
    model: Any
    tokenizer: Any
    more: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self, each: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
        """Note the ids that the model is shown; before each forward, ``each`` is called."""
        seen: list[int] = []

        def look(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            each()
            seen.extend(args[0].flatten().tolist())

        handle = self.model.get_input_embeddings().register_forward_pre_hook(look)
        try:
            yield seen
        finally:
            handle.remove()

    def shown(self, ask: Callable[[], object]) -> tuple[list[int], str]:
        """Return the ids that the model was shown while it was asked, and their text."""
        with self.watched() as seen:
            ask()
        return seen, self.tokenizer.decode(seen)

    def tokens(self, ask: Callable[[], object]) -> int:
        """Number of tokens of an answer: each is chosen after a forward."""
        forwards: list[None] = []
        with self.watched(lambda: forwards.append(None)):
            ask()
        return len(forwards)

    def stop_of(self, answer: str) -> str:
        """Return a part of an answer that takes several tokens, to stop at."""
        parts = [answer[start : start + 4] for start in range(2, len(answer) - 4)]
        several = (part for part in parts if part.isascii() and part not in QUESTION)
        return next(
            part
            for part in several
            if len(self.tokenizer(part, add_special_tokens=False)["input_ids"]) > 1
        )


def fault() -> None:
    """Fail as a device may in the middle of a forward."""
    raise RuntimeError("the device failed")


def in_time(ask: Callable[[], Any], limit_s: float) -> tuple[str, float]:
    """Return how a call ended, and after how many seconds; it may never end."""
    ends: list[str] = []

    def run() -> None:
        try:
            ask()
            ends.append("an answer")
        except Exception as error:
            ends.append(name_of(error))

    start, thread = time.monotonic(), threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return ends[0] if ends else "nothing", time.monotonic() - start


def name_of(error: Exception) -> str:
    """Return an error's class and the beginning of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:90].removesuffix(": ")


# -- what is looked for: with a chat model or an LLM of LangChain ----------------------------------------------------------------------


def first_tokens(side: Side) -> Seen:
    """Whether BOS stands twice before a chat prompt."""
    ids, _ = side.shown(lambda: side.chat.invoke(QUESTION))
    return Seen(f"the model is shown `{str(ids[:4])[:-1]}, …]`", ids[:2] == [1, 1])


def repeats_the_prompt(side: Side) -> Seen:
    """Whether an answer begins with its question."""
    answer = side.chat.invoke(QUESTION).content
    return Seen(
        "the answer holds the prompt" if QUESTION in answer else "the answer alone",
        QUESTION in answer,
    )


def usage(side: Side) -> Seen:
    """Whether an answer says how many tokens it took."""
    message = side.chat.invoke(QUESTION)
    given = sorted(message.response_metadata)
    used = dict(message.usage_metadata or {})
    what = (
        f"{used['total_tokens']} tokens in `usage_metadata`" if used else "`usage_metadata` is None"
    )
    return Seen(f"{what}, {len(given)} entries of `response_metadata`", not used)


def asynchronous(side: Side) -> Seen:
    """Whether ``ainvoke`` and ``astream`` answer."""

    async def stream() -> str:
        return "".join([piece.content async for piece in side.chat.astream(QUESTION)])

    async def answer() -> str:
        return (await side.chat.ainvoke(QUESTION)).content

    said = []
    for ask in (answer, stream):
        try:
            said.append(asyncio.run(ask()))
        except (NotImplementedError, AttributeError) as error:
            return Seen(
                f"`a{'stream' if ask is stream else 'invoke'}` raises {name_of(error)}", True
            )
    return Seen("both answer", said[0] != said[1])


def stops(side: Side) -> Seen:
    """Whether a stop string of several tokens ends an answer, asked at once or streamed."""
    ways: dict[str, Callable[..., str]] = {
        "invoke": side.llm.invoke,
        "stream": lambda *args, **options: "".join(side.llm.stream(*args, **options)),
    }
    ignored = []
    for way, ask in ways.items():
        stop = side.stop_of(ask(QUESTION).removeprefix(QUESTION))
        if stop in ask(QUESTION, stop=[stop]).removeprefix(QUESTION):
            ignored.append(f"`{way}`")
    return Seen(
        f"ignored by {' and '.join(ignored)}" if ignored else "end the answer, and are not in it",
        bool(ignored),
    )


def options_of_a_call(side: Side) -> Seen:
    """Whether an option of one call counts."""
    count = side.tokens(lambda: side.llm.invoke(QUESTION, **side.more))
    return Seen(f"`{next(iter(side.more))}=2` gives {count} tokens", count > 2)


def tools(side: Side) -> Seen:
    """Whether a bound tool is shown to the model."""

    def find_ledger(year: int) -> str:
        """Find the ledger of a year."""
        return str(year)

    _, text = side.shown(lambda: side.chat.bind_tools([find_ledger]).invoke(QUESTION))
    is_shown = "find_ledger" in text
    return Seen(
        "the prompt lists the tool" if is_shown else "the prompt has no word of the tool",
        not is_shown,
    )


def tool_results(side: Side) -> Seen:
    """Whether a tool's result can be answered, as agents do."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    call = {"name": "find_ledger", "args": {"year": 1901}, "id": "1"}
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("On the shelf.", tool_call_id="1"),
    ]
    try:
        _, text = side.shown(lambda: side.chat.invoke(turns))
    except ValueError as error:
        return Seen(f"raises {name_of(error)}", True)
    return Seen("the result is in the prompt", "On the shelf." not in text)


def chat_template(side: Side) -> Seen:
    """Whether an LLM shows a chat prompt by the model's template."""
    from langchain_core.prompts import ChatPromptTemplate

    chain = ChatPromptTemplate([("system", "Be short."), ("human", "{question}")]) | side.llm
    _, text = side.shown(lambda: chain.invoke({"question": QUESTION}))
    has_template = "<|im_start|>" in text
    lines = (
        "the chat template"
        if has_template
        else "its text with roles: `System: …`"
        if "System: Be short." in text
        else f"`{text[:24]!r} …`"
    )
    return Seen(f"the model is shown {lines}", not has_template)


def slow_prefill(side: Side) -> Seen:
    """Whether a stream survives a prefill of more than a minute."""
    waits = iter([GIVES_UP_S + 2])
    with side.watched(lambda: time.sleep(next(waits, 0.0))):
        end, seconds = in_time(lambda: list(side.chat.stream(QUESTION)), GIVES_UP_S + 30)
    return Seen(f"{end} after {seconds:.0f} s", end != "an answer")


def streamed_error(side: Side) -> Seen:
    """Whether an error of the model reaches who reads a stream."""
    with side.watched(fault):
        end, seconds = in_time(lambda: list(side.chat.stream(QUESTION)), GIVES_UP_S + 30)
    return Seen(f"{end} after {seconds:.0f} s", "the device failed" not in end)


# -- with an LLM of LlamaIndex ---------------------------------------------------------------------------------------------------------


def first_tokens_of_messages(side: Side) -> Seen:
    """Whether BOS stands twice before chat messages."""
    from llama_index.core.llms import ChatMessage

    ids, _ = side.shown(lambda: side.llm.chat([ChatMessage(QUESTION)]))
    return Seen(f"the model is shown `{str(ids[:4])[:-1]}, …]`", ids[:2] == [1, 1])


def event_loop(side: Side) -> Seen:
    """Whether anything else runs in an event loop while an answer is awaited."""

    async def both() -> int:
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.005)
                turns += 1

        ticking = asyncio.ensure_future(tick())
        await asyncio.sleep(0)
        await side.llm.acomplete(QUESTION)
        ticking.cancel()
        return turns

    side.llm.complete(QUESTION)  # loads it
    with side.watched(lambda: time.sleep(0.03)):
        turns = asyncio.run(both())
    return Seen("it stands still" if not turns else "it goes on", turns < 5)


def options_of_a_completion(side: Side) -> Seen:
    """Whether an option of one call counts."""
    count = side.tokens(lambda: side.llm.complete(QUESTION, max_new_tokens=2))
    return Seen(f"`max_new_tokens=2` gives {count} tokens", count > 2)


def usage_of_a_completion(side: Side) -> Seen:
    """Whether ``raw`` says how many tokens an answer took, and is small and plain."""
    raw = side.llm.complete(QUESTION).raw
    used = raw.get("usage")
    kinds = ", ".join(f"`{name}`: {type(value).__name__}" for name, value in raw.items())
    with contextlib.suppress(TypeError):
        json.dumps(raw)
        return Seen(f"`raw` has {kinds}", not used)
    return Seen(f"`raw` has {kinds}, which is no JSON", True)


def stops_of_a_completion(side: Side) -> Seen:
    """Whether a stop string ends an answer."""
    stop = side.stop_of(side.llm.complete(QUESTION).text)
    is_ignored = stop in side.llm.complete(QUESTION, stop=[stop]).text
    return Seen("ignored" if is_ignored else "end the answer, and are not in it", is_ignored)


def error_while_streaming(side: Side) -> Seen:
    """Whether an error of the model reaches who reads ``stream_complete``, which has no time limit."""
    with side.watched(fault):
        end, seconds = in_time(lambda: list(side.llm.stream_complete(QUESTION)), 15)
    return Seen(f"{end} after {seconds:.0f} s", "the device failed" not in end)


def wrapped_prompt(side: Side) -> Seen:
    """Whether ``completion_to_prompt`` counts for streams as for calls."""
    side.llm.completion_to_prompt = lambda prompt: f"Wrapped: {prompt}"
    try:
        _, text = side.shown(lambda: list(side.llm.stream_complete(QUESTION)))
    finally:
        side.llm.completion_to_prompt = None
    return Seen("used" if "Wrapped" in text else "left out", "Wrapped" not in text)


def query_engines_template(side: Side) -> Seen:
    """Whether ``predict``, by which query engines ask, uses the model's chat template."""
    from llama_index.core import PromptTemplate

    _, text = side.shown(lambda: side.llm.predict(PromptTemplate("{q}"), q=QUESTION))
    return Seen("used" if "<|im_start|>" in text else "left out", "<|im_start|>" not in text)


def context_window(side: Side) -> Seen:
    """Whether prompts are packed for the model's own context window."""
    window, own = side.llm.metadata.context_window, side.model.config.max_position_embeddings
    return Seen(f"{window} of the model's {own} tokens", window != own)


class Row(NamedTuple):
    """A fault: what it is called, the function that looks for it, and whether that takes a minute."""

    name: str
    look: Callable[[Side], Seen]
    is_slow: bool = False


LANGCHAIN = (
    Row("First token ids of a chat prompt", first_tokens),
    Row("What `invoke` returns", repeats_the_prompt),
    Row("Tokens used", usage),
    Row("`ainvoke` and `astream`", asynchronous),
    Row("Stop strings", stops),
    Row("Options of one call", options_of_a_call),
    Row("`bind_tools`", tools),
    Row("A tool's result as last message", tool_results),
    Row("A chat prompt piped into an LLM", chat_template),
    Row("A stream whose prefill takes 62 s", slow_prefill, True),
    Row("An error of the model in a stream", streamed_error, True),
)
LLAMA_INDEX = (
    Row("First token ids of chat messages", first_tokens_of_messages),
    Row("The event loop during `acomplete`", event_loop),
    Row("Options of one call", options_of_a_completion),
    Row("Tokens used", usage_of_a_completion),
    Row("Stop strings", stops_of_a_completion),
    Row("An error of the model in `stream_complete`", error_while_streaming),
    Row("`completion_to_prompt` in `stream_complete`", wrapped_prompt),
    Row("The chat template in query engines", query_engines_template),
    Row("Context window", context_window),
)


def seen_by(row: Row, side: Side) -> Seen:
    """Return what a row's function saw of a side; any other error than those it expects is a fault, too."""
    try:
        return row.look(side)
    except Exception as error:
        return Seen(f"raises {name_of(error)}", True)


def saved_model(directory: str) -> str:
    """Write the tiny model, with a template that writes BOS and tools."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE + tokenizer.chat_template
    tokenizer.save_pretrained(directory)
    tiny_model("llama").save_pretrained(directory)
    return directory


def ours(directory: str) -> tuple[Side, Side]:
    """Return kvrag's classes for LangChain and for LlamaIndex."""
    import langchain_kvrag
    from llama_index.llms.kvrag import KVRagLLM

    chat = langchain_kvrag.ChatKVRag(model=directory, max_tokens=TOKENS)
    text, llm = (
        langchain_kvrag.KVRagLLM(model=directory, max_tokens=TOKENS),
        KVRagLLM(directory, max_new_tokens=TOKENS),
    )
    loaded = chat.engine.loaded
    of = {"model": loaded.lm.model, "tokenizer": loaded.encoder.tokenizer}
    return Side(chat, text, **of, more={"max_tokens": 2}), Side(llm, llm, **of)


def theirs(directory: str) -> tuple[Side, Side]:
    """Return the incumbents' classes, with their own defaults but for greedy answers and their length."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from llama_index.llms.huggingface import HuggingFaceLLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"max_new_tokens": TOKENS, "do_sample": False}  # a pipeline samples by default
    pipe = HuggingFacePipeline.from_model_id(
        directory, task="text-generation", pipeline_kwargs=options
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    llm = HuggingFaceLLM(model=model, tokenizer=tokenizer, max_new_tokens=TOKENS)
    chat = ChatHuggingFace(llm=pipe, model_id=directory)
    first = Side(chat, pipe, pipe.pipeline.model, pipe.pipeline.tokenizer, {"max_new_tokens": 2})
    return first, Side(llm, llm, model, tokenizer)


ROWS = LANGCHAIN, LLAMA_INDEX
PACKAGES = ("langchain-huggingface", "llama-index-llms-huggingface")


def main() -> None:
    """Look for every fault on both sides, print a table, and write the JSON."""
    options = parser(__doc__)
    options.add_argument(
        "--quick", action="store_true", help="leave out what takes minutes; writes nothing"
    )
    args = options.parse_args()
    threading.excepthook = lambda _: None  # of the incumbents' threads, whose errors nobody sees
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        sides = zip(PACKAGES, ROWS, theirs(saved_model(directory)), ours(directory), strict=True)
        for package, looked_for, incumbent, own in sides:
            for row in looked_for:
                if row.is_slow and args.quick:
                    continue
                found = {
                    name: seen_by(row, side)
                    for name, side in (("theirs", incumbent), ("ours", own))
                }
                for name, seen in found.items():
                    kind = "FAULT" if seen.is_fault else "good"
                    print(f"{package} | {row.name} | {name} | {kind}: {seen.what}", flush=True)
                rows.append(
                    {"package": package, "name": row.name}
                    | {k: v._asdict() for k, v in found.items()}
                )
    about = machine()
    about["versions"] |= {name: importlib.metadata.version(name) for name in PACKAGES}
    if not args.quick:
        write_result(
            "incumbents", {"machine": about, "model": "a tiny random Llama", "rows": rows}, args.out
        )


if __name__ == "__main__":
    main()
