"""Comments in a silent stream: where they stand, and that none comes where none belongs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenflow_sgl.adapter.keepalive import COMMENT, KeepAlive

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


def reply(script: list[Any], *, headers: Any = SSE, status: int = 200, interval_s: float = 0.02) -> list[bytes]:
    """The bodies a client gets from an app that sends `script`: bytes are sent, numbers are seconds of silence."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(0)  # a socket may make us wait in the middle of a message
            bodies.append(message["body"])

    async def run() -> None:
        async with KeepAlive(send, interval_s) as alive:
            await alive.send({"type": "http.response.start", "status": status, "headers": headers})
            for part in script:
                if isinstance(part, bytes):
                    await alive.send({"type": "http.response.body", "body": part, "more_body": True})
                else:
                    await asyncio.sleep(part)
            await alive.send({"type": "http.response.body", "body": b"", "more_body": False})
            await asyncio.sleep(3 * interval_s)  # a task behind the reply

    asyncio.run(run())
    return bodies


def test_a_silent_stream_gets_comments_between_its_events_and_none_after_the_last() -> None:
    bodies = reply([b"data: 1\n\n", 0.2, b"data: 2\n\n"])
    assert bodies[0] == b"data: 1\n\n" and bodies[-2:] == [b"data: 2\n\n", b""]
    comments = bodies[1:-2]
    assert comments and set(comments) == {COMMENT}


def test_a_stream_that_waits_for_its_first_token_gets_comments_too() -> None:
    bodies = reply([0.2, b"data: 1\n\n"])
    assert bodies[0] == COMMENT and bodies[-2:] == [b"data: 1\n\n", b""]


def test_a_stream_that_talks_gets_none() -> None:
    assert COMMENT not in reply([b"data: 1\n\n"] * 20, interval_s=5.0)


@pytest.mark.parametrize(
    ("headers", "status"), [([(b"content-type", b"application/json")], 200), ([], 200), (SSE, 400)]
)
def test_what_is_no_event_stream_is_left_alone(headers: Any, status: int) -> None:
    assert reply([b"{", 0.1, b"}"], headers=headers, status=status) == [b"{", b"}", b""]


def test_a_comment_is_one_that_clients_skip() -> None:
    assert COMMENT.startswith(b":") and COMMENT.endswith(b"\n\n") and COMMENT.count(b"\n") == 2
