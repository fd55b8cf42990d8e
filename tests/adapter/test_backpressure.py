"""Clients that do not read, before a stand-in connection: who is told of them, when they are cut off, and when not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenflow_sgl.adapter import backpressure
from tokenflow_sgl.adapter.backpressure import EXCHANGE, Backpressure, Engine, Exchange

SSE = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]
TICK_S = 0.01


class Connection:
    """Stands where uvicorn's cycle stands: its `send` blocks while the client does not read."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.socket = socket.socket()
        self.sent: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_aborted = False
        self.limits: list[int] = []
        self.unread: Callable[[], int] = lambda: 1000

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if not self.is_aborted:
            self.sent.append(message)

    # the transport
    def abort(self) -> None:
        self.is_aborted = True
        self.reads.set()  # uvicorn lets go of who waits when a connection is lost

    def set_write_buffer_limits(self, high: int) -> None:
        self.limits.append(high)

    def get_write_buffer_size(self) -> int:
        return self.unread()

    def get_extra_info(self, name: str) -> Any:
        return self.socket

    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


class Case:
    """A reply of three events; the client stops reading after the first."""

    def __init__(self, *, limit_s: float = 0.0, headers: Any = SSE, rid: str | None = "a", bare: bool = False) -> None:
        self.connection = Connection()
        if bare:
            self.connection.transport = None
        self.told: list[tuple[str, bool]] = []
        self.trims: list[str] = []
        self.headers, self.rid = headers, rid
        self.changed = asyncio.Condition()
        self.layer = Backpressure(self._app, lambda: Engine(limit_s, self._tell, self.trims.append))

    def _tell(self, rid: str, unread: bool) -> None:
        self.told.append((rid, unread))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        scope[EXCHANGE].rid = self.rid
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        self.connection.reads.clear()
        await send({"type": "http.response.body", "body": b"2", "more_body": True})
        await send({"type": "http.response.body", "body": b"3", "more_body": False})

    def start(self) -> asyncio.Task[None]:
        async def receive() -> Any:
            raise AssertionError("nobody asks")

        return asyncio.create_task(self.layer({"type": "http"}, receive, self.connection.send))


