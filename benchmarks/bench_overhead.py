"""What the adapters of LangChain and LlamaIndex add to the time to first token of the engine alone.

One engine, its model, its chunks in the memory tier and one prompt of 4,000 tokens, streamed until the first token: by the engine, and by
each class. All take turns in each round, in an order that moves on; differences are of the same round. The host's part is measured by
itself, too: the same calls, with an engine that answers at once.

    KVRAG_EVAL_DATA=... python benchmarks/bench_overhead.py [--repeats 15] [--threads 2]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from common import items, machine, parser, small_model, write_result

from kvrag import GenerationResult, KVRagEngine
from kvrag.generate.streams import TokenStream
from langchain_kvrag import ChatKVRag, KVRagLLM
from llama_index.llms import kvrag as of_llama_index

LIMIT = 0.02
"""Share of the engine's own time to first token that an adapter may add."""
HOST_REPEATS = 200

Ask = Callable[[], Iterator[Any]]


def first(ask: Ask) -> tuple[float, float]:
    """Milliseconds to the first token, and of CPU time; the stream is left then."""
    wall, cpu = time.perf_counter(), time.process_time()
    stream = ask()
    next(stream)
    took = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
    stream.close()  # type: ignore[attr-defined]
    return took


def streams(chunks: list[str], question: str) -> tuple[KVRagEngine, dict[str, Ask]]:
    """Return the one engine with the chunks' KV, and how each class is asked for the same prompt."""
    from langchain_core.prompts import ChatPromptTemplate
    from llama_index.core.llms import ChatMessage

    template = ChatPromptTemplate([("human", "{context}{question}")])
    given = {"context": "\n\n".join(chunks), "question": question}
    text = f"{given['context']}{question}"
    prefix = KVRagEngine.get(small_model(), dtype="float32").prefix_text
    options: dict[str, Any] = {"model": small_model(), "dtype": "float32", "prefix": prefix}
    chat, llm = ChatKVRag(**options, max_tokens=4), KVRagLLM(**options, max_tokens=4)
    other = of_llama_index.KVRagLLM(**options, max_new_tokens=4)
    engine = chat.engine
    assert llm.engine is engine
    assert other.engine is engine
    engine.precompute(chunks)
    return engine, {
        "the engine": lambda: engine.stream([{"role": "user", "content": text}], max_new_tokens=4),
        "`ChatKVRag`": lambda: chat.stream(text),
        "`prompt | ChatKVRag`": lambda: (template | chat).stream(given),
        "`prompt | KVRagLLM`": lambda: (template | llm).stream(given),
        "LlamaIndex `KVRagLLM.stream_chat`": lambda: other.stream_chat([ChatMessage(text)]),
        "LlamaIndex `KVRagLLM.stream_complete`": lambda: other.stream_complete(text),
    }


def host_only(engine: KVRagEngine, asks: dict[str, Ask]) -> dict[str, float]:
    """Median milliseconds of each class to its first token, where the engine answers at once."""
    result = engine.generate("Who?", max_new_tokens=1)

    def at_once(prompt: Any, **_: Any) -> TokenStream:
        def produce(emit: Callable[[str], None], _: Any) -> GenerationResult:
            emit("one")
            return result

        return TokenStream(produce)

    with mock.patch.object(engine, "stream", at_once):
        return {
            name: statistics.median(first(ask)[0] for _ in range(HOST_REPEATS))
            for name, ask in asks.items()
        }


def main() -> None:
    """Measure, and write the JSON; exits with 1 above the limit."""
    args = parser(__doc__, repeats=15, threads=torch.get_num_threads()).parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = KVRagEngine.get(small_model(), dtype="float32").tokenizer
    chunks = [chunk for item in items(tokenizer, count=2) for chunk in item.chunks][:16]
    engine, asks = streams(chunks, items(tokenizer, count=1)[0].tail)
    names = list(asks)
    rounds: list[dict[str, tuple[float, float]]] = []
    for index in range(args.repeats + 1):
        turn = index % len(names)
        rounds.append({name: first(asks[name]) for name in [*names[turn:], *names[:turn]]})
        print({name: round(took[0]) for name, took in rounds[-1].items()}, flush=True)
    del rounds[0]  # the first round warms up
    host = host_only(engine, asks)
    base = statistics.median(each[names[0]][0] for each in rounds)
    rows = []
    for name in names:
        wall, cpu = (statistics.median(each[name][i] for each in rounds) for i in (0, 1))
        more, more_cpu = (
            statistics.median(each[name][i] - each[names[0]][i] for each in rounds) for i in (0, 1)
        )
        part = host[name] - host[names[0]]
        row = {
            "name": name,
            "ttft_ms": wall,
            "cpu_ms": cpu,
            "more_ms": more,
            "more_cpu_ms": more_cpu,
            "host_ms": part,
        }
        rows.append(row | {"share": more / base, "host_share": part / base})
        print(row, f"{part / base:.2%}")
    tokens = engine.prefill([{"role": "user", "content": "\n\n".join(chunks)}]).prompt_tokens
    found = {
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct",
        "tokens": tokens,
        "limit": LIMIT,
        "rows": rows,
    }
    write_result("overhead", found | {"rounds": rounds, "host": host}, args.out)
    if max(row["host_share"] for row in rows) > LIMIT:
        raise SystemExit("an adapter's own part is above its limit")


if __name__ == "__main__":
    main()
