"""The LLM in serialised form: loaded objects by their names, and the store's config."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import field_serializer
from llama_index.core.llms.custom import CustomLLM

from kvrag import StoreConfig
from kvrag.fields import EngineFields
from llama_index.llms.kvrag.options import portable, short_name


class SerialisedLLM(EngineFields, CustomLLM):
    """What :class:`~llama_index.llms.kvrag.KVRagLLM` writes down of itself."""

    @field_serializer("model", "tokenizer", "kv_dir", "dtype", "device", check_fields=False)
    def _serialise_name(self, value: Any) -> str | None:
        return None if value is None else short_name(value)

    @field_serializer("prefix", check_fields=False)
    def _serialise_prefix(self, value: Any) -> str | None:
        return value if isinstance(value, str) else None

    @field_serializer("store_config")
    def _serialise_store_config(self, value: StoreConfig | None) -> dict[str, Any] | None:
        return None if value is None else portable(value)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Describe the LLM so that ``from_dict`` makes the same one.

        Raises
        ------
        ConfigError
            If its ``store_config`` holds a function: without that, the same one would store otherwise, for instance unencrypted.
        """
        self._serialise_store_config(self.store_config)  # its own exception, which pydantic would wrap
        return super().to_dict(**kwargs)

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to be pickled with a function in the store's config; LlamaIndex would leave the whole config out."""
        self._serialise_store_config(self.store_config)
        return super().__getstate__()
