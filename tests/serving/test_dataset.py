"""What precompute_dataset asks of Ray Data, and what its worker does with a batch; no cluster."""

from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from texts import make_chunks

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")

from kvrag import ConfigError, KVRagEngine, precompute_dataset
from kvrag.testing.models import tiny_model
from kvrag_ray import command
from kvrag_ray.dataset import Worker, Workers

CHUNKS = make_chunks(3, words=42)


class Asked:
    """Stands for a dataset: keeps what is asked of it."""

    def map_batches(self, fn, **options):
        self.fn, self.options = fn, options
        return self


@pytest.fixture
def cluster(monkeypatch):
    """Let Ray say that its cluster has so much."""
    return lambda **have: monkeypatch.setattr(ray, "cluster_resources", lambda: have)


@pytest.mark.parametrize(
    ("have", "given", "workers", "cpus", "gpus"),
    [
        ({"CPU": 8.0}, {}, (8, 8), 7 / 8, None),
        # Two of a whole core would leave none to who reads.
        ({"CPU": 2.0}, {"concurrency": 2}, (2, 2), 0.5, None),
        ({"CPU": 1.0}, {}, (1, 1), 0.5, None),
        ({"CPU": 64.0, "GPU": 4.0}, {}, (4, 4), 1.0, 1.0),
        ({"CPU": 64.0, "GPU": 4.0}, {"num_gpus": 0.5}, (8, 8), 1.0, 0.5),
        ({"CPU": 4.0}, {"num_gpus": 1}, (1, 1), 1.0, 1),  # GPUs come when they are asked for
        (
            {"CPU": 64.0, "GPU": 4.0},
            {"num_gpus": 0, "concurrency": (2, 6), "num_cpus": 3},
            (2, 6),
            3,
            None,
        ),
    ],
)
def test_there_is_a_worker_for_each_gpu_or_core(
    cluster, tiny_dir, tmp_path, have, given, workers, cpus, gpus
):
    cluster(**have)
    asked = precompute_dataset(Asked(), tiny_dir, kv_dir=tmp_path / "kv", workers=Workers(**given))
    pool = asked.options["compute"]
    assert (
        (pool.min_size, pool.max_size),
        asked.options["num_cpus"],
        asked.options["num_gpus"],
    ) == (workers, cpus, gpus)


def test_a_worker_stores_batches_and_reports_each(cluster, tiny_dir, tmp_path):
    cluster(CPU=2.0)
    run = {"batch_size": 2, "collection": "books"}
    asked = precompute_dataset(
        Asked(), tiny_dir, kv_dir=tmp_path, text="body", id="name", run=run, namespace="mine"
    )
    assert asked.fn is Worker
    worker = Worker(**asked.options["fn_constructor_kwargs"])
    batch = {
        "body": np.array([*CHUNKS, "short", " ", None, np.nan], object),
        "name": np.array(["a", np.int64(2), UUID(int=3), *"defg"], object),
        "other": np.arange(7),
    }
    [first] = worker(batch).to_pylist()
    [again] = worker(batch).to_pylist()
    assert (first["chunks"], first["stored"], first["skipped"], first["failed"]) == (7, 3, 0, [])
    assert {each["id"] for each in first["short"]} == {f"books/{name}" for name in "defg"}
    assert (again["stored"], again["skipped"], again["stored_bytes"]) == (0, 3, 0)
    assert (
        worker(batch).schema == worker({name: values[:0] for name, values in batch.items()}).schema
    )
    engine = KVRagEngine.from_pretrained(tiny_dir, kv_dir=tmp_path, namespace="mine")
    assert sorted(engine.document_ids()) == sorted(
        f"books/{name}" for name in ("a", 2, UUID(int=3))
    )
    engine.close()


def test_without_a_column_chunks_have_no_id(cluster, tiny_dir, tmp_path):
    cluster(CPU=2.0)
    asked = precompute_dataset(Asked(), tiny_dir, kv_dir=tmp_path, id=None)
    [row] = Worker(**asked.options["fn_constructor_kwargs"])(
        {"text": np.array(CHUNKS, object)}
    ).to_pylist()
    assert row["stored"] == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": tiny_model("llama")}, "loaded model"),
        ({"kv_dir": None}, "lost with them"),
        ({"kv_dir": 3}, "kv_dir is 3"),
        ({"disk_bytes": 3}, "StoreConfig"),
        ({"store_config": {"disk_byte": 3}}, "disk_byte"),
    ],
)
def test_what_workers_could_not_use_is_refused_here(cluster, tiny_dir, tmp_path, wrong, words):
    cluster(CPU=2.0)
    given = {"model": tiny_dir, "kv_dir": tmp_path, **wrong}
    with pytest.raises(ConfigError, match=words):
        precompute_dataset(Asked(), given.pop("model"), **given)


def test_workers_in_another_directory_find_a_model_named_from_here(
    cluster, tiny_dir, tmp_path, monkeypatch
):
    cluster(CPU=2.0)
    monkeypatch.chdir(Path(tiny_dir).parent)
    asked = precompute_dataset(Asked(), f"./{Path(tiny_dir).name}", kv_dir=tmp_path / "kv")
    monkeypatch.chdir(tmp_path)
    worker = Worker(**asked.options["fn_constructor_kwargs"])
    [row] = worker({name: np.array(CHUNKS, object) for name in ("id", "text")}).to_pylist()
    assert row["stored"] == 3


def test_a_report_that_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    file = tmp_path / "nowhere" / "report.parquet"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        command.precompute([], {}, {}, None, file, is_quiet=True)
