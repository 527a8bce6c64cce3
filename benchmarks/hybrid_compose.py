"""Reuse of chunks in hybrid language models: a research form, in plain torch, of what an engine would do.

A linear layer (gated delta rule, Mamba-2) maps its state affinely, ``S_out = A S_in + B``, and a chunk's ``(A, B)`` do not depend on what
stands before it once the inputs of its rows are fixed. :func:`delta_map` and :func:`decay_map` make the pair, :func:`compose` chains pairs.

:class:`Hybrid` stores the inputs of every row instead (for a linear layer the rows that enter its convolution and its gates, for an
attention layer keys without position, and values), so that chosen rows can be computed anew: their inputs replace the stored ones, and
the cheap part of every layer (convolution, recurrence) runs over all rows. No weight meets a row that is not chosen. With no row chosen
this gives the states that composed pairs give.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Map = tuple[Tensor, Tensor]
"""``(A, B)`` of some rows: A is ``[..., d, d]``, or ``[..., 1, 1]`` where the state only decays."""
Stored = list[dict[str, Tensor]]
"""What every layer needs of every row, by name: tensors ``[batch, rows, ...]``."""


def delta_map(key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Map:
    """Make ``(A, B)`` of rows of a gated delta rule.

    A row maps ``S`` to ``exp(decay) (I - beta k k^T) S + beta k v^T``.

    Parameters
    ----------
    key, value : Tensor
        ``[..., rows, d]``; the keys are normalised.
    beta, decay : Tensor
        ``[..., rows]``.
    """
    width = key.shape[-1]
    a = torch.eye(width, dtype=key.dtype).expand(*key.shape[:-2], width, width)
    b = torch.zeros(*key.shape[:-2], width, value.shape[-1], dtype=key.dtype)
    for row in range(key.shape[-2]):
        k = key[..., row, :, None]
        step = beta[..., row, None, None]
        fade = decay[..., row, None, None].exp()
        a, b = fade * a, fade * b
        a = a - step * k @ (k.mT @ a)
        b = b - step * k @ (k.mT @ b - value[..., row, None, :])
    return a, b


def decay_map(key: Tensor, value: Tensor, decay: Tensor) -> Map:
    """Make ``(A, B)`` of rows that add ``k v^T`` to a state that fades by one number a head: A is that number."""
    total = decay.cumsum(-1)
    weight = (total[..., -1:] - total).exp()
    return total[..., -1, None, None].exp(), (key * weight[..., None]).mT @ value


def compose(maps: Sequence[Map], state: Tensor) -> Tensor:
    """Send a state through maps in the order of the prompt."""
    for a, b in maps:
        state = (a * state if a.shape[-1] == 1 else a @ state) + b
    return state


def _normalised(key: Tensor) -> Tensor:
    return key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)


def _convolved(rows: Tensor, conv: Any, activation: Any) -> Tensor:
    """Run a causal depthwise convolution over ``[batch, rows, channels]``."""
    kernel = conv.weight.shape[-1]
    padded = F.pad(rows.mT, (kernel - 1, 0))
    out = F.conv1d(padded, conv.weight, conv.bias, groups=rows.shape[-1]).mT
    return out if activation is None else activation(out)


def delta_rows(part: Any, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a gated delta rule stores of rows, and the gate of their outputs."""
    if hasattr(part, "in_proj_qkvz"):
        *three, z, b, a = part.fix_query_key_value_ordering(
            part.in_proj_qkvz(hidden), part.in_proj_ba(hidden)
        )
        rows = torch.cat([t.flatten(2) for t in three], -1)
        return {"rows": rows, "b": b, "a": a}, z
    z = part.in_proj_z(hidden)
    rows = part.in_proj_qkv(hidden)
    return {"rows": rows, "b": part.in_proj_b(hidden), "a": part.in_proj_a(hidden)}, z


