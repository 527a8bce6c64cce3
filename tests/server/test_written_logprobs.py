"""How OpenAI writes the log-probabilities of an answer's tokens."""

import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvrag.types import TokenLogprob
from kvrag_server.shapes import LogprobWriter


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


def test_offsets_are_places_in_the_prompts_text(tokenizer):
    ids = [tokenizer.bos_token_id, *tokenizer("Who reads?", add_special_tokens=False).input_ids]
    told = [TokenLogprob(ids[0], math.nan), *[TokenLogprob(token, -1.0) for token in ids[1:]]]
    written = LogprobWriter(tokenizer, is_chat=False, echo="Who reads?").write(told)
    assert (
        written["token_logprobs"][0],
        written["top_logprobs"][0],
        written["text_offset"][0],
    ) == (None, None, 0)
    for token, at in zip(written["tokens"][1:], written["text_offset"][1:], strict=True):
        assert "Who reads?"[at : at + len(token)] == token
