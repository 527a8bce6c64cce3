"""Bodies as clients send them with their own defaults, by client, and the file of its sources that builds them.

Every body names the served model, ``ID``. A body that is accepted must be answered; nothing of it may be a fault.
"""

from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ID = "tiny"

USER = {"role": "user", "content": "Who keeps the lamp?"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds a keeper.", "parameters": SCHEMA},
}


class Sent(NamedTuple):
    """A body of a client, and in which file of the client's sources it is built."""

    client: str
    source: str
    given: dict[str, Any]

    @property
    def path(self) -> str:
        return TEXT if "prompt" in self.given else CHAT

    @property
    def body(self) -> dict[str, Any]:
        return {"model": ID, **self.given}


def each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


CLIENTS = (
    Sent(
        "Open WebUI",
        "backend/open_webui/utils/payload.py, routers/openai.py",
        {
            **STREAM,
            "messages": [SYSTEM, USER],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repeat_penalty": 1.1,
            "mirostat": 0,
            "mirostat_eta": 0.1,
            "mirostat_tau": 5.0,
            "tfs_z": 1,
            "num_ctx": 4096,
            "num_keep": 24,
            "num_batch": 512,
            "use_mmap": True,
            "keep_alive": "5m",
            "reasoning_effort": "medium",
            "seed": 0,
            "stop": ["###"],
            "logit_bias": {},
            "metadata": {"chat_id": "a", "message_id": "b"},
            "max_tokens": 4,
        },
    ),
    Sent(
        "Open WebUI, title of a chat",
        "backend/open_webui/routers/tasks.py",
        {
            "messages": [USER],
            "stream": False,
            "max_completion_tokens": 4,
            "user": "a",
            "chat_id": "b",
            "session_id": "c",
        },
    ),
    Sent(
        "Continue, chat",
        "core/llm/llms/OpenAI.ts, packages/openai-adapters/src/apis/OpenAI.ts",
        {
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
            "max_tokens": 4,
            "temperature": 0.5,
            "top_p": None,
            "frequency_penalty": None,
            "presence_penalty": None,
            **STREAM,
            "stop": None,
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
    ),
    Sent(
        "Continue, autocomplete",
        "core/llm/llms/OpenAI.ts",
        {
            "prompt": "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
            "max_tokens": 4,
            "temperature": 0.01,
            "stream": True,
            "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "/src/", "\n\n", "```"],
        },
    ),
    Sent(
        "Cline",
        "src/core/api/providers/openai.ts",
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": [{"type": "text", "text": "<task>\nWho?\n</task>"}]},
                {"role": "assistant", "content": "<read_file>a.py</read_file>", "tool_calls": None},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "[result]"},
                        {"type": "text", "text": "ok"},
                    ],
                },
            ],
            "temperature": 0,
            "max_tokens": 4,
            **STREAM,
            "tools": None,
        },
    ),
    Sent(
        "SillyTavern, chat completions",
        "src/endpoints/backends/chat-completions.js",
        {
            "messages": [
                SYSTEM,
                {"role": "user", "content": "Who?", "name": "Ann"},
                {"role": "system", "content": "[Go on]"},
            ],
            "temperature": 1,
            "max_tokens": 4,
            "stream": False,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "top_k": 0,
            "stop": ["\nAnn:"],
            "logit_bias": {},
            "seed": -1,
            "n": 1,
            "logprobs": True,
            "top_logprobs": 10,
        },
    ),
    Sent(
        "SillyTavern, text completions",
        "public/scripts/textgen-settings.js",
        {
            "prompt": "Ann: Who?\nBob:",
            "max_new_tokens": 4,
            "max_tokens": 4,
            "logprobs": 10,
            "temperature": 0.7,
            "top_p": 0.5,
            "typical_p": 1,
            "typical": 1,
            "repetition_penalty": 1.2,
            "top_k": 40,
            "add_bos_token": True,
            "smoothing_curve": 1,
            "dry_allowed_length": 2,
            "dry_base": 1.75,
            "dry_sequence_breakers": '["\\n", ":"]',
            "stopping_strings": ["\nAnn:"],
            "stop": ["\nAnn:"],
            "truncation_length": 4096,
            "ban_eos_token": False,
            "skip_special_tokens": True,
            "include_reasoning": True,
            "tfs": 1,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "custom_token_bans": "",
            "banned_strings": [],
            "api_type": "generic",
            "api_server": "http://127.0.0.1:8000",
            "xtc_threshold": 0.1,
            "adaptive_target": -0.01,
            "adaptive_decay": 0.9,
            "n": 1,
            "ignore_eos": False,
            "spaces_between_special_tokens": True,
            "rep_pen": 1.2,
            "repeat_penalty": 1.2,
            "n_predict": 4,
            "num_predict": 4,
            "num_ctx": 4096,
            "guidance_scale": 1,
            "negative_prompt": "",
            "stream": True,
            **each(
                0,
                "min_p frequency_penalty presence_penalty min_length min_tokens smoothing_factor "
                "dry_multiplier dry_penalty_last_n max_tokens_second top_a mirostat_mode "
                "xtc_probability nsigma top_n_sigma min_keep mirostat",
            ),
        },
    ),
    Sent(
        "LibreChat",
        "@librechat/agents, which extends LangChain's ChatOpenAI",
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "user": "6512bd43d9caa6e02c990b0a",
            **STREAM,
            "max_tokens": 4,
            "modalities": ["text"],
            "verbosity": "medium",
        },
    ),
    Sent(
        "ragas",
        "src/ragas/llms/base.py, by LangChain's ChatOpenAI",
        {
            "messages": [USER],
            "n": 3,
            "temperature": 0.3,
            "stream": False,
            "max_completion_tokens": 4,
        },
    ),
    Sent(
        "ragas, structured",
        "src/ragas/llms/base.py, by instructor",
        {
            "messages": [USER],
            "temperature": 0.01,
            "top_p": 0.1,
            "max_tokens": 64,
            "response_format": {"type": "json_object"},
        },
    ),
    Sent(
        "instructor, tools",
        "instructor/processing/response.py",
        {
            "messages": [USER],
            "max_tokens": 64,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        },
    ),
    Sent(
        "instructor, JSON schema",
        "instructor/processing/response.py",
        {
            "messages": [USER],
            "max_tokens": 64,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Keeper", "schema": SCHEMA, "strict": True},
            },
        },
    ),
    Sent(
        "lm-evaluation-harness, generation",
        "lm_eval/models/openai_completions.py, LocalCompletionsAPI",
        {
            "prompt": [[1, 5, 6], [1, 7]],
            "max_tokens": 4,
            "temperature": 0,
            "stop": ["\n\n", "Question:"],
            "seed": 1234,
        },
    ),
    Sent(
        "lm-evaluation-harness, log-likelihood",
        "lm_eval/models/openai_completions.py, LocalCompletionsAPI",
        {
            "prompt": [[1, 5, 6, 9], [1, 7]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    Sent(
        "lm-evaluation-harness, chats",
        "lm_eval/models/openai_completions.py, LocalChatCompletion",
        {
            "messages": [{"role": "user", "content": "2 + 2 =", "type": "text"}],
            "max_tokens": 4,
            "temperature": 0,
            "stop": ["Question:"],
            "seed": 1234,
        },
    ),
    Sent(
        "aider",
        "aider/models.py, by litellm",
        {"messages": [SYSTEM, USER], "stream": True, "temperature": 0, "max_tokens": 4},
    ),
    Sent(
        "Vercel AI SDK",
        "packages/openai-compatible/src/chat/openai-compatible-chat-language-model.ts",
        {
            "user": None,
            "max_tokens": 4,
            "temperature": 0,
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": "auto",
            **STREAM,
        },
    ),
    Sent(
        "LlamaIndex, OpenAILike",
        "llama_index/llms/openai/base.py",
        {
            "messages": [USER],
            "stream": False,
            "temperature": 0.1,
            "max_tokens": 4,
            "tool_choice": "none",
        },
    ),
    Sent(
        "vLLM's own clients",
        "vllm/entrypoints/openai/chat_completion/protocol.py",
        {
            "messages": [USER],
            "frequency_penalty": 0.0,
            "logprobs": False,
            "top_logprobs": 0,
            "max_tokens": 4,
            "n": 1,
            "presence_penalty": 0.0,
            "stop": [],
            "stream": False,
            "tool_choice": "none",
            "use_beam_search": False,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "length_penalty": 1.0,
            "stop_token_ids": [],
            "include_stop_str_in_output": False,
            "ignore_eos": False,
            "min_tokens": 0,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "echo": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "priority": 0,
            "request_id": "a",
            **each(
                None,
                "logit_bias response_format seed stream_options temperature top_p tools user "
                "best_of truncate_prompt_tokens prompt_logprobs documents chat_template "
                "chat_template_kwargs guided_json guided_regex",
            ),
        },
    ),
    Sent(
        "OpenAI's client, every field of its own at nothing",
        "src/openai/types/chat/completion_create_params.py",
        {
            "messages": [{"role": "user", "content": "Who?", "name": None}],
            "function_call": "none",
            "functions": [],
            "max_completion_tokens": 4,
            "modalities": ["text"],
            "prompt_cache_key": "a",
            "response_format": {"type": "text"},
            "safety_identifier": "b",
            "service_tier": "auto",
            "store": False,
            "stream_options": {"include_obfuscation": False},
            "user": "c",
            "verbosity": "low",
            **each(
                None,
                "audio frequency_penalty logit_bias logprobs max_tokens metadata n "
                "parallel_tool_calls prediction presence_penalty prompt_cache_retention "
                "reasoning_effort seed stop stream temperature tool_choice tools top_logprobs "
                "top_p web_search_options",
            ),
        },
    ),
)
