"""Calibration: the search finds the cheapest repair that reaches the target, and its profile is kept, used and named; tiny models."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from kit import all_answers_are_right
from texts import make_chunks
from typer.testing import CliRunner

from kvrag import Chunk, InputError, KVRagEngine, RepairConfig, UnsupportedModelError
from kvrag.cli.app import app
from kvrag.config import StoreConfig
from kvrag.evaluate import calibrate
from kvrag.evaluate.calibrate import HIGHER, LOWER, START, Profile, Trial, profile_file, search

CHUNKS = make_chunks(8, words=30, seed=5)
PROMPT = [*(part for text in CHUNKS[:4] for part in (Chunk(text), "\n\n")), "What is it?"]
LEAST = calibrate.LEAST_PROMPTS
SMALL = {"prompts": 4, "chunks_per_prompt": 2}
ANY = {"max_mean_kl": 10.0, "min_top1": 0.0}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    """No profile outlives its test, and one of four prompts is kept."""
    monkeypatch.setenv("KVRAG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "LEAST_PROMPTS", SMALL["prompts"])
    all_answers_are_right(monkeypatch)


# -- the search, on made-up measurements --------------------------------------------------------------------------------


class Bench:
    """Measures by a formula: KL falls with the ratio; ``gains`` are subtracted where a config has these values."""

    def __init__(self, *, kl_at_1=0.001, error=0.001, gains=()):
        self.trials: list[Trial] = []
        self.kl_at_1, self.error, self.gains = kl_at_1, error, dict(gains)

    def __call__(self, repair: RepairConfig) -> Trial:
        ratio = 0.0 if repair.strategy == "none" else repair.recompute_ratio or 0.15
        kl = 0.2 if not ratio else self.kl_at_1 / ratio
        kl -= sum(
            gain
            for (name, value), gain in self.gains.items()
            if ratio and getattr(repair, name) == value
        )
        self.trials.append(Trial(repair, ratio, ratio, kl, self.error, 1.0, 0.0))
        return self.trials[-1]

    def find(self, limit: float) -> Trial:
        return search(self, lambda trial: trial.reaches(limit, 0.97))


def test_no_repair_is_tried_first_and_kept_if_it_is_enough():
    bench = Bench()
    assert bench.find(0.3).repair.strategy == "none"
    assert len(bench.trials) == 1


@pytest.mark.parametrize("least", [*LOWER, 0.10, *HIGHER[1:]])
def test_the_lowest_ratio_that_reaches_the_target_is_kept(least):
    bench = Bench(error=0.0001)
    assert bench.find(0.001 / least + 0.00023).repair == replace(START, recompute_ratio=least)
    assert len(bench.trials) <= 1 + 1 + len(LOWER)


def test_a_mean_that_reaches_the_target_by_less_than_its_error_is_not_enough():
    bench = Bench(error=0.001)
    assert bench.find(0.0215).repair.recompute_ratio == 0.10  # at 0.05 the mean is 0.020


def test_top1_needs_its_error_to_spare_too():
    trial = Trial(START, 0, 0, 0.01, 0.001, 0.98, 0.004)
    assert trial.reaches(0.02, 0.97)
    assert not replace(trial, top1_error=0.005).reaches(0.02, 0.97)


def test_where_none_reaches_the_target_the_least_kl_is_kept():
    bench = Bench()
    assert bench.find(0.001).repair == replace(START, recompute_ratio=HIGHER[-1])


@pytest.mark.parametrize(
    "options", [{"prompts": 1}, {"chunks_per_prompt": 9}, {"chunks_per_prompt": 0}]
)
def test_too_little_text_is_refused(engine, options):
    with pytest.raises(InputError, match="can't be made of 8 chunks"):
        engine.calibrate([*CHUNKS, CHUNKS[0], "too short"], **{**SMALL, **options}, keep=False)


def test_a_small_sample_turns_nothing_off(tiny_dir, tmp_path, monkeypatch):
    """It is refused before anything is computed, or measured without being kept."""
    monkeypatch.setattr(calibrate, "LEAST_PROMPTS", LEAST)
    few = {"prompts": 2, "chunks_per_prompt": 2}
    engine = KVRagEngine.from_pretrained(tiny_dir)
    with pytest.raises(InputError, match=rf"at least {LEAST}, or keep=False"):
        engine.calibrate(CHUNKS, **few, **ANY)
    assert engine.calibrate(CHUNKS, **few, **ANY, keep=False).kept.repair.strategy == "none"
    assert engine.repair == RepairConfig()
    corpus = tmp_path / "notes.md"
    corpus.write_text("\n\n".join(CHUNKS), "utf-8")
    options = (tiny_dir, "--corpus", corpus, "--chunk-tokens", 100, "--prompts", 2, "--chunks", 2)
    refused = run(*options, "--target-kl", 10, "--min-top1", 0)
    assert refused.exit_code == 2
    assert "--no-keep" in refused.stderr
    looked = run(*options, "--target-kl", 10, "--min-top1", 0, "--no-keep")
    assert looked.exit_code == 0, looked.output
    assert "nothinghaschanged" in "".join(c for c in looked.stdout if c not in "│ \n")
    assert KVRagEngine.from_pretrained(tiny_dir).repair == RepairConfig()


def test_a_kept_profile_says_once_that_it_decides_and_one_of_few_prompts_does_not(tiny_dir, caplog):
    engine = KVRagEngine.from_pretrained(tiny_dir)
    profile = replace(engine.calibrate(CHUNKS, **SMALL, **ANY), date="2026-01-01")
    file = profile_file(engine)

    def said():
        return [r.getMessage() for r in caplog.records if "kept in" in r.getMessage()]

    given = KVRagEngine.from_pretrained(tiny_dir, repair=START)
    assert given.repair == START
    assert not said()
    for _ in range(2):
        assert KVRagEngine.from_pretrained(tiny_dir).repair.strategy == "none"
    (line,) = said()
    assert "none" in line
    assert str(file) in line
    assert "Delete this file" in line
    file.write_text(json.dumps(asdict(replace(profile, prompts=SMALL["prompts"] - 1))))
    assert KVRagEngine.from_pretrained(tiny_dir).repair == RepairConfig()


# -- what is kept, and who uses it ---------------------------------------------------------------------------------------


def test_a_profile_is_used_by_every_engine_on_the_model_and_context(tiny_dir, tmp_path):
    def opened(**options):
        return KVRagEngine.from_pretrained(tiny_dir, **options)

    engine, trials = opened(kv_dir=tmp_path / "kv"), []
    assert engine.repair == RepairConfig()
    profile = engine.calibrate(CHUNKS, **SMALL, max_mean_kl=0.0, on_trial=trials.append)
    assert not profile.is_reached
    assert profile.kept in trials
    assert profile.kept.repair != RepairConfig()
    assert 0 < profile.kept.rows < profile.kept.cost < 1
    assert engine.repair == opened().repair == profile.kept.repair
    assert opened(extra_keys={"team": "search"}).repair == profile.kept.repair
    given = RepairConfig(recompute_ratio=0.11)
    assert opened(repair=given).repair == given
    for other in (
        {"context": None},
        {"store_config": StoreConfig(kv_dtype="int8")},
        {"dtype": "bfloat16"},
    ):
        assert opened(**other).repair == RepairConfig(), other
    assert list(engine.store.catalog.keys()) == [], "nothing of it is left in the user's store"


def test_answers_use_the_profile_unless_told_otherwise(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir)
    engine.precompute(CHUNKS)
    prompt = PROMPT
    before = engine.prefill(prompt, mode="stitch").repaired_tokens
    engine.calibrate(CHUNKS, **SMALL, **ANY)
    assert before > engine.prefill(prompt, mode="stitch").repaired_tokens == 0
    assert engine.generate(prompt, mode="stitch", max_new_tokens=1).repaired_tokens == 0
    assert engine.prefill(prompt, mode="stitch", repair=RepairConfig()).repaired_tokens == before


def test_explain_and_verify_say_where_the_repair_comes_from(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir)
    engine.precompute(CHUNKS)
    prompt, given = PROMPT, RepairConfig(recompute_ratio=0.11)
    assert (
        engine.explain(prompt).repair
        == "query_runs, 4% and 192 rows, at most 25%, first_k 1, shift 1 (default)"
    )
    profile = engine.calibrate(CHUNKS, **SMALL, **ANY)
    kl = f"{profile.kept.mean_kl:.3f}"
    said = f"none (calibrated on 4 prompts: mean KL {kl}, top-1 {profile.kept.top1:.0%})"
    assert engine.explain(prompt).repair == said
    assert f"repair: {said}" in str(engine.explain(prompt))
    assert engine.verify([prompt]).repair == said
    for named in (engine.explain(prompt, repair=given), engine.verify([prompt], repair=given)):
        assert named.repair == "query_runs, ratio 0.11, first_k 1, shift 1 (given)"
    own = KVRagEngine.from_pretrained(tiny_dir, repair=given)
    assert own.explain(prompt).repair == named.repair
    assert "misses the target" in str(replace(profile, max_mean_kl=-1.0))


def test_calibration_is_repeatable_and_measures_the_exact_as_exact(tiny_dir, monkeypatch):
    def run(seed=0, **options):
        engine = KVRagEngine.from_pretrained(tiny_dir)
        return engine.calibrate(CHUNKS, **SMALL, seed=seed, keep=False, **options)

    assert run() == run() != run(seed=1)
    monkeypatch.setattr(calibrate, "START", RepairConfig(strategy="all", recompute_ratio=0.03))
    kept = run(max_mean_kl=1e-6).kept
    assert kept.repair.strategy == "all"
    assert kept.top1 == 1
    assert kept.mean_kl < 1e-6


def test_a_damaged_profile_is_none_and_unknown_fields_are_ignored(tiny_dir):
    engine = KVRagEngine.from_pretrained(tiny_dir)
    profile = engine.calibrate(CHUNKS, **SMALL, **ANY)
    file, text = profile_file(engine), json.dumps(asdict(profile))
    assert file.read_text() == text
    fields = json.loads(text)
    wrong = {
        **fields,
        "kept": {**fields["kept"], "repair": {**fields["kept"]["repair"], "recompute_ratio": 7}},
    }
    for damaged in (
        "",
        text[:-9],
        "[]",
        json.dumps({**fields, "kept": {}}),
        json.dumps(wrong),
        "\x00",
    ):
        file.write_text(damaged)
        assert KVRagEngine.from_pretrained(tiny_dir).repair == RepairConfig()
    file.write_text(json.dumps({**fields, "of a newer version": 1}))
    assert KVRagEngine.from_pretrained(tiny_dir).repair == profile.kept.repair


def test_a_shipped_profile_is_used_after_the_users_own(tiny_dir, monkeypatch):
    own = KVRagEngine.from_pretrained(tiny_dir).calibrate(CHUNKS, **SMALL, **ANY)
    file = profile_file(KVRagEngine.from_pretrained(tiny_dir))
    shipped = replace(own, kept=replace(own.kept, repair=RepairConfig(recompute_ratio=0.17)))
    monkeypatch.setattr(calibrate, "_shipped", lambda: {file.stem: shipped})
    assert KVRagEngine.from_pretrained(tiny_dir).repair == own.kept.repair
    file.unlink()
    assert KVRagEngine.from_pretrained(tiny_dir).repair == shipped.kept.repair


def test_shipped_profiles_can_be_read_and_have_reached_their_targets():
    for name, profile in calibrate._shipped().items():
        assert name.startswith("sha256:")
        assert isinstance(profile, Profile)
        assert profile.is_reached


def test_other_weights_have_no_profile(engine_of):
    engine_of("llama").calibrate(CHUNKS, **SMALL, **ANY)
    assert engine_of("llama").repair.strategy == "none"
    assert engine_of("llama", seed=1).repair == RepairConfig()


def test_weights_that_change_in_place_lose_the_profile_and_find_it_again(engine_of):
    """As adapters do that are switched: a profile is that of what answers now."""
    engine = engine_of("llama")
    engine.calibrate(CHUNKS, **SMALL, **ANY)
    weight = engine.loaded.lm.model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)
        assert engine.repair == RepairConfig()
        weight.copy_(kept)
    assert engine.repair.strategy == "none"


def test_short_chunks_that_the_engine_stores_are_calibrated(engine_of):
    engine = engine_of("llama", store_config=StoreConfig(min_chunk_tokens=4))
    short = [chunk[:40] for chunk in CHUNKS]
    lengths = [len(engine.loaded.encoder.chunk_ids(text)) for text in short]
    assert max(lengths) < StoreConfig().min_chunk_tokens
    assert engine.calibrate(short, **SMALL, **ANY).is_reached


def test_a_model_that_is_refused_or_knows_no_fact_is_not_calibrated(engine_of, monkeypatch):
    monkeypatch.setattr("kvrag.evaluate.answers.IS_RIGHT", 0.5)
    with pytest.raises(InputError, match=r"no planted fact right.*enable_thinking"):
        engine_of("llama").calibrate(CHUNKS, **SMALL, **ANY)
    with pytest.raises(UnsupportedModelError, match="is not reused"):
        engine_of("gpt2").calibrate(CHUNKS, **SMALL)


# -- the command ---------------------------------------------------------------------------------------------------------


def run(*args, command="calibrate", **options):
    return CliRunner().invoke(app, [command, *map(str, args)], **options)


def test_the_command_prints_every_candidate_and_what_was_kept(tiny_dir, tmp_path):
    corpus = tmp_path / "notes.md"
    corpus.write_text("\n\n".join(CHUNKS), "utf-8")
    options = (tiny_dir, "--corpus", corpus, "--chunk-tokens", 100, "--prompts", 4, "--chunks", 2)
    missed = run(*options, "--target-kl", 0, "--json")
    assert missed.exit_code == 1, missed.output
    values = json.loads(missed.stdout)
    assert values["best"] is None
    found = values["contexts"]["default"]
    assert not found["reached"]
    assert len(found["trials"]) == len(missed.stderr.strip().splitlines()) == 5
    assert found["profile"]["kept"] in found["trials"]
    assert KVRagEngine.from_pretrained(tiny_dir).repair == RepairConfig(
        **found["profile"]["kept"]["repair"]
    )
    contexts = ("--chunk-context", "default", "--chunk-context", "default:40")
    reached = run(*options, *contexts, "--target-kl", 10, "--min-top1", 0)
    assert reached.exit_code == 0, reached.output
    # The path of a cache folds wherever a line ends.
    shown = "".join(c for c in reached.stdout if c not in "│ \n")
    assert all(
        word in shown
        for word in ("meanKL", "top-1", "computed", "targetreached", "profiles", "'default:40'")
    )
    told = run(
        "--model", tiny_dir, "--kv-dir", tmp_path / "kv", command="explain", input="Who?"
    ).stdout
    assert "repair: none (calibrated on 4 prompts: mean KL" in told
    for context in ("default", "default:40"):
        assert KVRagEngine.from_pretrained(tiny_dir, context=context).repair.strategy == "none"
    assert KVRagEngine.from_pretrained(tiny_dir, context="default:50").repair == RepairConfig()


def test_the_command_names_what_it_lacks(tiny_dir, tmp_path, monkeypatch):
    refused = run(tiny_dir, "--corpus", tmp_path / "nowhere")
    assert refused.exit_code == 2
    assert "nowhere" in refused.stderr
    monkeypatch.setattr(
        "kvrag.cli.documents.__file__", str(tmp_path / "site-packages" / "kvrag" / "cli" / "x.py")
    )
    monkeypatch.chdir(tmp_path)
    bare = run(tiny_dir)
    assert bare.exit_code == 2
    assert "pass --corpus" in bare.stderr


def test_an_engine_of_a_subclass_is_evaluated_as_one(tiny_dir):
    class Counting(KVRagEngine):
        calls = 0

        def generate(self, *args, **options):
            Counting.calls += 1
            return super().generate(*args, **options)

    Counting.from_pretrained(tiny_dir).evaluate(
        CHUNKS, count=2, chunks_per_prompt=2, max_new_tokens=1
    )
    assert Counting.calls == 4
