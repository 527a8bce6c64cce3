"""Option names of langchain-huggingface: translated into kvrag's names, or refused.

Options with the value ``None`` are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvrag import ConfigError
from kvrag.adapters import unknown_option

Options = Mapping[str, Any]
"""Options by name."""

ALIASES = {
    **dict.fromkeys(("model_id", "model_name"), "model"),
    **dict.fromkeys(("stop_sequence", "stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "max_tokens"),
    "request_timeout": "timeout",
    "min_tokens": "min_new_tokens",
    "torch_dtype": "dtype",
}
"""kvrag's names of options by their other names."""
_SAMPLED = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
    "stop",
    "do_sample",
    "dtype",
)
"""kvrag's option names that ``pipeline_kwargs`` and ``generate_kwargs`` may hold."""

_PIPELINE = ", of the pipeline"
_PARTS = ("model", "tokenizer")
_LOCAL = "the model runs in this process, and no service is asked"
_ONE = "one answer is decoded, token by token"
_NO_PROMPT = "answers never hold the prompt; put it in front of them yourself"
_UNUSED = ("max_retries", "api_key")
"""Standard parameters of LangChain's models that have no effect on a model in this process.

No request is sent, so it can't get lost.
"""
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("base_url", "api_base", "endpoint_url"), ((), _LOCAL)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "n"), ((1,), _ONE)),
    **dict.fromkeys(
        ("logprobs", "top_logprobs"), ((False, 0), "engine.generate(logprobs=...) returns them")
    ),
    "return_full_text": ((False,), _NO_PROMPT),
    "skip_prompt": ((True,), _NO_PROMPT),
    "task": (("text-generation",), "only causal language models are run"),
    "backend": (("default", "pipeline"), "models are run by torch"),
    # 4 is HuggingFacePipeline's default, so users did not choose it.
    "batch_size": (
        (1, 4),
        "prompts are answered together; config={'max_concurrency': ...} of batch limits them",
    ),
    "max_length": ((), "it would count the prompt; pass max_tokens"),
    "stream_usage": ((True,), "the last chunk of a stream always says what was used"),
    "use_cache": ((True,), "answers are always decoded with their KV"),
}
"""Options that can't be changed: their accepted values, and the reason."""


def named(options: Options, kind: str) -> Any:
    """Return the value of kvrag's option ``kind`` under any of its names, if given."""
    given = (
        value
        for name, value in options.items()
        if ALIASES.get(name, name) == kind and value is not None
    )
    return next(given, None)


def understood(options: Options, *, of: str) -> dict[str, Any]:
    """Return options of a model or a call under kvrag's names; unknown options stay unchanged.

    Raises
    ------
    ConfigError
        If an option asks for something impossible, or is given twice with different values.
    """
    out = dict[str, Any]()
    spelt = dict[str, str]()
    for name, value, where in _flat(options):
        # None is a context, too: chunks are encoded behind the prefix alone.
        if value is None and name != "context":
            continue
        if name in _FIXED:
            fine, remedy = _FIXED[name]
            if value not in fine:
                raise ConfigError(f"{of} takes no {name}={value!r}: {remedy}; leave it out")
            continue
        if name in _UNUSED:
            continue
        kind = ALIASES.get(name, name)
        if where and kind not in (*_SAMPLED, *(_PARTS if where == _PIPELINE else ())):
            raise unknown_option(name, _SAMPLED, of=f"{of}{where}")
        if kind in out and out[kind] != value:
            raise ConfigError(
                f"{of} has {kind} twice, as {spelt[kind]} and as {name}{where}; pass one of them"
            )
        out[kind] = value
        spelt.setdefault(kind, name + where)
    _take_sampling(out)
    _take_device(out)
    return out


def _flat(options: Options, where: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the names and values of options, also in dicts and pipelines, and their places."""
    for name, value in options.items():
        if name in ("pipeline_kwargs", "generate_kwargs"):
            yield from _flat(value or {}, f", in {name}")
        elif name == "pipeline" and value is not None:
            yield from _flat(_of_pipeline(value), _PIPELINE)
        elif name == "llm" and value is not None:
            inner = getattr(value, "pipeline", None)
            if inner is None:
                raise ConfigError(
                    f"llm is of type {type(value).__name__}; pass a HuggingFacePipeline, or "
                    "model=... with its name"
                )
            parts = {part: getattr(value, part, None) for part in ("pipeline_kwargs", "batch_size")}
            yield from _flat({"pipeline": inner, **parts})
        elif value is not None or name not in ("pipeline", "llm"):
            yield name, value, where


def _of_pipeline(pipeline: Any) -> dict[str, Any]:
    """Return the parts of a transformers pipeline, and its options for answers."""
    kind = pipeline._postprocess_params.get("return_type")
    full = {} if kind is None else {"return_full_text": kind.name != "NEW_TEXT"}
    return {
        **getattr(pipeline, "_generate_kwargs", {}),
        **pipeline._forward_params,
        **pipeline._preprocess_params,
        **full,
        "task": pipeline.task,
        "model": pipeline.model,
        "tokenizer": pipeline.tokenizer,
    }


def _take_sampling(out: dict[str, Any]) -> None:
    """Turn ``do_sample`` into a temperature: 0 if false; 1 if true and no temperature was given."""
    is_sampling = out.pop("do_sample", None)
    if is_sampling is None:
        return
    if "temperature" not in out:
        out["temperature"] = float(is_sampling)
    elif bool(out["temperature"]) != is_sampling:
        raise ConfigError(
            f"do_sample is {is_sampling}, and temperature is {out['temperature']!r}; pass one of "
            "them"
        )


def _take_device(out: dict[str, Any]) -> None:
    """Turn ``device_map`` into a device, unless it splits the model; -1 is the CPU."""
    wanted = out.pop("device_map", None)
    if wanted is not None and "device" in out:
        raise ConfigError(
            f"device is {out['device']!r}, and device_map is {wanted!r}; pass one of them"
        )
    if isinstance(wanted, dict) or wanted in ("balanced", "balanced_low_0", "sequential"):
        out["model_kwargs"] = {**out.get("model_kwargs", {}), "device_map": wanted}
    elif wanted not in (None, "auto"):  # "auto" is the default: CUDA if available
        out["device"] = wanted
    if out.get("device") == -1:
        out["device"] = "cpu"
