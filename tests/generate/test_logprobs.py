"""Log-probabilities, penalties and biases of an answer's tokens, and how OpenAI writes them."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kvrag import ConfigError
from kvrag.config import SamplingConfig
from kvrag.generate.defaults import Penalties
from kvrag.generate.logprobs import Delta, LogprobWriter
from kvrag.types import TokenLogprob

PROMPT = "One two three"


def test_they_are_of_the_models_own_logits(engine):
    got = engine.generate(
        PROMPT, max_new_tokens=6, temperature=1.5, seed=3, repetition_penalty=1.3, logprobs=3
    )
    scored = engine.score(PROMPT, got.token_ids)
    want = torch.log_softmax(scored.logits, dim=-1)
    assert [each.token_id for each in got.logprobs] == got.token_ids
    for row, each in zip(want, got.logprobs, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert [token for token, _ in each.top] == row.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_without_asking_there_are_none_and_the_answer_is_the_same(engine):
    plain = engine.generate(PROMPT, max_new_tokens=6)
    told = engine.generate(PROMPT, max_new_tokens=6, logprobs=0)
    assert plain.logprobs is None
    assert plain.token_ids == told.token_ids
    assert all(each.top == () and each.logprob <= 0 for each in told.logprobs)
    with engine.stream(PROMPT, max_new_tokens=6) as stream:
        assert {type(piece) for piece in stream} == {str}


def test_a_stream_tells_each_once_and_in_order(engine):
    with engine.stream(PROMPT, max_new_tokens=20, logprobs=1, temperature=1.0, seed=5) as stream:
        pieces = list(stream)
    told = [each for piece in pieces for each in piece.logprobs]
    assert all(isinstance(piece, Delta) for piece in pieces)
    assert tuple(told) == stream.result.logprobs[: len(told)]
    assert len(pieces) > 3
    assert all(piece.logprobs for piece in pieces)


def test_penalties_count_the_answer_alone_and_presence_counts_once():
    """OpenAI's formula: ``logit - count * frequency - (count > 0) * presence``."""
    config = SamplingConfig(frequency_penalty=0.5, presence_penalty=1.0)
    ids, logits = (
        torch.tensor([[5, 5, 7, 7, 7, 9]]),
        torch.zeros(1, 12),
    )  # three of the prompt, three of the answer
    found = Penalties(config, num_prompt=3)(ids, logits)[0]
    assert {token: value for token, value in enumerate(found.tolist()) if value} == {
        7: -2.0,
        9: -1.5,
    }


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"logit_bias": {7: 3.5}}]
)
def test_penalties_and_biases_have_openais_formula(engine, options):
    """Greedy: each token is the largest of the logits that a full prefill gives, changed by hand."""
    ids = engine.generate(PROMPT, max_new_tokens=12, **options).token_ids
    logits = engine.score(PROMPT, ids).logits
    for at, token in enumerate(ids):
        counts = torch.bincount(
            torch.tensor(ids[:at], dtype=torch.long), minlength=logits.shape[-1]
        )
        changed = logits[at] - options.get("frequency_penalty", 0) * counts
        changed -= options.get("presence_penalty", 0) * (counts > 0)
        changed[7] += options.get("logit_bias", {}).get(7, 0)
        assert token == int(changed.argmax())
    assert ids != engine.generate(PROMPT, max_new_tokens=12).token_ids


def test_a_bias_forbids_and_forces(engine):
    first = engine.generate(PROMPT, max_new_tokens=1).token_ids[0]
    assert (
        first not in engine.generate(PROMPT, max_new_tokens=5, logit_bias={first: -100}).token_ids
    )
    assert engine.generate(PROMPT, max_new_tokens=5, logit_bias={9: 100}).token_ids == [9] * 5


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.5},
        {"presence_penalty": math.nan},
        {"logit_bias": {5: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {10**7: 1}},
        {"logprobs": 21},
        {"logprobs": True},
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(engine, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine.generate(PROMPT, max_new_tokens=2, **options)


class Pieces:
    """A tokenizer of some pieces, as SentencePiece or a byte-level one spells them."""

    def __init__(self, pieces, decoder=""):
        self._pieces, self.added_tokens_decoder = ["<|end|>", *pieces], {0: "<|end|>"}
        self.backend_tokenizer = type("Backend", (), {"decoder": decoder})

    def convert_ids_to_tokens(self, token):
        return self._pieces[token] if token < len(self._pieces) else None


@pytest.mark.parametrize(
    "tokenizer",
    [
        Pieces(["▁A", "<0xE2>", "<0x82>", "<0xAC>", "!"]),
        Pieces(["ĠA", "â", "Ĥ", "¬", "!"], "ByteLevel(...)"),
    ],
    ids=["sentencepiece", "byte-level"],
)
def test_tokens_are_bytes_and_partial_characters_stay_apart(tokenizer):
    told = [
        TokenLogprob(token, -1.0, ((token, -1.0), (99, -math.inf))) for token in (1, 2, 3, 4, 5, 0)
    ]
    chat = LogprobWriter(tokenizer, is_chat=True).write(told)["content"]
    assert b"".join(bytes(each["bytes"]) for each in chat) == " A€!<|end|>".encode()
    assert [each["token"] for each in chat][:3] == [" A", "bytes:\\xe2", "bytes:\\x82"]
    assert chat[0]["top_logprobs"][1] == {"token": "", "logprob": -9999.0, "bytes": []}
    text = LogprobWriter(tokenizer, is_chat=False)
    parts = [text.write(told[:3]), text.write(told[3:])]
    assert parts[0]["text_offset"] + parts[1]["text_offset"] == [0, 2, 2, 2, 3, 4]
    assert parts[0]["top_logprobs"][1] == {"bytes:\\xe2": -1.0, "": -9999.0}


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_tokenizers_bytes_are_the_texts():
    from demo.parts import packaged_model

    file = Path(packaged_model())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "Zoë's 价格 is 5 € 🙂\n\tnext"
    write = LogprobWriter(tokenizer, is_chat=True)
    assert b"".join(map(write.bytes_of, tokenizer(text)["input_ids"])) == text.encode()
