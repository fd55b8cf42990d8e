"""Clients that do not read, on a live server: noticed, cut off after the limit, and at nobody else's cost."""

from __future__ import annotations

import json
from http.client import IncompleteRead
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from support.live import Server, until
from support.sockets import (
    CHAT,
    KEY,
    ask_and_read_nothing,
    chat,
    hear,
    hear_end,
    narrow,
    open_socket,
    say,
    texts,
    unread,
)

pytestmark = pytest.mark.e2e
LONG = 1400  # tokens: some 350 kB of events, twice of what all buffers on the way hold
KEYED = {"Authorization": f"Bearer {KEY}"}


def events_of(data: bytes) -> list[dict[str, Any]]:
    payloads = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(p) for p in payloads if p.endswith(b"}")]


@pytest.fixture(scope="module")
def whole(shared_server: Server) -> dict[int, str]:
    """What a client that reads gets."""
    return texts(shared_server.wake().post_stream(CHAT, chat(LONG, stream=True)).wait_end().events)


def test_who_comes_back_before_the_limit_gets_every_token(server: Server, whole: dict[int, str]) -> None:
    before = unread(server)
    silent = ask_and_read_nothing(server, chat(LONG))
    until(lambda: unread(server)["halted"] == before["halted"] + 1, "the client that does not read")
    until(lambda: not server.state()["streams"], "an answer that is complete and unread")
    data = silent.getresponse().read()  # IncompleteRead without the terminating chunk
    assert data.endswith(b"data: [DONE]\n\n") and texts(events_of(data)) == whole
    assert unread(server)["cut"] == before["cut"]


def test_who_comes_back_to_a_socket_before_the_limit_gets_every_token(server: Server, whole: dict[int, str]) -> None:
    before = unread(server)
    with open_socket(server, sock=narrow(server)) as ws:
        say(ws, chat(LONG))
        until(lambda: unread(server)["halted"] == before["halted"] + 1, "the client that does not read")
        got = hear_end(ws)
    assert got[-1] == {"type": "done"} and texts(got) == whole


def test_who_reads_nothing_is_cut_off_with_an_error_and_another_stream_is_whole(strict_server: Server) -> None:
    server, before = strict_server, unread(strict_server)
    whole = texts(server.post_stream(CHAT, chat(300, stream=True), KEYED).wait_end().events)
    silent = ask_and_read_nothing(server, chat(LONG, rid="silent"), KEY)
    until(lambda: unread(server)["halted"] == before["halted"] + 1, "the client that does not read")
    other = server.post_stream(CHAT, chat(300, stream=True), KEYED)
    until(lambda: unread(server)["cut"] == before["cut"] + 1, "the client cut off")
    with pytest.raises((IncompleteRead, ConnectionError)):
        silent.getresponse().read()
    assert other.wait_end().ended and texts(other.events) == whole
    server.settle()
    assert server.log.read_text(errors="replace").count("stream 'silent' cut off: its client read nothing for 3 s") == 1


def test_a_socket_that_reads_nothing_is_cut_off_and_never_told_done(strict_server: Server) -> None:
    server, before = strict_server, unread(strict_server)
    got: list[dict[str, Any]] = []
    with open_socket(server, key=KEY, sock=narrow(server)) as ws:
        say(ws, chat(LONG))
        until(lambda: unread(server)["cut"] == before["cut"] + 1, "the socket cut off")
        server.settle()
        with pytest.raises(ConnectionClosed):
            while True:
                got.append(hear(ws))
    assert got[0]["type"] == "started" and not any("type" in message for message in got[1:])
