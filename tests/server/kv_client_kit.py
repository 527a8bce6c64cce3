"""Tenants of a real server, and servers that answer as a test says."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from kvrag import KVRagClient, KVRagEngine


class Tenant(NamedTuple):
    """A tenant of a served engine, with a namespace of its own."""

    engine: KVRagEngine
    url: str
    name: str

    @property
    def key(self) -> str:
        return f"secret-{self.name}"

    @property
    def client(self) -> KVRagClient:
        return KVRagClient(self.url, api_key=self.key)

    @property
    def space(self) -> str:
        return f"{self.engine.namespace}/{self.name}"

    def ids(self) -> list[str]:
        return self.engine.document_ids(namespace=self.space)

    def kept(self, texts: list[str]) -> list[int]:
        """Which of the texts have KV, as the engine finds it in a prompt."""
        found = [self.engine.explain(f"{text}\n\n?", namespace=self.space).hits for text in texts]
        return [number for number, hits in enumerate(found) if hits]


class Answer(NamedTuple):
    """Status, body and headers of an answer; no status: the connection is closed instead."""

    status: int | None = 200
    body: Any = ""
    headers: dict[str, str] = {}  # noqa: RUF012


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[tuple[str, Any, str | None]]]]:
    """A server that gives the answers, the last of them again and again; its address, and the requests so far: path, body, key."""
    seen: list[tuple[str, Any, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length) or "null")
            answer = answers[min(len(seen), len(answers) - 1)]
            seen.append((self.path, body, self.headers["authorization"]))
            if answer.status is None:
                return
            text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
            self.send_response(answer.status)
            for name, value in {**answer.headers, "content-length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
