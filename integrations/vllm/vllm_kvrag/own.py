"""vLLM's own model as a causal LM of kvrag: all that is used of vLLM's inside, but its requests.

In the context of a forward, stand-ins take the places of the attention layers: they write to
kvrag's buffer and attend over it. vLLM's layers, and its own steps, stay as they are. So
quantised weights, experts and kernels are vLLM's.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.forward_context import (
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvrag import StoreError, UnsupportedModelError
from kvrag.adapters import EngineLM, ModelSource, load_made

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


NAP_S = 3e-4  # far less than a step on a CPU


class VllmLM(EngineLM):
    """vLLM's model, which computes rows for kvrag.

    No other thread may run it meanwhile, but at a pause: the forward's context is global to the
    process, and so are the kernels' scratch memories.
    """

    _manager: Any = None  # vLLM's, of adapters (LoRA), if it takes any
    _adapter: ReferenceType[Any]
    _number = 0  # of this model's adapter, if it has one
    pauses = True
    """Whether vLLM's steps may run between the layers of a forward."""

    def __init__(self, vllm_config: VllmConfig, held: Any) -> None:
        self._held = held
        self._manager = getattr(held, "lora_manager", None)
        if getattr(self._manager, "supports_tower_connector_lora", False):
            raise UnsupportedModelError("its adapters change more than its text decoder")
        self.block_size = vllm_config.cache_config.block_size
        self.is_quantised = vllm_config.model_config.quantization is not None
        self._vllm_config = vllm_config
        self._named = attention_layers(vllm_config)
        # Compiled code ends with the sizes of vLLM's own steps.
        self._most = vllm_config.scheduler_config.max_num_batched_tokens
        config = vllm_config.model_config
        compiles = vllm_config.compilation_config.mode
        # As many devices have key heads of their own; the others have the same ones again.
        parallel = vllm_config.parallel_config
        devices = parallel.tensor_parallel_size
        splits = min(devices, config.get_total_num_kv_heads())
        self.replicas = devices // splits
        super().__init__(
            config.hf_text_config,
            f"vllm {vllm.__version__}, {compiles}, {devices}",
            config.dtype,
            vllm_config.device_config.device,
            [
                (splits * each.num_kv_heads, each.head_size, each.head_size_v, each.sliding_window)
                for each in self._named.values()
            ],
            config.max_model_len,
        )
        # Experts, adapters and models of images keep buffers of a step's size. On GPUs these are
        # locked, or at addresses that captured graphs read.
        self._is_bounded = (
            self._manager is not None or parallel.is_moe_model or config.is_multimodal_model
        )
        if self._is_bounded:
            self.most_timed = min(self.most_timed, self._most)

    def load(self, source: ModelSource) -> object:
        """Identify the model as a source's; engines use it while the result is in use."""
        config = self._vllm_config.model_config
        if config.hf_overrides or config.hf_config_path:
            raise UnsupportedModelError(
                "its config is not that of its files (--hf-overrides, --hf-config-path)"
            )
        # ``--quantization-config`` may quantise a quantised checkpoint further.
        is_stored = not config.quantization or (
            hasattr(config.hf_config, "quantization_config")
            and getattr(config, "quantization_config", None) is None
        )
        # Where vLLM runs a model of transformers, it has changed the class.
        with set_current_vllm_config(self._vllm_config):
            return load_made(source, self, self._held, is_stored=is_stored)

    def compute(self, ids: torch.Tensor, rows: Any, logits: int) -> torch.Tensor:
        """Compute rows of token ids ``(B, R)``; stand-ins attend over ``rows``."""
        self.check(ids)
        count = ids.numel()
        places = {
            name: StandIn(layer, index, rows)
            for index, (name, layer) in enumerate(self._named.items())
        }
        # Compiled code may copy its inputs to where those of a step go, at a pause.
        is_eager = count > self._most or self._vllm_config.compilation_config.cudagraph_copy_inputs
        with self._context(places, None, rows.positions, logits * len(ids), is_eager=is_eager):
            hidden = self._forward(ids.flatten(), rows.positions)
            if not logits:
                return hidden
            last = hidden.view(*ids.shape, -1)[:, -logits:]
            found: torch.Tensor = self._held.compute_logits(last.flatten(0, 1))
            return found.view(*last.shape[:2], -1)[..., : self.vocab_size]

    def check(self, ids: torch.Tensor) -> None:
        """Raise ``torch.OutOfMemoryError`` for a batch of more rows than a step of vLLM's."""
        if ids.numel() > self._most and (len(ids) > 1 or self._is_bounded):
            # A step shouldn't wait for more, either.
            raise torch.OutOfMemoryError("a batch of more rows than a step of vLLM's")

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states behind the last layer, ``(N, width)``."""
        config = self._vllm_config.model_config
        if config.uses_mrope:  # text has the same position on all axes
            positions = positions.expand(3, -1)
        # Compiled code takes what vLLM's own steps give it, and the dtype, without a check.
        given: dict[str, Any] = {"input_ids": ids.int()}
        # vLLM 0.26 asks elsewhere whether a model that can take images is served for text alone.
        takes = getattr(config, "supports_multimodal_inputs", config.is_multimodal_model)
        if takes or config.enable_prompt_embeds:
            given = {"input_ids": None, "inputs_embeds": self._held.embed_input_ids(ids.int())}
        hidden: torch.Tensor = self._held(positions=positions, **given)
        return hidden

    @contextmanager
    def _context(
        self,
        places: Mapping[str, Any],
        metadata: Any,
        slots: torch.Tensor,
        num_logits: int,
        *,
        is_eager: bool,
    ) -> Iterator[None]:
        """Enter the context of a forward in which ``places`` are looked up by layers' names."""
        own = (self._number,)
        mapping = None
        if self._manager is not None:
            mapping = LoRAMapping(own * len(slots), own * max(1, num_logits), is_prefill=True)
        self.check_adapter()
        self.use(mapping)
        with (
            set_current_vllm_config(self._vllm_config),
            set_forward_context(
                dict.fromkeys(places, metadata),
                self._vllm_config,
                num_tokens=len(slots),
                slot_mapping=dict.fromkeys(places, slots),
                skip_compiled=is_eager,
            ),
        ):
            context = get_forward_context()
            context.no_compile_layers = {**context.no_compile_layers, **places}
            try:
                yield
            finally:  # also of a forward that is stopped once its rows are written
                self.check_adapter()
                if self.mapping != mapping:
                    raise StoreError("its adapter could not be used again after a pause")

    def aside(self) -> AbstractContextManager[None]:
        """Leave the context of a forward for a while, so that another may run."""
        aside: AbstractContextManager[None] = override_forward_context(None)
        return aside

    @property
    def mapping(self) -> LoRAMapping | None:
        """Adapters that vLLM's layers add to the rows of a forward."""
        found: LoRAMapping | None = getattr(self._manager, "_last_mapping", None)
        return found

    @torch.inference_mode()
    def use(self, mapping: LoRAMapping | None) -> None:
        """Have vLLM's layers add these adapters to rows."""
        if mapping is not None:
            for number in {*mapping.index_mapping} - {0}:
                self._manager.activate_adapter(number)
            self._manager.set_adapter_mapping(mapping)

    def adapters(self) -> Mapping[int, Any]:
        """Return the adapters that vLLM has loaded, by number."""
        return dict(getattr(self._manager, "list_adapters", dict)())

    def check_adapter(self) -> None:
        """Raise ``StoreError`` if vLLM has unloaded or replaced this model's adapter."""
        if self._number and self.adapters().get(self._number, self) is not self._adapter():
            raise StoreError("its adapter was unloaded, or replaced")

    def adapted(self, adapter: Any) -> VllmLM:
        """Return the model with an adapter."""
        own = copy(self)
        own._number = adapter.id
        own._adapter = ref(adapter)
        return own

    def tables(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the tables of rotary modules, vLLM's, and transformers' where vLLM runs these."""
        for module in self._held.modules():
            name = type(module).__name__
            if hasattr(module, "cos_sin_cache"):
                yield name, partial(_cached, module.cos_sin_cache), not module.is_neox_style
            elif name.endswith("RotaryEmbedding") and hasattr(module, "inv_freq"):
                scale = getattr(module, "attention_scaling", 1.0)
                for is_neighbours in (False, True):
                    yield name, partial(_computed, module.inv_freq, scale), is_neighbours

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: Any) -> None:
        """Write rows ``(T, H, D)`` to slots of vLLM's cache, with the attention's own function."""
        own = [*self._named.values()][layer]
        own.impl.do_kv_cache_update(own, keys, values, own.kv_cache, slots)

    @torch.inference_mode()
    def logits_of_step(self, cache: KVCacheConfig, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of vLLM's own step for a prompt, in the first blocks of its cache."""
        count = len(ids)
        size = self.block_size
        blocks = torch.arange(1, 2 + (count - 1) // size, dtype=torch.int32, device=self.device)
        positions = torch.arange(count, device=self.device)
        slots = blocks[positions // size].long() * size + positions % size
        starts = torch.tensor([0, count], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=starts[1:].to(self.device),
            seq_lens_cpu_upper_bound=starts[1:],
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            block_table_tensor=blocks[None],
            slot_mapping=slots,
            positions=positions,
            causal=True,
        )
        with set_current_vllm_config(self._vllm_config):
            metadata = self._builder(cache).build(0, common)
        with self._context(self._named, metadata, slots, count, is_eager=True):
            hidden = self._forward(ids.to(self.device), positions)
            logits: torch.Tensor = self._held.compute_logits(hidden)
        return logits[..., : self.vocab_size]

    def _builder(self, cache: KVCacheConfig) -> Any:
        """Return a builder of the attention's metadata."""
        (group,) = cache.kv_cache_groups
        backend = self._named[group.layer_names[0]].get_attn_backend()
        return backend.get_builder_cls()(
            group.kv_cache_spec, group.layer_names, self._vllm_config, self.device
        )


class StandIn:
    """Stand-in of an attention layer, in the context of a forward.

    vLLM's two operations look it up by the layer's name, and call its ``impl``.
    """

    def __init__(self, layer: Any, index: int, rows: Any) -> None:
        self.layer = layer
        self.impl = self
        self._index = index
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def do_kv_cache_update(self, _: Any, keys: Any, values: Any, *__: object) -> None:
        """Write fresh rows."""
        self._rows.write(self._index, keys, values)

    def forward(
        self, _: Any, query: torch.Tensor, *__: object, output: torch.Tensor, **more: object
    ) -> torch.Tensor:
        """Attend over the rows."""
        if any(each is not None for each in more.values()):
            raise UnsupportedModelError(f"its attention rounds its output ({', '.join(more)})")
        impl = self.layer.impl
        scores = {
            "scale": impl.scale,
            "softcap": getattr(impl, "logits_soft_cap", None) or None,
            "sinks": getattr(impl, "sinks", None),
        }
        output.copy_(self._rows.attend(self._index, query, scores).reshape(output.shape))
        return output


def sleep_while_waiting() -> None:
    """Let this process of vLLM's sleep while it waits for another one.

    Else it spins for a second first, on a core that the other one computes with.
    """
    wait = SpinCondition.wait

    def nap_and_wait(*given: Any, **limit: Any) -> None:
        time.sleep(NAP_S)
        wait(*given, **limit)

    SpinCondition.wait = nap_and_wait


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the attention layers by name; raise ``UnsupportedModelError`` for other kinds."""
    found = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "kv_cache"):
            continue  # experts
        if type(layer) is not Attention or layer.kv_sharing_target_layer_name is not None:
            raise UnsupportedModelError(f"{name} is a {type(layer).__name__}, not full attention")
        if layer.attn_backend.forward_includes_kv_cache_update:
            raise UnsupportedModelError(f"the attention of {name} writes the cache itself")
        found[name] = layer
    return found


def adapter_digest(adapter: Any) -> str:
    """Return a digest of an adapter's tensors and settings; its name and number don't count."""
    found = hashlib.sha256()
    for name, layer in sorted(adapter.loras.items()):
        for field, value in sorted(vars(layer).items()):
            found.update(f"{name}.{field}".encode())
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, torch.Tensor):
                    found.update(each.cpu().contiguous().view(torch.uint8).numpy().data)
                else:
                    found.update(repr(each).encode())
    return found.hexdigest()


def _cached(table: torch.Tensor, positions: torch.Tensor) -> Any:
    return table[positions.to(table.device)].float().to(positions.device).chunk(2, dim=-1)


def _computed(inv_freq: torch.Tensor, scale: float, positions: torch.Tensor) -> Any:
    angles = positions[:, None] * inv_freq.float().to(positions.device)
    return angles.cos() * scale, angles.sin() * scale
