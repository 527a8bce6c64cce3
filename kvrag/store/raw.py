"""Read bytes of a file that may be anything."""

from __future__ import annotations

import os

from kvrag.store.header import MAX_HEADER_BYTES, BlobRejected

HEAD_BYTES = 16 * 1024
"""What is read first: most headers are not longer."""


def fill(fd: int, view: memoryview, offset: int) -> None:
    """Read until ``view`` is full; a read may return less than asked for."""
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise BlobRejected("it has the wrong length")
        view, offset = view[count:], offset + count


def read_head(fd: int, file_size: int, limit: int = MAX_HEADER_BYTES) -> bytearray:
    """Read a header, whatever it says."""
    if file_size < 8:
        raise BlobRejected("it has the wrong length")
    head = bytearray(min(file_size, HEAD_BYTES))
    fill(fd, memoryview(head), 0)
    start = 8 + int.from_bytes(head[:8], "little")
    if start > min(file_size, limit):
        raise BlobRejected("its header has an impossible length")
    read = len(head)
    head.extend(bytes(max(0, start - read)))
    fill(fd, memoryview(head)[read:], read)
    del head[start:]
    return head
