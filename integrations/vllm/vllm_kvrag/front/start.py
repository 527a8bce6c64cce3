"""Start vLLM with kvrag's connector, and the front before it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fastapi import FastAPI

from kvrag import ConfigError, Library
from kvrag.adapters import Address, ModelSource, StorePlanner, check_context
from kvrag_server.command import Given
from kvrag_server.config import ServerConfig
from kvrag_server.service import served_name
from vllm_kvrag.front.app import create_front
from vllm_kvrag.front.child import Child, check_given, check_installed, command_of
from vllm_kvrag.front.upstream import Upstream


@contextmanager
def started(
    options: Given, config: ServerConfig, given: Sequence[str]
) -> Iterator[tuple[FastAPI, Child]]:
    """Start vLLM, wait until it answers, and return the front's application and vLLM's process.

    Leaving the context ends vLLM. If vLLM ends by itself, this process gets SIGTERM.

    Parameters
    ----------
    options
        Options of :meth:`kvrag.KVRagEngine.from_pretrained`; ``context`` only if it was given.
    config
        Options of the front.
    given
        vLLM's own options.

    Raises
    ------
    ConfigError, MissingDependencyError
        If an option or a variable has no effect before vLLM or is unsafe; if vLLM is not
        installed.
    KVRagError
        If vLLM ends before it answers.
    """
    check_installed(config.api_keys)
    check_given(given)
    _check_addresses(options["kv_dir"], *asdict(options["store_config"]).values())
    source = ModelSource(options["model"], device="cpu")
    source.check()
    check_context(options.get("context"))
    library = Library(
        options["kv_dir"],
        namespace=options.get("namespace", "default"),
        store_config=options["store_config"],
    )
    # Other users can't enter the socket's directory.
    with closing(library), TemporaryDirectory(prefix="kvrag-front-") as folder:
        planner = StorePlanner(
            library,
            source,
            options.get("prefix"),
            options.get("chat_template_kwargs"),
        )
        name = served_name(source.name, config)
        uds = os.path.join(folder, "vllm.sock")
        command = command_of(
            os.fspath(options["model"]),
            name,
            uds,
            _of_connector(options, library, planner, config),
            _of_vllm(options) + list(given),
        )
        child = Child(command)
        with closing(child):
            transport = httpx.HTTPTransport(uds=uds)
            with httpx.Client(transport=transport, base_url="http://vllm") as client:
                child.wait(client)
            child.watch(lambda: os.kill(os.getpid(), signal.SIGTERM))
            upstream = Upstream(uds=uds, fault=lambda: child.fault)
            yield create_front(library, name, planner, upstream, config), child


def _check_addresses(*values: Any) -> None:
    """Raise ``ConfigError`` for an address with a password: vLLM logs its arguments."""
    for value in values:
        if isinstance(value, Address) and value.revealed() != str(value):
            raise ConfigError(
                f"the address {value} has a password, which vLLM would show to all users of this "
                "machine; name a server that asks for none, such as a local proxy of it"
            )


def _of_connector(
    options: Given, library: Library, planner: StorePlanner, config: ServerConfig
) -> Given:
    """Return the connector's configuration.

    With API keys, requests that name no namespace, which the front does not know, find nothing.
    """
    repair = options.get("repair")
    own: Given = {
        "mode": "blend",
        "kv_dir": library.kv_dir and str(library.kv_dir),
        "namespace": f"{library.namespace}/" if config.api_keys else library.namespace,
        "prefix": planner.prefix,
        "store_config": asdict(library.store_config),
        "repair": repair and asdict(repair),
    }
    if "context" in options:
        own["context"] = options["context"]
    return own


def _of_vllm(options: Given) -> list[str]:
    """Return the options of vLLM that kvrag has, too."""
    return [
        "--dtype",
        str(options.get("dtype", "auto")),
        "--default-chat-template-kwargs",
        json.dumps(options.get("chat_template_kwargs") or {}),
    ]
