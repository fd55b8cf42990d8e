"""The page's own small server: its files, and what they ask of the TokenFlow server, with the keys given at the start.

Owns the list of what is forwarded; knows nothing of what it means. Invariant: nothing is answered to another site (a
name that was rebound to this machine, a foreign page in the same browser), and no key ever reaches the browser.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from .sockets import relay

OWN_HOSTS = ("127.0.0.1", "localhost")
MAX_BODY_BYTES = 8 << 20
PASSED_ON = ("content-type", "x-tokenflow-request-id", "x-tokenflow-ack-token", "x-accel-buffering")
PAGE_FILES = {
    "/": ("dashboard/page/index.html", "text/html"),
    "/dash.css": ("dashboard/page/dash.css", "text/css"),
    "/dash.js": ("dashboard/page/dash.js", "text/javascript"),
    "/model.js": ("dashboard/page/model.js", "text/javascript"),
    "/table.js": ("dashboard/page/table.js", "text/javascript"),
    "/chat.js": ("dashboard/page/chat.js", "text/javascript"),
    "/lanes.js": ("dashboard/page/lanes.js", "text/javascript"),
    "/tokenflow.js": ("client/tokenflow.js", "text/javascript"),
}
PAGE_HEADERS = {
    # A model's text is never markup here, and if it ever were, it could load and run nothing.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Target:
    """The server that is watched. `url` without a path; keys None where none is set."""

    url: str
    api_key: str | None = None
    admin_key: str | None = None

    def headers(self, *, admin: bool = False) -> dict[str, str]:
        key = (self.admin_key or self.api_key) if admin else self.api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def key_names(self) -> list[str]:
        return [name for name, key in (("api", self.api_key), ("admin", self.admin_key)) if key is not None]


def foreign(headers: Mapping[str, str], path: str) -> str | None:
    """Why a request is not of this page, None if it is.

    A rebound name shows in Host; a foreign page in Origin, or, where browsers send none, in Sec-Fetch-Site.
    """
    host = headers.get("host", "")
    if urlsplit(f"//{host}").hostname not in OWN_HOSTS:
        return f"Host: {host[:64]!r} is not valid; valid is {' or '.join(OWN_HOSTS)}"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return f"Origin: {origin[:64]!r} is not valid; valid is http://{host}"
    is_link = path == "/" and headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_link:
        return "Sec-Fetch-Site: a page of another site asked; valid is this page"
    return None


class OnlyThisPage:
    """ASGI middleware: others are refused before any route, WebSocket handshakes included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = foreign(Headers(scope=scope), scope["path"]) if scope["type"] in ("http", "websocket") else None
        if why is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(why, 403)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # before accept: the handshake is answered with 403


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "dashboard", "code": status}}, status)


def make_app(target: Target) -> Starlette:
    """The page's application; it connects to the server at the first request."""
    client = httpx.AsyncClient(base_url=target.url, timeout=httpx.Timeout(10.0, read=None), trust_env=False)

    async def ask(request: Request, *, admin: bool) -> Response:
        """Forward one request, the reply piece by piece; a browser that leaves ends the request at the server."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"body: more than {MAX_BODY_BYTES} bytes; valid is up to that")
        headers = {**target.headers(admin=admin), "accept-encoding": "identity"}
        if request.method == "POST":
            headers["content-type"] = request.headers.get("content-type", "application/json")
        query = {"since": request.query_params["since"]} if "since" in request.query_params else None
        sent = client.build_request(request.method, request.url.path, params=query, content=body, headers=headers)
        try:
            reply = await client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return _error(502, f"{target.url} does not answer: {error or type(error).__name__}")
        passed = {name: reply.headers[name] for name in PASSED_ON if name in reply.headers}
        return StreamingResponse(_parts(reply), reply.status_code, {**passed, "cache-control": "no-store"})

    async def for_all(request: Request) -> Response:
        return await ask(request, admin=False)

    async def for_admin(request: Request) -> Response:
        return await ask(request, admin=True)

    async def info(_request: Request) -> Response:
        """What the page says about itself. The keys' names only."""
        return JSONResponse(
            {"server": target.url, "keys": target.key_names(), "websocket": find_spec("websockets") is not None}
        )

    async def socket(websocket: Any) -> None:
        await relay(websocket, target.url, target.headers())

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    forwarded = [
        Route("/tokenflow/state", for_admin, methods=["GET"]),
        Route("/tokenflow/config", for_admin, methods=["GET"]),
        Route("/v1/models", for_all, methods=["GET"]),
        Route("/v1/chat/completions", for_all, methods=["POST"]),
        Route("/tokenflow/ack", for_all, methods=["POST"]),
        WebSocketRoute("/tokenflow/stream", socket),
    ]
    pages = [Route(path, _page(*where)) for path, where in PAGE_FILES.items()]
    routes = [*pages, Route("/dash/info", info), *forwarded]
    return Starlette(routes=routes, middleware=[Middleware(OnlyThisPage)], lifespan=lifespan)


async def _parts(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        # An end that is not the server's must not look like one: the error cuts the browser's reply, too.
        async for part in reply.aiter_raw():
            yield part
    finally:
        await reply.aclose()


def _page(name: str, media_type: str) -> Any:
    async def page(_request: Request) -> Response:
        content = files("tokenflow_sgl").joinpath(name).read_bytes()
        return Response(content, headers={**PAGE_HEADERS, "content-type": f"{media_type}; charset=utf-8"})

    return page
