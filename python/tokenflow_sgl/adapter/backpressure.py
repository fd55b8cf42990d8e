"""Clients that do not read: noticed early, told to the scheduler, and cut off after a limit.

Owns the outermost ASGI layer of the server and the sizes of a streamed reply's buffers; decides nothing about a
stream's place in the engine. Invariant: a stream that is cut off never ends normally, and a client that reads again
before that gets every token.

A reply to a client that reads nothing fills the kernel's buffers, then the transport's; then `send` blocks. With the
kernel's usual 2.5 MB that is after ten thousand tokens, and who is modelled to read them reads none.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .keepalive import Message, Send, is_event_stream

logger = logging.getLogger(__name__)
Receive = Callable[[], Awaitable[Message]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

EXCHANGE = "tokenflow.exchange"  # the key in an ASGI scope
BLOCKED_S = 1.0  # a send that takes longer has a client that does not read
_SEND_BUFFER_BYTES = 64 * 1024
_WRITE_BUFFER_BYTES = 16 * 1024
# Of a connection of another kind, and of one that is closed already: uvloop then raises RuntimeError.
_NOT_THERE = (AttributeError, RuntimeError, OSError, ValueError)


@dataclass(slots=True)
class Exchange:
    """What the layers of one request tell each other: the connection below, and the stream the bridge opened."""

    transport: Any = None
    rid: str | None = None
    token: str | None = None
    is_over: bool = False  # the stream's last message is on its way: from now on its id may be another's


@dataclass(frozen=True)
class Engine:
    """What this layer must know of the server behind it.

    limit_s: seconds without a byte read after which a stream is cut off, 0 = never. tell: (id, whether its client
    leaves unread what it is sent). trim: forget what is queued for this id and superseded by what is queued behind it.
    """

    limit_s: float
    tell: Callable[[str, bool], None]
    trim: Callable[[str], None]


class Backpressure:
    """ASGI layer outside all middleware. `engine` is called at the start of each streamed reply."""

    def __init__(self, app: App, engine: Callable[[], Engine]) -> None:
        self.app = app
        self.engine = engine
        self.halted = 0  # sends that blocked for BLOCKED_S
        self.cut = 0  # streams

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        exchange = scope.get(EXCHANGE)
        if exchange is None:
            # uvicorn's `send` is a method of what holds the connection; of other servers nothing is known.
            exchange = scope[EXCHANGE] = Exchange(getattr(getattr(send, "__self__", None), "transport", None))
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reply = _Reply(self, exchange, send)
        await self.app(scope, receive, reply.send)


class _Reply:
    """The sends of one reply, watched from its start on if it is an event stream."""

    def __init__(self, layer: Backpressure, exchange: Exchange, send: Send) -> None:
        self._layer, self._exchange, self._send = layer, exchange, send
        self._engine: Engine | None = None
        self._since_s = 0.0
        self._unread_bytes = 0
        self._halted = False
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and is_event_stream(message):
            self._engine = self._layer.engine()
            _tune(self._exchange.transport, self._engine.limit_s)
        if self._engine is None:
            await self._send(message)
            return
        loop = asyncio.get_running_loop()
        self._since_s = loop.time()
        self._timer = loop.call_later(BLOCKED_S, self._blocked)
        try:
            await self._send(message)
        finally:
            self._timer.cancel()
            # Also where the send failed or was cancelled: the next stream of this id would inherit the halt.
            if self._halted:
                self._tell(self._engine, False)

    def _blocked(self) -> None:
        """One more second without a byte read, or one in which some were."""
        assert self._engine is not None
        loop = asyncio.get_running_loop()
        unread_bytes = _unread_bytes(self._exchange.transport)
        if not self._halted:
            self._layer.halted += 1
            self._tell(self._engine, True)
        elif unread_bytes < self._unread_bytes:
            self._since_s = loop.time()  # slow, but it reads
        self._unread_bytes = unread_bytes
        if (rid := self._rid) is not None:
            self._engine.trim(rid)
        if 0.0 < self._engine.limit_s <= loop.time() - self._since_s and self._cut_off(self._engine.limit_s):
            return
        self._timer = loop.call_later(BLOCKED_S, self._blocked)

    @property
    def _rid(self) -> str | None:
        return None if self._exchange.is_over else self._exchange.rid

    def _tell(self, engine: Engine, unread: bool) -> None:
        self._halted = unread
        if (rid := self._rid) is not None:
            engine.tell(rid, unread)

    def _cut_off(self, limit_s: float) -> bool:
        """Whether there is a connection that can be. The server then sees it lost, and tells the app, as ever."""
        transport = self._exchange.transport
        if transport is None:
            return False
        self._layer.cut += 1
        logger.warning(
            "TokenFlow: stream %r cut off: its client read nothing for %g s (--tokenflow-stall-limit)",
            self._exchange.rid,
            limit_s,
        )
        abort(transport)
        return True


def abort(transport: Any) -> None:
    """With a reset: after an ordinary close the kernel keeps what is unread for a client that may never come."""
    with suppress(*_NOT_THERE):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(*_NOT_THERE):
        transport.abort()


def _tune(transport: Any, limit_s: float) -> None:
    """Small buffers below a streamed reply. Left as they are where the connection is of another kind."""
    if transport is None:
        return
    with suppress(*_NOT_THERE):
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    with suppress(*_NOT_THERE):
        protocol = transport.get_protocol()
        if getattr(protocol, "ping_timeout", None):
            # A client that reads nothing sees no ping either, and would be cut off by its WebSocket before our limit.
            protocol.ping_timeout = max(protocol.ping_timeout, limit_s) if limit_s else None


def _unread_bytes(transport: Any) -> int:
    """What was sent and not acknowledged, and what waits to be sent; 0 where that cannot be known."""
    with suppress(*_NOT_THERE):
        number = transport.get_extra_info("socket").fileno()
        in_kernel = struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0]
        return int(in_kernel) + int(transport.get_write_buffer_size())
    return 0


def put_outermost(app: Any, layer: Callable[[App], App]) -> None:
    """Around all of the app's middleware, whatever is added to it later. Before its first request."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: layer(build())