def play(case: Callable[[], Awaitable[None]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backpressure, "BLOCKED_S", TICK_S)
        asyncio.run(asyncio.wait_for(case(), 30.0))


async def until(seen: Callable[[], Any]) -> None:
    while not seen():
        await asyncio.sleep(TICK_S / 4)


def test_who_stops_reading_is_told_once_and_again_when_it_reads_and_gets_everything() -> None:
    async def run() -> None:
        case = Case()
        task = case.start()
        await until(lambda: len(case.trims) >= 5)
        assert case.told == [("a", True)] and case.layer.halted == 1
        case.connection.reads.set()
        await task
        assert case.told == [("a", True), ("a", False)] and set(case.trims) == {"a"}
        assert case.connection.bodies() == [b"1", b"2", b"3"] and case.layer.cut == 0

    play(run)


def test_who_reads_nothing_is_cut_off_after_the_limit_and_never_gets_a_normal_end() -> None:
    async def run() -> None:
        case = Case(limit_s=5 * TICK_S)
        await case.start()
        assert case.connection.is_aborted and case.layer.cut == 1
        assert case.connection.bodies() == [b"1"] and case.told[0] == ("a", True)

    play(run)


def test_a_halt_ends_with_its_stream_also_where_the_app_is_cancelled_in_mid_send() -> None:
    """Else the next stream of the same id would be taken for one that nobody reads."""

    async def run() -> None:
        case = Case()
        task = case.start()
        await until(lambda: case.told)
        task.cancel()
        await asyncio.wait([task])
        assert case.told == [("a", True), ("a", False)]

    play(run)


def test_of_a_stream_whose_last_message_is_not_read_nothing_is_told() -> None:
    """Its id is free by then, and what is told would be about another."""

    async def run() -> None:
        case = Case()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope[EXCHANGE].rid, scope[EXCHANGE].is_over = "a", True
            case.connection.reads.clear()
            await send({"type": "http.response.start", "status": 200, "headers": SSE})

        case.layer.app = app
        task = case.start()
        await until(lambda: case.layer.halted)
        case.connection.reads.set()
        await task
        assert not case.told and not case.trims

    play(run)


def test_without_a_limit_nobody_is_cut_off() -> None:
    async def run() -> None:
        case = Case(limit_s=0.0)
        task = case.start()
        await until(lambda: len(case.trims) >= 20)
        assert not case.connection.is_aborted
        case.connection.reads.set()
        await task

    play(run)


def test_a_slow_reader_is_not_cut_off_as_long_as_it_reads() -> None:
    async def run() -> None:
        case = Case(limit_s=5 * TICK_S)
        left = iter(range(1000, 0, -1))
        case.connection.unread = lambda: next(left)
        task = case.start()
        await until(lambda: len(case.trims) >= 20)
        assert not case.connection.is_aborted
        case.connection.unread = lambda: 0
        await task
        assert case.connection.is_aborted

    play(run)


def test_a_reply_that_is_no_stream_is_left_alone() -> None:
    async def run() -> None:
        case = Case(limit_s=TICK_S, headers=JSON)
        task = case.start()
        await until(lambda: not case.connection.reads.is_set())
        for _ in range(20):
            await asyncio.sleep(TICK_S / 4)
        assert not case.connection.is_aborted and not case.told and not case.connection.limits
        case.connection.reads.set()
        await task
        assert case.connection.bodies() == [b"1", b"2", b"3"]

    play(run)


def test_a_server_whose_connections_are_unknown_cuts_nobody_off() -> None:
    async def run() -> None:
        case = Case(limit_s=TICK_S, bare=True)
        task = case.start()
        await until(lambda: len(case.trims) >= 10)
        assert case.told == [("a", True)] and case.layer.cut == 0
        case.connection.reads.set()
        await task

    play(run)


def test_a_stream_without_an_id_is_cut_off_and_nothing_is_told() -> None:
    async def run() -> None:
        case = Case(limit_s=2 * TICK_S, rid=None)
        await case.start()
        assert case.connection.is_aborted and not case.told and not case.trims

    play(run)


def test_buffers_below_a_stream_are_small_and_its_websocket_waits_as_long_for_a_pong() -> None:
    class Protocol(asyncio.Protocol):
        ping_timeout: float | None = 20.0

    async def run() -> None:
        protocol = Protocol()
        listener = await asyncio.get_running_loop().create_server(lambda: protocol, "127.0.0.1", 0)
        made = asyncio.Event()
        protocol.connection_made = lambda transport: (setattr(protocol, "transport", transport), made.set())  # type: ignore[assignment,func-returns-value]
        _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        await made.wait()
        transport: Any = protocol.transport  # type: ignore[attr-defined]
        backpressure._tune(transport, 60.0)
        # The kernel doubles what it is given, for its own bookkeeping.
        size = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert size == 2 * backpressure._SEND_BUFFER_BYTES
        assert transport.get_write_buffer_limits()[1] == backpressure._WRITE_BUFFER_BYTES
        assert protocol.ping_timeout == 60.0
        backpressure._tune(transport, 0.0)
        assert protocol.ping_timeout is None
        assert backpressure._unread_bytes(transport) == 0
        transport.write(b"x" * 100_000)
        assert backpressure._unread_bytes(transport) > 0
        transport.abort()
        writer.close()
        listener.close()

    asyncio.run(run())


def test_what_is_not_known_about_a_connection_is_left_as_it_is() -> None:
    for transport in (None, object()):
        backpressure._tune(transport, 60.0)
        assert backpressure._unread_bytes(transport) == 0


class Closed:
    """What uvloop makes of a connection that is closed: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the handler is closed")

        return ask


def test_a_connection_that_is_closed_already_fails_no_reply() -> None:
    backpressure._tune(Closed(), 60.0)
    backpressure.abort(Closed())
    assert backpressure._unread_bytes(Closed()) == 0


def test_the_layer_stands_outside_all_middleware_and_hands_on_who_holds_the_connection() -> None:
    seen: list[Any] = []

    class App:
        def build_middleware_stack(self) -> Any:
            async def stack(scope: Any, receive: Any, send: Any) -> None:
                seen.append(scope[EXCHANGE])

            return stack

    app = App()
    backpressure.put_outermost(app, lambda inner: Backpressure(inner, lambda: Engine(0.0, None, None)))  # type: ignore[arg-type]

    async def run() -> None:
        connection, ours = Connection(), Exchange()
        stack = app.build_middleware_stack()
        await stack({"type": "websocket"}, None, connection.send)
        await stack({"type": "http", EXCHANGE: ours}, None, connection.send)
        await stack({"type": "lifespan"}, None, print)
        assert seen[0].transport is connection and seen[1] is ours and seen[2].transport is None

    asyncio.run(run())
