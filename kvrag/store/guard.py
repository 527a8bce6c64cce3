"""Protection of blobs by keys: a MAC over everything in them, or AES-256-GCM, or both.

A MAC adds to a header the SHA-256 of each layer, and an HMAC of the header. Encryption hides the whole header in one field of another
one, which holds the layers as bytes::

    format, version, key (the chunk's), cipher, cipher_key (its public name), salt, layer_digests, layer_tags, sealed

Each blob is encrypted with a key of its own, derived with a random salt, so its nonces can be places: layer 0, layer 1, …, header. Every
layer is bound to the chunk's key, its place, the format's version and the header; the header to everything that stands in clear.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvrag.identity.fingerprint import FORMAT_VERSION, canonical, chunk_key
from kvrag.store import gcm
from kvrag.store.header import (
    FAULTS,
    NO_DIGEST,
    BlobRejected,
    Foreign,
    Header,
    decode,
    frame,
    key_ids,
    pad,
    parse,
    split,
)
from kvrag.store.keys import Keys, derive, key_id
from kvrag.store.places import dump

SALT_BYTES = 32

HEADER_PLACE = 2**32 - 1
"""Place of the header among the layers, for its nonce."""

CLEAR = ("format", "version", "key", "cipher", "cipher_key", "salt", "layer_digests", "layer_tags")
"""What stands in clear in the header of an encrypted blob, beside its layers' sizes and a MAC."""

DAMAGED_HEADER = "its header is damaged or forged"
DAMAGED_DATA = "its data is damaged or forged"


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands in a protected blob's header beside what a plain one says.

    Parameters
    ----------
    sums
        SHA-256 (hex) of each stored layer, where there is a MAC.
    salt, tags, sealed
        Of the encryption: salt of the blob's key, GCM tags (hex) of the layers, and the plain header, encrypted (base64).
    """

    sums: tuple[str, ...] = ()
    salt: bytes = b""
    tags: tuple[str, ...] = ()
    sealed: str = ""


class Guard:
    """Writes and proves blobs with the keys of a store.

    Parameters
    ----------
    keys
        With a key for a MAC, or for encryption, or both.

    Raises
    ------
    MissingDependencyError
        If chunks are to be encrypted and ``cryptography`` is not installed.
    """

    def __init__(self, keys: Keys) -> None:
        self._mac, self._cipher = keys.mac, keys.cipher
        if self._cipher is not None:
            gcm.check()
        self.ids = (self._mac and key_id(self._mac), self._cipher and key_id(self._cipher))
        """Public names of the keys of MAC and encryption."""

    @classmethod
    def of(cls, keys: Keys) -> Guard | None:
        """Return the guard of a store; ``None`` where blobs are plain."""
        return cls(keys) if keys.mac is not None or keys.cipher is not None else None

    def head_size(self, header: Header) -> int:
        """Length of the header that a blob will have; nothing is encrypted for it."""
        count = len(header.digests)
        sums = ("0" * 64,) * count if self.signs else ()
        if not self.encrypts:
            return len(self.encode(header, Marks(sums)))
        sealed = base64.b64encode(bytes(len(_plain(header)) + gcm.TAG_BYTES)).decode()
        tags = ("0" * 2 * gcm.TAG_BYTES,) * count
        return len(self.encode(header, Marks(sums, bytes(SALT_BYTES), tags, sealed)))

    def decode(self, head: bytearray) -> tuple[Header, Opening]:
        """Prove a header, and return it with what proves the layers.

        Raises
        ------
        BlobRejected
            If it is damaged, forged, or of another version.
        Foreign
            If it is not protected by these keys.
        """
        try:
            metadata, tensors = split(head)
            if key_ids(metadata) != self.ids:
                raise Foreign
            header, marks = self._parse(metadata, tensors)
            expected = [len(header.digests)] * 2
            counts = [len(marks.sums) if self._mac else expected[0], len(marks.tags) if self._cipher else expected[1]]
            if counts != expected or not hmac.compare_digest(self.encode(header, marks), bytes(head)):
                raise BlobRejected(DAMAGED_HEADER)
        except FAULTS:
            raise BlobRejected(DAMAGED_HEADER) from None
        return header, Opening(self, header, marks)

    def encode(self, header: Header, marks: Marks) -> bytes:
        """Write a header with its marks, and sign it."""
        extra = {"mac_key": str(self.ids[0]), "layer_sums": ",".join(marks.sums)} if self._mac else {}
        sign = self._sign if self._mac else None
        if self._cipher is None:
            return header.encode(extra, sign)
        return frame({**self._clear(header, marks), "sealed": marks.sealed, **extra}, dump(layers_of(header)), sign)

    def seal(self, header: Header, salt: bytes, tags: Sequence[str]) -> str:
        """Encrypt a header, bound to what will stand in clear beside it."""
        bound = _bound(self._clear(header, Marks(salt=salt, tags=tuple(tags))), layers_of(header))
        parts, tag = gcm.encrypt(self.key_of(header, salt), HEADER_PLACE, [memoryview(_plain(header))], bound)
        return base64.b64encode(b"".join([*parts, tag])).decode()

    def key_of(self, header: Header, salt: bytes) -> bytes:
        """Key of one blob."""
        return self._key(chunk_key(header.identity), salt)

    @property
    def encrypts(self) -> bool:
        """Whether blobs are encrypted."""
        return self._cipher is not None

    @property
    def signs(self) -> bool:
        """Whether blobs have a MAC."""
        return self._mac is not None

    def _key(self, name: str, salt: bytes) -> bytes:
        assert self._cipher is not None, "asked for by code that encrypts"
        return derive(self._cipher, f"blob {name}", salt=salt)

    def _sign(self, content: bytes) -> str:
        assert self._mac is not None, "asked for by code that signs"
        return hmac.digest(self._mac, content, "sha256").hex()

    def _clear(self, header: Header, marks: Marks) -> dict[str, str]:
        values = (
            "kvrag",
            str(FORMAT_VERSION),
            chunk_key(header.identity),
            gcm.NAME,
            str(self.ids[1]),
            marks.salt.hex(),
        )
        return dict(zip(CLEAR, (*values, ",".join(header.digests), ",".join(marks.tags)), strict=True))

    def _parse(self, metadata: dict[str, Any], tensors: bytes) -> tuple[Header, Marks]:
        sums = tuple(metadata["layer_sums"].split(",")) if self._mac else ()
        if self._cipher is None:
            return parse(metadata, tensors), Marks(sums)
        salt, sealed = bytes.fromhex(metadata["salt"]), metadata["sealed"]
        raw = memoryview(base64.b64decode(sealed, validate=True))
        bound = _bound({name: metadata[name] for name in CLEAR}, json.loads(tensors))
        plain = bytearray(len(raw) - gcm.TAG_BYTES)
        key = self._key(metadata["key"], salt)
        if not gcm.decrypt(
            key, HEADER_PLACE, raw[: -gcm.TAG_BYTES], bytes(raw[-gcm.TAG_BYTES :]), bound, memoryview(plain)
        ):
            raise BlobRejected(DAMAGED_HEADER)
        header = decode(bytearray(pad(bytes(plain))))
        return header, Marks(sums, salt, tuple(metadata["layer_tags"].split(",")), sealed)


class Sealing:
    """One blob that is being written: takes its layers in order, then gives its header.

    Parameters
    ----------
    guard
        Whose keys.
    header
        The plain header; its digests are not used.
    """

    def __init__(self, guard: Guard, header: Header) -> None:
        self._guard, self._plan = guard, header
        # Drawn here and not when the blob is planned: nothing is ever encrypted twice with one key.
        self._salt = secrets.token_bytes(SALT_BYTES) if guard.encrypts else b""
        self._key = guard.key_of(header, self._salt) if guard.encrypts else b""
        self._core = _core(header) if guard.encrypts else b""
        self.tags: list[str] = []
        self.sums: list[str] = []

    def layer(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the bytes to store for the next layer."""
        if self._guard.encrypts:
            index = len(self.tags)
            views, tag = gcm.encrypt(self._key, index, views, _place(self._plan, index, self._core))
            self.tags.append(tag.hex())
        if self._guard.signs:
            digest = hashlib.sha256()
            for view in views:
                digest.update(view)
            self.sums.append(digest.hexdigest())
        return views

    def head(self, header: Header) -> bytes:
        """Return the header to store; ``header`` has the digests of what was stored."""
        sums = tuple(self.sums) if self._guard.signs else ()
        if not self._guard.encrypts:
            return self._guard.encode(header, Marks(sums))
        sealed = self._guard.seal(header, self._salt, self.tags)
        return self._guard.encode(header, Marks(sums, self._salt, tuple(self.tags), sealed))


