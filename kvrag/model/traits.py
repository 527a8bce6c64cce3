"""The proof at load: one forward of a few tokens shows, layer by layer, how keys turn, where they are free of positions, who sees whom.

Every attention module gets one of two hidden states at each row, whatever came before, at positions from 0 to the end of the context
window. So the keys of rows with the same state must be the same once they are turned back: that holds for the right rotation only,
and fails for keys that depend on their position, or on their neighbours, in any other way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError, is_out_of_memory
from kvrag.model.forward import Forward, Observed, running, switched
from kvrag.model.key_sources import KeySource, decoder_of, key_sources
from kvrag.model.kv import KVBuffer, LayerShape
from kvrag.model.masks import read_mask
from kvrag.model.rope import RotaryTable
from kvrag.model.rotary import STILL, Turning, turnings
from kvrag.model.rows import EVERYTHING, Reach, Rows

STATES = (0, 0, 1, 0, 1, 1, 0, 1)
"""Which of the two hidden states each row of the probe has: neighbours differ, so a mix of neighbours shows."""


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What the proof found out about one layer.

    Parameters
    ----------
    shape
        Heads and head dims of its KV.
    turning
        How its keys turn.
    source
        Where its position-free keys can be taken from, or ``None``: turn the cached keys back.
    reach
        How far back its rows see.
    """

    shape: LayerShape
    turning: Turning
    source: KeySource | None
    reach: Reach


@dataclass(slots=True)
class Seen(Observed):
    """What one forward showed: keys and values by layer, submodule outputs by layer, the first layer's input, masks, weights."""

    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    first_input: list[torch.Tensor] = field(default_factory=list)
    weights: dict[int, bool] = field(default_factory=dict)


class _Recorder(Forward):
    """A forward whose cache stores nothing and notes the keys and values handed to it."""

    def __init__(self, model: PreTrainedModel, seen: Seen, num_rows: int) -> None:
        super().__init__(Rows.span(0, num_rows), KVBuffer([]), model.device)
        self.observed = seen
        self._name = type(model).__name__

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.observed.kv:
            raise UnsupportedModelError(f"{self._name} writes the KV of layer {layer_idx} twice in one forward")
        self.observed.kv[layer_idx] = (key_states, value_states)
        return key_states, value_states


def probe_positions(context: int) -> list[int]:
    """Positions of the probe's rows: near and far, 0 and the last one among them."""
    last = max(context, len(STATES)) - 1
    return sorted({0, 1, 2 + last // 7, 3 + last // 3, 4 + last // 2, last - 2, last - 1, last})


def observe(model: PreTrainedModel, attentions: list[torch.nn.Module], positions: torch.Tensor) -> Seen:
    """Run the probe's forward and note all that the proof needs; the caller holds the model's lock.

    Raises
    ------
    UnsupportedModelError
        If the forward fails: the model expects something else than tokens, positions and a cache of keys and values.
    """
    try:
        return _observe(model, attentions, positions)
    except UnsupportedModelError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} can't run over chosen tokens with a cache of keys and values ({type(error).__name__}: {error}), so "
            "nothing can be proven about it"
        ) from error


@torch.inference_mode()
def _observe(model: PreTrainedModel, attentions: list[torch.nn.Module], positions: torch.Tensor) -> Seen:
    seen = Seen()
    states = torch.tensor(STATES[: len(positions)], device=positions.device)
    recorder = _Recorder(model, seen, len(positions))
    with ExitStack() as stack:
        for layer, attention in enumerate(attentions):
            stack.enter_context(_watched(attention, layer, states, seen))
        stack.enter_context(switched(model, recorder))
        inputs = {"position_ids": positions[None], "attention_mask": torch.ones_like(positions)[None]}
        decoder = decoder_of(model)
        decoder(
            input_ids=((states + 1) % int(model.config.vocab_size))[None],
            past_key_values=recorder,
            use_cache=True,
            **{name: value for name, value in inputs.items() if name in accepted(decoder)},
        )
    return seen


