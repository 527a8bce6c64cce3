"""Options of the Ray Serve application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrag import ConfigError, KVRagEngine, Library, StoreConfig
from kvrag.adapters import address, place
from kvrag_server.config import ServerConfig, keys_of_environment

Options = Mapping[str, Any]
"""Options by name."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Options of :func:`build`; all values can be written in YAML.

    Parameters
    ----------
    model, kv_dir
        As for :meth:`kvrag.KVRagEngine.from_pretrained`. Replicas on several machines need a shared
        store, here or as ``store["shared"]``.
    engine, store, repair, server
        Further options of the engine, of :class:`kvrag.StoreConfig`, :class:`kvrag.RepairConfig`
        and :class:`kvrag_server.ServerConfig`. Without ``server["api_keys"]``, API keys come from
        ``KVRAG_API_KEYS`` on every machine, which is the better place for them.
    replicas
        Number of replicas, or a range ``(least, most)`` or ``"2-8"`` to scale in with the load.
    num_cpus, num_gpus
        CPUs and GPUs per replica.
    fronts
        Number of processes that take requests and pass them on.
    autoscaling
        Further options of Ray Serve's ``AutoscalingConfig``, if ``replicas`` is a range.
    warm_s
        Most seconds that a new replica loads the most used chunks into memory, before it takes
        requests.
    has_keys
        Whether a machine without API keys is refused; :func:`kvrag_ray.build` sets it where it
        finds keys.
    """

    model: str
    # repr=False: these may hold a URL with a password, or API keys.
    kv_dir: str | None = field(default=None, repr=False)
    engine: Options = field(default_factory=dict)
    store: Options = field(default_factory=dict, repr=False)
    repair: Options | None = None
    server: Options = field(default_factory=dict, repr=False)
    replicas: int | str | Sequence[int] = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    fronts: int = 1
    autoscaling: Options = field(default_factory=dict)
    warm_s: float = 10.0
    has_keys: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dir", place(self.kv_dir))
        object.__setattr__(
            self, "store", {name: address(value) for name, value in self.store.items()}
        )
        if self.engine.keys() & {"model", "kv_dir", "repair", "store_config"}:
            raise ConfigError(
                "ServingConfig.engine has model, kv_dir, repair or store_config, which would have "
                "no effect there; pass model, kv_dir, repair and store beside it"
            )
        least, most = self.least_and_most
        if self.kv_dir is None:
            raise ConfigError(
                "ServingConfig.kv_dir is None, and replicas could share nothing; "
                "name a directory or a shared store"
            )
        if not 1 <= least <= most or self.fronts < 1:
            raise ConfigError(
                f"ServingConfig has replicas={self.replicas!r} and fronts={self.fronts!r}; pass "
                "numbers from 1, or the least and the most replicas, as 2-8"
            )
        if self.autoscaling and least == most:
            raise ConfigError(
                "ServingConfig.autoscaling has no effect without a range of replicas; "
                "pass replicas=(1, 4)"
            )
        self.server_config, self.store_config  # noqa: B018 - raise on invalid options

    @property
    def least_and_most(self) -> tuple[int, int]:
        """The range of replicas; zeros if it is none."""
        given: Any = self.replicas
        if not isinstance(given, list | tuple):
            given = str(given).split("-")
        try:
            least, most = map(int, given if len(given) == 2 else given * 2)
        except ValueError:
            return 0, 0
        return least, most

    @property
    def server_config(self) -> ServerConfig:
        """The server's options, with the API keys of this machine."""
        config = ServerConfig(**{"api_keys": keys_of_environment(), **self.server})
        if self.has_keys and not config.api_keys:
            raise ConfigError(
                "this machine has no API keys, and the machine that built the application has; "
                "set KVRAG_API_KEYS on every machine"
            )
        return config

    @property
    def store_config(self) -> StoreConfig:
        """The store's options."""
        return StoreConfig(**self.store)

    def open_library(self) -> Library:
        """Return the documents of the store, without a model."""
        return Library(
            self.kv_dir,
            namespace=self.engine.get("namespace", "default"),
            store_config=self.store_config,
        )

    def open(self) -> KVRagEngine:
        """Return an engine; its model is loaded at first use."""
        return KVRagEngine.from_pretrained(
            self.model,
            kv_dir=self.kv_dir,
            store_config=self.store_config,
            repair=self.repair,
            **self.engine,
        )
