"""Decode steps of requests with memory of their own: they share a pass over the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvrag.model.attention import fused_attention, ragged_attention
from kvrag.model.forward import Attentions, Forward, Pair
from kvrag.model.rows import EVERYTHING, KVBuffer, Limits, Rows
from kvrag.model.steps import MAX_TOGETHER, Steps


class NextRow(NamedTuple):
    """Next row of a request: its token, int64 ``(1,)``, its buffer and its position.

    ``alone`` computes its logits without other requests.
    """

    token_id: torch.Tensor
    kv: KVBuffer
    position: int
    alone: Callable[[], torch.Tensor]


class NextRows(Forward):
    """Decode step of several requests: row ``i`` is the next row of request ``i``.

    Every request has a buffer of its own, and a row sees only its request's rows. So the attention
    of a layer is computed request by request; everything else is a single pass over the weights.

    Parameters
    ----------
    requests
        Buffer and position of every row.
    attentions
        Attention modules of the model.
    """

    def __init__(self, requests: Sequence[tuple[KVBuffer, int]], attentions: Attentions) -> None:
        first, position = requests[0]
        super().__init__(
            Rows.span(position, position + 1), first, attentions, outputs=len(requests)
        )
        self.requests = requests
        self.positions = torch.tensor(
            [position for _, position in requests], device=attentions.device
        )
        self._each = [
            Limits(torch.tensor([p], device=attentions.device), p + 1) for _, p in requests
        ]
        self._layer = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write every fresh row into its request's buffer, where :meth:`attend` reads it."""
        self._layer = layer_idx
        pair = self._attentions.in_order(layer_idx, (key_states, value_states))
        for side, fresh in enumerate(pair):
            for (kv, position), row in zip(self.requests, fresh.unbind(2), strict=True):
                kv.layers[layer_idx][side].select(2, position).copy_(row)
        if layer_idx not in self._attentions.latent:
            return key_states, value_states
        # The module makes keys and values of the latents of all requests at once.
        keys, values = (
            torch.cat(side, dim=2) for side in zip(*self._cached(layer_idx), strict=True)
        )
        return self._attentions.in_order(layer_idx, (keys, values))

    def _cached(self, layer: int) -> list[Pair]:
        """Return the keys and values of every request in a layer."""
        found = []
        for kv, position in self.requests:
            keys, values = kv.layers[layer]
            found.append((keys[:, :, : position + 1], values[:, :, : position + 1]))
        return found

    def attend(
        self,
        module: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attend request by request.

        In memory, the outputs lie row by row, as the model reads them.
        """
        reach = self.reach.get(module, EVERYTHING)
        layer = self.reads.get(module, self._layer)
        outs = []
        is_plain = scores["softcap"] is None and scores["sinks"] is None
        own = self._cached(layer)
        if layer in self._attentions.latent:
            sizes = [limits.num_keys for limits in self._each]
            split = (torch.split(x, sizes, dim=2) for x in (keys, values))
            own = list(zip(*split, strict=True))
        for (own_keys, own_values), limits, row in zip(
            own, self._each, query.unsqueeze(3).unbind(2), strict=True
        ):
            if is_plain and reach.is_whole(limits.num_keys):
                out = fused_attention(row, own_keys, own_values, scores["scale"])
            else:
                out = ragged_attention(row, own_keys, own_values, limits, reach=reach, **scores)
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, dim=1).transpose(1, 2)


class Extension:
    """Extension of a buffer behind its first ``length`` rows: ``ids (R,) -> logits (R, vocab)``."""

    def __init__(self, model: Steps, kv: KVBuffer, length: int) -> None:
        self._model = model
        self._kv = kv
        self._length = length

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute rows.

        A single row is computed together with rows of other requests, where the model can.
        """
        rows = Rows.span(self._length, self._length + len(ids))
        self._length = rows.stop

        def alone() -> torch.Tensor:
            return self._model.forward(ids, rows, self._kv, logits=len(ids))[0][0]

        if len(ids) > 1 or self._kv.start is not None:
            return alone()
        row = NextRow(ids, self._kv, rows.stop - 1, alone)
        limit = MAX_TOGETHER if self._model.can_share_forwards else 1
        return self._model.lock.step(row, self._model.step, limit=limit)
