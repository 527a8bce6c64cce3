"""Fixtures: tiny random models and a tokenizer made on the spot; nothing is fetched."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
import random
import shutil
import ssl
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from fake_driver import Driver
from kit import heed_signals

from kvrag import KVRagEngine
from kvrag.blend.cost import IN_ROWS
from kvrag.generate import pipeline, scheduler
from kvrag.kv import buffers as kv_buffers
from kvrag.kv.buffers import Buffers
from kvrag.model import CausalLM
from kvrag.testing.models import save_tiny_model, tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer

torch.set_num_threads(1)

# Temporary files lie in memory where there is plenty: tests sync thousands, and would wait for a disk.
RAM_DISK = "/dev/shm"
if os.access(RAM_DISK, os.W_OK) and shutil.disk_usage(RAM_DISK).free > 2**32:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", RAM_DISK)

heed_signals()

scheduler.DEFAULT_MAX_NEW_TOKENS = (
    64  # tiny models never end an answer; tests/generate/test_lengths.py has the true one
)

SPREAD = {
    "contract/test_escaped_documents.py::test_escaped_documents_are_named_in_the_answer_and_warned_of_once": 3,
    "contract/test_langchain_chains.py::test_what_reaches_the_model_whole_is_reused": 3,
    "contract/test_llama_index_chains.py::test_what_reaches_the_model_whole_is_reused": 3,
    "contract/test_llama_index_tools.py::test_an_agent_asks_a_query_engine_and_answers": 4,
    "kernels/test_ahead.py::test_every_way_of_keeping_kv_is_built_for_every_kind_of_rotation": 3,
    "kernels/test_commands.py::test_build_compiles_what_is_asked": 0,
    "kernels/test_compile.py::test_a_tile_softens_while_the_tile_before_it_is_added_to_the_outputs": 4,
    "kernels/test_compile.py::test_no_form_of_the_stitch_spills": 8,
    "kernels/test_compile.py::test_no_form_that_is_built_ahead_spills": 8,
    "kernels/test_compile.py::test_no_kernel_grows": 8,
    "kernels/test_compile.py::test_no_variant_spills": 8,
    "kernels/test_compile.py::test_relatives_of_the_architectures_compile_too": 0,
    "kernels/test_emulated_attention.py::test_float16": 20,
    "kernels/test_emulated_attention.py::test_keys_split_over_blocks_are_combined": 36,
    "kernels/test_emulated_attention.py::test_planted_bugs_are_caught": 12,
    "kernels/test_emulated_attention.py::test_rows_see_exactly_their_keys": 20,
    "kernels/test_emulated_attention.py::test_the_order_of_warps_and_of_copies_changes_no_bit": 18,
    "kernels/test_emulated_attention.py::test_the_self_test_passes_a_kernel_that_is_right": 8,
    "kernels/test_emulated_attention.py::test_without_a_bug_the_same_checks_pass": 10,
    "kernels/test_probe.py::test_the_kernel_does_the_same": 6,
    "kernels/test_probe.py::test_turing": 4,
    "kernels/test_stitch.py::test_planted_bugs_are_caught": 8,
    "kernels/test_stitch.py::test_the_kernel_does_the_same": 8,
    "kernels/test_stitch.py::test_the_kernel_reads_codes_to_the_bit": 3,
    "kernels/test_stitch_wiring.py::test_the_kernel_stitches_for_the_engine": 5,
    "langchain/test_lc_messages.py::test_a_message_is_shown_or_refused_by_name": 3,
    "langchain/test_lc_tools.py::test_several_calls_are_kept_unless_they_are_not_allowed": 3,
    "llama_index_adapter/test_llama_index_messages.py::test_a_message_is_shown_or_refused_by_name": 3,
    "llama_index_adapter/test_llama_index_parts.py::test_a_full_context_is_packed_and_still_fits": 0,
    "server/test_serve.py::test_the_log_is_lines_of_json": 0,
    "serving/test_cluster.py::test_a_replica_is_killed_under_load_and_no_request_is_lost": 0,
    "serving/test_cluster.py::test_chunks_are_stored_once_and_to_the_bit_although_a_worker_is_killed": 0,
    "store/test_kills.py::test_a_kill_at_any_step_costs_time_only": 4,
    "store/test_shared_faults.py::test_a_bad_network_costs_no_more_than_the_deadline": 5,
    "identity/test_adapters.py::test_every_kind_has_its_own_fingerprint_and_stays_exact": 3,
    "cli/test_cli_forms.py::test_a_fault_of_the_input_is_a_sentence": 3,
    "cli/test_cli_forms.py::test_a_model_comes_first_or_is_named": 4,
    "cli/test_cli_forms.py::test_commands_write_to_terminals_of_any_encoding": 3,
    "repository/test_docs.py::test_the_site_is_built_without_a_warning_and_asks_no_other_host": 0,
    "engine/test_engine.py::test_an_engine_per_namespace_costs_no_files_and_the_oldest_are_freed": 0,
    "engine/test_equivalence.py::test_an_empty_store_answers_like_plain_transformers": 6,
    "engine/test_equivalence.py::test_an_exact_answer_is_plain_transformers_answer": 6,
    "engine/test_equivalence.py::test_chunks_moved_by_more_than_a_thousand_rows_are_exact_after_full_repair": 16,
    "engine/test_equivalence.py::test_every_strategy_runs_with_and_without_shift": 4,
    "engine/test_equivalence.py::test_more_repair_is_closer_to_full_prefill": 8,
    "engine/test_equivalence.py::test_one_chunk_behind_its_own_prefix_equals_full_prefill": 6,
    "engine/test_equivalence.py::test_repaired_rows_never_see_the_future": 6,
    "engine/test_equivalence.py::test_repairing_every_row_equals_full_prefill": 3,
    "repository/test_examples.py::test_an_example_answers_both_ways_and_reuses": 0,
    "repository/test_examples.py::test_an_example_says_what_it_needs": 4,
    "model/test_flash.py::test_logits_are_those_of_torch": 5,
    "repository/test_gpu_check.py::test_a_dry_run_goes_through_every_part_and_says_that_nothing_was_measured": 0,
    "repository/test_gpu_check.py::test_a_dry_run_of_the_kernels_benchmark_has_every_part": 0,
    "repository/test_gpu_check.py::test_a_dry_run_of_the_streams_has_every_part": 0,
    "repository/test_gpu_check.py::test_a_machine_without_kvrags_own_packages_can_run_all_of_it": 0,
    "generate/test_beginnings.py::test_another_question_over_the_same_documents_computes_the_question": 4,
    "generate/test_histories.py::test_a_chat_is_answered_as_without": 9,
    "generate/test_histories.py::test_an_erasure_by_another_process_counts": 3,
    "precompute/test_batches.py::test_chunks_of_a_batch_are_those_encoded_alone": 3,
    "model/test_plain.py::test_a_refused_model_answers_like_plain_transformers": 6,
    "model/test_proof.py::test_reuse_is_proven_for_every_accepted_architecture": 3,
    "blend/test_slide.py::test_a_chat_of_fifty_turns_goes_on_in_flat_memory": 0,
    "model/test_steps.py::test_recorded_forwards_give_the_same_logits": 6,
    "prompt/test_tokenizers.py::test_a_line_break_between_chunks_changes_no_seam_of_real_prompts": 0,
    "generate/test_tool_calls.py::test_calls_are_read_and_never_shown": 2,
    "model/test_lock.py::test_a_forward_that_gives_way_computes_what_it_computes_alone": 32,
    "model/test_lock.py::test_answers_are_those_of_requests_alone": 32,
    "precompute/test_write_back.py::test_a_process_that_ends_right_after_its_answer_ends_in_order": 0,
    "vllm_connector/test_blend_vllm.py::test_blended_answers_are_those_of_kvrags_engine": 5,
    "model/test_steps.py::test_each_shape_equals_the_launched_forward_bit_for_bit": 2,
    "model/test_plain.py::test_a_refused_model_scores_and_prefills": 3,
    "model/test_attention.py::test_rows_see_exactly_their_keys": 7,
    "model/test_proof.py::test_the_proof_has_power_in_low_precision": 3,
    "prompt/test_plan_ids.py::test_ids_of_segments_are_planned_as_their_text": 5,
    "prompt/test_plan_ids.py::test_a_seam_costs_its_own_rows": 3,
    "blend/test_stitch_launches.py::test_both_ways_write_the_same_rows": 3,
    "contract/test_shared_tokenizer.py::test_a_tokenizer_in_python_gives_the_same_whatever_is_asked_of_it": 3,
    "contract/test_shared_tokenizer.py::test_a_wrapped_tokenizer_is_as_private": 5,
    "engine/test_equivalence.py::test_no_chunk_row_depends_on_the_question_but_by_selection": 3,
    "contract/test_shared_tokenizer.py::test_what_other_threads_ask_of_the_tokenizer_changes_nothing": 3,
}
"""Tests of which every so many-th case runs in `make test`; 0: none does."""

POISON = 0xFF
"""A byte that makes a NaN of every kind of number with a fraction."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases of :data:`SPREAD`; with ``KVRAG_SHUFFLE=SEED``, put files, and the tests of each, into a random order."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in SPREAD:
            if not SPREAD[name] or seen[name] % SPREAD[name]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
    if seed := os.environ.get("KVRAG_SHUFFLE"):
        draw = random.Random(seed)
        places = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        draw.shuffle(items)
        items.sort(key=lambda item: places[item.path])


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_run(tmp_path_factory):
    """Keep what kvrag remembers for this run, away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.delenv("KVRAG_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(autouse=True)
def own_profiles(cache_of_the_run):
    """Let no profile outlive its test: engines of later tests on the same model would repair by it."""
    yield
    shutil.rmtree(cache_of_the_run / "kvrag" / "profiles", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def no_stopwatch():
    """Let ``auto`` go by the number of rows: what a tiny model takes is another choice on each machine.

    Files of prices aren't read either: commands that tests start leave theirs where this process finds them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrag.blend.cost.costs_of", lambda lm, file: IN_ROWS)
        yield


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    """Fill memory that nobody has written with NaN, integers with their largest: a test that reads it fails always, not now and then."""
    # It then fills what `empty` returns.
    torch.use_deterministic_algorithms(True, warn_only=True)
    numpy_empty, take, come_back = np.empty, Buffers.take, Buffers._come_back

    def empty(*args, **options):
        made = numpy_empty(*args, **options)
        if made.dtype.kind in "iu":
            made.fill(np.iinfo(made.dtype).max)
        elif made.dtype.kind == "f":
            made.fill(np.nan)
        return made

    def taken(self, num_bytes):
        view = take(self, num_bytes)
        np.frombuffer(view, np.uint8).fill(POISON)
        return view

    def returned(self, owner, process):
        if process == os.getpid():  # a child would write to its parent's
            owner.numpy().fill(POISON)
        come_back(self, owner, process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", empty)
        patch.setattr(Buffers, "take", taken)
        patch.setattr(Buffers, "_come_back", returned)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_list_of_authorities():
    """Read the certificates of authorities once: each client read them anew, and no test speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture
def buffers(monkeypatch) -> Buffers:
    """Buffers that nothing else has used."""
    fresh = Buffers()
    for place in ("kvrag.kv.layers", "kvrag.store.blobs", "kvrag.kv.crypto", "kvrag.kv.format"):
        monkeypatch.setattr(f"{place}.BUFFERS", fresh)
    return fresh


@pytest.fixture
def driver(monkeypatch, buffers) -> Iterator[Driver]:
    """A driver that isn't there, which locks pages."""
    yield Driver.install(monkeypatch)
    kv_buffers._sources.clear()
    buffers._idle.clear()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """Leave out of garbage collections what was imported and collected: tests ask for many of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def few_objects():
    """Leave out of a module's garbage collections, too, what earlier modules have made: each took a second or two."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A directory with a tiny Llama and its tokenizer, which stays loaded: it is read and proven once."""
    directory = save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))
    loaded = KVRagEngine.from_pretrained(directory).loaded
    yield directory
    del loaded


