"""Servers as processes, and a client of plain sockets: it costs hardly any of the cores that it measures, and may be slow or leave.

What comes back is kept as it came, with the time of each piece. Nothing of kvrag is imported: any server that speaks to OpenAI will do.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
_ADDRESS = re.compile(rf"http://{re.escape(HOST)}:(\d+)")


@dataclass
class Answer:
    """What a request came to: ``texts``, ``reasons`` and ``calls`` by index of the choice; times are of ``time.perf_counter``."""

    status: int = 0
    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[Any]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    account: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    left: bool = False
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return self.pieces[0] - self.sent

    @property
    def gaps_ms(self) -> list[float]:
        """Between pieces of text."""
        return [1e3 * (b - a) for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Tokens of all its choices."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def said(self) -> tuple[Any, ...]:
        """What must be the same whenever the same is asked."""
        functions = {
            index: [call["function"] for call in calls]
            for index, calls in sorted(self.calls.items())
        }
        return sorted(self.texts.items()), sorted(self.reasons.items()), functions, self.tokens

    def take(self, data: dict[str, Any], now: float) -> None:
        """Add an event, or a whole answer."""
        if "error" in data:
            self.error = str(
                data["error"].get("message") if isinstance(data["error"], dict) else data["error"]
            )
            return
        if self.id and data["id"] != self.id:
            self.error = f"an event of {data['id']} came for {self.id}"
        self.id = data["id"]
        for choice in data["choices"]:
            index, own = choice["index"], choice.get("delta") or choice.get("message") or choice
            text = own.get("content") or own.get("text") or ""
            if text:
                self.pieces.append(now)
            self.texts[index] = self.texts.get(index, "") + text
            if calls := own.get("tool_calls"):
                self.calls[index] = self.calls.get(index, []) + calls
            if reason := choice.get("finish_reason"):
                if index in self.reasons:
                    self.error = f"choice {index} ended twice"
                self.reasons[index] = reason
        self.usage = data.get("usage") or self.usage
        self.account = data.get("kvrag") or self.account


@dataclass(frozen=True)
class Rude:
    """What a client does that servers must bear: leave after so many events, or wait so long between reads of a few bytes."""

    leave_after: int | None = None
    pause_s: float = 0.0


async def ask(
    port: int,
    body: dict[str, Any],
    *,
    key: str | None = None,
    path: str = CHAT,
    rude: Rude | None = None,
    answer: Answer | None = None,
) -> Answer:
    """Send one request over a connection of its own, and read the answer, whole or as events, to its end.

    A connection that fails is an answer with ``error``; one that ends too early isn't ``is_done``. ``answer`` is filled, so that it can be
    looked at before its end.
    """
    answer, rude = answer or Answer(), rude or Rude()
    answer.sent = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(
            HOST, port, limit=2**16 if not rude.pause_s else 2**10
        )
    except OSError as error:
        answer.error = f"no connection: {error}"
        return answer
    try:
        writer.write(_request(port, body, key, path))
        await writer.drain()
        answer.status, headers = await _head(reader)
        stream = _body(reader, headers, rude.pause_s)
        if "text/event-stream" in headers.get("content-type", ""):
            await _read_events(answer, stream, rude)
        elif rude.leave_after is None:
            answer.take(json.loads(b"".join([part async for part in stream])), time.perf_counter())
            answer.is_done = not answer.error
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    finally:
        answer.ended = time.perf_counter()
        writer.transport.abort() if answer.left else writer.close()
    return answer


def _request(port: int, body: dict[str, Any], key: str | None, path: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {HOST}:{port}",
        "Content-Type: application/json",
        "Connection: close",
    ]
    lines += [f"Content-Length: {len(content)}", *([f"Authorization: Bearer {key}"] if key else [])]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str], pause_s: float
) -> AsyncIterator[bytes]:
    """Yield the body's parts, by ``Content-Length`` or in HTTP's chunks."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        yield await reader.readexactly(int(headers.get("content-length", 0)))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        if pause_s:
            await asyncio.sleep(pause_s)
        yield (await reader.readexactly(size + 2))[:-2]


async def _read_events(answer: Answer, stream: AsyncIterator[bytes], rude: Rude) -> None:
    rest, seen = b"", 0
    async for part in stream:
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                answer.is_done = not answer.error
            else:
                answer.take(json.loads(data), now)
                seen += 1
        if rude.leave_after is not None and seen >= rude.leave_after:
            answer.left = True
            return
    # transformers' server ends its streams without [DONE]
    answer.is_done = answer.is_done or (not answer.error and bool(answer.reasons))


class Server:
    """A server's process, which says in its log where it listens.

    Parameters
    ----------
    command
        What to run; it must choose a free port by itself.
    log
        File that its output goes to.
    env
        Variables beside this process's own.
    wait_s
        Seconds within which it must answer ``/health``.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: dict[str, str] | None = None,
        wait_s: float = 180,
    ):
        self.log = log
        self._output = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=self._output, env=os.environ | (env or {})
        )
        self.port = self._await(wait_s)

    def _await(self, wait_s: float) -> int:
        end = time.monotonic() + wait_s
        while time.monotonic() < end and self.process.poll() is None:
            if found := _ADDRESS.search(self.log.read_text(errors="replace")):
                port = int(found[1])
                try:
                    urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=10).close()
                    return port
                except OSError:
                    pass
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(
            f"the server did not start:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, wait_s: float = 60) -> int:
        """Ask it to end, and return its exit status; it is killed if it doesn't."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9
        finally:
            self._output.close()

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait()
        self._output.close()

    def get(self, path: str, key: str | None = None) -> str:
        """Return what is at a path."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, str]:
        """Send JSON that asks for no completion, and return status and body; status 0 where the server is gone."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)

    def metrics(self) -> dict[str, float]:
        """Return ``/metrics``: value by name and labels, as they are written there."""
        lines = (
            line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")
        )
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def size(self) -> dict[str, int]:
        """Return its resident bytes, now and at their peak, threads and open files (Linux)."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        kilobytes = {
            "rss": status.get("VmRSS", "0"),
            "peak": status.get("VmHWM", "0"),
        }  # neither where it has ended
        found = {name: 1024 * int(value.split()[0]) for name, value in kilobytes.items()}
        return found | {
            "threads": int(status["Threads"]),
            "files": len(list((folder / "fd").iterdir())),
        }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99: the least value that so many of the values don't exceed."""
    ordered = sorted(values)
    places = {
        name: min(len(ordered) - 1, -(-len(ordered) * share // 100) - 1)
        for name, share in SHARES.items()
    }
    return {name: round(ordered[place], 4) for name, place in places.items()} if ordered else {}


SHARES = {"p50": 50, "p95": 95, "p99": 99}
