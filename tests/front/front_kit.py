"""A stand-in for vLLM 0.32's server on a real socket, and a front before it."""

import asyncio
import json
import threading
import time
from contextlib import closing, contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvrag import Library
from kvrag.adapters import ModelSource, StorePlanner
from kvrag_server import ServerConfig
from vllm_kvrag.front.app import create_front
from vllm_kvrag.front.upstream import Upstream

RECORD = {"exactness": "repaired", "mode": "stitch", "cached_tokens": 40, "repaired_tokens": 4}
USAGE = {"prompt_tokens": 50, "completion_tokens": 3, "total_tokens": 53}
USAGE["prompt_tokens_details"] = {"cached_tokens": 49}  # vLLM counts all that it did not compute
WORDS = ["A", " copper", " key."]


@contextmanager
def serving(app):
    """Serve an application on a free port; give its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class FakeVLLM:
    """Answers like vLLM 0.32 with kvrag's connector, and keeps the requests."""

    def __init__(self, engine):
        self.engine, self.requests, self.cancelled = engine, [], threading.Event()
        self.answers_worker = self.goes_on = True
        self.release = threading.Event()
        self.is_busy, self.fails = False, None
        routes = [
            Route("/health", lambda _: Response()),
            Route("/metrics", lambda _: PlainTextResponse("vllm:num_requests_running 1.0\n")),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
            Route("/endless", self.endless, methods=["GET", "POST"]),
            Route("/{path:path}", self.other, methods=["GET", "POST", "DELETE"]),
        ]
        self.app = Starlette(routes=routes)

    @property
    def last(self):
        return self.requests[-1]

    async def _keep(self, request):
        content = await request.body()
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        kept = {"path": request.url.path, "query": request.url.query, "body": body}
        self.requests.append({**kept, "headers": dict(request.headers), "content": content})
        return body

    async def models(self, request):
        await self._keep(request)
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def chat(self, request):
        body = await self._keep(request)
        if body.get("max_tokens") == 999:
            error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": error}, 400)
        if body.get("max_tokens") == 998:
            await self.wait_for_the_client(request)
        head = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
        if body.get("stream"):
            kind = body.get("media_type", "text/event-stream")
            return StreamingResponse(self.events(body, head), media_type=kind)
        message = {"role": "assistant", "content": "".join(WORDS), "tool_calls": []}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        whole = {**head, "object": "chat.completion", "choices": choices, "usage": USAGE}
        params = None if body.get("stop") else {"kvrag": RECORD}  # its API server finds the string
        return JSONResponse({**whole, "kv_transfer_params": params})

    async def events(self, body, head):
        head = {**head, "object": "chat.completion.chunk"}
        for word in WORDS:
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            yield self.event({**head, "choices": [choice]})
            while not self.goes_on:
                await asyncio.sleep(0.01)
        yield self.event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield self.event({**head, "choices": [], "usage": USAGE})
        yield "data: [DONE]\n\n"

    @staticmethod
    def event(data):
        return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"

    async def text(self, request):
        body = await self._keep(request)
        asked = ((body.get("kv_transfer_params") or {}).get("kvrag")) or {}
        told = RECORD
        if asked.get("report") and self.is_busy:
            await self.wait_for_the_client(request)
        if self.fails is not None:
            return JSONResponse({"error": {"message": "no room"}}, self.fails)
        if {"describe", "precompute", "report"} & set(asked):
            told = self.worker(asked) if self.answers_worker else None
        choices = [{"index": 0, "text": "".join(WORDS), "finish_reason": "length"}]
        whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny"}
        params = None if told is None else {"kvrag": told}
        return JSONResponse(
            {**whole, "choices": choices, "usage": USAGE, "kv_transfer_params": params}
        )

    def worker(self, asked):
        """Answer as the connector does, from an engine that has the model."""
        if "describe" in asked:
            repair = "query, ratio 0.1"
            fingerprint = self.engine.loaded.fingerprint
            return {"fingerprint": fingerprint, "repair": repair, "refusal": None}
        if "report" in asked:
            return {"report": RECORD if asked["report"] else None}
        given = asked["precompute"]
        if "refuse" in given["texts"][0]:
            return {"error": "the text is too long; cut it", "code": "InputError"}
        if "explode" in given["texts"][0]:
            return {"error": "the disk is full; free some space", "code": "StoreError"}
        texts = given.pop("texts")
        report = self.engine.precompute(texts, **given, show_progress=False)
        return {"precompute": {"stored": report.stored, "skipped": report.skipped, "failed": []}}

    async def endless(self, request):
        await self._keep(request)

        async def parts():
            try:
                while True:
                    yield b"x" * 65536
                    await asyncio.sleep(0.001)
            finally:
                self.cancelled.set()

        return StreamingResponse(parts())

    async def wait_for_the_client(self, request):
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.cancelled.set()

    async def other(self, request):
        await self._keep(request)
        status = int(request.query_params.get("status", 200))
        return Response(b"passed", status, headers={"x-own": "1"}, media_type="text/plain")


@contextmanager
def fronted(model, kv_dir, fake, config=None, *, fault=lambda: None, **options):
    """Serve a front before a stand-in; give its address, its application and its library."""
    source = ModelSource(model)
    with closing(Library(kv_dir, **options)) as library, serving(fake.app) as url:
        front = create_front(
            library,
            "tiny",
            StorePlanner(library, source),
            Upstream(url=url, fault=fault),
            config or ServerConfig(),
        )
        with serving(front) as address:
            yield address, front, library


def until(condition, seconds=20):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
