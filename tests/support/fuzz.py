"""Hostile messages for a live server's /tokenflow routes, made from a seed, and what may not come of them.

Owns what is sent and what is found wrong in the answers; innocent streams are bystanders.py's. Invariant: what is sent
depends on the seed only; when it arrives does not.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection

from support.live import Server
from support.sockets import chat, open_socket

OPEN_AT_ONCE = 4  # sockets
_PATIENCE_S = struct.pack("ll", 2, 0)  # for a server that reads nothing more, since nobody reads its answers
_NUMBERS = (0, -1, 1, 3, 1.5, -0.0, 1e308, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**40)
_TEXTS = (
    "",
    "x",
    "\0",
    "\u202e",
    "\ud83d\ude00",
    "x" * 300,
    "x" * 70_000,
    "inf",
    "nan",
    "1e999",
    "HEALTH_CHECK",
    "../..",
)


def hostile_value(rng: random.Random, rids: Sequence[str]) -> Any:
    """A value that fits hardly any field. `rids`: ids of streams that are none of the sender's."""
    return rng.choice(
        (
            lambda: rng.choice(_NUMBERS),
            lambda: rng.choice(_TEXTS),
            lambda: rng.choice((None, True, False, [], {}, [[]], {"": {}})),
            lambda: rng.choice(rids) if rids else "nobody",
            lambda: [rng.choice(_NUMBERS) for _ in range(rng.choice((1, 20, 2000)))],
            lambda: {rng.choice(_TEXTS)[:400]: rng.choice(_NUMBERS), "read_rate": rng.choice(_NUMBERS)},
            lambda: {"tokenflow": {"rate": rng.choice(_NUMBERS), "parent": rng.choice(rids or ["x"])}},
            lambda: {"read_rate": rng.choice((*_NUMBERS, *_TEXTS[:3], "inf", None, True))},
        )
    )()


def request(rng: random.Random, rids: Sequence[str]) -> dict[str, Any]:
    """A request, half of the time with a hostile field or two."""
    body = chat(rng.choice((1, 3, 10, 40)), stream_options={"include_usage": rng.random() < 0.5})
    if rng.random() < 0.2:
        body["prompt"] = rng.choice(("a prompt", [5, 6, 7], ["a", "b"], [-1], [5, 10**6], hostile_value(rng, rids)))
        del body["messages"]
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 2)):
            fields = ("tokenflow", "rid", "n", "custom_params", "stream", "messages", "stream_options", "max_tokens")
            body[rng.choice((*fields, "read_rate", "model", "type"))] = hostile_value(rng, rids)
    if type(body.get("n")) is int and body["n"] > 4:
        body["n"] = 4  # as many answers as are asked for, and the machine is small
    return body


def report(rng: random.Random, rids: Sequence[str]) -> dict[str, Any]:
    said: dict[str, Any] = {"type": "ack", "consumed_tokens": rng.choice((0, 1, 7, 10**6))}
    if rng.random() < 0.5:
        said[rng.choice(("index", "consumed_tokens", "id", "token", "type", "more"))] = hostile_value(rng, rids)
    return said


def nested(rng: random.Random) -> str:
    levels = rng.choice((100, 253, 254, 255, 900, 990, 1000, 1023, 1024, 1025, 20_000))
    left, right = rng.choice((("[", "]"), ('{"a":', "}")))
    text = left * levels + ("1" if left != "[" else "") + right * levels
    return rng.choice(("%s", '{"type": %s}', '{"type": "ack", "index": %s}', '{"prompt": %s}', '{"acks": %s}')) % text


def broken(rng: random.Random, rids: Sequence[str]) -> bytes:
    """A message as bytes, a few of them changed, lost or doubled; mostly no JSON, often no UTF-8."""
    text = bytearray(json.dumps(rng.choice((request, report))(rng, rids)).encode()[:5000])
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 2)] = rng.choice((b"", rng.randbytes(1), rng.randbytes(3), b'"', b"}", b"NaN"))
        text = text or bytearray(b"{")
    return bytes(text)


