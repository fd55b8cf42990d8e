"""/tokenflow/stream: one stream at a time over a WebSocket, with reports of consumption on the way back.

Owns the socket and its messages; generates nothing and judges no report. Each request becomes an HTTP call of this
same app (inner_call.py), so that keys, read rates, ids, tokens and errors are those of the HTTP routes. Invariant:
whatever a client sends ends its own socket at most, and no stream of a socket outlives it.

A browser lets any page open a socket to any server and sends no key of its own accord, so two things are checked before
the handshake is answered, which HTTP middleware never sees: the key, and the Origin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from . import acks
from .backpressure import EXCHANGE, abort
from .http import CHAT, COMPLETIONS, dumped, error_content
from .inner_call import InnerCall
from .rates import BadField

PATH = "/tokenflow/stream"
PROTOCOL, KEY_PROTOCOL = "tokenflow", "tokenflow-key."
IDLE_S = 300.0  # without a request
_ONLY_TEXT, _IDLE = 1003, 1000
_DEFAULT_PORTS = {"http": 80, "https": 443}
Report = Callable[[list[acks.Ack]], None]


@dataclass(frozen=True)
class Server:
    """What a socket must know of its server. report: hands judged reports to the scheduler."""

    acks: acks.AckBook
    report: Report
    api_key: str | None = None
    admin_api_key: str | None = None
    origins: tuple[str, ...] = ()
    idle_s: float = IDLE_S


def has_library() -> bool:
    """Whether uvicorn can speak WebSocket: without a library for it a handshake is a plain GET, answered with 404."""
    from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol

    return AutoWebSocketsProtocol is not None


async def serve(ws: WebSocket, server: Server) -> None:
    authorization = _authorization(ws)
    if (status := _refusal(ws, authorization, server)) is not None:
        await _deny(ws, status)
        return
    await ws.accept(subprotocol=PROTOCOL if PROTOCOL in ws.scope.get("subprotocols", ()) else None)
    session = _Session(ws, server, authorization)
    try:
        await session.run()
    except WebSocketDisconnect:
        pass
    finally:
        session.end()


def _authorization(ws: WebSocket) -> str | None:
    """The handshake's header, or the key among its subprotocols: browsers cannot set headers."""
    offered = [p for p in ws.scope.get("subprotocols", ()) if p.startswith(KEY_PROTOCOL)]
    header = ws.headers.get("authorization")
    if header is None and offered:
        return "Bearer " + offered[0].removeprefix(KEY_PROTOCOL)
    return header


def _refusal(ws: WebSocket, authorization: str | None, server: Server) -> int | None:
    """The status a handshake is refused with; None if it may go on."""
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    origin = ws.headers.get("origin")
    if origin is not None and not _is_welcome(origin.lower(), ws.headers.get("host", "").lower(), server.origins):
        return 403
    if authorization is not None and not authorization.isascii():
        return 401  # upstream's comparison raises TypeError
    decision = decide_request_auth(
        method="GET",
        path=PATH,
        authorization_header=authorization,
        api_key=server.api_key,
        admin_api_key=server.admin_api_key,
        auth_level=AuthLevel.NORMAL,
    )
    return None if decision.allowed else decision.error_status_code


def _is_welcome(origin: str, host: str, origins: tuple[str, ...]) -> bool:
    if "*" in origins or origin in origins:
        return True
    try:
        page, here = urlsplit(origin), urlsplit("//" + host)
        default = _DEFAULT_PORTS.get(page.scheme)
        return bool(page.hostname) and (page.hostname, page.port or default) == (here.hostname, here.port or default)
    except ValueError:
        return False


async def _deny(ws: WebSocket, status: int) -> None:
    if "websocket.http.response" in ws.scope.get("extensions", {}):
        says = {401: "Unauthorized", 403: "Forbidden"}.get(status, "Refused")
        await ws.send_denial_response(JSONResponse({"error": says}, status_code=status))
    else:
        await ws.close()  # before accept: 403


