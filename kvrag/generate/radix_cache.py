"""Keep the KV of finished requests in a radix tree of token ids.

A prompt that begins like an earlier prompt, or continues it, computes only its new tokens. Rows
that equal a full prefill's serve every prompt with the same beginning. Rows behind a chunk that was
reused approximately depend on the question that the chunk was repaired for. Such rows are kept in
separate nodes, and serve only prompts that continue that conversation: prompts that hold its prompt
and the first token of its answer.

A model that keeps a running state goes on where a snapshot of its state was kept, so its nodes hold
snapshots beside the rows of its attention layers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvrag.blend.stitch import HistoryMatch
from kvrag.kv.snapshot import Layers, Snapshot


@dataclass(slots=True, eq=False)
class _Node:
    """Rows that follow the rows of ``parent``: ids, int64 ``(T,)``, and KV.

    A match of fewer than ``needed`` rows is not used. ``repair`` made approximate rows; exact rows
    have none. ``snapshots`` are by the number of this node's rows before them.
    """

    parent: _Node | None
    ids: np.ndarray
    layers: Layers
    needed: int = 1
    repair: Hashable = None
    children: list[_Node] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return _size(self.layers, slice(None)) + sum(
            snapshot.num_bytes for snapshot in self.snapshots.values()
        )

    def match(self, ids: np.ndarray) -> int:
        """Return the number of first ids equal to ``ids``; 0 if fewer than ``needed``."""
        count = min(len(self.ids), len(ids))
        differing = np.flatnonzero(self.ids[:count] != ids[:count])
        found = int(differing[0]) if len(differing) else count
        return found if found >= self.needed else 0

    def best(self, ids: np.ndarray, *repairs: Hashable) -> tuple[int, _Node | None]:
        """Return the child that matches most first ids, and their number; exact rows go first.

        Rows of other ``repairs`` don't count.
        """
        fitting = [
            (c.match(ids), c.repair is None, c) for c in self.children if c.repair in repairs
        ]
        count, _, child = max(fitting, key=lambda each: each[:2], default=(0, True, None))
        return count, child if count else None


# Nodes from the root on, with the numbers of their rows that match.
_Path = list[tuple[_Node, int]]

# Caches of this process, the least recently filled first.
_recent = weakref.WeakKeyDictionary["RadixCache", None]()
_guard = threading.Lock()


class RadixCache:
    """Radix trees of an engine, by ``space``: all that KV depends on besides token ids.

    Together they take at most ``max_bytes``, on the model's ``device``; the least recently used
    leaves are evicted first. The caches of all engines on a device take no more than the largest
    ``max_bytes``: the least recently filled caches are cleared first. A reader holds references to
    the rows that it copies, so they may be evicted meanwhile.
    """

    def __init__(self, max_bytes: int, device: torch.device | None = None) -> None:
        self.max_bytes = max_bytes
        self.device = device
        self._lock = threading.Lock()
        self._roots: dict[Hashable, _Node] = {}
        # least recently used first
        self._nodes: dict[_Node, None] = {}
        self._num_bytes = 0

    def stats(self) -> dict[str, int]:
        """Return the number of bytes and tokens that are kept."""
        with self._lock:
            return {"bytes": self._num_bytes, "tokens": sum(len(node.ids) for node in self._nodes)}

    def clear(self, is_meant: Callable[[Any], bool] = lambda _: True) -> int:
        """Drop the trees of the spaces that ``is_meant`` accepts, and return their bytes."""
        with self._lock:
            before = self._num_bytes
            gone = [self._roots.pop(space) for space in [*self._roots] if is_meant(space)]
            while gone:
                node = gone.pop()
                gone += node.children
                self._nodes.pop(node, None)
                self._num_bytes -= node.num_bytes
            return before - self._num_bytes

    def find(
        self,
        space: Hashable,
        token_ids: Sequence[int],
        *,
        repair: Hashable = None,
        needs_state: bool = False,
    ) -> HistoryMatch | None:
        """Return kept rows that match the beginning of a prompt, if any.

        The prompt's last row is always left to compute. Approximate rows match only if the same
        ``repair`` made them: a request for a better repair must not get the rows of another, and
        without a repair, all rows are exact. With ``needs_state``, the rows end at a snapshot, and
        may be none.
        """
        snapshot = None
        with self._lock:
            path = self._walk(space, np.asarray(token_ids[:-1]), repair)
            common = sum(count for _, count in path)
            if needs_state:
                path, snapshot = _to_snapshot(path)
            exact = sum(count for node, count in path if node.repair is None)
            parts = tuple((node.layers, count) for node, count in path)
        if common:
            return HistoryMatch(parts, exact, sum(count for _, count in parts), snapshot, common)
        return None

    def keep(
        self,
        space: Hashable,
        token_ids: Sequence[int],
        layers: Layers,
        *,
        num_exact: int,
        num_prompt: int,
        repair: Hashable = None,
        is_valid: Callable[[], bool] = lambda: True,
        snapshots: Mapping[int, Snapshot] = MappingProxyType({}),
    ) -> None:
        """Keep a copy of a finished request's rows.

        ``token_ids`` are the ids of the rows: ``num_prompt`` of the prompt, then the answer's
        tokens that have KV. ``layers`` hold at least as many rows, of which the first ``num_exact``
        equal a full prefill's; ``snapshots`` are by the number of such rows before them. New rows
        that exceed ``max_bytes`` alone are not kept. Nothing is kept unless ``is_valid``, called
        under the lock, returns true.
        """
        ids = np.asarray(token_ids)
        with self._lock:
            if not is_valid():
                return
            node = self._roots.setdefault(space, _Node(None, ids[:0], ()))
            node, at = self._add(node, ids[:num_exact], layers, 0)
            self._place(node, at, snapshots)
            if num_exact < len(ids):
                self._add(node, ids, layers, at, num_prompt=num_prompt, repair=repair)
            self._evict()
        self._make_room()

    def release(self) -> int:
        """Clear all caches on the device, and return their bytes."""
        return sum(cache.clear() for cache in self._beside())

    def _beside(self) -> list[RadixCache]:
        """Return the caches on the same device, the least recently filled first and this last."""
        with _guard:
            _recent.pop(self, None)
            _recent[self] = None
            return [cache for cache in _recent if cache.device == self.device]

    def _make_room(self) -> None:
        caches = self._beside()
        most = max(cache.max_bytes for cache in caches)
        for cache in caches[:-1]:
            if sum(each._num_bytes for each in caches) > most:
                cache.clear()

    def _walk(self, space: Hashable, ids: np.ndarray, repair: Hashable) -> _Path:
        node = self._roots.get(space)
        at = 0
        path = _Path()
        while node is not None:
            count, child = node.best(ids[at:], None, repair)
            if child is None:
                break
            path.append((child, count))
            self._use(child)
            at += count
            node = child if count == len(child.ids) else None
        return path

    def _add(
        self,
        node: _Node,
        ids: np.ndarray,
        layers: Layers,
        at: int,
        *,
        num_prompt: int = 0,
        repair: Hashable = None,
    ) -> tuple[_Node, int]:
        """Add the missing rows of ``ids[at:]`` below a node; they are exact without a ``repair``.

        Returns the last node, and the index in ``ids`` where it ends.
        """
        while at < len(ids):
            count, child = node.best(ids[at:], repair)
            if child is None:
                break
            if count < len(child.ids):
                if repair is None:
                    child = self._split(child, count)
                elif at + count < len(ids):  # else no row is missing: the answer was broken off
                    break
            self._use(child)
            at += count
            node = child
        needed = max(1, num_prompt + 1 - at)
        missing = slice(at, len(ids))
        if len(ids) - at < needed or _size(layers, missing) > self.max_bytes:
            return node, at
        added = _Node(node, ids[missing].copy(), _copied(layers, missing), needed, repair)
        node.children.append(added)
        self._use(added)
        self._num_bytes += added.num_bytes
        return added, len(ids)

    def _place(self, node: _Node | None, stop: int, snapshots: Mapping[int, Snapshot]) -> None:
        """Put snapshots into a node that ends at row ``stop``, and into the nodes above it."""
        while node is not None:
            start = stop - len(node.ids)
            for at, snapshot in snapshots.items():
                if start < at <= stop and at - start not in node.snapshots:
                    node.snapshots[at - start] = snapshot
                    self._num_bytes += snapshot.num_bytes
            node = node.parent
            stop = start

    def _split(self, node: _Node, count: int) -> _Node:
        """Move the first ``count`` rows of a node to a new node above it, and return that node."""
        assert node.parent is not None
        above, below = slice(0, count), slice(count, None)
        upper = _Node(
            node.parent, node.ids[above].copy(), _copied(node.layers, above), children=[node]
        )
        node.parent.children[node.parent.children.index(node)] = upper
        node.parent = upper
        node.ids = node.ids[below].copy()
        node.layers = _copied(node.layers, below)
        upper.snapshots = {at: each for at, each in node.snapshots.items() if at <= count}
        node.snapshots = {at - count: e for at, e in node.snapshots.items() if at > count}
        return upper

    def _use(self, node: _Node) -> None:
        self._nodes.pop(node, None)
        self._nodes[node] = None

    def _evict(self) -> None:
        while self._num_bytes > self.max_bytes:
            leaf = next(node for node in self._nodes if not node.children)
            del self._nodes[leaf]
            assert leaf.parent is not None
            leaf.parent.children.remove(leaf)
            self._num_bytes -= leaf.num_bytes


def _size(layers: Layers, rows: slice) -> int:
    return sum(side[:, :, rows].nbytes for layer in layers for side in layer)


def _copied(layers: Layers, rows: slice) -> Layers:
    return [(keys[:, :, rows].clone(), values[:, :, rows].clone()) for keys, values in layers]


def _to_snapshot(path: _Path) -> tuple[_Path, Snapshot | None]:
    """Cut a path behind its last snapshot, and return both."""
    while path:
        node, count = path.pop()
        at = max((n for n in node.snapshots if n <= count), default=0)
        if at:
            return [*path, (node, at)], node.snapshots[at]
    return [], None
