"""Tiny byte-level BPE tokenizer with a chat template, trained on a paragraph, without downloads."""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 400

TEXT = (
    "The archive opens at nine and closes at five. A reader asks for a box, and the keeper brings "
    "it to the table by the window.\n"
    "Retrieval finds the chunks that answer a question; the model reads them in the order in which "
    "they arrive, and answers in words.\n"
    "The keys and the values of a chunk depend on what stands before it: that is what a repair has "
    "to put right."
)

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(*, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of :data:`VOCAB_SIZE` ids.

    0 is pad, 1 BOS, 2 EOS (``<|im_end|>``), 3 ``<|im_start|>``.

    Parameters
    ----------
    add_bos
        Whether encoding with special tokens puts BOS first, as Llama tokenizers do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(s, special=True) for s in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