@pytest.fixture
def go_on():
    """What hangs goes on at the end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def engine(tiny_dir, tmp_path):
    """A fresh engine on the tiny Llama with its own store; chunks have no context, so that first ones are exact."""
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path / "kv", context=None)
    yield engine
    engine.close()


@pytest.fixture
def engine_of(tokenizer, tmp_path):
    """Make engines on tiny models by architecture name, or on a model; without a context, unless one is given."""
    made: list[KVRagEngine] = []

    def make(model="llama", *, seed=0, **options):
        if isinstance(model, str):
            options.setdefault("kv_dir", tmp_path / f"kv-{model}")
            model = tiny_model(model, seed=seed)
        made.append(
            KVRagEngine.from_pretrained(
                model, **{"tokenizer": tokenizer, "context": None, **options}
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def no_histories(monkeypatch):
    """Let models of the frameworks keep no KV of requests: the test asks the same thing again."""
    monkeypatch.setattr("kvrag.adapters.models.HISTORY_BYTES", 0)


@pytest.fixture
def abreast(monkeypatch):
    """Let so many requests begin to decode at the same time, and count what their forwards compute."""
    real, sizes = pipeline.decode, []

    def install(parties):
        barrier = threading.Barrier(parties)
        work = CausalLM.step

        def counted(self, rows):
            sizes.append(len(rows))
            return work(self, rows)

        def decode(*args, **options):
            barrier.wait(60)
            return real(*args, **options)

        monkeypatch.setattr(CausalLM, "step", counted)
        monkeypatch.setattr(pipeline, "decode", decode)
        return sizes

    return install