def accepted(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the options that a module's ``forward`` takes."""
    return frozenset(inspect.signature(type(module).forward).parameters)


@contextmanager
def _watched(attention: torch.nn.Module, layer: int, states: torch.Tensor, observed: Seen) -> Iterator[None]:
    """Give the attention its two hidden states, and note its submodules' outputs and whether it returns its weights."""
    outputs: dict[str, torch.Tensor] = {}
    observed.outputs.append(outputs)

    def is_ours() -> bool:
        return isinstance(running(), _Recorder)

    def give(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not is_ours():
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer == 0:
            observed.first_input.append(hidden)
        hidden = hidden[:, (states > 0).int() * 2]  # row 0 is of state 0, row 2 of state 1
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def note(name: str) -> Callable[..., None]:
        def keep(_: torch.nn.Module, __: object, output: object) -> None:
            if isinstance(output, torch.Tensor) and is_ours():
                outputs[name] = output

        return keep

    def weigh(_: torch.nn.Module, __: object, output: object) -> None:
        if is_ours():
            second = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            observed.weights[layer] = isinstance(second, torch.Tensor) and second.dim() == 4

    handles = [m.register_forward_hook(note(name)) for name, m in attention.named_modules() if name]
    handles.append(attention.register_forward_pre_hook(give, with_kwargs=True))
    handles.append(attention.register_forward_hook(weigh))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prove(
    model: PreTrainedModel, attentions: list[torch.nn.Module], observed: Seen, positions: torch.Tensor
) -> list[LayerTraits]:
    """Find out how each layer turns its keys and what its rows see.

    Raises
    ------
    UnsupportedModelError
        If tokens know their absolute position, a layer's keys turn in no way that was found, or its mask is of another kind.
    """
    name = type(model).__name__
    if not _depends_on_state_only(observed.first_input[0][0], observed.first_input[0].dtype):
        raise UnsupportedModelError(
            f"{name} adds its absolute position to each token before the first layer (learned or sinusoidal embeddings), so a chunk's KV "
            "fits one position only: reuse is possible there alone, as a prefix"
        )
    if any(tensor.dim() != 4 for pair in observed.kv.values() for tensor in pair):
        raise UnsupportedModelError(
            f"{name} keeps its keys and values in a shape of its own; kvrag needs (batch, heads, tokens, head dim)"
        )
    if sorted(observed.kv) != list(range(len(attentions))):
        raise UnsupportedModelError(
            f"{name} has {len(attentions)} layers of attention, but {len(observed.kv)} of them keep keys and values of their own; kvrag "
            "can't store and move what layers share"
        )
    candidates = _Candidates(model, positions)
    traits = []
    for layer, attention in enumerate(attentions):
        keys, values = observed.kv[layer]
        turning, table = candidates.explain(layer, attention, keys)
        if _spread_within_states(values[0].float()) > _tolerance(values, values.dtype):
            raise UnsupportedModelError(
                f"layer {layer} of {name} keeps values that depend on their position (compressed attention keeps turned keys in their "
                "place); kvrag moves keys only"
            )
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
        source = _source_of(model, attention, observed.outputs[layer], keys, table)
        traits.append(LayerTraits(shape, turning, source, _reach_of(model, layer, attention, observed)))
    return traits


def _depends_on_state_only(rows: torch.Tensor, dtype: torch.dtype) -> bool:
    return _spread_within_states(rows[None]) <= _tolerance(rows, dtype)


def _tolerance(values: torch.Tensor, dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps * float(values.abs().max()) + 1e-6


def _spread_within_states(rows: torch.Tensor) -> float:
    """Largest difference among rows ``(H, T, D)`` of the same hidden state."""
    states = torch.tensor(STATES[: rows.shape[1]], device=rows.device)
    return max(float((part - part[:, :1]).abs().max()) for part in (rows[:, states == 0], rows[:, states == 1]))


class _Candidates:
    """Ways of turning that were found so far, with their tables at the probe's positions."""

    def __init__(self, model: PreTrainedModel, positions: torch.Tensor) -> None:
        self._model, self._positions = model, positions
        self._by_dim: dict[int, list[tuple[Turning, RotaryTable]]] = {}

    def explain(self, layer: int, attention: torch.nn.Module, keys: torch.Tensor) -> tuple[Turning, RotaryTable]:
        """Return the way of turning, and its table, that explains these keys best; refuse the model if none does."""
        dim, tolerance, exact = keys.shape[-1], _tolerance(keys, keys.dtype), keys[0].float()
        if dim not in self._by_dim:
            self._by_dim[dim] = self._of(attention, dim)
        known = self._by_dim[dim]

        def spread_of(candidate: tuple[Turning, RotaryTable]) -> float:
            return _spread_within_states(candidate[1].unrotate(exact, slice(0, exact.shape[1])))

        best = min(known, key=spread_of)
        if spread_of(best) > tolerance and layer > 0:  # rotary modules of this layer's own
            own = self._of(attention, dim)
            best = min(own, key=spread_of)
            known.append(best)
        if spread_of(best) > tolerance:
            names = list(dict.fromkeys(turning.name for turning, _ in known if turning is not STILL))
            raise UnsupportedModelError(
                f"the keys of layer {layer} of {type(self._model).__name__} depend on their position in a way that turning them back by "
                f"its rotary tables ({', '.join(names) or 'it has none'}) doesn't undo, for example by a normalisation after the "
                "rotation; kvrag can't move such keys"
            )
        return best

    def _of(self, attention: torch.nn.Module, dim: int) -> list[tuple[Turning, RotaryTable]]:
        return [(turning, turning.at(self._positions)) for turning in turnings(decoder_of(self._model), attention, dim)]


def _source_of(
    model: PreTrainedModel,
    attention: torch.nn.Module,
    outputs: dict[str, torch.Tensor],
    keys: torch.Tensor,
    table: RotaryTable,
) -> KeySource | None:
    """Return the source whose keys, turned, are the keys that the layer attends to; ``None`` if no submodule gives them."""
    heads, rows, dim = keys.shape[1:]
    config = model.config
    groups = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    best, least = None, _tolerance(keys, keys.dtype)
    for source, captured in key_sources(attention, outputs, heads, dim, groups):
        turned = table.rotate(captured[0].transpose(0, 1), slice(0, rows))
        error = float((turned.float() - keys[0].float()).abs().max())
        if error <= least:
            best, least = source, error
    return best


def _reach_of(model: PreTrainedModel, layer: int, attention: torch.nn.Module, observed: Seen) -> Reach:
    if not observed.masks:  # attention that can't be replaced gets its own mask in every forward
        if not observed.weights.get(layer):
            raise UnsupportedModelError(
                f"layer {layer} of {type(model).__name__} neither asks for an attention function nor returns its attention's weights; "
                "kvrag can't tell what its rows attend to"
            )
        return EVERYTHING
    mask = observed.masks.get(id(attention))
    reach = None if mask is None else read_mask(mask, model.config, observed.kv[layer][0].device)
    if reach is None:
        raise UnsupportedModelError(
            f"layer {layer} of {type(model).__name__} has an attention mask that is neither causal, nor a sliding window, nor in chunks; "
            "kvrag can't apply it to chosen rows"
        )
    return reach
