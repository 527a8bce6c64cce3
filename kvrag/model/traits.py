"""Layer traits, observed in a forward of a few tokens at load: rotation, key source and reach.

Every row gets one of two hidden states at the input of every attention module, at positions from 0
to the end of the context window. So keys of rows with the same state must be equal once they are
rotated back. That holds only for the right rotation. It fails for keys that depend on their
position in any other way, or on their neighbours.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from kvrag.errors import UnsupportedModelError, is_out_of_memory
from kvrag.model.candidates import KeySource, decoder_of, key_sources, read_mask, rotations, scaled
from kvrag.model.forward import Attentions, Forward, Observed, running, switched
from kvrag.model.lock import text_config
from kvrag.model.plain import UNLIMITED, context_window
from kvrag.model.rope import NO_ROTATION, RotaryTable, Rotation
from kvrag.model.rows import EVERYTHING, KVBuffer, LayerShape, Pair, Reach, Rows

# Hidden state of every row: neighbours vary within a state, so a mix of neighbours shows.
STATES = (0, 0, 1, 0, 1, 1, 0, 1)
# Models' names of the cache argument: "cache" from transformers 5.24 on.
CACHE = frozenset({"cache", "past_key_values"})


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """Traits of a layer that keeps KV.

    ``source`` locates its position-free keys; without a source, the cached keys are rotated back.
    ``attended`` is the shape of the keys and values that it attends to. With ``is_latent``, it
    makes them of what it caches: a position-free latent, kvrag's values, then a rotary key, kvrag's
    keys. With ``expands``, it makes keys or values of the cached ones in any way but by repeating
    heads. ``modules`` are the indices of the attention modules that read its KV: first the writer
    of it, then later modules that keep none of their own (Gemma 4).
    """

    shape: LayerShape
    attended: LayerShape
    rotation: Rotation
    source: KeySource | None
    reach: Reach
    is_latent: bool
    expands: bool
    modules: tuple[int, ...]


@dataclass(slots=True)
class Seen(Observed):
    """Observations of a forward by layer: its KV, and outputs of its attention and of submodules.

    ``outputs`` are by the submodules' names; the attention's own is ``""``.
    ``inputs`` are the indices and inputs of the attention modules in the order of their calls, and
    ``writers`` the index of the module that writes each layer.
    """

    kv: dict[int, Pair] = field(default_factory=dict)
    writers: dict[int, int] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[tuple[int, Tensor]] = field(default_factory=list)


class _NoLayers(list[Any]):
    """Layers of a recorder's cache: a model that looks for them keeps more than keys and values."""

    def __getitem__(self, _: object) -> Any:
        raise UnsupportedModelError(
            "its layers keep more in their cache than a key and a value per token, for example "
            "several tokens compressed to an entry; kvrag stores keys and values only"
        )


class _Recorder(Forward):
    """Forward with a cache that stores nothing, and records the keys and values handed to it."""

    def __init__(self, model: PreTrainedModel, seen: Seen, num_rows: int) -> None:
        super().__init__(Rows.span(0, num_rows), KVBuffer([]), Attentions(model.device))
        self.layers = _NoLayers()
        self.observed = self._seen = seen
        self._name = type(model).__name__

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> Pair:
        if layer_idx in self._seen.kv:
            raise UnsupportedModelError(
                f"{self._name} writes the KV of layer {layer_idx} twice in one forward"
            )
        self._seen.kv[layer_idx] = (key_states, value_states)
        self._seen.writers[layer_idx] = self._seen.inputs[-1][0]
        return key_states, value_states

    def update_indexer(self, *_: object, **__: object) -> Tensor:
        """Refuse layers that choose the keys of a row by other keys, in a cache of their own."""
        raise UnsupportedModelError(
            f"{self._name} chooses the keys that a row sees by a sparse indexer, which caches "
            "keys of its own; kvrag stores keys and values only, so these would be missing"
        )

    def get_conv_state(self, *_: object, **__: object) -> Tensor:
        """Refuse layers that mix a token with the tokens right before it."""
        raise UnsupportedModelError(
            f"{self._name} mixes every token with the tokens right before it by convolutions with "
            "a state of their own; kvrag stores keys and values only, "
            "so that state would be missing"
        )


