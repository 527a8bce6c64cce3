"""vLLM with blended prompts: answers are those of kvrag's engine, and nobody else finds their blocks.

One process of vLLM per model. Skipped without vLLM (docs/how-to/vllm.md).
"""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from texts import make_chunks
from vllm_kit import TESTED, needs_vllm, unchanged_class

from kvrag import KVRagEngine
from kvrag.testing.models import TINY, save_tiny_model

pytestmark = needs_vllm
CHUNKS = [text.partition(": ")[2] for text in make_chunks(5, words=60)]
IDS = list("abcde")
REPAIR = {"recompute_ratio": 0.2}
BLOCK = 32  # the smallest of vLLM's attention on CPUs


class Vllm:
    """vLLM on a tiny model with a store, and kvrag's own engine on both."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        directory: Path,
        name: str,
        *,
        mode: str = "blend",
        context: str | None = "default",
        model: str | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from vllm_kvrag.loader import register

        register()
        # vLLM's attention on CPUs has no head dim of 16; Mistral's window is refused, and newer ones have none.
        window = {"sliding_window": None} if name == "mistral" else {}
        shape = {"hidden_size": 128, "head_dim": 32, **window}
        patch.setitem(TINY, "wide", {"model_type": name, **TINY[name], **shape})
        self.kv_dir = directory / "kv"
        is_made = model is not None
        model = model or str(directory / "model")
        if not is_made:
            save_tiny_model(Path(model), "wide")
        self.engine = KVRagEngine.from_pretrained(
            model, kv_dir=self.kv_dir, repair=REPAIR, context=context
        )
        if not is_made:
            assert not self.engine.precompute(CHUNKS, ids=IDS).failed
        transfer = KVTransferConfig(
            kv_connector="KVRagConnector",
            kv_connector_module_path="vllm_kvrag.connector",
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "kv_dir": str(self.kv_dir),
                "mode": mode,
                "context": context,
                "repair": REPAIR,
            },
        )
        own = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**26,
            "block_size": BLOCK,
            "load_format": "kvrag",
        }
        self.classes = ExitStack()
        self.classes.enter_context(unchanged_class(self.engine.loaded.lm.model))
        self.llm = LLM(model, **(own | options), kv_transfer_config=transfer)
        # Where vLLM runs a model of transformers, it changes the class, of this engine's model, too.
        for module in self.engine.loaded.lm.model.modules():
            module.do_not_compile = True

    def prompt(self, *order: int, question: str = "\n\nWho asks for a box?") -> list[int]:
        encoder = self.engine.loaded.encoder
        text = "Answer from these notes.\n\n" + "\n\n".join(CHUNKS[i] for i in order) + question
        return [*encoder.bos_ids, *encoder.live_ids(text)]

    def beginning(self, first: int, other: int) -> tuple[list[int], list[int]]:
        """The stored prefix with a chunk right behind it, and a prompt that begins with both."""
        encoder = self.engine.loaded.encoder
        head = [*encoder.bos_ids, *encoder.live_ids(self.engine.prefix_text)]
        stored = [*head, *encoder.chunk_ids(CHUNKS[first])]
        return stored, [
            *stored,
            *encoder.live_ids(f"\n\n{CHUNKS[other]}\n\nWho asks for a box?"),
        ]

    def ask(self, *asked: tuple[Any, ...], num: int = 6, lora: Any = None, **own: Any) -> list[Any]:
        """Answers to prompts with their modes, and fields of their own, in one batch."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=num,
                logprobs=5,
                ignore_eos=True,
                extra_args={
                    "kv_transfer_params": {
                        "kvrag": {"mode": mode, "trace": True} | own | dict(*fields)
                    }
                },
            )
            for _, mode, *fields in asked
        ]
        prompts = [{"prompt_token_ids": ids} for ids, *_ in asked]
        return self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)

    def said(self, answer: Any) -> dict[str, Any]:
        return answer.kv_transfer_params["kvrag"]

    def assert_private(self) -> None:
        """No request has left anything behind."""
        core = self.llm.llm_engine.engine_core.engine_core
        mode = core.scheduler.connector._scheduler
        for kept in (mode._decisions, mode._private, mode._said, mode._waiting):
            assert not kept


