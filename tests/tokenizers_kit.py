"""SentencePiece-like tiny tokenizers."""

from __future__ import annotations

import json
from typing import Literal

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from kvrag.testing.tokenizers import TEXT, VOCAB_SIZE


def tiny_sentencepiece_tokenizer(
    prepend: Literal["normalizer", "always", "first", "never"] = "normalizer",
    *,
    add_bos: bool = True,
) -> PreTrainedTokenizerFast:
    """Build a SentencePiece-like BPE tokenizer of :data:`VOCAB_SIZE` ids.

    0 is ``<unk>``, 1 BOS, 2 EOS; then come all bytes, then pieces of words.

    Parameters
    ----------
    prepend
        Source of the dummy prefix: ``"normalizer"``, a normaliser (Llama 2, Phi 3); ``"always"``,
        Metaspace after every control token; ``"first"``, Metaspace at the very start only
        (non-legacy Llama); ``"never"``, no dummy prefix (Gemma).
    add_bos
        Whether encoding with special tokens puts BOS first.
    """
    vocabulary, merges = sentencepiece_parts()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    elif prepend == "never":
        tokenizer.normalizer = spaces
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [*tail, *([] if prepend == "never" else [decoders.Strip(" ", 1, 0)])]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
    )


def sentencepiece_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and merges of :func:`tiny_sentencepiece_tokenizer`.

    They are for tokenizer classes that take them as arguments.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    alphabet = [*map(chr, range(33, 127)), "▁"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    size = VOCAB_SIZE - len(first)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([TEXT.replace("\n", " ")], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*first, *sorted(model["vocab"], key=model["vocab"].get)]
    return {piece: index for index, piece in enumerate(pieces)}, [
        (left, right) for left, right in model["merges"]
    ]
