"""Routes ``/v1/kv/…``: precompute, list, explain, delete and count, in the key's namespace."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from kvrag.adapters import IndexRequest, Prompt
from kvrag_server.completions import chat_prompt, text_prompt
from kvrag_server.errors import APIError
from kvrag_server.fields import JsonObject
from kvrag_server.schema import DeleteRequest, ExplainRequest, PrecomputeRequest
from kvrag_server.service import desk_of, service_of

router = APIRouter(prefix="/v1/kv")


@router.post("/precompute")
async def precompute(body: PrecomputeRequest, request: Request) -> JsonObject:
    """Compute and store the KV of documents."""
    service = service_of(request)
    tenant = request.state.tenant
    namespace = service.namespace(tenant)
    texts = [document.text for document in body.documents]
    ids = [document.id for document in body.documents]
    items = IndexRequest(texts, ids=ids, collection=body.collection).items()
    service.admission.check(tenant)  # a server that shuts down, or has too much to answer
    # When the request comes, because a deletion may come while it waits for a slot.
    announce = partial(items.announce, service.engine.store, service.engine.space_of(namespace))
    async with service.precomputes.slot(tenant, announce):
        report = await run_in_threadpool(
            service.engine.precompute,
            texts,
            ids=ids,
            collection=body.collection,
            namespace=namespace,
            announced=True,
            show_progress=False,  # the client waits, without a terminal
        )
    return asdict(report)


@router.get("/documents")
async def documents(request: Request, collection: str | None = None) -> JsonObject:
    """List the ids of the documents that have KV."""
    desk = desk_of(request)
    found = await run_in_threadpool(
        desk.library.document_ids,
        collection=collection,
        namespace=desk.namespace(request.state.tenant),
    )
    return {"object": "list", "data": found}


@router.post("/delete")
async def delete(body: DeleteRequest, request: Request) -> dict[str, int]:
    """Delete documents, and erase the KV that no other document needs."""
    desk = desk_of(request)
    gone = await run_in_threadpool(
        desk.library.delete,
        body.ids,
        collection=body.collection,
        namespace=desk.namespace(request.state.tenant),
    )
    return {"erased_chunks": gone}


@router.post("/explain")
async def explain(body: ExplainRequest, request: Request) -> JsonObject:
    """Explain which chunks of a prompt are known and have KV, and why other text has no KV."""
    service = service_of(request)
    prompt = explained(body)
    options = service.reuse(body.kvrag, request.state.tenant)
    for name in ("tools", "chat_template_kwargs", "continue_final_message"):
        options[name] = getattr(body, name)
    return asdict(await run_in_threadpool(service.engine.explain, prompt, **options))


@router.get("/stats")
async def stats(request: Request) -> JsonObject:
    """Return totals of engine and store, and the numbers of running and waiting requests."""
    service = service_of(request)
    return {
        **await run_in_threadpool(service.engine.stats),
        "running": service.admission.running,
        "waiting": service.admission.waiting,
    }


def explained(body: ExplainRequest) -> Prompt:
    """Return the prompt of a request, of either kind; raises ``APIError`` if it has not one."""
    if (body.messages is None) == (body.prompt is None):
        raise APIError(400, "pass either messages or prompt", "invalid_value", param="messages")
    if body.prompt is not None:
        return text_prompt(body.prompt, body.kvrag)
    return chat_prompt(body.messages or (), body.kvrag)