@pytest.fixture
def vllm_of(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    made: list[Vllm] = []

    def make(name: str = "llama", **options: Any) -> Vllm:
        made.append(Vllm(monkeypatch, tmp_path, name, **options))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()
        each.llm.llm_engine.engine_core.shutdown()
        each.classes.close()


def assert_first(answer: Any, other: Any, limit: float = 1e-4) -> None:
    """The first token's log-probabilities are the same."""
    one, two = answer.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
    assert len(one.keys() & two.keys()) >= 3
    for token in one.keys() & two.keys():
        assert one[token].logprob == pytest.approx(two[token].logprob, abs=limit)


def assert_engine(vllm: Vllm, ids: list[int], answer: Any) -> None:
    """An answer begins as kvrag's engine's, with the same repair."""
    assert_first_of(vllm.engine, ids, answer)


def assert_first_of(engine: KVRagEngine, ids: list[int], answer: Any) -> None:
    """An answer begins as an engine's."""
    own = engine.prefill(ids, mode="stitch")
    logprobs = own.logits.float().log_softmax(-1).flatten()
    for token, found in answer.outputs[0].logprobs[0].items():
        assert found.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


@pytest.mark.parametrize("name", TESTED)
def test_blended_answers_are_those_of_kvrags_engine(vllm_of, name):
    vllm = vllm_of(name)
    ids = vllm.prompt(2, 0, 3)
    (blended,) = vllm.ask((ids, "stitch"), trace=False)
    said = vllm.said(blended)
    assert said["exactness"] == "repaired", said
    assert said["holes"] == []
    assert said["cached_tokens"] > said["repaired_tokens"] > 0
    assert sum(said["tokens"].values()) == len(ids)
    assert "sources" not in said
    assert_engine(vllm, ids, blended)
    own = vllm.engine.generate(ids, mode="stitch", max_new_tokens=6)
    assert list(blended.outputs[0].token_ids)[: len(own.token_ids)] == list(own.token_ids)
    (after,) = vllm.ask((ids, "full"))
    assert vllm.said(after)["exactness"] in ("full", "exact")
    exact = vllm.engine.prefill(ids, mode="full").logits.float().log_softmax(-1).flatten()
    for token, found in after.outputs[0].logprobs[0].items():
        assert found.logprob == pytest.approx(float(exact[token]), abs=1e-3)
    vllm.assert_private()


def test_exact_beginnings_alone_are_loaded_where_the_connector_is_for_them(vllm_of):
    """Whatever a request asks for, the answer is that without stored KV, from the same log-probabilities."""
    vllm = vllm_of(mode="prefix", context=None)
    stored, ids = vllm.beginning(2, 0)
    (alone,) = vllm.ask((ids, "full"))
    for mode in ("prefix", "auto", "stitch"):
        vllm.llm.reset_prefix_cache()
        (answer,) = vllm.ask((ids, mode))
        assert vllm.said(answer)["exactness"] == "exact"
        assert vllm.said(answer)["cached_tokens"] == len(stored)
        assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
        assert_first(answer, alone)
    vllm.assert_private()


def test_no_other_request_finds_blended_blocks(vllm_of):
    """In both orders, in one batch, behind shared rows, after resumption; and what is exact stays shared."""
    vllm = vllm_of()
    ids = vllm.prompt(2, 0, 3)
    (alone,) = vllm.ask((ids, "full"), num=30)
    vllm.llm.reset_prefix_cache()
    first, blended, second = vllm.ask((ids, "stitch"), (ids, "stitch"), (ids, "full"), num=30)
    for each in (first, blended):
        assert vllm.said(each)["exactness"] == "repaired"
        assert_engine(vllm, ids, each)
        assert each.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids
    assert_first(second, alone)
    vllm.llm.reset_prefix_cache()
    (first,) = vllm.ask((ids, "stitch"), num=30)
    (after,) = vllm.ask((ids, "full"), num=30)
    head = vllm.said(first)["sources"][0][1] if vllm.said(first)["sources"][0][0] != "reused" else 0
    assert after.num_cached_tokens <= head + BLOCK
    assert_first(after, alone)
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    # An answer's blocks are the request's own, too.
    longer = [*ids, *first.outputs[0].token_ids]
    (behind,) = vllm.ask((longer, "full"))
    assert behind.num_cached_tokens <= len(ids)
    (fresh,) = vllm.ask((ids, "stitch"), num=30)  # behind exact rows of the full prefill
    assert fresh.num_cached_tokens >= len(ids) - BLOCK - 1
    vllm.assert_private()


def test_exact_beginnings_stay_shared(vllm_of):
    vllm = vllm_of()
    encoder = vllm.engine.loaded.encoder
    rules = "Keep to the notes, and say so if they do not answer the question. " * 6
    text = rules + "\n\n".join(CHUNKS[i] for i in (1, 0)) + "\n\nWho?"
    ids = [*encoder.bos_ids, *encoder.live_ids(text)]
    (first,) = vllm.ask((ids, "stitch"))
    assert vllm.said(first)["exactness"] == "repaired"
    (after,) = vllm.ask((ids, "full"))
    num_rules = len(encoder.live_ids(rules))
    assert num_rules - 2 * BLOCK <= after.num_cached_tokens <= num_rules + BLOCK
    vllm.llm.reset_prefix_cache()
    (alone,) = vllm.ask((ids, "full"))
    assert_first(after, alone)
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_resumed_request_keeps_its_blocks_to_itself(vllm_of):
    """The cache is too small for all answers: requests are preempted, and go on."""
    vllm = vllm_of(num_gpu_blocks_override=30, max_num_seqs=4, max_model_len=800)
    prompts = [vllm.prompt(2, 0), vllm.prompt(0, 3), vllm.prompt(3, 1)]
    num = 140  # two prompts fit, and their answers don't
    alone = [vllm.ask((ids, "full"), num=num)[0] for ids in prompts]
    vllm.llm.reset_prefix_cache()
    blended = [vllm.ask((ids, "stitch"), num=num)[0] for ids in prompts]
    vllm.llm.reset_prefix_cache()
    preempted = noted_preemptions(vllm)
    together = vllm.ask(*[(ids, "stitch") for ids in prompts * 2], num=num)
    assert preempted
    for one, other in zip(together, blended * 2, strict=True):
        assert vllm.said(one)["exactness"] == "repaired"
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    for one, other in zip(vllm.ask(*[(i, "full") for i in prompts], num=num), alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert_first(one, other)
    vllm.assert_private()


def noted_preemptions(vllm: Vllm) -> list[str]:
    """Note the requests that are preempted from now on."""
    scheduler = vllm.llm.llm_engine.engine_core.engine_core.scheduler
    found: list[str] = []
    real = scheduler._preempt_request

    def noting(request: Any, *args: Any, **own: Any) -> None:
        found.append(request.request_id)
        real(request, *args, **own)

    scheduler._preempt_request = noting
    return found


def test_whatever_happens_to_the_store_costs_time_only(vllm_of, monkeypatch):
    vllm = vllm_of()
    ids = vllm.prompt(2, 0, 3)
    (blended,) = vllm.ask((ids, "stitch"))
    assert vllm.said(blended)["exactness"] == "repaired"
    (full,) = vllm.ask((ids, "full"))
    vllm.llm.reset_prefix_cache()
    vllm.engine.delete(["c"])  # erased
    (erased,) = vllm.ask((ids, "stitch"))
    reused = dict_of(vllm.said(erased)["sources"])
    assert reused["reused"] < dict_of(vllm.said(blended)["sources"])["reused"]
    assert_engine(vllm, ids, erased)
    # Precomputed by vLLM's worker; a mistake is answered, and a prompt's blocks are not shared.
    (report,) = vllm.ask((ids, "auto"), num=1, precompute={"texts": [CHUNKS[2]], "ids": ["c"]})
    assert vllm.said(report)["precompute"]["stored"] == 1
    for wrong in ({"texts": [7]}, {"words": ["a"]}, {"texts": [""], "ids": ["c"]}):
        (report,) = vllm.ask((ids, "auto"), num=1, precompute=wrong)
        assert set(vllm.said(report)) == {"error", "code"}
    vllm.llm.reset_prefix_cache()  # which has exact rows for chunks that were erased
    (again,) = vllm.ask((ids, "stitch"))
    assert vllm.said(again)["sources"] == vllm.said(blended)["sources"]
    assert_first(again, blended)
    (other,) = vllm.ask((ids, "full"))
    assert_first(other, full)
    vllm.llm.reset_prefix_cache()
    for each in vllm.kv_dir.rglob("*"):  # damaged
        if each.is_file() and each.stat().st_size > 10_000 and each.suffix != ".sqlite":
            content = bytearray(each.read_bytes())
            content[len(content) // 2] ^= 1
            each.chmod(0o600)
            each.write_bytes(content)
    (damaged,) = vllm.ask((ids, "stitch"))
    assert damaged.outputs[0].token_ids
    shutil.rmtree(vllm.kv_dir)  # gone
    (gone,) = vllm.ask((ids, "stitch"))
    (other,) = vllm.ask((ids, "full"))
    assert_first(other, full)
    assert len(gone.outputs[0].token_ids) == 6
    vllm.assert_private()


def dict_of(sources: list[list[Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for origin, count in sources:
        found[origin] = found.get(origin, 0) + count
    return found


def test_a_model_whose_logits_differ_from_vllms_gets_exact_beginnings(vllm_of, monkeypatch):
    """Scores that are off by a hundredth show beside vLLM's logits; every answer says so."""
    from kvrag.adapters import Blending
    from kvrag.model.forward import Forward

    attend, logits = Forward.attend, Blending.logits

    def scaled(self: Any, module: int, query: Any, *args: Any) -> Any:
        return attend(self, module, query * 1.01, *args)

    def compared(self: Any, ids: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Forward, "attend", scaled)
            return logits(self, ids)

    monkeypatch.setattr(Blending, "logits", compared)
    vllm = vllm_of(context=None)
    stored, ids = vllm.beginning(2, 0)
    (answer,) = vllm.ask((vllm.prompt(2, 0, 3), "stitch"))
    assert "logits differ from vLLM's" in vllm.said(answer)["fallback_reason"]
    assert vllm.said(answer)["exactness"] == "full"
    (alone,) = vllm.ask((ids, "full"))
    for mode in ("stitch", "auto", "prefix"):
        vllm.llm.reset_prefix_cache()
        (answer,) = vllm.ask((ids, mode))
        assert vllm.said(answer)["exactness"] == "exact"
        assert vllm.said(answer)["cached_tokens"] == len(stored)
        assert "logits differ from vLLM's" in vllm.said(answer)["fallback_reason"]
        assert_first(answer, alone)
    (report,) = vllm.ask((ids, "auto"), num=1, precompute={"texts": [CHUNKS[2] + " More."]})
    assert "logits differ from vLLM's" in vllm.said(report)["error"]
    vllm.assert_private()
