"""What can be said of a blob without its keys: whether it is damaged. Whose it is, and whether it is forged, can't."""

from __future__ import annotations

import json
import os
from typing import Any

import xxhash

from kvrag.store.directory import Directory, NotRegular
from kvrag.store.header import FAULTS, BlobRejected, frame, split
from kvrag.store.places import dump
from kvrag.store.raw import fill, read_head

PIECE_BYTES = 2**20
"""What is read at once."""


def check(directory: Directory, *place: str, data: bool) -> None:
    """Check the header's digest and the file's length, and with ``data`` the digest of each layer as it is stored.

    Raises
    ------
    BlobRejected
        If it is damaged.
    OSError
        If it can't be read.
    """
    try:
        fd, status = directory.open(*place)
    except NotRegular:
        raise BlobRejected("it is not a regular file") from None
    try:
        head = read_head(fd, status.st_size)
        digests, sizes = _layers(head)
        if status.st_size != len(head) + sum(sizes):
            raise BlobRejected("it has the wrong length")
        start = len(head)
        for digest, size in zip(digests, sizes, strict=True) if data else ():
            if _digest(fd, start, size) != digest:
                raise BlobRejected("its data is damaged")
            start += size
    finally:
        os.close(fd)


def _digest(fd: int, start: int, size: int) -> str:
    """Digest of a part of a file, read piece by piece: nothing proves that its size is that of a layer."""
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(min(size, PIECE_BYTES)))
    for at in range(start, start + size, PIECE_BYTES):
        view = piece[: start + size - at]
        fill(fd, view, at)
        digest.update(view)
    return digest.hexdigest()


def _layers(head: bytearray) -> tuple[list[str], list[int]]:
    """Return digests and sizes of the layers, if the header is as it was written."""
    try:
        marks, tensors = split(head)
        fields: dict[str, Any] = json.loads(tensors)
        _, mac = marks.pop("header_digest"), marks.pop("header_mac", None)
        if frame(marks, dump(fields), None if mac is None else lambda _: str(mac)) != head:
            raise BlobRejected("its header is damaged")
        digests = marks["layer_digests"].split(",")
        sizes = [0] * len(digests)
        for name, tensor in fields.items():
            sizes[int(name.split(".")[1])] += _size(tensor)
    except (*FAULTS, IndexError):
        raise BlobRejected("its header is damaged") from None
    return digests, sizes


def _size(tensor: dict[str, Any]) -> int:
    start, stop = tensor["data_offsets"]
    if not 0 <= start <= stop < 2**48:
        raise ValueError("not a place")
    return int(stop - start)
