"""The socket in front of an app that answers as told: what reaches the app, what the client is told, who is let in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from support.live import until
from tokenflow_sgl.adapter import messages, routes, websocket

PATH = websocket.PATH
DONE = "data: [DONE]\n\n"


class Manager:
    """A tokenizer manager that keeps what it should send to the scheduler."""

    rid_to_state: dict[str, Any] = {}  # noqa: RUF012
    incremental_streaming_output = False
    model_config = SimpleNamespace(vocab_size=1000)

    def __init__(self, **keys: Any) -> None:
        self.server_args = SimpleNamespace(**{"api_key": None, "admin_api_key": None, **keys})
        self.sent: list[Any] = []

    def config_value(self, name: str) -> None: ...

    async def _async_dispatch_to_scheduler(self, message: messages.AckReq) -> None:
        self.sent.append(message)


class World:
    """An app whose chat route streams `events` and then does what `then` says: end, wait, fail."""

    def __init__(self, patch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.manager = Manager(**keys)
        patch.setattr(routes, "_tokenizer_manager", lambda: self.manager)
        self.events = ['data: {"n": 1}\n\n', ": still here\n\n", 'data: {"n": 2}\n\n', DONE]
        self.then = "end"
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.left = 0
        app = FastAPI()
        app.post("/v1/chat/completions")(self._answer)
        app.post("/v1/completions")(self._answer)
        routes.install(app)
        self.client = TestClient(app)

    async def _answer(self, request: Request) -> Any:
        body = await request.json()
        self.requests.append((body, dict(request.headers)))
        if body.get("refuse"):
            return JSONResponse({"object": "error", "message": "no", "code": 418}, status_code=418)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        try:
            for event in self.events:
                yield event
            if self.then == "wait":
                await asyncio.Event().wait()
            if self.then == "fail":
                raise RuntimeError("the engine died")
        except asyncio.CancelledError:
            self.left += 1
            raise


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    with made.client:
        yield made


def ask(ws: Any, **more: Any) -> None:
    ws.send_json({"messages": [{"role": "user", "content": "x"}], **more})


def to_end(ws: Any) -> list[dict[str, Any]]:
    got = [ws.receive_json()]
    while got[-1].get("type") not in ("done", "error", "cancelled"):
        got.append(ws.receive_json())
    return got


def test_a_reply_is_started_chunks_done_and_the_next_request_may_follow(world: World) -> None:
    with world.client.websocket_connect(PATH) as ws:
        for rid in ("one", "two"):
            ask(ws, rid=rid)
            assert to_end(ws) == [{"type": "started", "id": rid}, {"n": 1}, {"n": 2}, {"type": "done"}]


def test_a_request_is_the_http_routes_own_with_what_the_handshake_said(world: World) -> None:
    headers = {"X-TokenFlow-Read-Rate": "8", "Authorization": "Bearer k", "Cookie": "c=1", "X-Mine": "y"}
    with world.client.websocket_connect(PATH, headers=headers) as ws:
        ws.send_json({"prompt": "x", "tokenflow": {"read_rate": 8}})
        to_end(ws)
    body, got = world.requests[0]
    assert body["stream"] is True and body["custom_params"]["tokenflow"]["rate"] == 8.0
    assert got["authorization"] == "Bearer k" and got["x-mine"] == "y" and got["content-type"] == "application/json"
    assert not {"cookie", "upgrade", "sec-websocket-key", "connection"} & set(got)


def test_events_split_and_joined_by_the_app_arrive_one_by_one(world: World) -> None:
    world.events = ['data: {"n"', ': 1}\n\ndata: {"n": 2}\n', '\ndata: {"e": "\u00e9 \\"error\\""}\n\n' + DONE]
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        assert to_end(ws)[1:] == [{"n": 1}, {"n": 2}, {"e": '\u00e9 "error"'}, {"type": "done"}]


def test_a_report_goes_to_the_scheduler_and_only_a_refused_one_is_answered(world: World) -> None:
    world.then = "wait"
    with world.client.websocket_connect(PATH) as ws:
        ws.send_json({"type": "ack", "consumed_tokens": 1})
        assert ws.receive_json() == {"type": "ack", "index": 0, "verdict": "not_found"}
        ask(ws, rid="mine", n=2)
        assert ws.receive_json()["type"] == "started"
        ws.send_json({"type": "ack", "consumed_tokens": 7, "index": 1})
        ws.send_json({"type": "ack", "consumed_tokens": 7, "index": 2})
        while "type" not in (said := ws.receive_json()):
            pass
        assert said == {"type": "ack", "index": 2, "verdict": "not_found"}
        until(lambda: world.manager.sent, "the report")
        assert [m.acks for m in world.manager.sent] == [(("mine", 1, 7),)]
        for _ in range(40):
            ws.send_json({"type": "ack", "consumed_tokens": 8})
        assert ws.receive_json() == {"type": "ack", "index": 0, "verdict": "rate_limited"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "message"),
        ("nonsense", "message"),
        ("[]", "message"),
        ("5", "message"),
        ("{}", "message"),
        ('{"type": "halt"}', "type"),
        ('{"type": "cancel", "why": 1}', "type"),
        ('{"type": "ack"}', "consumed_tokens"),
        ('{"type": "ack", "consumed_tokens": -1}', "consumed_tokens"),
        ('{"type": "ack", "consumed_tokens": true}', "consumed_tokens"),
        ('{"type": "ack", "consumed_tokens": 1, "index": "0"}', "index"),
        ('{"type": "ack", "consumed_tokens": 1, "token": "t"}', "token"),
        ('{"type": "ack", "consumed_tokens": 1, "id": "other"}', "id"),
        ('{"type": "ack", "consumed_tokens": 1, "more": 1}', "more"),
        ('{"type": "ack", "consumed_tokens": NaN}', "message"),
        ('{"messages": []}', "message"),  # a second request
        ("[" * 10_000, "message"),
        ('{"messages":' + "[" * 10_000, "message"),
        ('{"type": ' + "[" * 1000 + "]" * 1000 + "}", "type"),
    ],
)
def test_a_message_that_is_refused_names_its_field_and_ends_no_stream(world: World, text: str, field: str) -> None:
    world.events, world.then = world.events[:1], "wait"
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        assert (ws.receive_json()["type"], ws.receive_json()) == ("started", {"n": 1})
        ws.send_text(text)
        said = ws.receive_json()
        assert (said["type"], said["status"], said["error"]["param"]) == ("error", 400, field)
        assert said["ended"] is False  # the stream under way goes on
        assert "valid is" in said["error"]["message"]
        ws.send_json({"type": "cancel"})
        assert ws.receive_json() == {"type": "cancelled"}
    assert not world.manager.sent


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stream": False}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"tokenflow": {"read_rate": 0}}, "tokenflow.read_rate"),
        ({"deep": json.loads("[" * 300 + "]" * 300)}, "body"),
    ],
)
def test_a_request_that_is_refused_names_its_field_and_the_socket_goes_on(
    world: World, more: dict[str, Any], field: str
) -> None:
    with world.client.websocket_connect(PATH) as ws:
        ask(ws, **more)
        (said,) = to_end(ws)
        assert (said["status"], said["ended"], said["error"]["param"]) == (400, True, field)
        ask(ws)
        assert to_end(ws)[-1] == {"type": "done"}
    assert len(world.requests) == 1


def test_a_refusal_of_the_route_is_told_with_its_status(world: World) -> None:
    with world.client.websocket_connect(PATH) as ws:
        ask(ws, refuse=True)
        (said,) = to_end(ws)
    assert said["status"] == 418 and said["error"]["message"] == "no"


@pytest.mark.parametrize(
    ("events", "then", "status", "says"),
    [
        (['data: {"error": {"message": "out of luck", "code": 503}}\n\n', DONE], "end", 503, "out of luck"),
        ([], "end", 500, "the stream ended before its end"),
        ([], "fail", 500, "the stream ended before its end"),
        (["data: {"], "end", 500, "the stream ended before its end"),
    ],
)
def test_a_stream_that_fails_is_an_error_and_never_done(
    world: World, events: list[str], then: str, status: int, says: str
) -> None:
    world.events, world.then = ['data: {"n": 1}\n\n', *events], then
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        got = to_end(ws)
        assert got[1:-1] == [{"n": 1}]
        assert (got[-1]["type"], got[-1]["status"], got[-1]["error"]["message"]) == ("error", status, says)
        assert got[-1]["ended"] is True


def test_cancel_reaches_the_app_as_a_client_that_left_and_the_next_request_may_follow(world: World) -> None:
    world.then = "wait"
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        ws.receive_json()
        ws.send_json({"type": "cancel"})
        assert to_end(ws)[-1] == {"type": "cancelled"}
        ws.send_json({"type": "cancel"})  # too late, and no matter
        world.then = "end"
        ask(ws)
        assert to_end(ws)[-1] == {"type": "done"}
    assert world.left == 1


def test_the_end_of_a_socket_is_the_end_of_its_stream(world: World) -> None:
    world.then = "wait"
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        ws.receive_json()
    with world.client.websocket_connect(PATH) as ws:  # a turn of the loop
        ws.send_text("")
        ws.receive_json()
    assert world.left == 1


def test_a_message_that_is_no_text_ends_the_socket(world: World) -> None:
    with world.client.websocket_connect(PATH) as ws:
        ws.send_bytes(b"{}")
        with pytest.raises(WebSocketDisconnect) as closed:
            ws.receive_json()
    assert closed.value.code == 1003


def test_a_socket_that_asks_for_nothing_is_closed_and_one_with_a_stream_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = websocket.Server
    monkeypatch.setattr(websocket, "Server", lambda **given: server(**given, idle_s=0.02))
    with world.client.websocket_connect(PATH) as ws, pytest.raises(WebSocketDisconnect) as closed:
        ws.receive_json()
    assert closed.value.code == 1000

    async def slowly() -> AsyncIterator[str]:
        yield world.events[0]
        await asyncio.sleep(0.2)  # ten times the limit
        yield DONE

    monkeypatch.setattr(world, "_stream", slowly)
    with world.client.websocket_connect(PATH) as ws:
        ask(ws)
        assert to_end(ws)[-1] == {"type": "done"}


def test_a_socket_that_the_protocol_closed_meanwhile_is_not_closed_twice() -> None:
    class Socket:
        async def receive(self) -> dict[str, Any]:
            return {"type": "websocket.receive", "bytes": b"1"}

        async def close(self, code: int, reason: str) -> None:
            raise RuntimeError("Unexpected ASGI message 'websocket.close', after sending 'websocket.close'.")

    server = websocket.Server(routes._acks, lambda _: None)
    asyncio.run(websocket._Session(Socket(), server, None).run())  # type: ignore[arg-type]


def refused(world: World, path: str = PATH, **connect: Any) -> int:
    with pytest.raises(WebSocketDenialResponse) as answer, world.client.websocket_connect(path, **connect):
        pass
    return int(answer.value.status_code)


def test_without_the_key_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, api_key="right", admin_api_key="boss")
    with world.client:
        assert refused(world) == 401
        assert refused(world, path=PATH + "?key=right&api_key=right&authorization=Bearer%20right") == 401
        for header in ("Bearer wrong", "right", "Basic right", "Bearer boss", b"Bearer \xe9"):
            assert refused(world, headers={"Authorization": header}) == 401
        assert refused(world, subprotocols=["tokenflow", "tokenflow-key.wrong"]) == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert refused(world, headers=wrong, subprotocols=["tokenflow-key.right"]) == 401


def test_with_the_key_in_the_header_or_among_the_subprotocols_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, api_key="right")
    with world.client:
        with world.client.websocket_connect(PATH, headers={"Authorization": "Bearer right"}) as ws:
            assert ws.accepted_subprotocol is None
            ask(ws)
            to_end(ws)
        with world.client.websocket_connect(PATH, subprotocols=["tokenflow", "tokenflow-key.right"]) as ws:
            assert ws.accepted_subprotocol == "tokenflow"
            ask(ws)
            to_end(ws)
    assert [headers["authorization"] for _, headers in world.requests] == ["Bearer right"] * 2


def test_a_page_of_another_host_is_let_in_only_where_it_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, _tokenflow={"origins": "https://chat.example.com"})
    with world.client:
        assert refused(world, headers={"Origin": "https://evil.example.com"}) == 403
        assert refused(world, headers={"Origin": "null"}) == 403
        for origin in ("http://testserver", "https://chat.example.com", "https://CHAT.example.com"):
            with world.client.websocket_connect(PATH, headers={"Origin": origin}):
                pass


@pytest.mark.parametrize(
    ("origin", "host", "listed", "welcome"),
    [
        ("http://a:30000", "a:30000", (), True),
        ("http://a", "a:80", (), True),
        ("https://a:443", "a", (), True),
        ("http://a:30000", "a:30001", (), False),
        ("http://a.evil", "a", (), False),
        ("http://[::1]:5", "[::1]:5", (), True),
        ("http://a:x", "a:x", (), False),
        ("", "", (), False),
        ("null", "null", (), False),
        ("null", "a", ("null",), True),
        ("http://b", "a", ("*",), True),
        ("http://b:1", "a", ("http://b",), False),
    ],
)
def test_origin_and_host_are_the_same_place(origin: str, host: str, listed: tuple[str, ...], welcome: bool) -> None:
    assert websocket._is_welcome(origin, host, listed) is welcome


def test_without_a_library_the_server_says_that_sockets_are_off(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import uvicorn.protocols.websockets.auto as auto

    assert world.client.get("/tokenflow/config").json()["websocket"] is True
    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", None)
    assert world.client.get("/tokenflow/config").json()["websocket"] is False
    with caplog.at_level(logging.WARNING):
        routes.say_whether_sockets_work()
    assert len(caplog.records) == 1 and PATH in caplog.text and "pip install websockets" in caplog.text
