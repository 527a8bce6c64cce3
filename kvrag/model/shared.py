"""Rows of several requests in a forward: portions of recorded forwards, and decode steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvrag.model.attention import fused_attention, ragged_attention
from kvrag.model.forward import Attentions, BeforeWrite, Forward
from kvrag.model.rows import EVERYTHING, KVBuffer, Limits, Pair, Rows

MAX_TOGETHER = 64  # requests with next rows in the same forward, at most
# Numbers of rows that forwards are recorded for.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MAX_ROWS = BUCKETS[-1]
LONGEST = MAX_ROWS - MAX_TOGETHER  # rows of a prompt in a forward: next rows of others still fit
OUTPUTS = (0, 1, 16, 64, 256, MAX_ROWS)  # numbers of rows with logits, likewise
MAX_OBSERVED = 1024  # rows that a shift observes


class Portion(NamedTuple):
    """Rows of a request in a forward, with the outputs that they need.

    The fields are parameters of :meth:`CausalLM.forward`.
    """

    token_ids: Tensor
    rows: Rows
    kv: KVBuffer
    logits: int = 0
    mass_rows: int = 0
    mass_layers: range | None = None
    before_write: BeforeWrite | None = None

    @property
    def shift(self) -> Any:
        """The change of the buffer, if it can be recorded (``ResidualShift``), or else ``None``."""
        return self.before_write if hasattr(self.before_write, "fixed") else None

    @property
    def is_recordable(self) -> bool:
        """Whether a recorded forward may compute these rows, in pieces if nothing prevents it."""
        size = len(self.token_ids)
        if self.mass_rows or self.before_write:
            size += _at_least(min(self.mass_rows, MAX_ROWS)) - self.mass_rows
            if size > LONGEST:
                return False
        return (
            self.kv.start is not None
            and self.before_write is self.shift
            and self.logits <= MAX_TOGETHER
        )

    @property
    def start(self) -> int:
        """First slot of its request."""
        return self.kv.start or 0

    @property
    def size(self) -> int:
        """Share of a forward: mass takes one alone, and a shift leaves room for next rows."""
        if self.mass_rows:
            return MAX_ROWS
        return max(len(self.token_ids), 0 if self.shift is None else LONGEST)

    def cut(self) -> list[Portion]:
        """Cut the rows into pieces that a recorded forward takes; the last has all outputs."""
        slots = self.rows.indices(torch.device("cpu"))
        head = (len(slots) - 1) % LONGEST + 1
        sizes = [head, *[LONGEST] * ((len(slots) - 1) // LONGEST)]
        parts = zip(torch.split(self.token_ids, sizes), torch.split(slots, sizes), strict=True)
        *pieces, last = [Portion(ids, Rows.at(own), self.kv) for ids, own in parts]
        return [*pieces, self._replace(token_ids=last.token_ids, rows=last.rows)]


class Form(NamedTuple):
    """Form of a recording: numbers of rows, and what it computes.

    With ``waits``, every layer waits until the stored KV of its layer is stitched.
    """

    waits: bool
    rows: int
    logits: int
    mass_rows: int
    mass_layers: range | None
    observed: int
    shifted: int


# Logits and mass, as :meth:`CausalLM.forward` returns them.
Found = tuple[Tensor, Tensor | None]


def _at_least(count: int, sizes: Sequence[int] = BUCKETS) -> int:
    return sizes[bisect_left(sizes, count)]


def placed(pieces: Sequence[Portion], waits: bool) -> tuple[Form, list[Tensor]]:
    """Return the shape of a forward of these pieces, and the place of every row in it.

    Rows with outputs come last, and spare rows before them: they add no mass.
    """
    shift = next((piece.shift for piece in pieces if piece.shift is not None), None)
    last = [max(piece.logits, piece.mass_rows) for piece in pieces]
    first = [len(piece.token_ids) - count for piece, count in zip(pieces, last, strict=True)]
    mass_rows = sum([piece.mass_rows for piece in pieces])
    mass_rows = mass_rows and _at_least(mass_rows)
    logits = _at_least(sum([piece.logits for piece in pieces]), OUTPUTS)
    rows = _at_least(max(sum(first) + max(sum(last), mass_rows), logits))
    shape = Form(
        waits,
        rows,
        logits,
        mass_rows,
        pieces[0].mass_layers,
        min(rows, MAX_OBSERVED) if shift else 0,
        1 << max(10, (shift.num_shifted - 1).bit_length()) if shift else 0,
    )
    places = list[Tensor]()
    front, back = 0, rows - sum(last)
    for num_first, num_last in zip(first, last, strict=True):
        places.append(
            torch.cat([torch.arange(front, front + num_first), torch.arange(back, back + num_last)])
        )
        front += num_first
        back += num_last
    return shape, places


def inputs_of(
    shape: Form, pieces: Sequence[Portion], places: Sequence[Tensor], spare: int
) -> Tensor:
    """Return ids, slots, positions and first visible slots, int64 ``(4, rows)``, on the host.

    A spare row is in the slot ``spare`` and sees it alone.
    """
    inputs = torch.tensor([[0], [spare], [0], [spare]]).repeat(1, shape.rows)
    for piece, place in zip(pieces, places, strict=True):
        positions = piece.rows.indices(inputs.device)
        start = torch.tensor(piece.start).expand(len(place))
        inputs[:, place] = torch.stack([piece.token_ids.cpu(), positions + start, positions, start])
    return inputs


class NextRows(Forward):
    """Decode step of several requests: row ``i`` is the next row of request ``i``.

    Every request has a buffer of its own, and a row sees only its request's rows. So the attention
    of a layer is computed request by request; everything else is a single pass over the weights.

    Parameters
    ----------
    pieces
        The row of every request, with its buffer.
    attentions
        Attention modules of the model.
    """

    def __init__(self, pieces: Sequence[Portion], attentions: Attentions) -> None:
        first = pieces[0]
        super().__init__(first.rows, first.kv, attentions, outputs=len(pieces))
        own = [each.rows.indices(attentions.device) for each in pieces]
        self.positions = torch.cat(own)
        self._each = [Limits(at, each.rows.stop) for at, each in zip(own, pieces, strict=True)]
        self._pieces = pieces
        self._layer = 0

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> Pair:
        """Write every fresh row into its request's buffer, where :meth:`attend` reads it."""
        self._layer = layer_idx
        pair = self._attentions.in_order(layer_idx, (key_states, value_states))
        for side, fresh in enumerate(pair):
            for piece, row in zip(self._pieces, fresh.unbind(2), strict=True):
                piece.kv.layers[layer_idx][side].select(2, piece.rows.stop - 1).copy_(row)
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
        for piece in self._pieces:
            keys, values = piece.kv.layers[layer]
            found.append((keys[:, :, : piece.rows.stop], values[:, :, : piece.rows.stop]))
        return found

    def attend(
        self,
        module: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scores: Mapping[str, Any],
    ) -> Tensor:
        """Attend request by request.

        In memory, the outputs lie row by row, as the model reads them.
        """
        reach = self._attentions.reach.get(module, EVERYTHING)
        layer = self._attentions.reads.get(module, self._layer)
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
