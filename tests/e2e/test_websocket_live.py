"""/tokenflow/stream on a live server: the answers of HTTP, reports that count, and sockets that harm nobody."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from support.live import Server
from support.sockets import CHAT, KEY, chat, hear, hear_end, open_socket, say, teach, texts

pytestmark = pytest.mark.e2e
MASK = b"\0\0\0\0"


def begin(server: Server, ws: ClientConnection, tokens: int = 1200, **more: Any) -> str:
    """A stream under way over this socket; its id."""
    say(ws, chat(tokens, **more))
    started = hear(ws)
    assert started["type"] == "started", started
    server.row(started["id"], lambda r: r["generated_tokens"] > 100)
    return str(started["id"])


@pytest.mark.parametrize("choices", [1, 2])
def test_an_answer_is_the_one_of_http(server: Server, choices: int) -> None:
    body = chat(60, n=choices, stream_options={"include_usage": True, "continuous_usage_stats": True})
    plain = server.post_stream(CHAT, {**body, "stream": True}).wait_end()
    with open_socket(server) as ws:
        say(ws, body)
        got = hear_end(ws)
    assert got[0]["type"] == "started" and got[-1] == {"type": "done"}
    assert {c["id"] for c in got[1:-1]} == {got[0]["id"]} or choices > 1
    assert texts(got) == texts(plain.events) and set(texts(got)) == set(range(choices))
    assert {tuple(c) for c in got[1:-1]} == {tuple(c) for c in plain.events}, "the same fields in every chunk"
    assert got[-2]["usage"]["completion_tokens"] == plain.events[-1]["usage"]["completion_tokens"] == 60 * choices


def test_a_report_moves_the_buffer_and_reports_teach_the_rate(server: Server) -> None:
    with open_socket(server) as ws:
        rid = begin(server, ws, tokenflow={"read_rate": 6})
        say(ws, {"type": "ack", "consumed_tokens": 90})
        server.row(rid, lambda r: r["consumed_tokens"] >= 90)
        teach(server, rid, lambda tokens: say(ws, {"type": "ack", "consumed_tokens": 90 + tokens}))


def test_cancel_frees_the_engine_and_the_socket_takes_the_next_request(server: Server) -> None:
    with open_socket(server) as ws:
        begin(server, ws)
        say(ws, {"type": "cancel"})
        assert hear_end(ws)[-1] == {"type": "cancelled"}
        server.settle()
        say(ws, chat(5))
        assert hear_end(ws)[-1] == {"type": "done"}


def reset(ws: ClientConnection) -> None:
    ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ws.socket.close()


def vanish_inside_a_frame(ws: ClientConnection) -> None:
    ws.socket.sendall(b"\x81\xfe\x40\x00" + MASK + b"{")  # a text of 16 kB begins
    ws.socket.shutdown(socket.SHUT_RDWR)


def send_binary(ws: ClientConnection) -> None:
    ws.send(b"\x00\x01")
    assert closed_with(ws) == 1003


def send_broken_utf8(ws: ClientConnection) -> None:
    ws.socket.sendall(b"\x81\x82" + MASK + b"\xff\xfe")
    assert closed_with(ws) == 1007


def send_too_much(ws: ClientConnection) -> None:
    try:
        ws.send("x" * (17 << 20))
    except ConnectionClosed:
        pass
    closed_with(ws)


def close_oddly(ws: ClientConnection) -> None:
    ws.close(1011, "odd")


def nest_deeply(ws: ClientConnection) -> None:
    ws.send("[" * 10_000)
    while (heard := hear(ws)).get("type") != "error":
        pass
    assert heard["error"]["param"] == "message"
    ws.close()


def ping_without_end(ws: ClientConnection) -> None:
    ws.socket.sendall((b"\x89\x80" + MASK) * 10_000)
    say(ws, {"type": "cancel"})
    assert hear_end(ws)[-1] == {"type": "cancelled"}
    ws.close()


def send_byte_by_byte(ws: ClientConnection) -> None:
    text = b'{"type": "cancel"}'
    first, *rest = [bytes([byte]) for byte in text]
    ws.socket.sendall(b"\x01\x81" + MASK + first)
    for byte in rest[:-1]:
        ws.socket.sendall(b"\x00\x81" + MASK + byte)
    ws.socket.sendall(b"\x80\x81" + MASK + rest[-1])
    assert hear_end(ws)[-1] == {"type": "cancelled"}
    ws.close()


def closed_with(ws: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            hear(ws)
    return closed.value.rcvd.code if closed.value.rcvd else None


@pytest.mark.parametrize(
    "harm",
    [
        reset, vanish_inside_a_frame, send_binary, send_broken_utf8, send_too_much, close_oddly, nest_deeply,
        ping_without_end, send_byte_by_byte,
    ],
)  # fmt: skip
def test_whatever_a_client_does_ends_its_own_socket_and_touches_no_other_stream(
    server: Server, harm: Callable[[ClientConnection], None]
) -> None:
    with open_socket(server) as other, open_socket(server) as ws:
        begin(server, ws)
        say(other, chat(120))
        harm(ws)
        whole = hear_end(other)
    assert whole[-1] == {"type": "done"}
    # Its own stream ended with it: the fixture waits for a free engine, within less than the rest of it would take.
    plain = server.post_stream(CHAT, chat(120, stream=True)).wait_end()
    assert texts(whole) == texts(plain.events)


def refused(server: Server, **given: Any) -> int:
    with pytest.raises(InvalidStatus) as answer, open_socket(server, **given):
        pass
    return int(answer.value.response.status_code)


def test_without_the_key_or_from_a_strange_page_the_handshake_is_refused(strict_server: Server) -> None:
    assert refused(strict_server) == 401
    assert refused(strict_server, key="wrong") == 401
    assert refused(strict_server, key=KEY, origin="https://evil.example.com") == 403
    for given in ({"key": KEY, "origin": "https://chat.example.com"}, {"key": KEY, "origin": strict_server.url}):
        with open_socket(strict_server, **given) as ws:
            say(ws, chat(5))
            assert hear_end(ws)[-1] == {"type": "done"}


def test_a_page_says_its_key_among_the_subprotocols(strict_server: Server) -> None:
    assert refused(strict_server, subprotocols=["tokenflow", "tokenflow-key.wrong"]) == 401
    with open_socket(strict_server, subprotocols=["tokenflow", f"tokenflow-key.{KEY}"]) as ws:
        assert ws.subprotocol == "tokenflow"
        say(ws, chat(5))
        assert hear_end(ws)[-1] == {"type": "done"}


def test_the_server_says_that_it_has_sockets(server: Server) -> None:
    assert server.http.get("/tokenflow/config").json()["websocket"] is True
