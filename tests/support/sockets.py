"""Clients that hold their socket in their own hands: WebSockets of a live server, and readers that do not read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from support.live import Server, until

CHAT = "/v1/chat/completions"
KEY = "a-key_of.it$own"  # of a server that asks for one


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy chat body without EOS."""
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "a reader waits"}], "max_tokens": tokens,
        "temperature": 0, "ignore_eos": True, **more,
    }  # fmt: skip


def teach(server: Server, rid: str, report: Callable[[int], None]) -> None:
    """Report a reader of 60 tok/s until the server believes in more than 12: each report may at most double what it
    believes."""
    began_s = time.monotonic()

    def learned() -> bool:
        report(int(60 * (time.monotonic() - began_s)))
        time.sleep(0.25)  # a reader's pace, and no wait for the server
        return bool(server.row(rid)["read_rate_tok_s"] > 12)

    until(learned, "more than twice the declared rate")


def texts(events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """What a reader of chat chunks has seen of each choice."""
    seen: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            seen[choice["index"]] = seen.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return seen


def narrow(server: Server) -> socket.socket:
    """A connection whose client keeps no more than 4 kB of what it does not read."""
    at = urlsplit(server.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60.0)
    sock.connect((at.hostname, at.port))
    return sock


def open_socket(server: Server, *, key: str | None = None, **given: Any) -> ClientConnection:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = server.url.replace("http://", "ws://") + "/tokenflow/stream"
    return connect(url, additional_headers=headers, proxy=None, compression=None, close_timeout=1.0, **given)


def say(ws: ClientConnection, message: Mapping[str, Any]) -> None:
    ws.send(json.dumps(message))


def hear(ws: ClientConnection) -> dict[str, Any]:
    heard = json.loads(ws.recv(timeout=60.0))
    assert isinstance(heard, dict)
    return heard


def hear_end(ws: ClientConnection) -> list[dict[str, Any]]:
    """All messages up to the one that ends the stream."""
    got = [hear(ws)]
    while got[-1].get("type") not in ("done", "error", "cancelled"):
        got.append(hear(ws))
    return got


def ask_and_read_nothing(server: Server, body: Mapping[str, Any], key: str | None = None) -> HTTPConnection:
    """A streamed request over HTTP whose reply nobody reads until somebody does."""
    at = urlsplit(server.url)
    client = HTTPConnection(at.hostname or "", at.port)
    client.sock = narrow(server)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    client.request("POST", CHAT, json.dumps({**body, "stream": True}), headers)
    return client


def unread(server: Server) -> dict[str, int]:
    """How many blocked sends and streams cut off the server has seen in its life."""
    counts: dict[str, int] = server.http.get("/tokenflow/config").json()["http"]["unread"]
    return counts
