"""All that adapters of frameworks and engines import, besides the names of ``kvrag`` itself.

::

    framework's model class ─▶ models: EngineFields (options as fields) ─▶ engine
    its vector store or pipeline ─▶ documents: DocumentKV ─▶ engine, or a RemoteHost
    another engine's front, its scheduler ─▶ planning: StorePlanner ─▶ plan, ids, reuse
    its worker ─▶ running: EngineLM, its model as a causal LM
                  blending: Blending ─▶ rows of a prompt, computed by its model

May import every room of the core; nothing of the core imports it. An adapter imports from ``kvrag``
and from here alone, so a change inside kvrag can't break it.
"""

from kvrag.adapters.blending import Blending
from kvrag.adapters.documents import AdapterOptions, DocumentKV
from kvrag.adapters.models import EngineFields
from kvrag.adapters.planning import ChunkFinder, ModelFacts, Reuse, StorePlanner
from kvrag.adapters.running import EngineLM, load_made
from kvrag.config import config_class, parameters_of, unknown_option
from kvrag.config.address import Address, address, place
from kvrag.generate.logprobs import Delta
from kvrag.generate.request import ReuseOptions
from kvrag.hooks import Content
from kvrag.hosts import RemoteHost
from kvrag.model.source import ModelSource
from kvrag.precompute.documents import IndexRequest
from kvrag.precompute.encode import check_context
from kvrag.progress import Progress, tell_short
from kvrag.prompt.template import Prompt, PromptEncoder
from kvrag.prompt.tokenizer import UnreadableTextError, check_encodable

__all__ = [
    "AdapterOptions",
    "Address",
    "Blending",
    "ChunkFinder",
    "Content",
    "Delta",
    "DocumentKV",
    "EngineFields",
    "EngineLM",
    "IndexRequest",
    "ModelFacts",
    "ModelSource",
    "Progress",
    "Prompt",
    "PromptEncoder",
    "RemoteHost",
    "Reuse",
    "ReuseOptions",
    "StorePlanner",
    "UnreadableTextError",
    "address",
    "check_context",
    "check_encodable",
    "config_class",
    "load_made",
    "parameters_of",
    "place",
    "tell_short",
    "unknown_option",
]
