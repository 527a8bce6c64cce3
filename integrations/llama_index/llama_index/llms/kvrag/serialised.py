"""Serialised form of the LLM: loaded objects by their names, and the store's config."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import field_serializer
from llama_index.core.llms.function_calling import FunctionCallingLLM

from kvrag import ConfigError, StoreConfig
from kvrag.adapters import EngineFields
from llama_index.llms.kvrag.options import portable, short_name


class SerialisedLLM(EngineFields, FunctionCallingLLM):
    """Serialisation of :class:`~llama_index.llms.kvrag.KVRagLLM`."""

    @field_serializer("model", "tokenizer", "kv_dir", "dtype", "device", check_fields=False)
    def _serialise_name(self, value: Any) -> str | None:
        if value is None:
            return None
        return short_name(value)

    @field_serializer("prefix", check_fields=False)
    def _serialise_prefix(self, value: Any) -> str | None:
        if isinstance(value, str):
            return value
        return None

    @field_serializer("store_config")
    def _serialise_store_config(self, value: StoreConfig | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return portable(value)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Describe the LLM so that ``from_dict`` makes an equal LLM.

        Raises
        ------
        ConfigError
            If the description would lack an option that decides which KV is found or how it is
            stored: a template as ``prefix``, an object or a token in ``model_kwargs``, or a
            function in ``store_config``.
        """
        # Called here for its own exception, which pydantic would wrap.
        self._serialise_store_config(self.store_config)
        if self.prefix is not None and not isinstance(self.prefix, str):
            raise ConfigError(
                "a prefix that is no text can't be serialised; pass its text, which is "
                "llm.engine.prefix_text"
            )
        for name, value in self.model_kwargs.items():
            if name == "token" or not isinstance(value, (str, int, float, dict, list, type(None))):
                raise ConfigError(
                    f"{name!r} in model_kwargs can't be serialised; create the LLM again where it "
                    "is needed"
                )
        return {**super().to_dict(**kwargs), "model_kwargs": self.model_kwargs}

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to be pickled with a function in the store's config.

        LlamaIndex would leave out the whole config.
        """
        self._serialise_store_config(self.store_config)
        return super().__getstate__()
