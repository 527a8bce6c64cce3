"""Causal LM that another engine holds and runs: its forwards compute rows over kvrag's buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from kvrag.errors import UnsupportedModelError
from kvrag.identity.model import LiveIdentity, describe, weights_digest
from kvrag.identity.weights import keep_name
from kvrag.model.forward import Attentions, Forward, StopForward
from kvrag.model.lm import CausalLM, LoadedModel
from kvrag.model.load import LOADED, origin_of
from kvrag.model.plain import auto_class, regime_limit
from kvrag.model.rope import NO_ROTATION, MakeTables, RotaryTables, Rotation, complex_product
from kvrag.model.rows import EVERYTHING, LayerShape, Reach
from kvrag.model.source import ModelSource
from kvrag.model.traits import (
    STATES,
    LayerTraits,
    differs_within_states,
    sample_positions,
    tolerance,
)
from kvrag.prompt.template import PromptEncoder


class EngineLM(CausalLM):
    """Causal LM that another engine holds; a subclass runs it.

    Parameters
    ----------
    config
        Config of its text decoder.
    engine
        Name of the engine with all that changes its times: costs are kept by it.
    dtype, device
        Of its activations.
    layers
        Key heads, head dims of keys and values, and window (``None``: all keys) of every attention
        layer that keeps KV.
    longest
        Most tokens that the engine takes.

    Raises
    ------
    UnsupportedModelError
        If its KV can't be moved, by its config, or if no rotary table explains its keys.
    """

    def __init__(
        self,
        config: Any,
        engine: str,
        dtype: torch.dtype,
        device: Any,
        layers: Sequence[tuple[int, int, int, int | None]],
        longest: int,
    ) -> None:
        config = copy(config)
        config._attn_implementation = engine
        self._layers = layers
        self._longest = longest
        shell: Any = torch.nn.Module()  # what kvrag asks a model for besides its forwards
        shell.config = config
        shell.dtype = dtype
        shell.device = torch.device(device)
        super().__init__(shell)

    def compute(self, ids: torch.Tensor, rows: EngineRows, logits: int) -> torch.Tensor:
        """Compute rows of token ids ``(B, R)``; every attention layer calls ``rows``.

        Returns logits of the last ``logits`` rows, ``(B, logits, vocab)``; of none, anything.
        """
        raise NotImplementedError

    def tables(self) -> Iterable[tuple[str, MakeTables, bool]]:
        """Yield the name of each rotary table that it may use, the table, and its kind.

        The table is a function ``positions (N,) -> cos, sin (N, width / 2)``. The kind is whether
        pairs are neighbours; else they are halves.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def find_traits(self) -> None:
        """Find every layer's rotation: rows of a token have the same keys once rotated back.

        In a forward whose attention adds nothing, these depend on the token alone in all layers.
        """
        if regime_limit(self.config) is not None:
            raise UnsupportedModelError("its angles change with the prompt's length")
        self.context_window = self.reuse_window = min(self.context_window, self._longest)
        positions = torch.tensor(sample_positions(self.context_window), device=self.device)
        states = torch.tensor(STATES[: len(positions)], device=self.device)
        seen = _Watch(positions)
        self.compute(states[None] + 1, seen, 0)
        known = [NO_ROTATION, *(_rotation(*each) for each in self.tables())]
        self.traits = []
        for index, (*shape, width) in enumerate(self._layers):
            reach = Reach(window=width) if width else EVERYTHING
            keys = seen.keys[index]
            found = [(_error(each, keys, positions), each) for each in known]
            error, rotation = min(found, key=itemgetter(0))
            if error > tolerance(keys):
                raise UnsupportedModelError(f"no rotary table explains the keys of layer {index}")
            own = LayerShape(*shape)
            self.traits.append(
                LayerTraits(
                    own,
                    own,
                    rotation,
                    source=None,
                    reach=reach,
                    is_latent=False,
                    expands=False,
                    modules=(index,),
                )
            )
        self._attentions = list[Any](self.traits)
        reaches = {id(each): each.reach for each in self.traits}
        self._switch = Attentions(self.device, reaches, [*reaches][-1:])
        self.is_dense = False
        self._can_pack = False
        self._tables = RotaryTables([each.rotation for each in self.traits], self.reuse_window)

    def _run(self, ids: torch.Tensor, forward: Forward, logits: int) -> torch.Tensor:
        with suppress(StopForward):
            return self.compute(ids, EngineRows(self.traits, forward, len(ids)), logits)
        return torch.empty(0, dtype=torch.float32)


class EngineRows:
    """Rows of a forward: the engine's layers write them to kvrag's buffer, and attend over it.

    Tensors are ``(B · R, heads, dim)``; ``positions`` are of these rows.
    """

    def __init__(self, traits: Sequence[LayerTraits], forward: Forward, batch: int) -> None:
        self.positions = forward.positions.repeat(batch)
        self._traits = traits
        self._forward = forward
        self._batch = batch

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the rows of a layer."""
        self._pair = self._forward.update(self._by_head(keys), self._by_head(values), layer)

    def attend(self, layer: int, query: torch.Tensor, scores: Mapping[str, Any]) -> torch.Tensor:
        """Attend over the rows of the layer that was written last."""
        found = self._forward.attend(
            id(self._traits[layer]), self._by_head(query), *self._pair, scores
        )
        return found.transpose(1, 2).flatten(0, 1)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self._batch, -1, *x.shape[-2:]).transpose(1, 2)


class _Watch(EngineRows):
    """Rows that no layer sees; ``keys``, ``(H, T, D)``, are noted by layer."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        self.keys = dict[int, torch.Tensor]()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer] = keys.transpose(0, 1).clone()
        self._like = values

    def attend(self, layer: int, query: torch.Tensor, scores: Mapping[str, Any]) -> torch.Tensor:
        return query.new_zeros((*query.shape[:2], self._like.shape[-1]))


def load_made(
    source: ModelSource, lm: EngineLM, held: torch.nn.Module, *, is_stored: bool
) -> LoadedModel:
    """Identify a model that another engine holds, as if it had been loaded from a source.

    Engines of this process with the same source use it while the result is in use.
    ``is_stored``: the engine holds the weights as the source's files give them; else the held
    module's weights are hashed.
    """
    config = source.load_config()
    with torch.device("meta"):
        like: Any = auto_class(config).from_config(config, dtype=lm.dtype)
    tokenizer = source.load_tokenizer()
    weights = (origin_of(source, like) if is_stored else None) or weights_digest(held)
    lm.model.held = held  # a change of its weights is noticed
    found = describe(like, tokenizer, weights)
    if found.quantisation:  # the engine's products round otherwise than transformers' do
        found = replace(found, quantisation=f"{found.quantisation} by another engine")
    identity = LiveIdentity(lm.model, found)
    keep_name(identity.fingerprint, source.name)
    loaded = LoadedModel(lm, PromptEncoder(tokenizer, lm), identity)
    LOADED[(*source.key, PromptEncoder)] = loaded
    return loaded


def _error(rotation: Rotation, keys: torch.Tensor, positions: torch.Tensor) -> float:
    """Return how much the keys of a token differ once they are rotated back."""
    return differs_within_states(rotation.at(positions).unrotate(keys.float(), slice(None)))


def _rotation(name: str, tables: MakeTables, is_neighbours: bool) -> Rotation:
    cos, _ = tables(torch.zeros(1, dtype=torch.int64))
    return Rotation(
        name,
        tables,
        complex_product if is_neighbours else _halves,
        float(cos[0, 0]),
        2 * cos.shape[1],
        0,
        False,
    )


def _halves(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = keys.chunk(2, dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