def message(rng: random.Random, rids: Sequence[str]) -> str | bytes:
    """One message's content: text where it is UTF-8."""
    kind = rng.random()
    if kind < 0.3:
        return json.dumps(request(rng, rids))
    if kind < 0.6:
        return json.dumps(report(rng, rids))
    if kind < 0.75:
        return json.dumps(
            {"type": "cancel"} if rng.random() < 0.8 else {"type": "cancel", "id": rng.choice(rids or ["x"])}
        )
    if kind < 0.85:
        return nested(rng)
    if kind < 0.9:
        return json.dumps(hostile_value(rng, rids))
    raw = broken(rng, rids)
    with suppress(UnicodeDecodeError):
        return raw.decode()
    return raw


def frame(opcode: int, data: bytes, *, last: bool = True) -> bytes:
    """A client's frame, masked with zeros."""
    size = len(data)
    length = bytes([128 | size]) if size < 126 else struct.pack("!BH", 254, size) if size < 65536 else b""
    return bytes([opcode | (last << 7)]) + (length or struct.pack("!BQ", 255, size)) + bytes(4) + data


def misframed(rng: random.Random, rids: Sequence[str]) -> bytes:
    """What no well-behaved library sends: reserved bits and opcodes, bad lengths, text that is none, noise."""
    data = rng.choice((b"", b"\xff\xfe", rng.randbytes(200), broken(rng, rids)))
    return rng.choice(
        (
            frame(1, b"\xc3\x28" + data),
            frame(2, data),
            frame(0, data),
            frame(rng.randrange(3, 8), data),
            bytes([0x80 | rng.choice((0x40, 0x20, 0x10)) | 1]) + frame(1, data)[1:],
            frame(9, rng.randbytes(200)),
            frame(8, struct.pack("!H", rng.choice((0, 999, 1005, 1006, 1015, 5000))) + data[:100]),
            frame(8, b"\x03"),
            frame(1, data, last=False) + frame(1, data),
            b"\x81\x05hello",
            b"\x81\xff" + struct.pack("!Q", 2**63 + 5) + bytes(4),
            b"\x81\xff" + struct.pack("!Q", 2**40) + bytes(4),
            rng.randbytes(rng.choice((1, 2, 50, 3000))),
        )
    )


class Fuzz:
    """`rids`: the ids of the streams that must not feel it, asked anew for each message."""

    def __init__(self, server: Server, seed: int, rids: Callable[[], list[str]]) -> None:
        self.server, self.rids = server, rids
        self.rng = random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._open: list[_Socket] = []

    def run(self, messages: int) -> None:
        """Sends so many more; the sockets stay open for the next call."""
        goal = self.sent.total() + messages
        while self.sent.total() < goal:
            if self.rng.random() < 0.25:
                self._call()
                continue
            if len(self._open) < OPEN_AT_ONCE:
                self._open.append(_Socket(self))
            sock = self.rng.choice(self._open)
            if not sock.step():
                self._open.remove(sock)

    def close(self) -> None:
        for sock in self._open:
            sock.leave("close")
        self._open = []

    def _call(self) -> None:
        """One request to one of the HTTP routes."""
        rng, rids = self.rng, self.rids()
        self.sent["http"] += 1
        if rng.random() < 0.2:
            path = "/tokenflow/" + rng.choice(("state", "config"))
            since = rng.choice(("", "-1", "1e3", "9" * 30, "\uff11", "0", str(2**62), "x" * 3000, "\0"))
            self._judge(
                path, self.server.http.request(rng.choice(("GET", "GET", "POST")), path, params={"since": since})
            )
            return
        victim = rng.choice(rids) if rids and rng.random() < 0.5 else "nobody"
        items = [{"id": victim, "token": "guess", "consumed_tokens": 10**6} for _ in range(rng.choice((1, 1, 5, 1001)))]
        if rng.random() < 0.6:
            items[0][rng.choice(("id", "token", "consumed_tokens", "index", "more"))] = hostile_value(rng, rids)
        if rng.random() < 0.7:
            body = json.dumps({rng.choice(("acks", "acks", "acks", "more")): items}).encode()
        else:
            body = rng.choice((broken(rng, rids), nested(rng).encode(), rng.randbytes(50), b"", b" " * (2 << 20)))
        kind = rng.choice(("application/json", "text/plain", "application/x-www-form-urlencoded", b"\xff"))
        reply = self.server.http.post("/tokenflow/ack", content=body, headers={"Content-Type": kind})
        self._judge("/tokenflow/ack", reply)
        if reply.status_code == 200 and any(a["verdict"] != "not_found" for a in reply.json()["acks"]):
            self.wrong.append(f"a report with a guessed token: {reply.text[:200]}")

    def _judge(self, path: str, reply: httpx.Response) -> None:
        self.answers[f"http {reply.status_code}"] += 1
        if reply.status_code >= 500:
            self.wrong.append(f"{path}: {reply.status_code} {reply.text[:200]} for {reply.request.content[:200]!r}")


