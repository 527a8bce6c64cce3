"""Routes ``/v1/kv/…``: vLLM's worker computes KV; the store is read and erased here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from kvrag.adapters import IndexRequest
from kvrag_server import documents
from kvrag_server.fields import JsonObject
from kvrag_server.schema import ExplainRequest, PrecomputeRequest
from kvrag_server.service import desk_of
from vllm_kvrag.front.prompts import chat_of, check_window, planner_of
from vllm_kvrag.front.upstream import upstream_of

router = APIRouter(prefix="/v1/kv")
router.get("/documents")(documents.documents)
router.post("/delete")(documents.delete)


@router.post("/precompute")
async def precompute(body: PrecomputeRequest, request: Request, model: str | None = None) -> Any:
    """Let vLLM's worker compute and store the KV of documents; ``model`` names an adapter."""
    # The worker would refuse them in its own words, and JSON can't hold all of them.
    items = IndexRequest(
        [document.text for document in body.documents],
        ids=[document.id for document in body.documents],
        collection=body.collection,
    ).items()
    desk = desk_of(request)
    namespace = desk.namespace(request.state.tenant)
    await run_in_threadpool(desk.library.delete, items.unreadable, namespace=namespace)
    good = [item for item in items if not item.fault]
    asked = {
        "texts": [item.text for item in good],
        "ids": [item.doc_id for item in good],
        "collection": None,  # the ids hold it
        "namespace": namespace,
    }
    report = (await upstream_of(request).ask(None, model, precompute=asked))["precompute"]
    return {**report, "failed": [*items.faults, *report["failed"]]}


@router.post("/explain")
async def explain(body: ExplainRequest, request: Request) -> JsonObject:
    """Explain which chunks of a prompt are known and have KV, and why other text has no KV."""
    check_window(body.kvrag)
    return asdict(
        await run_in_threadpool(
            planner_of(request).explain,
            documents.explained(body),
            desk_of(request).namespace(request.state.tenant),
            body.kvrag.mode,
            body.kvrag.config,
            chat_of(body.model_dump()),
        )
    )


@router.get("/stats")
async def stats(request: Request) -> JsonObject:
    """Return the content of the store's tiers, as this process sees them; vLLM counts answers."""
    counted = await run_in_threadpool(desk_of(request).library.store.stats)
    return {"store": {name: asdict(tier) for name, tier in counted.items()}}
