"""The page at `/`: a prompt, and its answer as it comes, each run of accepted tokens in colour.

It needs no build step and loads nothing from elsewhere. Its headers let a browser do only what it needs: run its own
script and style, and ask this server; no other page can frame it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}


def add_page(app: FastAPI) -> None:
    """Add the page's routes; they are not part of the API, and so not of the OpenAPI document."""
    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, _sender(name, kind), include_in_schema=False)


def _sender(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = (files("pipeline.serving.http.page") / name).read_bytes()

    async def send() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return send
