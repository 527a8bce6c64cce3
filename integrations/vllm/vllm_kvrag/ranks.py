"""A model that is split among several devices: rank 0 drives, and the other ranks follow.

kvrag runs on rank 0 alone. The others compute their shares of vLLM's layers in the forwards that
rank 0 orders, between two of vLLM's own steps. Rank 0 attends, over the heads of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import broadcast, broadcast_object_list
from vllm.distributed.parallel_state import get_tp_group

from vllm_kvrag.own import VllmLM

LOST = "a forward has failed on one of several devices ({}): start vLLM anew"


class OverError(Exception):
    """Signal on a rank that rank 0 has ended a forward."""


class SplitLM(VllmLM):
    """A rank's share of vLLM's model; rank 0's is the model that kvrag uses.

    ``is_busy``: rank 0 has jobs, so it has orders in the next step. ``is_lost``: a forward is
    under way, or has failed in vLLM's own layers, where the other ranks may wait for this one.
    vLLM's own step would mix with it, so the process ends, and vLLM with it.
    """

    pauses = False  # all ranks would have to pause at the same layer

    def __init__(self, vllm_config: Any, held: Any) -> None:
        self.group = get_tp_group()
        self.leads = self.group.is_first_rank
        self.is_busy = False
        self.is_lost = False
        super().__init__(vllm_config, held)

    def find_traits(self) -> None:
        """Find the traits of all layers, on rank 0: the others have no use for them."""
        self._attentions, self.traits = [], []
        if self.leads:
            try:
                super().find_traits()
            except BaseException:
                self.end_turn(is_busy=False)
                raise

    def told(self, what: Any = None) -> Any:
        """Return what rank 0 tells."""
        box = [what]
        broadcast_object_list(box, self.group.first_rank, self.group.cpu_group)
        return box[0]

    def end_turn(self, *, is_busy: bool) -> None:
        """Go on to vLLM's own step; the other ranks do what rank 0 orders until then."""
        if self.leads:
            self.is_busy = is_busy
            self._order("", is_busy)
            return
        while (order := self.told())[0]:
            self._obey(*order)
        self.is_busy = order[1]

    def compute(self, ids: torch.Tensor, rows: Any, logits: int) -> Any:
        """Compute rows on all ranks; rank 0 attends over ``rows``."""
        self.check(ids)
        return self._on_all("_compute", (ids.cpu(), rows.positions.cpu(), logits), rows)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: Any) -> None:
        """Write rows of all heads to slots of vLLM's cache, on each rank its own heads."""
        wholes = [x.repeat_interleave(self.replicas, dim=1) for x in (keys, values)]
        self._on_all("_write", (layer, slots.cpu(), [x.shape for x in wholes]), wholes)

    def logits_of_step(self, cache: Any, ids: torch.Tensor) -> Any:
        """Return the logits of vLLM's own step for a prompt, in the first blocks of its cache."""
        return self._on_all("_logits_of_step", (cache, ids.cpu()))

    def own_heads(self, x: torch.Tensor) -> Any:
        """Return this rank's heads of what rank 0 has; on other ranks, ``x`` is room for it."""
        whole = x.contiguous()
        self.group.broadcast(whole)
        return whole.chunk(self.group.world_size, dim=1)[self.group.rank_in_group].contiguous()

    def is_over(self, fails: bool) -> bool:
        """Whether the forward ends here on all ranks, because it fails on rank 0, or is done."""
        over = torch.tensor(fails)
        broadcast(over, self.group.first_rank, self.group.cpu_group)
        self.is_lost = not over
        return bool(over)

    def _order(self, name: str, given: Any) -> None:
        if self.is_lost:
            raise SystemExit(LOST.format("see above"))
        self.told((name, given))

    @torch.inference_mode()
    def _obey(self, name: str, given: Sequence[Any]) -> None:
        try:
            getattr(self, name)(*given)
        except OverError:
            return
        except Exception as error:
            raise SystemExit(LOST.format(f"{type(error).__name__}: {error}")) from error

    def _on_all(self, name: str, given: Sequence[Any], *own: Any) -> Any:
        """Call a method on all ranks; ``own`` are the arguments that rank 0 alone has."""
        with self.lock:
            self._order(name, given)
            self.is_lost = True
            found = getattr(self, name)(*given, *own)
            self.is_lost = False
            return found

    def _compute(self, ids: torch.Tensor, positions: Any, logits: int, rows: Any = None) -> Any:
        return super().compute(
            ids.to(self.device), SharedRows(self, positions.to(self.device), rows), logits
        )

    def _write(self, layer: int, slots: Any, shapes: Any, wholes: Any = None) -> None:
        room = wholes or [torch.empty(x, dtype=self.dtype, device=self.device) for x in shapes]
        keys, values = map(self.own_heads, room)
        super().write(layer, keys, values, slots.to(self.device))

    def _logits_of_step(self, *given: Any) -> Any:
        return super().logits_of_step(*given)


class SharedRows:
    """Rows of a forward on all ranks; rank 0 has the ``rows`` to write and to attend over."""

    def __init__(self, lm: SplitLM, positions: torch.Tensor, rows: Any) -> None:
        self.positions = positions
        self._lm = lm
        self._rows = rows

    def write(self, layer: int, *pair: torch.Tensor) -> None:
        """Take this rank's heads of fresh rows."""
        self._pair = pair

    def attend(self, layer: int, query: torch.Tensor, scores: Mapping[str, Any]) -> torch.Tensor:
        """Attend over the rows of the layer that was written last."""
        lm = self._lm
        keys, values, queries = [
            lm.group.all_gather(each.contiguous(), dim=1) for each in (*self._pair, query)
        ]
        found = queries.new_empty((*queries.shape[:2], values.shape[-1]))
        error = None
        if lm.leads:
            try:
                self._rows.write(layer, keys[:, :: lm.replicas], values[:, :: lm.replicas])
                found = self._rows.attend(layer, queries, scores)
            except BaseException as failure:
                error = failure
        if lm.is_over(error is not None):
            raise error or OverError
        own: torch.Tensor = lm.own_heads(found)
        return own
