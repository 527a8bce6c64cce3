"""Precompute on many machines, with Ray Data.

Workers, by default as many as GPUs or CPU cores, store chunks in the same KV store. They take
batches of chunks as they come, and skip stored chunks. If a worker dies, it is restarted and its
batch runs again. A run can be interrupted and repeated at any time, and gives the same KV as a
single process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kvrag import ConfigError, KVRagEngine, require

if TYPE_CHECKING:
    from ray.data import Dataset

CHUNKS_PER_CALL = 32
"""Chunks per batch. A worker sorts them by length, so that forwards take similar lengths."""

NO_TEXT = "-"
"""Stands for a text that is missing or blank: the engine reports it as too short."""


@dataclass(frozen=True)
class Workers:
    """Workers of :func:`precompute_dataset`; the arguments are Ray's.

    Parameters
    ----------
    concurrency
        Number of workers, or ``(least, most)``. Default: the cluster's number of GPUs; without
        GPUs, its number of CPU cores.
    num_cpus, num_gpus
        CPU cores and GPUs per worker. Default: a GPU if the cluster has any; a core, or less if
        needed to leave a core for reading the dataset.
    """

    concurrency: int | tuple[int, int] | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of ``map_batches``; raises ``MissingDependencyError`` without Ray."""
        ray = require("ray", extra="ray", purpose="precompute_dataset")
        have = ray.cluster_resources()
        gpus = self.num_gpus
        count = self.concurrency
        cpus = self.num_cpus
        if gpus is None:
            gpus = 1.0 if have.get("GPU") else 0.0
        if count is None:
            count = max(1, int(have.get("GPU", 1) / gpus if gpus else have.get("CPU", 1)))
        least, most = (count, count) if isinstance(count, int) else count
        if cpus is None:
            cpus = min(1.0, max(have.get("CPU", 1) - 1, 0.5) / most)
        return {
            "compute": ray.data.ActorPoolStrategy(min_size=least, max_size=most),
            "num_cpus": cpus,
            "num_gpus": gpus or None,
        }


class Worker:
    """Actor with an engine that stores the chunks of batches.

    Parameters
    ----------
    columns
        Names of the text and id columns; the latter is ``None`` without ids.
    options, run
        Arguments of :meth:`KVRagEngine.from_pretrained`, and of :meth:`KVRagEngine.precompute`.
    """

    def __init__(
        self, columns: tuple[str, str | None], options: Mapping[str, Any], run: Mapping[str, Any]
    ) -> None:
        self._columns = columns
        self._run = run
        # A worker never reads its stored chunks.
        unread = replace(options["store_config"], ram_bytes=0)
        self._engine = KVRagEngine.from_pretrained(**{**options, "store_config": unread})

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Store a batch of chunks, and return its row of the report."""
        arrow = require("pyarrow", extra="ray", purpose="the report of precompute_dataset")
        text, name = self._columns
        texts = [
            each if isinstance(each, str) and each.strip() else NO_TEXT for each in batch[text]
        ]
        ids = None
        if name is not None:  # a number and a UUID are the documents that they are in other calls
            ids = [str(each) if isinstance(each, Integral | UUID) else each for each in batch[name]]
        report = asdict(
            self._engine.precompute(texts, ids=ids, **{"show_progress": False, **self._run})
        )
        row = {
            "worker": f"{socket.gethostname()}:{os.getpid()}",
            "chunks": len(texts),
            **report,
            "ended": time.time(),
        }
        # Empty lists need an explicit type.
        pairs = arrow.list_(arrow.struct([("id", arrow.string()), ("reason", arrow.string())]))
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
    """Compute and store the KV of a dataset's chunks, on all machines of a Ray cluster.

    Parameters
    ----------
    ds, text, id
        Dataset with a chunk per row, and the names of its text and id columns. Blank and null
        texts are reported as too short. Ids must be unique, and none null: strings, whole numbers
        or UUIDs. ``None``: chunks have no id.
    model, kv_dir, **options
        As for :meth:`KVRagEngine.from_pretrained`. For several machines ``kv_dir`` must be a shared
        store's address. Pass names of models and keys, not objects: a hub id or a path, and
        ``encryption_key="env:NAME"``.
    workers
        Number of workers, and their CPU cores and GPUs; default: the defaults of :class:`Workers`.
    run
        More arguments of :meth:`KVRagEngine.precompute`, such as ``batch_size``, ``prefix``,
        ``collection``, ``retention``.

    Returns
    -------
    Dataset
        A row per batch, with the fields of :class:`~kvrag.PrecomputeReport`, the number of
        ``chunks``, the ``worker``, and its end time ``ended`` (seconds since 1970, UTC). It is
        lazy: chunks are computed when it is used, as in
        ``precompute_dataset(...).write_parquet("report")``.

    Raises
    ------
    ConfigError
        If ``model`` is a loaded model, ``kv_dir`` is missing, or an option has an invalid value.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            "model is a loaded model, which can't be sent to workers; pass its hub id or path"
        )
    if kv_dir is None:
        raise ConfigError(
            "kv_dir is None, and KV in the workers' memory would be lost with them; pass a shared "
            "store"
        )
    options = {**options, "model": model, "kv_dir": kv_dir}
    # Wrong options raise here, before workers start.
    with closing(KVRagEngine.from_pretrained(**options)) as engine:
        options |= {
            "model": engine.source.model,
            "kv_dir": engine.kv_dir,
            "store_config": engine.store_config,
        }
    return ds.map_batches(
        Worker,
        batch_size=CHUNKS_PER_CALL,
        batch_format="numpy",
        fn_constructor_kwargs={"columns": (text, id), "options": options, "run": dict(run or {})},
        **(workers or Workers()).options(),
    )
