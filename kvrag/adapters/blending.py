"""Prompts blended for an engine that decodes them itself, over its own weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrag.adapters.planning import ModelFacts
from kvrag.blend.cost import IN_ROWS, CostModel
from kvrag.blend.prefill import prefill
from kvrag.blend.reuse import read
from kvrag.blend.stitch import filling, stitch
from kvrag.config import RepairConfig
from kvrag.engine import KVRagEngine
from kvrag.errors import StoreError
from kvrag.identity.fingerprint import ids_digest
from kvrag.model.lock import Clock
from kvrag.model.rows import KVBuffer, Pair, Rows
from kvrag.precompute.encode import encode_chunks, encode_prefix
from kvrag.prompt.plan import Plan
from kvrag.runtime import Cancel, end_team, own_modes
from kvrag.store.memory import Loaded
from kvrag.types import ChunkIdentity, ChunkKV, Hole

Write = Callable[[Iterable[Pair]], None]

LOOKED_AT = 16  # chunks of which one is compared: of the same prefix and context, and not rounded
# Largest mean difference, as a share of the mean, between KV that two engines compute. A wrong
# scale or rotation makes most of it.
SAME = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


class Chunks:
    """Chunks that were read for a prompt, in the place of the store."""

    def __init__(self, chunks: Mapping[ChunkIdentity, Loaded]) -> None:
        self._chunks = chunks

    def get_many(self, identities: Sequence[ChunkIdentity], **_: object) -> list[Loaded]:
        """Return chunks, as :meth:`kvrag.store.TieredStore.get_many`."""
        return [self._chunks[each] for each in identities]


class Blending:
    """Blends prompts with an engine's model.

    ``write`` takes keys and values of a prompt's rows, layer by layer, as they are complete.
    """

    leave_cores = staticmethod(end_team)

    def __init__(self, engine: KVRagEngine) -> None:
        self.engine = engine
        self.lm = engine.loaded.reusable
        self._fingerprint = engine.loaded.fingerprint  # what others plan by
        self.lm.records = False  # the device's memory is the other engine's: no pool
        # Measured once: beside the other engine's steps, a prompt's own times say little.
        self._costs = CostModel(engine.loaded)

    def facts(self, only_exact: str | None = None) -> ModelFacts:
        """Describe the model; measures its costs, unless it serves exact beginnings alone."""
        return ModelFacts(
            self._fingerprint,
            None,
            self.engine.repair,
            IN_ROWS if only_exact else self._costs.known(),
            self.lm.depth,
            self.lm.reuse_window,
            self.engine.context_digest,
            only_exact=only_exact,
        )

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of all tokens of a prompt, computed in full."""
        count = len(ids)
        return self.lm.forward(ids, Rows.span(0, count), self.lm.buffer(count), logits=count)[0][0]

    def stored_difference(self) -> str | None:
        """Return how stored KV differs from what the model computes; ``None`` if it doesn't.

        Another engine may have stored it. A single chunk tells, if there is one: of any namespace,
        because requests may name others than the engine's.
        """
        engine = self.engine
        head = engine.encoder.head_ids(engine.prefix_text)
        behind = (self._fingerprint, ids_digest(head), engine.context_digest, "auto")
        for key in sorted(engine.store.catalog.present())[:LOOKED_AT]:
            found = engine.store.identity(key)
            if found is None or behind != (
                found.model,
                found.prefix,
                found.context,
                found.kv_dtype,
            ):
                continue
            if (stored := engine.store.get(found)) is not None:
                prefix, _ = encode_prefix(self.lm, head, engine.context_ids)
                (own,) = encode_chunks(self.lm, prefix, [found.token_ids])
                share = _difference(stored, own)
                if share <= SAME[self.lm.dtype]:
                    return None
                return f"stored KV differs from what it computes, by {share:.0%} of its size"
        return None

    def check(self, plan: Plan) -> None:
        """Raise ``StoreError`` if the model's weights have changed since it was planned by them."""
        if {each.model for each in plan.identities} != {self.engine.loaded.fingerprint}:
            raise StoreError("the model's weights have changed since the start")

    def read(self, plan: Plan) -> Any:
        """Read a prompt's chunks, as long as the store may take; needs no turn of the model.

        Raises ``StoreError`` if none can be read, or the model's weights have changed.
        """
        self.check(plan)
        found = self.engine.store.get_many(
            plan.identities, timeout_s=self.engine.store_config.load_timeout_s
        )
        if all(isinstance(each, Hole) for each in found):
            raise StoreError("its stored KV is gone, or could not be read in time")
        return Chunks(dict(zip(plan.identities, found, strict=True)))

    @own_modes
    def repair(
        self,
        plan: Plan,
        repair: RepairConfig,
        write: Write,
        chunks: Any,
        cancel: Cancel = None,
    ) -> dict[str, Any]:
        """Stitch and repair a prompt; return the fields of :class:`~kvrag.types.Accounting`.

        Raises ``CancelledError`` between its forwards if ``cancel`` is set.
        """
        clock = Clock()
        done = prefill(
            self.lm,
            chunks,
            self._own(plan),
            mode="stitch",
            config=repair,
            costs=self._costs,
            max_new_tokens=0,
            load_timeout_s=0.0,
            clock=clock,
            cancel=cancel,
        )
        assert done.buffer is not None
        try:
            with clock.stage("write"):
                write(_layers(done.buffer))
            return done.accounting(clock)
        finally:
            done.release()

    def load(self, plan: Plan, stop: int, write: Write, chunks: Any) -> dict[str, Any]:
        """Load the first ``stop`` rows, which equal a full prefill's; return the accounting.

        Raises ``StoreError`` if some are gone.
        """
        clock = Clock()
        layout, reason, kvs, _ = read(
            self.lm, chunks, self._own(plan), "prefix", None, 0.0, clock, None
        )
        if not layout.reused or layout.reused[-1].stop < stop:
            raise StoreError(reason or "stored KV is gone")
        buffer = self.lm.buffer(layout.num_tokens)
        with clock.stage("stitch"), filling(buffer):
            stitch(buffer, layout, kvs, self.lm.rotary(layout.num_tokens))
            write(_layers(buffer))
        num_computed = layout.num_tokens - stop
        return {
            "exactness": "exact",
            "cached_tokens": stop,
            "repaired_tokens": 0,
            "computed_tokens": num_computed,
            "sources": [["exact", stop], ["computed", num_computed]],
            "timings_ms": dict(clock.timings_ms),
        }

    def _own(self, plan: Plan) -> Plan:
        """Return a plan of another process with this one's encoder."""
        return replace(plan, encoder=self.engine.encoder)


def _difference(one: ChunkKV, other: ChunkKV) -> float:
    """Return the largest mean difference of a layer's keys or values, as a share of their mean."""
    shares = [
        (a.float() - b.float()).abs().mean() / b.float().abs().mean()
        for layers in zip(one.layers, other.layers, strict=True)
        for a, b in zip(*((each.keys.cpu(), each.values.cpu()) for each in layers), strict=True)
    ]
    return float(max(shares))


def _layers(buffer: KVBuffer) -> Iterator[Pair]:
    for index, pair in enumerate(buffer.layers):
        buffer.wait_for(index)
        yield pair