def _repeats(given: Tensor, kept: Tensor) -> bool:
    """Whether the heads of one tensor are the heads of the other, each once or several times."""
    return torch.equal(given, kept.repeat_interleave(given.shape[1] // kept.shape[1], dim=1))


def sample_positions(context: int) -> list[int]:
    """Return positions for the rows: near and far, 0 and the last position among them."""
    last = max(context, len(STATES)) - 1
    return sorted({0, 1, 2 + last // 7, 3 + last // 3, 4 + last // 2, last - 2, last - 1, last})


def observe(model: PreTrainedModel, attentions: list[Module], positions: Tensor) -> Seen:
    """Run the forward and record it; the caller holds the model's lock.

    Raises ``UnsupportedModelError`` if it fails for another reason than memory.
    """
    seen = Seen()
    decoder = decoder_of(model)
    states = torch.tensor(STATES[: len(positions)], device=positions.device)
    recorder = _Recorder(model, seen, len(positions))
    inputs = {
        "position_ids": positions[None],
        "attention_mask": torch.ones_like(positions)[None],
        **dict.fromkeys(CACHE, recorder),
    }
    inputs = {option: value for option, value in inputs.items() if option in accepted(decoder)}
    inputs["input_ids"] = ((states + 1) % int(text_config(model).vocab_size))[None]
    try:
        with ExitStack() as hooks, switched(model, recorder), torch.inference_mode():
            for layer, attention in enumerate(attentions):
                _watch(attention, layer, states, seen, hooks)
            decoder(**inputs, use_cache=True)
    except Exception as error:  # code of any model
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} fails over chosen tokens with a cache of keys "
            f"and values only, which reuse needs ({type(error).__name__}: {error})"
        ) from error
    return seen


def accepted(module: Module) -> frozenset[str]:
    """Return the names of the options that a module's ``forward`` takes."""
    return frozenset(inspect.signature(type(module).forward).parameters)


def _watch(attention: Module, layer: int, states: Tensor, seen: Seen, hooks: ExitStack) -> None:
    """Feed an attention module its two hidden states, and record its submodules' outputs."""
    outputs: dict[str, Any] = {}
    seen.outputs.append(outputs)

    def is_ours() -> bool:
        return isinstance(running(), _Recorder)

    def give(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not is_ours():
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.inputs.append((layer, hidden))
        hidden = hidden[:, (states > 0).int() * 2]  # row 0 has state 0, row 2 has state 1
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def keep(name: str, _: Module, __: object, output: object) -> None:
        if is_ours():
            outputs[name] = output

    for name, module in attention.named_modules():
        hooks.enter_context(module.register_forward_hook(partial(keep, name)))
    hooks.enter_context(attention.register_forward_pre_hook(give, with_kwargs=True))


def find_traits(
    model: PreTrainedModel, attentions: list[Module], seen: Seen, positions: Tensor
) -> list[LayerTraits]:
    """Find how every layer rotates its keys, and the reach of its rows.

    Raises ``UnsupportedModelError`` for a model that kvrag can't follow.
    """
    name = type(model).__name__
    given = seen.inputs[0][1]
    if differs_within_states(given) > tolerance(given):
        raise UnsupportedModelError(
            f"{name} adds its absolute position to each token before the first layer, "
            "so KV fits one position only"
        )
    if any(tensor.dim() != 4 for pair in seen.kv.values() for tensor in pair):
        raise UnsupportedModelError(
            f"{name} keeps KV in its own shape; kvrag needs (batch, heads, tokens, head dim)"
        )
    readers = _readers(name, attentions, seen)
    known: dict[int, list[RotaryTable]] = {}
    traits = []
    for layer, modules in enumerate(readers):
        attention = attentions[modules[0]]
        keys, values = seen.kv[layer]
        is_latent = _is_positioned(values)
        if is_latent:
            keys, values = values, keys
        if _is_positioned(values):
            raise UnsupportedModelError(
                f"layer {layer} of {name} keeps keys and values that both depend on their "
                "position; kvrag moves only one of them"
            )
        table = _explain(model, layer, attention, keys, positions, known)
        read = seen.given.get(id(attention), (keys, values))
        expands = not all(map(_repeats, read, (keys, values)))
        source = _source_of(attention, seen.outputs[modules[0]], keys, table)
        reach, *others = dict.fromkeys(
            _reach_of(model, module, attentions[module], seen) for module in modules
        )
        if others:
            raise UnsupportedModelError(
                f"layers {', '.join(map(str, modules))} of {name} read the same keys and values "
                "through different windows; kvrag keeps a single window for each"
            )
        traits.append(
            LayerTraits(
                _shape_of(keys, values),
                _shape_of(*read),
                table.rotation,
                source,
                reach,
                is_latent,
                expands,
                tuple(modules),
            )
        )
    return traits


def _shape_of(keys: Tensor, values: Tensor) -> LayerShape:
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3])


def _readers(name: str, attentions: list[Module], seen: Seen) -> list[list[int]]:
    """Return the attention modules, by index, that read each layer's KV; its writer comes first.

    A module without KV of its own is given the tensors of an earlier layer. Raises
    ``UnsupportedModelError`` for a module that reads other tensors.
    """
    if sorted(seen.kv) != list(range(len(seen.kv))):
        raise UnsupportedModelError(
            f"{name} numbers the layers that keep KV {sorted(seen.kv)}; "
            f"kvrag needs 0 to {len(seen.kv) - 1}"
        )
    readers = [[seen.writers[layer]] for layer in range(len(seen.kv))]
    for module, attention in enumerate(attentions):
        if module in seen.writers.values():
            continue
        given = seen.given.get(id(attention), (None, None))
        found = [
            n for n, kv in seen.kv.items() if all(a is b for a, b in zip(kv, given, strict=True))
        ]
        if not found:
            raise UnsupportedModelError(
                f"layer {module} of {name} attends to keys and values that no layer keeps; "
                "kvrag can't move them"
            )
        readers[found[0]].append(module)
    return readers


def _is_positioned(cached: Tensor) -> bool:
    return differs_within_states(cached[0].float()) > tolerance(cached)


def tolerance(values: Tensor) -> float:
    """Return the largest difference by which roundings let equal keys differ."""
    return 8 * torch.finfo(values.dtype).eps * float(values.abs().max()) + 1e-6


def differs_within_states(rows: Tensor) -> float:
    """Return the largest difference among rows ``(H, T, D)`` of the same hidden state."""
    states = torch.tensor(STATES[: rows.shape[1]], device=rows.device)
    return max(
        float((part - part[:, :1]).abs().max())
        for part in (rows[:, states == 0], rows[:, states == 1])
    )


def _explain(
    model: PreTrainedModel,
    layer: int,
    attention: Module,
    keys: Tensor,
    positions: Tensor,
    known: dict[int, list[RotaryTable]],
) -> RotaryTable:
    """Return the table of the rotation that explains these keys best.

    ``known`` holds candidates by key dim. Raises ``UnsupportedModelError`` if no candidate fits.
    """
    dim = keys.shape[-1]
    most = tolerance(keys)
    exact = keys[0].float()

    def listed() -> list[RotaryTable]:
        return [each.at(positions) for each in rotations(decoder_of(model), attention, dim)]

    def error_of(table: RotaryTable) -> float:
        return differs_within_states(table.unrotate(exact, slice(0, exact.shape[1])))

    found = known[dim] = known.get(dim) or listed()
    best = min(found, key=error_of)
    if error_of(best) > most and layer > 0:  # it may have rotary modules of its own
        best = min(listed(), key=error_of)
        found.append(best)
    if error_of(best) > most:
        more = (
            RotaryTable(other, table.cos, table.sin)
            for table in found
            for other in scaled(attention, table.rotation, dim)
        )
        best = min((best, *more), key=error_of)
    if error_of(best) > most:
        names = dict.fromkeys(t.rotation.name for t in found if t.rotation is not NO_ROTATION)
        raise UnsupportedModelError(
            f"the keys of layer {layer} of {type(model).__name__} depend on their position in a "
            f"way that its rotary tables ({', '.join(names) or 'it has none'}) don't undo, "
            "for example by a normalisation after the rotation; kvrag can't move them"
        )
    return best


def _source_of(
    attention: Module,
    outputs: dict[str, Any],
    keys: Tensor,
    table: RotaryTable,
) -> KeySource | None:
    """Return the source that gives the attended keys, once rotated, if a submodule does."""
    heads, rows, dim = keys.shape[1:]
    best = None
    least = tolerance(keys)
    for source, captured in key_sources(attention, outputs, heads, dim):
        rotated = table.rotate(captured[0].transpose(0, 1), slice(0, rows))
        error = float((rotated.float() - keys[0].float()).abs().max())
        if error <= least:
            best = source
            least = error
    return best


def _reach_of(model: PreTrainedModel, layer: int, attention: Module, seen: Seen) -> Reach:
    where = f"layer {layer} of {type(model).__name__}"
    if not seen.masks:  # attention that can't be replaced gets its own mask in every forward
        match seen.outputs[layer].get(""):
            case (_, Tensor() as weights, *_) if weights.dim() == 4:
                return EVERYTHING
        raise UnsupportedModelError(
            f"{where} neither asks for an attention function nor returns attention weights"
        )
    mask = seen.masks.get(id(attention))
    if mask is None:
        raise UnsupportedModelError(
            f"{where} makes its own attention mask, for example from the tokens' values; "
            "kvrag can apply only masks that depend on positions alone"
        )
    config = text_config(model)
    far = min(context_window(config), UNLIMITED) - 1
    reach = read_mask(mask, config, far, model.device)
    if reach is None:
        raise UnsupportedModelError(
            f"{where} has an attention mask that is neither causal, nor sliding, nor in chunks"
        )
    return reach
