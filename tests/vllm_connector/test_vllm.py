"""vLLM: what kvrag's connector loads is what a full prefill computes.

The connector runs on vLLM's own interface where vLLM is installed, else on a recording of it, whose signatures are compared with vLLM's
where it is. End to end, vLLM answers with the stored KV as without.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from texts import make_chunks
from transformers import DynamicCache
from vllm_kit import (
    BLOCK,
    BLOCKS,
    HAS_VLLM,
    RECORDED,
    Layer,
    Setting,
    assert_same_answer,
    connect,
    connector_module,
    damage,
    needs_vllm,
    request_of,
    schedule,
    step_of,
    transfer_of,
)

from kvrag import KVRagEngine, StoreConfig
from kvrag.errors import ConfigError, UnsupportedModelError
from kvrag.testing.models import TINY, save_tiny_model, tiny_model
from vllm_kvrag import export_model
from vllm_kvrag.exported import TESTED, Exported, read_turns, weights_of
from vllm_kvrag.heads import Heads, cut

PREFIX = "<|im_start|>user\nAnswer from the context.\n\n"
CHUNKS = [text.partition(": ")[2] for text in make_chunks(3, words=60)]  # which begin differently


@pytest.fixture
def connector(monkeypatch):
    return connector_module(monkeypatch)


def test_the_connector_has_vllms_signatures(connector):
    base = connector.KVConnectorBase_V1
    for name, parameters in RECORDED.items():
        assert (
            tuple(inspect.signature(getattr(connector.KVRagConnector, name)).parameters)
            == parameters
        )
        if HAS_VLLM:
            assert tuple(inspect.signature(getattr(base, name)).parameters) == parameters
    if HAS_VLLM:
        assert base.__abstractmethods__ <= set(RECORDED)


@pytest.fixture
def setting_of(tmp_path):
    made: list[KVRagEngine] = []

    def make(name="llama", **options) -> Setting:
        directory = tmp_path / "model"
        if not directory.exists():
            save_tiny_model(directory, name)
        made.append(
            KVRagEngine.from_pretrained(
                directory, kv_dir=tmp_path / "kv", prefix=PREFIX, **{"context": None, **options}
            )
        )
        engine, encoder = made[-1], made[-1].loaded.encoder
        assert not engine.precompute(CHUNKS, ids=["a", "b", "c"]).failed
        ids = [list(encoder.chunk_ids(text)) for text in CHUNKS]
        found = Setting(
            engine, str(directory), tmp_path / "model.st", ids, list(encoder.head_ids(PREFIX))
        )
        export_model(engine, found.file)
        return found

    yield make
    for engine in made:
        engine.close()


def test_a_prompt_is_covered_as_far_as_it_is_stored(setting_of):
    setting = setting_of()
    heads, whole = setting.heads(), len(setting.head) + len(setting.ids[1])
    assert heads.match(setting.prompt(1))[1] == whole
    parts, count = heads.match(
        [*setting.head, *setting.ids[1][:20], 7, 7, 7]
    )  # the chunk's beginning, and another end
    assert count == len(setting.head) + 20
    assert [identity.token_ids for identity in parts] == [
        tuple(setting.head),
        tuple(setting.ids[1]),
    ]
    assert heads.match(setting.head)[1] == len(setting.head)
    assert heads.match([*setting.ids[1], *setting.head]) == ((), 0)
    assert heads.match([]) == ((), 0)
    assert [each[1:] for each in cut(parts, len(setting.head) - 2, len(setting.head) + 5)] == [
        (len(setting.head) - 2, len(setting.head)),
        (0, 5),
    ]


def test_what_is_not_exact_is_not_offered(setting_of, tmp_path):
    setting = setting_of()
    setting.engine.delete(["a", "b", "c"])
    behind = KVRagEngine.from_pretrained(
        setting.model, kv_dir=setting.engine.kv_dir, prefix=PREFIX, context="default:50"
    )
    assert not behind.precompute(CHUNKS, ids=["a", "b", "c"]).failed
    assert setting.heads().match(setting.prompt(0))[1] == len(
        setting.head
    )  # chunks behind a context: the prefix alone
    assert setting.heads("another").match(setting.prompt(0))[1] == 0
    rounded = setting_of(store_config=StoreConfig(kv_dtype="int8"), context=None)
    rounded.engine.delete(["a", "b", "c"])
    assert not rounded.engine.precompute(CHUNKS).failed
    assert rounded.heads().match(rounded.prompt(0))[1] == len(
        setting.head
    )  # that of the first engine
    assert Heads(setting.engine.store, "sha256:other", "default").match(setting.prompt(0))[1] == 0


def test_erased_chunks_are_gone_and_new_ones_are_found(setting_of):
    setting = setting_of()
    heads, prompt = setting.heads(), setting.prompt(0)
    assert heads.match(prompt)[1] > len(setting.head)
    heads._next = float("inf")  # its list is old from now on
    setting.engine.delete(["a"])
    assert setting.heads().match(prompt)[1] == heads.match(prompt)[1] == len(setting.head)
    setting.engine.precompute(
        [CHUNKS[0], "Another chunk, of which there was none before. " * 3], ids=["a", "d"]
    )
    assert heads.match(prompt)[1] > len(setting.head)
    new = [
        *setting.head,
        *setting.engine.loaded.encoder.chunk_ids("Another chunk, of which there was none"),
    ]
    assert heads.match(new)[1] == len(setting.head)
    heads._next = 0.0
    assert heads.match(new)[1] > len(setting.head) + 5


@pytest.mark.parametrize(
    "name", ["llama", "llama-yarn", "phi", "glm", "gptj", "smollm3", "gemma3_text"]
)
def test_rotations_are_the_models_own(setting_of, name):
    """Halves and neighbours, all dimensions and some, several kinds, none."""
    setting = setting_of(name)
    own = setting.engine.loaded.reusable.rotary(700)
    turns = read_turns(setting.file, torch.device("cpu"))
    assert len(turns) == len(own)
    for turn, table in zip(turns, own, strict=True):
        keys = torch.randn(2, 100, 16)
        expected = table.rotate(keys, slice(500, 600)) if table.width else keys
        assert torch.allclose(
            keys if turn is None else turn.rotate(keys, slice(500, 600)), expected, atol=1e-5
        )


def test_only_models_that_vllm_can_load_are_exported(engine_of, tmp_path, setting_of):
    with pytest.raises(ConfigError, match="loaded by its name or directory"):
        export_model(engine_of("llama"), tmp_path / "file")
    long = save_tiny_model(tmp_path / "long", "phi3-longrope")
    with pytest.raises(UnsupportedModelError, match="prompt's length"):
        export_model(KVRagEngine.from_pretrained(long, context=None), tmp_path / "file")
    latent = save_tiny_model(tmp_path / "latent", "deepseek_v3")
    with pytest.raises(UnsupportedModelError, match="this model has latent attention"):
        export_model(KVRagEngine.from_pretrained(latent, context=None), tmp_path / "file")
    with pytest.raises(ConfigError, match="not a file of"):
        Exported.read(__file__)
    setting = setting_of()
    with torch.no_grad():
        next(setting.engine.loaded.lm.model.parameters()).add_(1.0)
    with pytest.raises(ConfigError, match="loaded by its name or directory"):
        export_model(setting.engine, tmp_path / "file")


def test_weights_are_known_by_their_files_or_their_commit(setting_of, tmp_path):
    setting = setting_of()
    config, commit = setting.engine.loaded.lm.model.config, "0" * 40
    assert weights_of(setting.model, config) == {Exported.read(setting.file).weights}
    kept = tmp_path / "hub" / "snapshots" / commit
    save_tiny_model(kept, "llama", seed=1)
    by_name = weights_of("someone/model", SimpleNamespace(_commit_hash=commit))
    assert by_name < weights_of(str(kept), config)
    assert not weights_of(str(kept), config) & weights_of(setting.model, config)


@pytest.mark.parametrize("name", TESTED)
@pytest.mark.parametrize("computed", [0, 2 * BLOCK])
def test_loaded_rows_are_those_of_a_full_prefill(connector, setting_of, name, computed):
    setting, model = setting_of(name), tiny_model(name)
    model.set_attn_implementation("eager")  # some versions' SDPA leaves soft caps out
    prompt = setting.prompt(0)
    own = connect(connector, setting)
    layers = {
        f"model.layers.{i}.self_attn.attn": Layer(2, 16)
        for i in range(model.config.num_hidden_layers)
    }
    blocks = torch.randperm(BLOCKS)[: len(prompt) // BLOCK + 1].tolist()
    count = schedule(own, request_of(prompt), blocks, computed)
    stop = len(setting.head) + len(setting.ids[0])
    assert computed + count == stop
    own.start_load_kv(step_of({**layers, "model.layers.0.mlp.experts": object()}))
    with torch.no_grad():  # a cache without a config drops nothing, whatever the layers' windows
        expected = model(
            torch.tensor([prompt]), use_cache=True, past_key_values=DynamicCache()
        ).past_key_values
    for layer, (keys, values, *_) in zip(layers.values(), expected, strict=True):
        for found, computed_by_model in zip(layer.rows(blocks), (keys[0], values[0]), strict=True):
            assert torch.allclose(
                found[:, computed:stop], computed_by_model[:, computed:stop], atol=2e-5
            )
            assert not found[:, :computed].any()
            assert not found[:, stop:].any()
    assert own.get_block_ids_with_load_errors() == set()


def test_a_chunk_that_is_gone_by_then_is_left_to_vllm(connector, setting_of):
    setting = setting_of()
    own, prompt, blocks = connect(connector, setting), setting.prompt(0), list(range(20, 40))
    count = schedule(own, request_of(prompt), blocks, BLOCK)
    setting.engine.delete(["a"])
    layer = Layer(2, 16)
    own.start_load_kv(step_of({"model.layers.0.self_attn.attn": layer}))
    assert not layer.kv_cache.any()
    assert own.get_block_ids_with_load_errors() == set(blocks[1 : -(-(BLOCK + count) // BLOCK)])
    assert own.get_block_ids_with_load_errors() == set()


def test_requests_whose_kv_is_their_own_are_left_alone(connector, setting_of):
    setting = setting_of()
    own, prompt = connect(connector, setting), setting.prompt(0)
    for other in (
        {"lora_request": 1},
        {"mm_features": [1]},
        {"cache_salt": "salt"},
        {"prompt_embeds": 1},
    ):
        assert schedule(own, request_of(prompt, **other), []) == 0
    assert own._get_connector_metadata().loads == []
    stored = [*setting.head, *setting.ids[0]]
    assert (
        schedule(own, request_of(stored), list(range(20))) == len(stored) - 1
    )  # vLLM computes one at least
    assert own.get_num_new_matched_tokens(request_of(stored), len(stored) - 1) == (0, False)
    own.request_finished(request_of(stored), [])
    assert own._mode._found == {}


def test_another_model_dtype_or_cache_is_refused(connector, setting_of, tmp_path):
    setting = setting_of()
    other = tiny_model("llama-yarn").config
    changes: dict[str, dict[str, Any]] = {
        "weights": {"model": save_tiny_model(tmp_path / "other", seed=1)},
        "RoPE": {"hf_config": other},
        "float16": {"dtype": torch.float16},
        "quantised": {"quantization": "fp8"},
        "fp8": {"cache_dtype": "fp8"},
        "several devices": {"world_size": 2},
        "speculatively": {"speculative_config": "ngram"},
        "full attention": {"specs": [None]},
        "one group": {"specs": [None, None]},
        "recompute": {"kv_load_failure_policy": "fail"},
    }
    for word, change in changes.items():
        with pytest.raises(ConfigError, match=word):
            connect(connector, setting, **change)
    folder = save_tiny_model(tmp_path / "arcee", "arcee")
    other_type = KVRagEngine.from_pretrained(folder, kv_dir=setting.engine.kv_dir, context=None)
    export_model(other_type, file := tmp_path / "arcee.st")
    with pytest.raises(ConfigError, match="never tested"):
        connect(connector, Setting(other_type, str(tmp_path / "arcee"), file))


@needs_vllm
@pytest.mark.parametrize("name", TESTED)
def test_vllm_answers_with_stored_kv_as_without(setting_of, monkeypatch, capfd, name):
    from vllm import LLM, SamplingParams

    # vLLM's attention on CPUs has no head dim of 16; Mistral's window is refused, and newer ones have none.
    window = {"sliding_window": None} if name == "mistral" else {}
    monkeypatch.setitem(
        TINY,
        "wide",
        {"model_type": name, **TINY[name], "hidden_size": 128, "head_dim": 32, **window},
    )
    setting, sampling = setting_of("wide"), SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    options = {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
    }
    llm = LLM(setting.model, **options, max_num_seqs=4, kv_transfer_config=transfer_of(setting))
    prompts = [
        setting.prompt(0),
        [*setting.head, *setting.ids[1][:50], 70, 71, 72],
        setting.prompt(2),
    ]

    def answer(**own: Any) -> Any:
        return llm.generate(
            [{"prompt_token_ids": prompt, **own} for prompt in prompts], sampling, use_tqdm=False
        )

    alone, head = answer(cache_salt="own"), len(setting.head)  # which the connector leaves to vLLM
    assert [each.num_cached_tokens for each in alone] == [0, 0, 0]
    damage(setting, 2)
    found = answer()
    covered = [head + len(setting.ids[0]), head + 50]
    assert "is gone; vLLM computes it" in "".join(capfd.readouterr())
    again = answer()  # which begins with what vLLM's own prefix cache has
    for answers in (found, again):
        assert [each.num_cached_tokens for each in answers[:2]] == covered
        for one, other in zip(alone, answers, strict=True):
            assert_same_answer(one.outputs[0], other.outputs[0])
    setting.engine.delete(["a"])
    assert llm.reset_prefix_cache()
    assert answer()[0].num_cached_tokens == head


def test_an_engine_whose_chunks_vllm_would_not_load_is_not_exported(tmp_path):
    engine = KVRagEngine.from_pretrained(save_tiny_model(tmp_path / "model", "llama"))
    with pytest.raises(ConfigError, match=r"behind a context.*context=None"):
        export_model(engine, tmp_path / "file")


def test_exact_beginnings_are_loaded_where_prompts_cannot_be_blended(connector, setting_of):
    """An exported model takes over, on both sides, if the worker's weights can't be shared."""
    setting = setting_of()
    extra = {"mode": "blend", "context": None}
    worker = connect(connector, setting, extra=extra)
    hello = worker.get_handshake_metadata()
    assert "--load-format kvrag" in hello.about.refusal
    own = connect(connector, setting, extra=extra, role="SCHEDULER")
    ids = setting.prompt(0)
    request = request_of(
        ids, kv_transfer_params=None, skip_reading_prefix_cache=False, resumable=False
    )
    request.num_output_tokens, request.max_tokens = 0, 8
    assert own.get_num_new_matched_tokens(request, 0) == (0, False)
    own.set_xfer_handshake_metadata({0: hello})
    count, is_async = own.get_num_new_matched_tokens(request, 0)
    assert (count, is_async) == (len(setting.head) + len(setting.ids[0]), False)
    assert type(worker._mode) is type(own._mode)
