"""The client's side of the WebSocket protocol, against a server that says what a test wrote down."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from support.chat_standin import event
from support.live import until
from tokenflow_sgl.client import AsyncClient, Client, MissingExtra, RequestRefused, StreamBroken, StreamError

SAID: Any = [{"role": "user", "content": "hello"}]
STARTED = {"type": "started", "id": "rid"}


class Sockets:
    """`says`: the messages after a request; then it listens on, or closes if `closes`. `heard`: what came."""

    def __init__(self) -> None:
        self.says: list[Any] = []
        self.closes = False
        self.status = 101
        self.heard: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()
        self._server = serve(self._talk, "127.0.0.1", 0, process_request=self._admit)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()

    def _admit(self, socket: ServerConnection, request: Any) -> Any:
        self.keys.append(request.headers.get("Authorization"))
        assert request.path == "/tokenflow/stream"
        return None if self.status == 101 else socket.respond(self.status, '{"error": {"message": "no such key"}}')

    def _talk(self, socket: ServerConnection) -> None:
        self.heard.append(json.loads(socket.recv()))
        for message in self.says:
            socket.send(json.dumps(message))
        if self.closes:
            return
        try:
            while True:
                self.heard.append(json.loads(socket.recv()))
        except ConnectionClosed:
            self.gone.set()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    server = Sockets()
    yield server
    server.close()


def chunk(text: str, total: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(event(text, total)[6:])
    return said


def read_sync(url: str, got: list[str]) -> None:
    with Client(url, "key", transport="websocket") as client, client.chat(SAID, read_rate=100) as stream:
        got.extend(stream)


def read_async(url: str, got: list[str]) -> None:
    async def read() -> None:
        async with (
            AsyncClient(url, "key", transport="websocket") as client,
            client.chat(SAID, read_rate=100) as stream,
        ):
            async for piece in stream:
                got.append(piece)

    asyncio.run(read())


every = pytest.mark.parametrize("read", [read_sync, read_async])


@every
def test_an_answer_is_what_lies_between_started_and_done(sockets: Sockets, read: Callable[..., None]) -> None:
    sockets.says = [STARTED, chunk("Hel", 1), {"type": "ack", "index": 0, "verdict": "rate_limited"}, chunk("lo", 2)]
    sockets.says.append({"type": "done"})
    got: list[str] = []
    read(sockets.url, got)
    assert got == ["Hel", "lo"]
    request = sockets.heard[0]
    assert request["messages"] == SAID and request["tokenflow"] == {"read_rate": 100}
    assert sockets.keys == ["Bearer key"]
    assert {"type": "cancel"} not in sockets.heard


@every
def test_a_socket_that_closes_before_done_is_a_broken_stream(sockets: Sockets, read: Callable[..., None]) -> None:
    sockets.says, sockets.closes = [STARTED, chunk("Hel", 3)], True
    got: list[str] = []
    with pytest.raises(StreamBroken, match=r"closed without done.* received: 3 tokens of choice 0"):
        read(sockets.url, got)
    assert got == ["Hel"] and len(sockets.keys) == 1, "connected again"


@every
def test_a_socket_that_closes_before_the_reply_begins_is_a_broken_stream(
    sockets: Sockets, read: Callable[..., None]
) -> None:
    sockets.closes = True
    with pytest.raises(StreamBroken, match="before the reply began"):
        read(sockets.url, [])


@every
def test_an_error_before_the_reply_is_a_refusal_and_later_the_end_of_the_stream(
    sockets: Sockets, read: Callable[..., None]
) -> None:
    error = {"type": "error", "status": 400, "error": {"message": "read_rate: -1 is not valid"}}
    sockets.says = [error]
    with pytest.raises(RequestRefused, match="400: read_rate: -1") as refused:
        read(sockets.url, [])
    assert refused.value.status == 400
    refusal = {**error, "ended": False}  # of a report of ours
    sockets.says = [STARTED, refusal, chunk("Hel", 1), {**error, "ended": True}]
    got: list[str] = []
    with pytest.raises(StreamError, match="read_rate: -1"):
        read(sockets.url, got)
    assert got == ["Hel"]


@every
def test_a_key_that_is_refused_is_a_refused_request(sockets: Sockets, read: Callable[..., None]) -> None:
    sockets.status = 401
    with pytest.raises(RequestRefused, match="401: no such key") as refused:
        read(sockets.url, [])
    assert refused.value.status == 401


def test_reports_and_a_cancel_go_over_the_same_socket(sockets: Sockets) -> None:
    sockets.says = [STARTED, chunk("Hel", 1), chunk("lo", 2)]
    with Client(sockets.url, transport="websocket") as client:
        stream = client.chat(SAID, read_rate=100)
        assert [next(stream), next(stream)] == ["Hel", "lo"]
        until(lambda: {"type": "ack", "consumed_tokens": 2, "index": 0} in sockets.heard, "the last count")
        stream.cancel()
        assert list(stream) == []
    assert sockets.gone.wait(10) and sockets.heard[-1] == {"type": "cancel"}


def test_asynchronous_reports_and_cancel_go_over_the_same_socket(sockets: Sockets) -> None:
    sockets.says = [STARTED, chunk("Hel", 1), chunk("lo", 2)]

    async def read() -> None:
        async with AsyncClient(sockets.url, transport="websocket") as client, client.chat(SAID) as stream:
            assert await anext(stream) == "Hel"
            while not any(message.get("type") == "ack" for message in sockets.heard):
                await asyncio.sleep(0)

    asyncio.run(read())
    assert sockets.gone.wait(10) and sockets.heard[-1] == {"type": "cancel"}
    assert sockets.heard[1] == {"type": "ack", "consumed_tokens": 1, "index": 0}


def test_a_caller_that_is_cancelled_before_the_reply_began_leaves_no_socket_open(sockets: Sockets) -> None:
    """A request that waits its turn: given up, it would else run for nobody."""

    async def give_up() -> None:
        async with AsyncClient(sockets.url, transport="websocket") as client:
            stream = client.chat(SAID)
            opening = asyncio.create_task(stream.open())
            await asyncio.to_thread(until, lambda: sockets.heard, "the request")
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()
            assert await asyncio.to_thread(sockets.gone.wait, 10)  # and not by the end of the loop

    asyncio.run(give_up())


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    with (
        Client("http://127.0.0.1:1", transport="websocket") as client,
        pytest.raises(MissingExtra, match=r"pip install .tokenflow_sgl\[client\]"),
    ):
        client.chat(SAID)