class _Socket:
    """One hostile connection."""

    def __init__(self, fuzz: Fuzz) -> None:
        self._fuzz, self._rng = fuzz, fuzz.rng
        self._ws: ClientConnection = open_socket(fuzz.server, max_queue=4, ping_interval=None)
        self._ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE_S)
        self._reads = self._rng.random() < 0.7
        self._left = self._rng.choice((1, 5, 20, 60))
        self._own: str | None = None
        self._valid = True  # nothing but whole frames so far

    def step(self) -> bool:
        """Sends one message; whether the socket goes on."""
        rng, rids = self._rng, self._fuzz.rids()
        self._left -= 1
        try:
            if rng.random() < 0.06:
                self._valid = False
                self._raw("misframed", misframed(rng, rids))
            else:
                self._send(message(rng, rids))
            if self._reads:
                self._hear(rng.choice((0, 0, 1, 8)))
        except ConnectionClosed:
            self._closed(by_server=True)
            return False
        except OSError:
            self.leave("reset")
            return False
        if self._left > 0:
            return True
        self.leave(rng.choice(("close", "close", "reset", "half a frame", "read to the end")))
        return False

    def _send(self, said: str | bytes) -> None:
        data = said.encode() if isinstance(said, str) else said
        rng = self._rng
        if isinstance(said, bytes):
            self._valid = False
        if rng.random() < 0.15 and len(data) > 3:
            cuts = sorted(rng.sample(range(1, len(data)), min(3, len(data) - 1)))
            parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
            frames = [frame(0 if i else 1, p, last=i == len(parts) - 1) for i, p in enumerate(parts)]
            self._raw("fragments", frame(9, b"between").join(frames))
        else:
            self._raw("text" if isinstance(said, str) else "no UTF-8", frame(1, data))

    def _raw(self, kind: str, data: bytes) -> None:
        self._fuzz.sent[kind] += 1
        self._ws.socket.sendall(data)

    def _hear(self, count: int) -> None:
        for _ in range(count):
            try:
                self._take(json.loads(self._ws.recv(timeout=0.02)))
            except TimeoutError:
                return

    def _take(self, heard: dict[str, Any]) -> None:
        kind = str(heard.get("type", "chunk"))
        self._fuzz.answers[f"{kind} {heard['status']}" if kind == "error" else kind] += 1
        if kind == "started":
            self._own = heard["id"]
        foreign = kind == "chunk" and heard.get("id") != self._own and heard.get("id") in self._fuzz.rids()
        if foreign or (kind == "error" and heard["status"] >= 500):
            self._fuzz.wrong.append(f"heard on a hostile socket: {json.dumps(heard)[:400]}")

    def leave(self, how: str) -> None:
        self._fuzz.sent[how] += 1
        with suppress(OSError, WebSocketException, TimeoutError):
            if how == "reset":
                self._ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._ws.socket.close()
            elif how == "half a frame":
                self._ws.socket.sendall(b"\x81\xfe\x40\x00" + bytes(4) + b"{")
                self._ws.socket.shutdown(socket.SHUT_RDWR)
            elif how == "read to the end" and self._valid:
                self._ws.socket.sendall(frame(1, b'{"type": "cancel"}'))
                self._hear(1000)
        with suppress(OSError, WebSocketException):
            self._ws.close()
        self._closed()

    def _closed(self, *, by_server: bool = False) -> None:
        code = self._ws.close_code
        self._fuzz.answers[f"closed {code}"] += 1
        if self._ws.protocol.close_rcvd is None and not (by_server and self._valid):
            return  # broken off here, or for what was no frame
        if code in (1006, 1011):
            self._fuzz.wrong.append(f"closed by the server with {code}: {self._ws.close_reason}")
