"""GGUF files of Qwen2 models, for tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvrag.errors import require

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # types of tokens


def write_gguf(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    chat_template: str | None = None,
    is_quantised: bool = False,
) -> None:
    """Write a Qwen2 model as a GGUF file.

    Parameters
    ----------
    path
        File to write.
    config, tokenizer
        Contents of ``config.json`` and ``tokenizer.json``.
    tensors
        Names and values, as in the checkpoint.
    chat_template
        Text of the chat template.
    is_quantised
        Quantise matrices to 8 bits (``Q8_0``); else keep float32.
    """
    gguf = require("gguf", extra="gguf", purpose="writing GGUF files")
    writer = gguf.GGUFWriter(path, "qwen2")
    num_layers = config["num_hidden_layers"]
    writer.add_name("Qwen2")
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, config, tokenizer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, num_layers)
    codes = gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors:
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if is_quantised and values.ndim == 2:
            writer.add_tensor(own, gguf.quants.quantize(values, codes), raw_dtype=codes)
        else:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    """Write vocabulary and merges; ids without a token get a placeholder, as converters do."""
    size = config["vocab_size"]
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [_UNUSED] * size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = token, _NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
