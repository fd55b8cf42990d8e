"""A request of a socket as an HTTP call of the same app, and the events of its reply as messages.

Owns the translation in both directions; knows no route's fields. Invariant: a reply has exactly one last message (done
or error) unless the client left, and done only where the app said [DONE].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import orjson
from starlette.websockets import WebSocketDisconnect

from .backpressure import EXCHANGE, Exchange
from .keepalive import Message, is_event_stream

logger = logging.getLogger(__name__)
Say = Callable[[Mapping[str, Any] | str], Awaitable[None]]
_DONE = b"[DONE]"
_MAX_ERROR_BYTES = 64 * 1024
# Of the handshake, and no business of the request's: its framing, the socket's, the page's.
_NOT_PASSED_ON = (
    *(b"authorization", b"connection", b"content-encoding", b"content-length", b"content-type", b"cookie", b"expect"),
    *(b"keep-alive", b"origin", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
)
_running: set[asyncio.Task[None]] = set()  # asyncio keeps weak references only


class InnerCall:
    """One call. `say` sends a message to the client."""

    def __init__(self, scope: Mapping[str, Any], route: str, body: bytes, authorization: str | None, say: Say) -> None:
        self._app = scope["app"]
        outer: Exchange = scope.get(EXCHANGE) or Exchange()
        self._exchange = Exchange(outer.transport)
        self._scope = _http_scope(scope, route, len(body), authorization, self._exchange)
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._say = say
        self._gone = asyncio.Event()
        self._reply = _Reply()
        self.is_over = False

    @property
    def names(self) -> tuple[str, str]:
        """Id and token of the stream; names of none before it began."""
        return self._exchange.rid or "none", self._exchange.token or "none"

    def start(self) -> None:
        task = asyncio.create_task(self._run())
        _running.add(task)
        task.add_done_callback(_running.discard)

    def leave(self) -> None:
        """The client wants no more of it: the app hears what it hears of every client that left."""
        self.is_over = True
        self._gone.set()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("TokenFlow: a request over a WebSocket failed")
        if not self.is_over:
            await self._tell_end()

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.is_over:
            return
        try:
            if message["type"] == "http.response.start":
                self._reply.begin(message)
                if self._reply.is_stream:
                    await self._say({"type": "started", "id": self.names[0]})
                return
            for event in self._reply.feed(bytes(message.get("body", b""))):
                await self._say(event)
                if self.is_over:  # cancelled meanwhile, and told so: what follows would look like the next stream's
                    return
            if not message.get("more_body", False):
                await self._tell_end()
        except WebSocketDisconnect:
            self.leave()

    async def _tell_end(self) -> None:
        # Over first: who is told may ask for the next one at once. Gone last: the app would cancel this very send.
        self.is_over = True
        with suppress(WebSocketDisconnect):
            await self._say(self._reply.last_message())
        self._gone.set()


class _Reply:
    """What has come of a reply so far."""

    def __init__(self) -> None:
        self.is_stream = False
        self._status = 500
        self._rest = b""
        self._is_done = False
        self._error: dict[str, Any] | None = None

    def begin(self, start: Message) -> None:
        self._status = int(start["status"])
        self.is_stream = is_event_stream(start)

    def feed(self, part: bytes) -> list[str]:
        """The events that are complete now."""
        if not self.is_stream:
            self._rest = (self._rest + part)[:_MAX_ERROR_BYTES]
            return []
        *events, self._rest = (self._rest + part).split(b"\n\n")
        return [data.decode() for event in events if (data := self._data(event)) is not None]

    def _data(self, event: bytes) -> bytes | None:
        """What a client is shown of one event: not its comments, its end, or what it says of an error."""
        lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not lines or self._error is not None:
            return None
        if data == _DONE:
            self._is_done = True
            return None
        if b'"error"' in data and (error := _error_of(data)) is not None:
            self._error = error
            return None
        return data

    def last_message(self) -> dict[str, Any]:
        """What the client is told at the end of the reply."""
        if not self.is_stream:
            error = _error_of(self._rest, self._status) or _plain_error(
                self._status, self._rest[:200].decode("latin-1")
            )
            return _error(self._status, error)
        if self._error is not None:
            code = self._error.get("code")
            return _error(code if type(code) is int else 500, self._error)
        if self._is_done:
            return {"type": "done"}
        return _error(500, _plain_error(500, "the stream ended before its end"))


def _error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """`ended`: the stream is over. Else a client could not tell it from the refusal of a message."""
    return {"type": "error", "status": status, "ended": True, "error": error}


def _error_of(data: bytes, status: int | None = None) -> dict[str, Any] | None:
    """The error object in an event, or, with a status, in a body: upstream's errors are bare there."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict):
        return None
    error = parsed.get("error", parsed if status is not None else None)
    if isinstance(error, str):
        return _plain_error(status or 500, error)
    return error if isinstance(error, dict) else None


def _plain_error(status: int, says: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": says or _phrase(status), "type": kind, "param": None, "code": status}


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else f"status {status}"


def _http_scope(
    scope: Mapping[str, Any], route: str, length: int, authorization: str | None, exchange: Exchange
) -> MutableMapping[str, Any]:
    passed = [
        (k, v) for k, v in scope["headers"] if not k.lower().startswith(b"sec-") and k.lower() not in _NOT_PASSED_ON
    ]
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    if authorization is not None:
        own.append((b"authorization", authorization.encode("latin-1")))
    root = scope.get("root_path", "")
    return {
        "type": "http",
        # 2.3: below 2.4 an app listens for the disconnect, which is how it hears of a cancel.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "https" if scope.get("scheme") == "wss" else "http",
        "path": root + route,
        "raw_path": (root + route).encode(),
        "query_string": b"",
        "root_path": root,
        "headers": [*passed, *own],
        "client": scope.get("client"),
        "server": scope.get("server"),
        "state": dict(scope.get("state", {})),
        "extensions": {},
        EXCHANGE: exchange,
    }
