"""Precompute on many machines, with Ray Data: a worker for each GPU, or each core, stores chunks in one KV store.

Workers take batches of chunks as they come, and store what has no KV yet. A worker that dies is started again, and its batch with it; what
that had stored is skipped. So a run can be broken off and repeated at any time, and gives the KV that one process would have given.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvrag.config import StoreConfig, as_config
from kvrag.engine import KVRagEngine
from kvrag.errors import ConfigError, require
from kvrag.precompute.documents import check_kv_dir

if TYPE_CHECKING:
    from ray.data import Dataset

CHUNKS_PER_CALL = 32
"""Chunks that a worker is given at once: it sorts them by length, so that forwards take chunks of similar length."""


@dataclass(frozen=True)
class Workers:
    """How the work of :func:`precompute_dataset` is shared; the arguments are Ray's.

    Parameters
    ----------
    concurrency
        Workers, or ``(least, most)``. Default: one for each GPU of the cluster; without any, one for each core.
    num_cpus, num_gpus
        Of each worker. Default: a GPU if the cluster has any; else a core, or as much less as leaves one core to reading the dataset.
    """

    concurrency: int | tuple[int, int] | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of ``map_batches``; raises ``MissingDependencyError``."""
        ray = require("ray", extra="ray", purpose="precompute_dataset")
        have, gpus, count, cpus = (
            ray.cluster_resources(),
            self.num_gpus,
            self.concurrency,
            self.num_cpus,
        )
        if gpus is None:
            gpus = 1.0 if have.get("GPU") else 0.0
        if count is None:
            count = max(1, int(have["GPU"] / gpus if gpus else have.get("CPU", 1)))
        least, most = (count, count) if isinstance(count, int) else count
        if cpus is None:
            cpus = min(1.0, max(have.get("CPU", 1) - 1, 0.5) / most)
        pool = ray.data.ActorPoolStrategy(min_size=least, max_size=most)
        return {"compute": pool, "num_cpus": cpus, "num_gpus": gpus or None}


class Worker:
    """What each actor runs: an engine that stores the chunks of batches.

    Parameters
    ----------
    columns
        Names of the columns of texts and, unless it is ``None``, of ids.
    options, run
        Arguments of :meth:`KVRagEngine.from_pretrained`, and of :meth:`KVRagEngine.precompute`.
    """

    def __init__(
        self, columns: tuple[str, str | None], options: Mapping[str, Any], run: Mapping[str, Any]
    ) -> None:
        self._columns, self._run = columns, run
        config = (
            as_config(StoreConfig, options.get("store_config"), option="store_config")
            or StoreConfig()
        )
        unread = replace(config, ram_bytes=0)  # a worker reads nothing of what it stores
        self._engine = KVRagEngine.from_pretrained(**{**options, "store_config": unread})

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Store a batch's chunks, and return the row of the report."""
        arrow = require("pyarrow", extra="ray", purpose="the report of precompute_dataset")
        text, name = self._columns
        texts, ids = list(batch[text]), None if name is None else list(batch[name])
        report = asdict(
            self._engine.precompute(texts, ids=ids, **{"show_progress": False, **self._run})
        )
        row = {
            "worker": f"{socket.gethostname()}:{os.getpid()}",
            "chunks": len(texts),
            **report,
            "ended": time.time(),
        }
        # Their type must be known where there are none, too.
        pairs = arrow.list_(arrow.struct([("id", arrow.string()), ("reason", arrow.string())]))
        for what in ("failed", "short"):
            row[what] = [dict(zip(("id", "reason"), each, strict=True)) for each in row[what]]
        types = {"failed": pairs, "short": pairs}
        return arrow.table(
            {each: arrow.array([value], types.get(each)) for each, value in row.items()}
        )


def precompute_dataset(
    ds: Dataset,
    model: str | os.PathLike[str],
    *,
    kv_dir: str | os.PathLike[str],
    text: str = "text",
    id: str | None = "id",
    workers: Workers | None = None,
    run: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Compute and store the KV of a dataset's chunks, on all machines of a Ray cluster; raises ``ConfigError`` on a loaded model.

    Parameters
    ----------
    ds, text, id
        A chunk in each row, and the columns of its text and its id, which must be its own; ``None``: chunks have no id.
    model, kv_dir, **options
        As for :meth:`KVRagEngine.from_pretrained`. For several machines ``kv_dir`` must be a shared store's address, or a directory
        that all of them see. Models and keys are named, not passed: a hub id or a path, and ``encryption_key="env:NAME"``.
    workers
        How many there are, and what each of them needs; default: :class:`Workers`' own.
    run
        More arguments of :meth:`KVRagEngine.precompute`, as ``batch_size``, ``prefix``, ``collection``, ``retention``.

    Returns
    -------
    Dataset
        A row for each batch, with the fields of :class:`~kvrag.PrecomputeReport`, the number of ``chunks``, the ``worker``, and when it
        ``ended`` (seconds since 1970, UTC). Nothing is computed before it is used: ``precompute_dataset(...).write_parquet("report")``.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            "model is a loaded model, which can't be sent to workers; pass its hub id or path"
        )
    if kv_dir is None:
        raise ConfigError(
            "kv_dir is None, and KV in the workers' memory would be lost with them; pass a shared store"
        )
    options = {**options, "model": os.fspath(model), "kv_dir": check_kv_dir(kv_dir)}
    KVRagEngine.from_pretrained(
        **options
    ).close()  # what can't be used is said here, before workers start
    how = {
        "batch_size": CHUNKS_PER_CALL,
        "batch_format": "numpy",
        **(workers or Workers()).options(),
    }
    with_what = {"columns": (text, id), "options": options, "run": dict(run or {})}
    return ds.map_batches(Worker, fn_constructor_kwargs=with_what, **how)
