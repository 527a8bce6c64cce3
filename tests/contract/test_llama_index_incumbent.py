"""Whatever ``HuggingFaceLLM`` takes is understood by ``KVRagLLM`` under the same name, or refused with what to pass instead."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.output_parsers import SelectionOutputParser
from llama_index.core.prompts import PromptTemplate
from llama_index.core.rate_limiter import TokenBucketRateLimiter
from transformers import AutoTokenizer

from kvrag import ConfigError
from llama_index.llms.kvrag import KVRagLLM

incumbent = pytest.importorskip("llama_index.llms.huggingface").HuggingFaceLLM
PARSER, MANAGER = SelectionOutputParser(), CallbackManager([])
LIMITER = TokenBucketRateLimiter(requests_per_minute=60)
PLAIN = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def shown(llm: KVRagLLM, *, is_chat: bool = False) -> str:
    """Return what the model reads of a question."""
    asked: Any = [ChatMessage("Who?")] if is_chat else "Who?"
    return "".join(span.text for span in llm.explain(asked).spans)


def stopped_by(llm: KVRagLLM) -> bool:
    """Whether the second token that the model would say ends its answer."""
    return llm.complete("Who?", max_tokens=9).raw["usage"]["completion_tokens"] <= 2


def options(llm: KVRagLLM) -> dict[str, Any]:
    return {
        name: value
        for name, value in llm.to_payload().items()
        if name in ("temperature", "top_k", "top_p")
    }


Check = Callable[[KVRagLLM], bool]
UNDERSTOOD: dict[str, list[tuple[Any, Check]]] = {
    "callback_manager": [(MANAGER, lambda llm: llm.callback_manager is MANAGER)],
    "rate_limiter": [(LIMITER, lambda llm: llm.rate_limiter is LIMITER)],
    "system_prompt": [
        ("Be brief.", lambda llm: "system\nBe brief." in shown(llm)),
        ("", lambda llm: shown(llm) == PLAIN),
    ],
    "messages_to_prompt": [
        (
            lambda messages: "M:" + "|".join(m.content for m in messages),
            lambda llm: shown(llm, is_chat=True) == "M:Who?",
        )
    ],
    "completion_to_prompt": [
        (lambda completion: f"C:{completion}", lambda llm: shown(llm) == "C:Who?")
    ],
    "output_parser": [(PARSER, lambda llm: llm.output_parser is PARSER)],
    "pydantic_program_mode": [("llm", lambda llm: llm.pydantic_program_mode == "llm")],
    "query_wrapper_prompt": [
        ("<{query_str}>", lambda llm: shown(llm) == "<Who?>"),
        (PromptTemplate("<{query_str}>"), lambda llm: shown(llm) == "<Who?>"),
        (incumbent.model_fields["query_wrapper_prompt"].default, lambda llm: shown(llm) == PLAIN),
    ],
    "model_name": [("a/b", lambda llm: llm.model == "a/b")],
    "tokenizer_name": [("a/b", lambda llm: llm.tokenizer == "a/b")],
    "context_window": [(900, lambda llm: llm.metadata.context_window == 900)],
    "max_new_tokens": [(9, lambda llm: llm.metadata.num_output == 9)],
    "max_tokens": [(9, lambda llm: llm.metadata.num_output == 9)],
    "device_map": [
        ("auto", lambda llm: llm.device is None and not llm.model_kwargs),
        ("cpu", lambda llm: llm.device == "cpu"),
        (
            "balanced",
            lambda llm: llm.device is None and llm.model_kwargs == {"device_map": "balanced"},
        ),
        ({"": 0}, lambda llm: llm.device is None and llm.model_kwargs == {"device_map": {"": 0}}),
    ],
    "stopping_ids": [(None, lambda llm: not stopped_by(llm)), (range(5, 4096), stopped_by)],
    "tokenizer_outputs_to_remove": [(["token_type_ids"], lambda llm: shown(llm) == PLAIN)],
    "model_kwargs": [
        ({"torch_dtype": torch.bfloat16}, lambda llm: llm.engine.source.dtype == torch.bfloat16)
    ],
    "generate_kwargs": [
        (
            {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
            lambda llm: options(llm) == {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
        ),
        ({"do_sample": False}, lambda llm: options(llm) == {"temperature": 0.0}),
    ],
    "is_chat_model": [
        (False, lambda llm: not llm.metadata.is_chat_model and shown(llm) == "Who?"),
        (True, lambda llm: llm.metadata.is_chat_model and shown(llm) == PLAIN),
    ],
}
"""Values of its fields, and what must hold of an LLM that was given them."""

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "tokenizer_kwargs": [
        ({"tokenizer_kwargs": {"max_length": 9}}, r"pass tokenizer=AutoTokenizer.from_pretrained")
    ],
    "generate_kwargs": [({"generate_kwargs": {"num_beams": 2}}, "no option 'num_beams'")],
    "model_kwargs": [({"model_kwargs": {"dtype": "float16"}}, r"pass KVRagLLM\(dtype=")],
    "device_map": [({"device": "cpu", "device_map": "cuda"}, "pass device alone")],
    "model_name": [({"model": "a", "model_name": "b"}, "pass it once")],
    "stopping_ids": [({"stopping_ids": [-1]}, "greater than or equal to 0")],
}


def test_every_field_is_in_a_table():
    assert (
        incumbent.model_fields.keys() - UNDERSTOOD.keys() == {"tokenizer_kwargs"} <= REFUSED.keys()
    )
    parameters = inspect.signature(incumbent.__init__).parameters.keys() - {
        "self",
        "model",
        "tokenizer",
    }
    assert parameters <= UNDERSTOOD.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "case"), [(name, i) for name, cases in UNDERSTOOD.items() for i in range(len(cases))]
)
def test_it_is_understood(tiny_dir, name, case):
    value, check = UNDERSTOOD[name][case]
    model = {} if name == "model_name" else {"model": tiny_dir}
    assert check(KVRagLLM(**model, context=None, **{name: value}))


@pytest.mark.parametrize(
    ("name", "case"), [(name, i) for name, cases in REFUSED.items() for i in range(len(cases))]
)
def test_or_refused_with_a_remedy(tiny_dir, name, case):
    given, message = REFUSED[name][case]
    with pytest.raises(ConfigError, match=message):
        KVRagLLM(**{"model": tiny_dir, **given})


def test_a_window_that_is_larger_than_the_models_is_not_used_and_said_so(tiny_dir):
    with pytest.warns(
        UserWarning, match="context_window is 9999, and the model's, which holds, is 4096"
    ):
        assert KVRagLLM(tiny_dir, context_window=9999).metadata.context_window == 4096


def test_ready_objects_under_its_names_serialise(tiny_dir):
    llm = KVRagLLM(
        model=tiny_dir,
        tokenizer=AutoTokenizer.from_pretrained(tiny_dir),
        stopping_ids=[7],
        is_chat_model=False,
    )
    again = KVRagLLM.from_dict(json.loads(llm.to_json()))
    assert (again.stop_token_ids, again.is_chat_model, again.tokenizer) == ([7], False, tiny_dir)
