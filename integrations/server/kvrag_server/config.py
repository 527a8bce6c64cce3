"""Options of the server."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from kvrag import ConfigError
from kvrag.config.spelling import parse_bytes

KEYS_VARIABLE = "KVRAG_API_KEYS"
"""Variable that holds ``tenant=key`` pairs, separated by commas.

There is no option, because other users can see the arguments of a process.
"""

_HOST = re.compile(r"\*|(\*\.)?[^*/\s]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of :func:`kvrag_server.create_app`.

    Parameters
    ----------
    model_name
        Name that clients ask for; default: the model's own.
    api_keys
        Tenant of every key. With keys, ``/v1`` requires a key, and every tenant's chunks are in
        their own namespace. Without keys, all clients that reach the port are served, and they
        share the engine's namespace.
    max_running, max_waiting
        Requests that are answered at a time; requests that wait for a slot, beyond which requests
        are refused with 503.
    max_per_key
        Requests of a tenant that run and wait at a time, beyond which requests are refused with
        429. Default: no such limit.
    max_body_bytes
        Largest body of a request, in bytes, or as ``"8MiB"``.
    max_tokens
        Most tokens of an answer. A request without a limit gets as many as the context window
        leaves, up to this number.
    cors_origins
        Origins of web pages that may call the API from a browser, as ``https://chat.example.com``;
        ``"*"``: any. Default: only the server's own page.
    allowed_hosts
        Names of this server beside ``localhost`` and its addresses, as ``kvrag.example.com`` or
        ``*.example.com``; ``"*"``: any. Without keys, requests to other names are refused: a web
        page whose own name is pointed at this machine (DNS rebinding) could send them.
    timeout_s, drain_s
        Seconds that an answer may take, the wait for a slot included; seconds that running answers
        get when the server shuts down.
    """

    model_name: str | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    max_running: int = 64
    max_waiting: int = 256
    max_per_key: int | None = None
    max_body_bytes: int = 8 * 2**20
    max_tokens: int = 4096
    cors_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    timeout_s: float = 600.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_body_bytes", parse_bytes(self.max_body_bytes))
        for name in ("max_running", "max_body_bytes", "max_tokens", "timeout_s", "drain_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"ServerConfig.{name} is {getattr(self, name)!r}; it must be above 0"
                )
        if self.max_per_key is not None and self.max_per_key < 1:
            raise ConfigError(
                f"ServerConfig.max_per_key is {self.max_per_key!r}; it must be above 0, or None"
            )
        if self.max_waiting < 0:
            raise ConfigError(
                f"ServerConfig.max_waiting is {self.max_waiting!r}; it must not be below 0"
            )
        if not all(key and tenant for key, tenant in self.api_keys.items()):
            raise ConfigError(
                "ServerConfig.api_keys has an empty key or tenant; give each key a tenant"
            )
        for name, kind in (("cors_origins", "origins"), ("allowed_hosts", "names")):
            if isinstance(value := getattr(self, name), str):
                raise ConfigError(f"ServerConfig.{name} is {value!r}; pass a list of {kind}")
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"ServerConfig.allowed_hosts holds {host!r}; write a name without scheme and "
                    "port, as kvrag.example.com, *.example.com, or '*'"
                )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                wanted = (
                    "write scheme and host, as https://chat.example.com or http://localhost:3000, "
                    "without a path, or '*'"
                )
                raise ConfigError(f"ServerConfig.cors_origins holds {origin!r}; {wanted}")

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
    for pair in filter(
        None, (part.strip() for part in os.environ.get(KEYS_VARIABLE, "").split(","))
    ):
        tenant, mark, key = pair.partition("=")
        if not (mark and tenant and key):
            raise ConfigError(
                f"{KEYS_VARIABLE} has an entry without a tenant or a key; write "
                "tenant=key,tenant=key"
            )
        found[key] = tenant
    return found