class _Session:
    """One open socket."""

    def __init__(self, ws: WebSocket, server: Server, authorization: str | None) -> None:
        self._ws, self._server, self._authorization = ws, server, authorization
        self._call: InnerCall | None = None

    @property
    def _live(self) -> InnerCall | None:
        return None if self._call is None or self._call.is_over else self._call

    async def run(self) -> None:
        """Until the client leaves or has asked for nothing for too long. Raises WebSocketDisconnect."""
        while True:
            try:
                async with asyncio.timeout(self._server.idle_s):
                    message = await self._ws.receive()
            except TimeoutError:
                if self._live is None:
                    await self._close(_IDLE, f"no message for {self._server.idle_s:g} s")
                    return
                continue
            if message["type"] == "websocket.disconnect":
                return
            if message.get("text") is None:
                await self._close(_ONLY_TEXT, "text messages only")
                return
            try:
                await self._handle(message["text"])
            except BadField as error:
                await self._answer(
                    {"type": "error", "status": 400, "ended": self._live is None, **error_content(error)}
                )

    async def _close(self, code: int, reason: str) -> None:
        with suppress(RuntimeError):  # the protocol closed it, for what came behind this message
            await self._ws.close(code, reason)

    def end(self) -> None:
        if self._call is not None:
            self._call.leave()

    async def _handle(self, text: str) -> None:
        """Raises BadField."""
        body = _object(text)
        if "type" not in body and ("messages" in body or "prompt" in body):
            self._begin(body)
        elif body.get("type") == "ack":
            await self._ack(body)
        elif body == {"type": "cancel"}:
            # Without a stream it came too late: its end was told already.
            if (live := self._live) is not None:
                live.leave()
                await self._answer({"type": "cancelled"})
        else:
            valid = 'a chat body with messages, a completion body with prompt, or a type: "ack", "cancel"'
            raise BadField("type" if "type" in body else "message", body.get("type", text[:64]), valid)

    def _begin(self, body: dict[str, Any]) -> None:
        if self._live is not None:
            raise BadField("message", "a request", "one after the end of the stream under way: one stream per socket")
        if body.get("stream") not in (None, True):
            raise BadField("stream", body["stream"], "true, or leave it out: over a socket every answer is streamed")
        body["stream"] = True
        route = CHAT if "messages" in body else COMPLETIONS
        self._call = InnerCall(self._ws.scope, route, dumped(body), self._authorization, self._say)
        self._call.start()

    async def _ack(self, body: dict[str, Any]) -> None:
        said = {key: value for key, value in body.items() if key != "type"}
        for key in ("id", "token"):
            if key in said:
                raise BadField(key, said[key], "left out: a report is about this socket's stream")
        live = self._live
        names = live.names if live is not None else ("none", "none")
        item = {**said, "id": names[0], "token": names[1]}
        taken, verdicts = self._server.acks.judge([item], time.monotonic(), at="")
        if taken:
            self._server.report(taken)
        else:
            verdict = verdicts[0]
            await self._answer({"type": "ack", "index": verdict["index"], "verdict": verdict["verdict"]})

    async def _answer(self, message: Mapping[str, Any]) -> None:
        """Raises WebSocketDisconnect, also where the client reads none of its answers: only streams have a limit."""
        try:
            async with asyncio.timeout(self._server.idle_s):
                await self._say(message)
        except TimeoutError as error:
            abort(self._ws.scope[EXCHANGE].transport)
            raise WebSocketDisconnect(1006) from error

    async def _say(self, message: Mapping[str, Any] | str) -> None:
        """Raises WebSocketDisconnect when there is nobody to say it to."""
        text = message if isinstance(message, str) else orjson.dumps(message).decode()
        try:
            await self._ws.send_text(text)
        except RuntimeError as error:  # this side closed it, or the protocol did
            raise WebSocketDisconnect(1006) from error


def _object(text: str) -> dict[str, Any]:
    valid = "a JSON object"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadField("message", text[:64], valid) from error
    if not isinstance(body, dict):
        raise BadField("message", text[:64], valid)
    return body