def delta_inputs(part: Any, put: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys, values, beta and decay of all rows and value heads, from what a gated delta rule stores."""
    split = [part.key_dim, part.key_dim, part.value_dim]
    query, key, value = _convolved(put["rows"], part.conv1d, F.silu).split(split, -1)
    heads = (*query.shape[:2], -1)
    groups = part.num_v_heads // part.num_k_heads
    return (
        query.reshape(*heads, part.head_k_dim).repeat_interleave(groups, 2),
        key.reshape(*heads, part.head_k_dim).repeat_interleave(groups, 2),
        value.reshape(*heads, part.head_v_dim),
        put["b"].sigmoid(),
        -part.A_log.exp() * F.softplus(put["a"] + part.dt_bias),
    )


def scan_rows(part: Any, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a Mamba-2 layer stores of rows, and the gate of their outputs."""
    split = [part.intermediate_size, part.conv_dim, part.num_heads]
    projected = part.in_proj(hidden * getattr(part, "ssm_in_multiplier", 1.0))
    gate, rows, step = (projected * getattr(part, "mup_vector", 1.0)).split(split, -1)
    return {"rows": rows, "step": step}, gate


def scan_inputs(part: Any, put: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Values, keys, queries and steps of all rows and heads, from what a Mamba-2 layer stores."""
    state = part.n_groups * part.ssm_state_size
    convolved = _convolved(put["rows"], part.conv1d, F.silu)
    value, key, query = convolved.split([part.intermediate_size, state, state], -1)
    heads = (*value.shape[:2], part.n_groups, part.ssm_state_size)
    groups = part.num_heads // part.n_groups
    return (
        value.reshape(*heads[:2], part.num_heads, part.head_dim),
        key.reshape(heads).repeat_interleave(groups, 2),
        query.reshape(heads).repeat_interleave(groups, 2),
        F.softplus(put["step"] + part.dt_bias).clamp(*part.time_step_limit),
    )


def chunk_map(part: Any, put: dict[str, Tensor], first: int, last: int) -> Map:
    """Make ``(A, B)`` of a layer over the rows from ``first`` to before ``last`` of what it stored, head by head."""
    if hasattr(part, "head_k_dim"):
        _, key, value, beta, decay = delta_inputs(part, put)
        four = (_normalised(key), value, beta, decay)
        return delta_map(*(t[:, first:last].transpose(1, 2) for t in four))
    value, key, _, step = scan_inputs(part, put)
    three = (key, value * step[..., None], -part.A_log.exp() * step)
    return decay_map(*(t[:, first:last].transpose(1, 2) for t in three))


def mixers(model: Any) -> dict[int, Any]:
    """Layer number → its part that keeps a state."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        for name in ("linear_attn", "mamba"):
            if hasattr(getattr(layer, name, None), "A_log"):
                found[number] = getattr(layer, name)
    return found


@dataclass
class Result:
    """Logits of the last row, what every layer stored of all rows, and the attention that the last rows paid."""

    logits: Tensor
    stored: Stored
    mass: Tensor
    """Attention of the asking rows to every row, summed over layers, heads and asking rows: ``[batch, rows]``."""


class Hybrid:
    """A causal language model whose layers are attention, gated delta rule, Mamba-2 or short convolution.

    Its parts are found by their names in a layer; the model computes every projection.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.body = model.model
        self.functions = sys.modules[type(self.body).__module__]
        self.rotary = getattr(self.body, "rotary_emb", None)
        self.final = next(
            getattr(self.body, n)
            for n in ("norm", "final_layernorm", "embedding_norm")
            if hasattr(self.body, n)
        )

    @staticmethod
    def _part(layer: Any, *names: str) -> Any:
        return next((getattr(layer, n) for n in names if hasattr(layer, n)), None)

    @torch.no_grad()
    def run(
        self,
        ids: Tensor,
        rows: Tensor | None = None,
        stored: Stored | None = None,
        *,
        asking: int = 1,
        kept: str = "",
        forget: int = 0,
    ) -> Result:
        """Compute some rows of prompts, and take all others from what is stored.

        Parameters
        ----------
        ids : Tensor
            ``[batch, length]``.
        rows : Tensor, optional
            ``[batch, chosen]``, ascending, the last row included; all rows without it.
        stored : list of dict, optional
            What :meth:`run` stored of the rows that are not chosen, in the order of the prompt.
        asking : int
            The last rows whose attention is summed.
        kept : {"", "linear"}
            ``"linear"``: chosen rows before the asking ones change what attention layers store, and leave the states as they were.
        forget : int
            If given, linear layers see nothing of the rows from 1 to this one: a cache without states.
        """
        batch, length = ids.shape
        if rows is None:
            rows = torch.arange(length).expand(batch, length)
        hidden = self.body.embed_tokens(ids.gather(1, rows))
        everywhere = torch.arange(length)[None]
        rotation = self.rotary(hidden, everywhere) if self.rotary is not None else None
        mass = torch.zeros(batch, length)
        out: Stored = []
        for number, layer in enumerate(self.body.layers):
            before = None if stored is None else stored[number]
            norm = self._part(layer, "input_layernorm", "operator_norm")
            attention = self._part(layer, "self_attn")
            if attention is not None:
                mixed, now, paid = self._attend(
                    attention, norm(hidden), rows, before, rotation, asking
                )
                mass += paid
            else:
                mixer = self._part(layer, "linear_attn", "mamba", "conv")
                make = self._convolve
                if hasattr(mixer, "head_k_dim"):
                    make = self._delta
                elif hasattr(mixer, "A_log"):
                    make = self._scan
                hold = asking if kept == "linear" else 0
                mixed, now = make(mixer, norm(hidden), rows, before, hold, forget)
            out.append(now)
            hidden = hidden + mixed
            norm = self._part(layer, "post_attention_layernorm", "pre_ff_layernorm", "ffn_norm")
            hidden = hidden + self._part(layer, "mlp", "feed_forward")(norm(hidden))
        return Result(self.model.lm_head(self.final(hidden[:, -1])), out, mass)

    @staticmethod
    def _put(
        now: dict[str, Tensor], before: dict[str, Tensor] | None, rows: Tensor, hold: int = 0
    ) -> dict[str, Tensor]:
        """Replace the chosen rows of what is stored; with ``hold``, only the last so many rows."""
        if before is None:
            return now
        out = {}
        which = torch.arange(len(rows))[:, None]
        for name, new in now.items():
            out[name] = before[name].clone()
            out[name][which, rows[:, -hold:]] = new[:, -hold:]
        return out

    @staticmethod
    def _blank(put: dict[str, Tensor], forget: int) -> dict[str, Tensor]:
        """Nothing for a convolution to see in the rows that are forgotten."""
        if not forget:
            return put
        rows = put["rows"].clone()
        rows[:, 1 : forget + 1] = 0.0
        return {**put, "rows": rows}

    @staticmethod
    def _pick(values: Tensor, rows: Tensor) -> Tensor:
        return values[torch.arange(len(rows))[:, None], rows]

    def _attend(
        self,
        part: Any,
        hidden: Tensor,
        rows: Tensor,
        before: dict[str, Tensor] | None,
        rotation: Any,
        asking: int,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        shape = (*hidden.shape[:2], -1, part.head_dim)
        query = part.q_proj(hidden)
        gate = None
        if query.shape[-1] == 2 * part.o_proj.in_features if hasattr(part, "o_proj") else False:
            query, gate = query.view(*shape[:3], 2 * part.head_dim).chunk(2, -1)
        query, key = query.reshape(shape), part.k_proj(hidden).view(shape)
        norms = (
            self._part(part, "q_norm", "q_layernorm"),
            self._part(part, "k_norm", "k_layernorm"),
        )
        if norms[0] is not None:
            query, key = norms[0](query), norms[1](key)
        put = self._put({"key": key, "value": part.v_proj(hidden).view(shape)}, before, rows)
        keys, values = put["key"].transpose(1, 2), put["value"].transpose(1, 2)
        query = query.transpose(1, 2)
        if rotation is not None:
            cos, sin = rotation
            rotate = self.functions.apply_rotary_pos_emb
            keys = rotate(keys, keys, cos, sin)[1]
            query = rotate(query, query, cos[0][rows], sin[0][rows])[0]
        groups = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = query @ keys.mT * part.scaling
        later = torch.arange(keys.shape[2])[None, None] > rows[:, :, None]
        weights = scores.masked_fill(later[:, None], float("-inf")).softmax(-1)
        mixed = (weights @ values).transpose(1, 2).reshape(*hidden.shape[:2], -1)
        if gate is not None:
            mixed = mixed * gate.reshape(mixed.shape).sigmoid()
        project = self._part(part, "o_proj", "out_proj")
        return project(mixed), put, weights[:, :, -asking:].sum((1, 2))

    def _delta(
        self,
        part: Any,
        hidden: Tensor,
        rows: Tensor,
        before: dict[str, Tensor] | None,
        hold: int,
        forget: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        now, z = delta_rows(part, hidden)
        put = self._put(now, before, rows, hold)
        query, key, value, beta, decay = delta_inputs(part, self._blank(put, forget))
        if forget:
            beta[:, 1 : forget + 1], decay[:, 1 : forget + 1] = 0.0, 0.0
        mixed, _ = self.functions.torch_chunk_gated_delta_rule(
            query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True
        )
        mixed = self._pick(mixed, rows)
        gated = part.norm(mixed.flatten(0, -2), z.flatten(0, -2)).view(mixed.shape)
        return part.out_proj(gated.flatten(2)), put

    def _scan(
        self,
        part: Any,
        hidden: Tensor,
        rows: Tensor,
        before: dict[str, Tensor] | None,
        hold: int,
        forget: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        now, gate = scan_rows(part, hidden)
        put = self._put(now, before, rows, hold)
        value, key, query, step = scan_inputs(part, self._blank(put, forget))
        if forget:
            step[:, 1 : forget + 1] = 0.0
        total = (-part.A_log.exp() * step).cumsum(1).transpose(1, 2)
        fade = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        scores = torch.einsum("bthn,bshn->bhts", query, key) * fade
        mixed = torch.einsum("bhts,bshp->bthp", scores, value * step[..., None])
        mixed = self._pick((mixed + part.D[:, None] * value).flatten(2), rows)
        return part.out_proj(part.norm(mixed, gate)), put

    def _convolve(
        self,
        part: Any,
        hidden: Tensor,
        rows: Tensor,
        before: dict[str, Tensor] | None,
        hold: int,
        forget: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        b, c, x = part.in_proj(hidden).chunk(3, -1)
        put = self._put({"rows": b * x}, before, rows, hold)
        return part.out_proj(c * self._pick(_convolved(put["rows"], part.conv, None), rows)), put


def stitch(parts: Sequence[Stored]) -> Stored:
    """Join what is stored of consecutive rows."""
    return [
        {name: torch.cat([p[n][name] for p in parts], 1) for name in parts[0][n]}
        for n in range(len(parts[0]))
    ]


def cut(stored: Stored, first: int, last: int) -> Stored:
    """Take the rows from ``first`` to before ``last``."""
    return [{name: t[:, first:last] for name, t in layer.items()} for layer in stored]
