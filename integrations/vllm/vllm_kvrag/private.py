"""Private blocks: hashes by which vLLM's prefix cache finds a request's blocks for no other."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PrivateBlocks:
    """Requests whose blocks have hashes of their own, from their first approximate block on."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By request: hashes that those of the token ids of its first blocks replace.
        self._kept = dict[str, list[Any]]()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def num_exact(self, request_id: str) -> int:
        """Return how many first rows of a request can be exact: all, unless it has private blocks.

        After a preemption it may find private blocks of its own.
        """
        if request_id not in self._kept:
            return sys.maxsize
        return len(self._kept[request_id]) * self._block_size

    def hide(self, request: Request, num_exact: int) -> None:
        """Give a request's blocks hashes of their own, but for blocks of its first exact rows.

        A salt changes the first hash, and every hash depends on the hash before. Blocks that are
        full later follow from the last one, so this is never shared.
        """
        num_shared = max(0, min(num_exact // self._block_size, len(request.block_hashes) - 1))
        if request.request_id not in self._kept:
            shared = request.block_hashes[:num_shared]
            request.block_hashes.clear()
            request.cache_salt = f"kvrag-{uuid.uuid4().hex}"
            request.update_block_hashes()
            if num_shared:  # the first block is not salted
                request.cache_salt = None
            own = request.block_hashes[:num_shared]
            request.block_hashes[:num_shared] = shared
        else:  # fewer rows are exact than before, or the same
            own = self._kept[request.request_id]
            request.block_hashes[num_shared : len(own)] = own[num_shared:]
            own = own[:num_shared]
        self._kept[request.request_id] = own

    def show(self, request: Request, num_computed: int) -> None:
        """Give a request's blocks the hashes of their token ids again.

        They stay hidden if it has found approximate blocks of its own, after a preemption.
        """
        if request.request_id in self and num_computed <= self.num_exact(request.request_id):
            self.forget(request.request_id)
            request.cache_salt = None
            request.block_hashes.clear()
            request.update_block_hashes()

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished."""
        self._kept.pop(request_id, None)
