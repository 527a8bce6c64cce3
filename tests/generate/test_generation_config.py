"""The model's generation config: an answer without reuse is ``generate``'s under every option of it, or a warning names the option."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from kvrag import KVRagEngine, SamplingConfig
from kvrag.generate import defaults
from kvrag.generate.defaults import NOT_DONE, end_ids, processors_of
from kvrag.runtime import Runtime
from kvrag.testing.models import tiny_model

LENGTH = 12
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 11, 12, 13, 5, 6]


def followed(plain: list[int]) -> dict[str, Any]:
    """Values of the options that change greedy answers, for a model that without them answers ``plain``."""
    other = next(token for token in range(3, 60) if token not in plain)
    return {
        "eos_token_id": plain[4],
        "min_length": len(PROMPT) + 8,
        "min_new_tokens": 9,
        "repetition_penalty": 1.7,
        "encoder_repetition_penalty": 2.5,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "bad_words_ids": [[plain[0]], plain[2:4]],
        "sequence_bias": [[[plain[1]], -10.0], [[plain[0], plain[2]], 5.0]],
        "forced_bos_token_id": None,
        "forced_eos_token_id": other,
        "exponential_decay_length_penalty": (2, 9.0),
        "suppress_tokens": plain[:3],
        "begin_suppress_tokens": plain[:2],
        "watermarking_config": WatermarkingConfig(bias=20.0, seeding_scheme="selfhash"),
        "remove_invalid_values": True,
        "renormalize_logits": True,
    }


NEEDS_AN_END = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
UNCHANGED = ("forced_bos_token_id", "remove_invalid_values", "renormalize_logits")
"""Options that change no greedy answer behind a prompt of more than one token."""

SAMPLED = {
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.3,
    "top_h": 0.4,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.05,
}
"""Options that count when tokens are drawn."""

_ELSEWHERE = """
max_length max_new_tokens stop_strings do_sample temperature
early_stopping length_penalty
use_cache cache_implementation cache_config max_cache_len prefill_chunk_size
compile_config disable_compile continuous_batching_config low_memory
output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
pad_token_id bos_token_id decoder_start_token_id
transformers_version
is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind
target_lookbehind assistant_ensemble_weight speculation_type use_mtp
"""
ELSEWHERE = set(_ELSEWHERE.split())
"""Options with tests of their own, below or in test_lengths.py; of beams alone; of how it is computed, compiled and told; of batches, and
of empty prompts; the version; guesses of the next tokens, which greedy decoding proves or drops."""


@pytest.fixture(scope="module")
def loaded_engine(tokenizer) -> KVRagEngine:
    return KVRagEngine.from_pretrained(tiny_model("llama"), tokenizer=tokenizer)


@pytest.fixture
def engine(loaded_engine) -> Iterator[KVRagEngine]:
    model = loaded_engine.source.model
    before = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=sorted(end_ids(loaded_engine.loaded)), pad_token_id=0
    )
    yield loaded_engine
    model.generation_config = before


def ours(engine: KVRagEngine, **options: Any) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=LENGTH, mode="full", **options).token_ids


def theirs(engine: KVRagEngine, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = engine.source.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, **options
    )
    return out[0, len(PROMPT) :].tolist()


def configure(engine: KVRagEngine, plain: list[int], names: list[str]) -> None:
    config = engine.source.model.generation_config
    values = followed(plain)
    for name in names:
        setattr(config, name, values[name])
        if name in NEEDS_AN_END:
            config.eos_token_id = plain[4]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = sorted({*ends, *end_ids(engine.loaded)})


def test_every_option_of_a_generation_config_has_its_place():
    """An option of a newer transformers fails here until it is known what it does to an answer."""
    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known = {*followed(list(range(LENGTH))), *SAMPLED, *ELSEWHERE, *NOT_DONE}
    assert options - known == set()


@pytest.mark.parametrize("name", followed(list(range(LENGTH))))
def test_a_greedy_answer_is_that_of_generate_under_each_option(name, engine):
    if name == "encoder_no_repeat_ngram_size":  # counts for a model that repeats its prompt
        engine.source.model.generation_config.sequence_bias = [[[PROMPT[0]], 50.0]]
    plain = theirs(engine)
    assert ours(engine) == plain
    configure(engine, plain, [name])
    wanted = theirs(engine)
    assert ours(engine) == wanted
    assert (wanted == plain) == (name in UNCHANGED)


def test_a_watermark_that_is_written_as_json_is_followed(engine):
    engine.source.model.generation_config.watermarking_config = {
        "bias": 20.0,
        "seeding_scheme": "selfhash",
    }
    answer = ours(engine)
    engine.source.model.generation_config.watermarking_config = WatermarkingConfig(
        bias=20.0, seeding_scheme="selfhash"
    )
    assert answer == theirs(engine)


def test_end_tokens_are_where_the_scores_are(engine, monkeypatch):
    """Scores are on the model's device, and a mask of end tokens that is elsewhere can't be laid over them."""
    model = engine.source.model
    given = list[GenerationConfig]()
    monkeypatch.setattr(type(model), "device", torch.device("meta"))
    monkeypatch.setattr(
        type(model),
        "_get_logits_processor",
        lambda _, generation_config, **options: given.append(generation_config),
    )
    processors_of(
        model, SamplingConfig(min_new_tokens=3), PROMPT, max_new_tokens=5, eos_ids=frozenset({2})
    )
    assert given[0]._eos_token_tensor.device.type == "meta"


@pytest.mark.parametrize("seed", range(12))
def test_a_greedy_answer_is_that_of_generate_under_options_together(seed, engine):
    plain = theirs(engine)
    draw = random.Random(seed)
    configure(engine, plain, draw.sample([*followed(plain)], k=4))
    assert ours(engine) == theirs(engine)


@pytest.mark.parametrize("name", [*SAMPLED, "all"])
def test_scores_that_tokens_are_drawn_by_are_those_of_generate(name, engine):
    model = engine.source.model
    chosen = SAMPLED if name == "all" else {name: SAMPLED[name]}
    model.generation_config.update(**{"top_k": 0, **chosen})
    ids = torch.tensor([PROMPT])
    torch.manual_seed(0)
    told = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    options = {
        "max_new_tokens": 3,
        "do_sample": True,
        "temperature": 0.1,
        "repetition_penalty": 1.3,
    }
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **told)
    config = SamplingConfig(temperature=0.1, repetition_penalty=1.3)
    made = processors_of(model, config, PROMPT, max_new_tokens=3, eos_ids=end_ids(engine.loaded))
    for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        found = made(out.sequences[:, : len(PROMPT) + step], logits.float())
        assert torch.equal(found, scores)
        assert not torch.isfinite(scores).all()


def test_values_of_a_request_win_over_the_config_and_neutral_ones_switch_it_off(engine):
    model = engine.source.model
    model.generation_config.update(**SAMPLED, repetition_penalty=1.4, allow_custom_entries=True)
    off = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    kinds = [
        [
            type(p).__name__
            for p in processors_of(
                model, SamplingConfig(temperature=0.5, **given), PROMPT, max_new_tokens=3
            )
        ]
        for given in ({}, off)
    ]
    assert set(kinds[0]) - set(kinds[1]) == {
        "RepetitionPenaltyLogitsProcessor",
        *("TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"),
    }
    made = processors_of(model, SamplingConfig(temperature=0.5, top_k=3), PROMPT, max_new_tokens=3)
    (top_k,) = [p for p in made if type(p).__name__ == "TopKLogitsWarper"]
    assert top_k.top_k == 3


def test_sampling_takes_no_default_that_nobody_asked_for(engine):
    """``generate`` draws from the 50 likeliest tokens where no config says so."""
    made = processors_of(
        engine.source.model, SamplingConfig(temperature=0.5), PROMPT, max_new_tokens=3
    )
    assert [type(p).__name__ for p in made] == ["TemperatureLogitsWarper"]


def test_greedy_is_the_default_whatever_the_config_says(engine):
    plain = theirs(engine)
    engine.source.model.generation_config.update(do_sample=True, temperature=1.9, top_k=3)
    assert ours(engine) == plain


def test_a_stop_string_of_the_config_ends_the_answer(engine):
    plain = engine.generate(PROMPT, max_new_tokens=LENGTH, mode="full")
    engine.source.model.generation_config.stop_strings = plain.text[4:7]
    stopped = engine.generate(PROMPT, max_new_tokens=LENGTH, mode="full")
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(plain.text[4:7])]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]


@pytest.mark.parametrize("name", NOT_DONE)
def test_what_is_not_followed_is_named_once(name, engine, caplog, monkeypatch):
    model = engine.source.model
    monkeypatch.setattr(defaults, "RUNTIME", Runtime())
    plain = ours(engine)
    assert not caplog.messages
    setattr(model.generation_config, name, 4)
    with caplog.at_level(logging.WARNING):
        assert [ours(engine), ours(engine)] == [plain, plain]
    assert [message for message in caplog.messages if f"{name}=4" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_processors_are_made_by_generate_where_its_private_way_is_gone(engine, monkeypatch):
    plain = theirs(engine)
    configure(engine, plain, ["suppress_tokens", "no_repeat_ngram_size"])
    model, wanted = engine.source.model, theirs(engine)
    real = type(model)._get_logits_processor

    def other(self: Any, generation_config: Any, *values: Any, **options: Any) -> Any:
        if (
            "encoder_input_ids" in options and "prefix_allowed_tokens_fn" not in options
        ):  # as kvrag calls it
            raise TypeError("unexpected keyword argument")
        return real(self, generation_config, *values, **options)

    monkeypatch.setattr(type(model), "_get_logits_processor", other)
    assert ours(engine) == wanted != plain
