"""The page at ``/``: static files of this package, which speak to the public API; nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
import mimetypes
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag: a new version shows at once
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NAMES = ("index.html", "page.css", "page.js", "corpus.json", "icon.svg")
"""The files that are the page; nothing else is served."""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request) -> Response:
    """Return the page; it needs no key, what it asks the API for does."""
    return await part("index.html", request)


@router.get("/page/{name}")
async def part(name: str, request: Request) -> Response:
    """Return one of the page's files, or 304 if the browser has it."""
    if name not in NAMES:
        raise HTTPException(404)
    content = read(name)
    headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=mimetypes.guess_type(name)[0])


def read(name: str) -> bytes:
    """Return one of the page's files."""
    return files("kvrag.server").joinpath("static", name).read_bytes()
