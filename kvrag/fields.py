"""The options of an engine and of its answers as pydantic fields, for the frameworks' model classes to inherit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation

from kvrag import config
from kvrag.address import address
from kvrag.config import RepairConfig, StoreConfig
from kvrag.errors import ConfigError
from kvrag.types import MaxContext, Mode, Prove

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    ModelLike = str | os.PathLike[str] | PreTrainedModel
    Device = str | torch.device | None
    Dtype = str | torch.dtype
else:  # pydantic is not to check these, nor to write a schema of them
    ModelLike = Device = Dtype = Any


class EngineFields(BaseModel):
    """Options that the model classes of LangChain and LlamaIndex share; a wrong one is a :class:`~kvrag.ConfigError`.

    Fields are written down one by one, those of :class:`~kvrag.config.SamplingConfig` once more: editors and type checkers read them from
    here. ``__init__`` is hidden from them, here and in subclasses, as they would show its ``**data`` instead.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    temperature: float = 0.0
    """0 is greedy decoding, and so is what is below 0.001."""
    top_p: float | None = None
    """Nucleus filter, used when sampling: the likeliest tokens that have this probability together. 1 is off."""
    top_k: int | None = None
    """Top-k filter, used when sampling: the likeliest tokens, this many. 0 and -1 are off."""
    min_p: float | None = None
    """Filter, used when sampling: tokens of at least this share of the likeliest token's probability. 0 is off."""
    repetition_penalty: float | None = None
    """``None`` takes the model's own generation config."""
    min_new_tokens: int | None = None
    """The answer does not end by the model's own end tokens before it has this many tokens."""
    seed: int | None = None
    """Seed for sampling, below 2**64; ``None`` or -1 draws one."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the answer has it; from -2 to 2, as OpenAI's."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has."""
    tokenizer: Any = Field(default=None, repr=False)
    """A tokenizer, its id or directory; default: the model's."""
    kv_dir: Annotated[str | os.PathLike[str] | None, SkipValidation, AfterValidator(address)] = None
    """Directory of the KV store; default: chunks are kept in memory only."""
    prefix: Any = Field(default=None, repr=False)
    """What stands before the first chunk in your prompts: text, messages, the prompt template of your chain, a
    :class:`kvrag.TemplatePrefix` that also names the context variable, or ``learn``: what the first prompts show."""
    context: str | None = Field(default="default", repr=False)
    """What chunks are encoded behind besides the prefix: ``default`` (250 tokens of passages that ship with kvrag; ``default:1000``: more
    of them), your own text, or ``None``: a first chunk behind its own prefix is exact."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of tokens, by id; from -100 (never) to 100 (always)."""
    namespace: str = "default"
    """Chunks of one namespace are never found from another."""
    repair: RepairConfig | None = None
    """How stitched KV is repaired: a config, ``auto`` (the default: as calibrated for the model, else as :class:`kvrag.RepairConfig` says),
    ``fast`` or ``careful``."""
    store_config: StoreConfig | None = None
    """Budgets, limits and the key of the KV store."""
    mode: Annotated[Mode, SkipValidation] = "auto"
    """``auto``, ``full`` (no reuse), ``prefix`` (exact reuse only) or ``stitch``."""
    max_context: Annotated[MaxContext, SkipValidation] = "raise"
    """``raise``: an error where prompt and answer exceed the context window; ``slide``: the oldest tokens leave it (``evicted_tokens``)."""
    chat_template_kwargs: Annotated[dict[str, Any], SkipValidation] = Field(default_factory=dict)
    """Variables for the model's chat template, for instance ``{"enable_thinking": False}``; also per call."""
    dtype: Dtype = "auto"
    """``auto``: float32 on CPU, else the checkpoint's."""
    device: Device = None
    """``cpu``, ``cuda``, ...; default: CUDA if there is one."""
    prove: Annotated[Prove, SkipValidation] = "auto"
    """``auto``: prove once that reuse is exact for this model, else answer by full prefill; or ``off``."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)  # may hold tokens
    """For ``AutoModelForCausalLM.from_pretrained``."""

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            for name, kind in (("store_config", StoreConfig), ("repair", RepairConfig)):
                if name in data:  # not left to pydantic, which would repeat a key in its message
                    data[name] = config.as_config(kind, data[name], option=name)
            if "chat_template_kwargs" in data:
                data["chat_template_kwargs"] = config.check_template_kwargs(
                    data["chat_template_kwargs"]
                )
            super().__init__(**data)
            self.check_model_kwargs()
            config.check_prove(self.prove)
            config.check_mode(self.mode, self.max_context)

    def check_model_kwargs(self) -> None:
        """Raise :class:`ConfigError` where ``model_kwargs`` holds an option of this class or of the store."""
        own, of = type(self).model_fields, type(self).__name__
        for name in self.model_kwargs:
            if name in own:
                raise ConfigError(
                    f"model_kwargs of {of} holds {name!r}, an option of its own; pass {of}({name}=...)"
                )
        config.refuse_misplaced(self.model_kwargs, own, of=f"model_kwargs of {of}", misspelt=False)

    def engine_options(self) -> dict[str, Any]:
        """Return the options of :meth:`kvrag.KVRagEngine.get`, but for the prefix."""
        names = (
            *(
                "tokenizer",
                "kv_dir",
                "context",
                "namespace",
                "repair",
                "store_config",
                "dtype",
                "device",
                "prove",
            ),
            "chat_template_kwargs",
        )
        return {**self.model_kwargs, **{name: getattr(self, name) for name in names}}
