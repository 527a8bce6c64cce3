"""Options of the server."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated

from pydantic import BeforeValidator, Field

from kvrag import ConfigError
from kvrag.config import Count, Positive, options_class, parse_bytes

KEYS_VARIABLE = "KVRAG_API_KEYS"
"""Variable that holds ``tenant=key`` pairs, separated by commas.

There is no option, because other users can see the arguments of a process.
"""

_HOST = re.compile(r"\*|(\*\.)?[^*/\s]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def _no_text(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("pass a list")
    return value


Seconds = Annotated[float, Field(strict=True, gt=0)]
Names = Annotated[Sequence[str], BeforeValidator(_no_text)]


@options_class
class ServerConfig:
    """Options of :func:`kvrag_server.create_app`."""

    model_name: str | None = None
    """Name that clients ask for; default: the model's own."""
    api_keys: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Tenant of every key. With keys, ``/v1`` requires a key, and every tenant's chunks are in
    their own namespace. Without keys, all clients that reach the port are served, and they share
    the engine's namespace."""
    max_running: Positive = 64
    """Requests that are answered at a time."""
    max_waiting: Count = 256
    """Requests that wait for a slot, beyond which requests are refused with 503."""
    max_per_key: Positive | None = None
    """Requests of a tenant that run and wait at a time, beyond which requests are refused with
    429. Default: no such limit."""
    max_body_bytes: Annotated[Positive, BeforeValidator(parse_bytes)] = 8 * 2**20
    """Largest body of a request, in bytes, or as ``"8MiB"``."""
    max_tokens: Positive = 4096
    """Most tokens of an answer. A request without a limit gets as many as the context window
    leaves, up to this number."""
    cors_origins: Names = ()
    """Origins of web pages that may call the API from a browser, as ``https://chat.example.com``;
    ``"*"``: any. Default: only the server's own page."""
    allowed_hosts: Names = ()
    """Names of this server beside ``localhost`` and its addresses, as ``kvrag.example.com`` or
    ``*.example.com``; ``"*"``: any. Without keys, requests to other names are refused: a web page
    whose own name is pointed at this machine (DNS rebinding) could send them."""
    timeout_s: Seconds = 600.0
    """Seconds that an answer may take, the wait for a slot included."""
    drain_s: Seconds = 30.0
    """Seconds that running answers get when the server shuts down."""

    def __post_init__(self) -> None:
        if not all(key and tenant for key, tenant in self.api_keys.items()):
            raise ConfigError(
                "ServerConfig.api_keys has an empty key or tenant; give each key a tenant"
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"ServerConfig.allowed_hosts holds {host!r}; write a name without scheme and "
                    "port, as kvrag.example.com, *.example.com, or '*'"
                )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"ServerConfig.cors_origins holds {origin!r}; write scheme and host, as "
                    "https://chat.example.com or http://localhost:3000, without a path, or '*'"
                )

    def answers_to(self, host: str, address: str) -> bool:
        """Whether a request to ``host``, a name or an address, is meant for this server.

        ``address`` is the server's own end of the connection, if known.
        """
        host = host.rstrip(".")
        if host == "localhost" or _is_loopback(host) or host == address:
            return True
        # A browser looks an address up nowhere, so no page can be given one.
        if _is_address(host) and not _is_loopback(address):
            return True
        return any(
            [
                allowed in ("*", host) or (allowed[0] == "*" and host.endswith(allowed[1:]))
                for allowed in map(str.lower, self.allowed_hosts)
            ]
        )

    def tenant_of(self, authorization: str, x_api_key: str) -> str | None:
        """Return the tenant of the key in a request's headers, or ``None``.

        Anthropic's clients send the second header, all others a bearer token. Right and wrong keys
        take equally long.
        """
        kind, _, key = authorization.partition(" ")
        key = key.strip() if kind.lower() == "bearer" else x_api_key
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for known, tenant in self.api_keys.items():
            if hmac.compare_digest(hashlib.sha256(known.encode()).digest(), digest):
                found = tenant
        return found


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ip_address(host).is_loopback


def keys_of_environment() -> dict[str, str]:
    """Return tenants by key from :data:`KEYS_VARIABLE`; raise ``ConfigError`` for bad entries."""
    found = {}
    for pair in filter(None, map(str.strip, os.environ.get(KEYS_VARIABLE, "").split(","))):
        tenant, _, key = pair.partition("=")
        if not (tenant and key) or key in found:
            raise ConfigError(
                f"{KEYS_VARIABLE} has an entry without a tenant or a key, or a key twice; write "
                "tenant=key,tenant=key, with a key for each tenant"
            )
        found[key] = tenant
    return found