class Opening:
    """One blob that is being read; safe to use from several threads."""

    def __init__(self, guard: Guard, header: Header, marks: Marks) -> None:
        self.guard, self.header, self.marks = guard, header, marks
        self._key = guard.key_of(header, marks.salt) if guard.encrypts else b""
        self._core = _core(header) if guard.encrypts else b""

    def layer(self, index: int, stored: memoryview, out: memoryview) -> None:
        """Prove a layer, and decrypt it to ``out`` where it is encrypted; what is there must not be used if this raises.

        Raises
        ------
        BlobRejected
            If it is not what was written.
        """
        if self.guard.signs and hashlib.sha256(stored).hexdigest() != self.marks.sums[index]:
            raise BlobRejected(DAMAGED_DATA)
        if self.guard.encrypts:
            tag = bytes.fromhex(self.marks.tags[index])
            if not gcm.decrypt(self._key, index, stored, tag, _place(self.header, index, self._core), out):
                raise BlobRejected(DAMAGED_DATA)


def layers_of(header: Header) -> dict[str, Any]:
    """Tensors of an encrypted blob: each layer's bytes."""
    return {
        f"layer.{i:03d}": {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for i, (start, stop) in enumerate(pairwise(header.tensors.offsets))
    }


def _plain(header: Header) -> bytes:
    """Return a header's JSON without length and padding."""
    return header.encode()[8:].rstrip(b" ")


def _core(header: Header) -> bytes:
    """Digest of a header without its layers' digests, which are not known yet when layers are encrypted."""
    return hashlib.sha256(replace(header, digests=(NO_DIGEST,) * len(header.digests)).encode()).digest()


def _place(header: Header, index: int, core: bytes) -> bytes:
    """Say what a layer is bound to."""
    return canonical(
        {
            "version": str(FORMAT_VERSION).encode(),
            "key": chunk_key(header.identity).encode(),
            "layer": struct.pack("<II", index, len(header.digests)),
            "header": core,
        }
    )


def _bound(clear: dict[str, str], layers: dict[str, Any]) -> bytes:
    return canonical({"clear": dump(clear), "layers": dump(layers)})
