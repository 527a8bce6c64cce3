"""Page at ``/``: static files of this package that use the public API, and no other site."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

_HEADERS = {
    "Cache-Control": "no-cache",  # cached, but checked by ETag: a new version shows at once
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NAMES = ("index.html", "page.css", "page.js", "corpus.json", "icon.svg")
"""Files of the page; no other file is served."""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request) -> Response:
    """Return the page; it needs no key, but its requests to the API do."""
    return await part("index.html", request)


@router.get("/page/{name}")
async def part(name: str, request: Request) -> Response:
    """Return a file of the page, or 304 if the browser has it."""
    if name not in NAMES:
        raise HTTPException(404)
    content = read(name)
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=mimetypes.guess_type(name)[0])


def read(name: str) -> bytes:
    """Return the content of a file of the page."""
    return files("kvrag_server").joinpath("static", name).read_bytes()
