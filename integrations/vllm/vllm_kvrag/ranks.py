"""A model that is split among several devices: rank 0 drives, and the other ranks follow.

kvrag runs on rank 0 alone. The others compute their shares of vLLM's layers in the forwards that
rank 0 orders, between two of vLLM's own steps. Rank 0 attends over the heads of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group

from kvrag import UnsupportedModelError
from vllm_kvrag.own import Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

class OverError(Exception):
    """Signal on a rank that rank 0 has ended a forward early."""


class Ranks:
    """The ranks that share a model; each of them calls the methods in the same order.

    ``replicas`` is the number of ranks that have the same key heads. ``is_busy``: rank 0 has jobs,
    so there are orders in the next step. ``are_together``: no forward failed in vLLM's own layers,
    where the other ranks would wait for this one.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._group = get_tp_group()
        self.leads = self._group.is_first_rank
        self.count = self._group.world_size
        self.replicas = max(1, self.count // vllm_config.model_config.get_total_num_kv_heads())
        self.is_busy = False
        self.are_together = True

    def told(self, what: Any = None) -> Any:
        """Return what rank 0 tells."""
        box = [what]
        dist.broadcast_object_list(box, self._group.first_rank, group=self._group.cpu_group)
        return box[0]

    def order(self, name: str, *args: object) -> None:
        """Let the other ranks do this; raise ``RuntimeError`` if they can't any more."""
        if not self.are_together:
            raise RuntimeError("a forward has failed on one of several devices: start vLLM anew")
        self.told((name, *args))

    @contextmanager
    def ordered(self, name: str, *args: object) -> Iterator[None]:
        """Let the other ranks do what this rank does in the context."""
        self.order(name, *args)
        self.are_together = False
        try:
            yield
            self.are_together = True
        except UnsupportedModelError:
            self.are_together = True  # each of them raises it
            raise

    def let_step(self, *, is_busy: bool) -> None:
        """Let the other ranks go on to vLLM's own step, and, unless busy, all further ones."""
        self.is_busy = is_busy
        self.order("step", is_busy)

    def is_over(self, fails: bool) -> bool:
        """Whether the forward ends here, because rank 0 ends it early, or fails."""
        over = torch.tensor([fails])
        dist.broadcast(over, self._group.first_rank, group=self._group.cpu_group)
        self.are_together = bool(over)
        return self.are_together

    def first(self, reason: str | None) -> str | None:
        """Return the first reason that a rank has."""
        reasons: list[str | None] = [None] * self.count
        dist.all_gather_object(reasons, reason, group=self._group.cpu_group)
        return next(filter(None, reasons), None)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return, on rank 0, the heads ``(T, H, D)`` of all ranks."""
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.count)] if self.leads else None
        # vLLM's own gather on CPUs lets a rank run ahead, and then waits for ever.
        dist.gather(own, parts, self._group.first_rank, group=self._group.device_group)
        return None if parts is None else torch.cat(parts, dim=1)

    def scatter(self, own: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
        """Fill ``own``, ``(T, H, D)``, with this rank's heads of what rank 0 has."""
        parts = None
        if whole is not None:
            parts = [part.contiguous() for part in whole.chunk(self.count, dim=1)]
        dist.scatter(own, parts, self._group.first_rank, group=self._group.device_group)
        return own


class SharedRows:
    """Rows of a forward on several ranks; rank 0 has the ``rows`` to write and to attend over."""

    def __init__(self, ranks: Ranks, positions: torch.Tensor, rows: Any = None) -> None:
        self.positions = positions
        self._ranks = ranks
        self._rows = rows

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take this rank's heads of fresh rows."""
        self._pair = [self._ranks.gather(each) for each in (keys, values)]
        self._width = values.shape[-1]

    def attend(self, layer: int, query: torch.Tensor, scores: Mapping[str, Any]) -> torch.Tensor:
        """Attend over the rows of the layer that was written last."""
        ranks = self._ranks
        queries = ranks.gather(query)
        attended = error = None
        if self._rows is not None:
            try:
                self._rows.write(layer, *[each[:, :: ranks.replicas] for each in self._pair])
                attended = self._rows.attend(layer, queries, scores)
            except BaseException as failure:
                error = failure
        if ranks.is_over(error is not None):
            raise error or OverError
        return ranks.scatter(query.new_empty(*query.shape[:2], self._width), attended)


class SplitShare(Share):
    """This rank's share of a split model. What rank 0 does with its own, the others do, too."""

    def __init__(self, vllm_config: VllmConfig, held: Any, ranks: Ranks) -> None:
        super().__init__(vllm_config, held)
        self._ranks = ranks
        self.split = f", {ranks.count} ranks"

    def num_heads(self, layer: Any) -> int:
        """Return the number of key heads that the whole layer has."""
        return super().num_heads(layer) * self._ranks.count // self._ranks.replicas

    def compute(self, ids: torch.Tensor, rows: Any, logits: int) -> torch.Tensor:
        """Compute rows on all ranks; rank 0 attends over ``rows``."""
        with self._ranks.ordered("compute", ids.cpu(), rows.positions.cpu(), logits):
            return super().compute(ids, SharedRows(self._ranks, rows.positions, rows), logits)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: Any) -> None:
        """Write rows of all heads, each rank its own."""
        wholes = [each.repeat_interleave(self._ranks.replicas, dim=1) for each in (keys, values)]
        with self._ranks.ordered("write", layer, slots.cpu()):
            self._write(layer, slots, wholes)

    def logits_of_step(self, cache: KVCacheConfig, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of vLLM's own step for a prompt."""
        with self._ranks.ordered("logits", cache, ids.cpu()):
            return super().logits_of_step(cache, ids)

    @torch.inference_mode()
    def obey(self) -> None:
        """Do what rank 0 orders, until it lets the ranks step."""
        while True:
            # An early end, and what all ranks refuse, is rank 0's concern.
            with suppress(OverError, UnsupportedModelError):
                match self._ranks.told():
                    case "compute", ids, positions, logits:
                        shared = SharedRows(self._ranks, positions.to(self.device))
                        super().compute(ids.to(self.device), shared, logits)
                    case "write", layer, slots:
                        self._write(layer, slots.to(self.device), (None, None))
                    case "logits", cache, ids:
                        super().logits_of_step(cache, ids)
                    case "step", is_busy:
                        self._ranks.is_busy = is_busy
                        return

    def _write(self, layer: int, slots: torch.Tensor, wholes: Sequence[Any]) -> None:
        own = [*self.layers.values()][layer]
        like = torch.empty(
            (len(slots), own.num_kv_heads, 0), dtype=self.vllm_config.model_config.dtype, device=self.device
        )
        parts = [
            self._ranks.scatter(like.new_empty(*like.shape[:2], width), whole)
            for width, whole in zip((own.head_size, own.head_size_v), wholes, strict=True)
        ]
        super().write(layer, *parts, slots)
