"""A stand-in of a TokenFlow server for the page: its state route with any number of streams, and a chat that says what
it is told to say.

Owns invented numbers in the shapes of adapter/state_report.py. Invariant: it remembers every request and its key.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

PHASES = ("running", "running", "running", "parked", "waiting")
HEADERS = {"x-tokenflow-request-id": "mine", "x-tokenflow-ack-token": "secret"}


class StateServer:
    """`app` is what to serve; the rest is what a test turns, and what it finds."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.polls = 0
        self.seen: list[tuple[str, str | None, bytes]] = []  # path, key, body
        self.texts: list[str] = []
        self.ends = True  # with [DONE]
        self.hold = threading.Event()  # set: the chat goes on to its end
        self.hold.set()
        self.left = threading.Event()  # the client of a chat is gone
        self.state_status = 200
        self.websocket = False  # what the settings say; the route is there
        self.heard: list[dict[str, Any]] = []  # over the socket
        self.socket_keys: list[str | None] = []
        routes = [
            Route("/tokenflow/state", self.state),
            Route("/tokenflow/config", self.config),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenflow/ack", self.ack, methods=["POST"]),
            WebSocketRoute("/tokenflow/stream", self.socket),
            Route("/flush_cache", self.ack, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _note(self, request: Request) -> None:
        self.seen.append((request.url.path, request.headers.get("authorization"), await request.body()))

    def requests(self, path: str) -> list[tuple[str | None, bytes]]:
        return [(key, body) for at, key, body in self.seen if at == path]

    async def state(self, request: Request) -> Response:
        await self._note(request)
        self.polls += 1
        if self.state_status != 200:
            return JSONResponse({"error": {"message": "a key is missing"}}, self.state_status)
        return JSONResponse(state_of(self.streams, self.polls, int(request.query_params["since"])))

    async def config(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"policy": "tokenflow", "release": "0.5.23", "websocket": self.websocket})

    async def models(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def ack(self, request: Request) -> Response:
        await self._note(request)
        return JSONResponse({"acks": []})

    async def chat(self, request: Request) -> Response:
        await self._note(request)
        return StreamingResponse(self._words(), headers=HEADERS, media_type="text/event-stream")

    async def socket(self, websocket: WebSocket) -> None:
        """One answer; it ends when `hold` is set or its client cancels, without a word where `ends` is not."""
        self.socket_keys.append(websocket.headers.get("authorization"))
        await websocket.accept("tokenflow")
        self.heard.append(await websocket.receive_json())
        await websocket.send_json({"type": "started", "id": "mine"})
        for number, text in enumerate(self.texts):
            await websocket.send_json(chunk_of(number, text))
        listening = asyncio.create_task(self._listen(websocket))
        while not (self.hold.is_set() or listening.done()):
            await asyncio.sleep(0.02)
        listening.cancel()
        if self.left.is_set():
            return
        if self.ends:
            await websocket.send_json({"type": "done"})
        await websocket.close(1000 if self.ends else 1011)

    async def _listen(self, websocket: WebSocket) -> None:
        try:
            while True:
                self.heard.append(await websocket.receive_json())
        except WebSocketDisconnect:
            self.left.set()

    async def _words(self) -> AsyncIterator[str]:
        try:
            for number, text in enumerate(self.texts):
                yield f"data: {json.dumps(chunk_of(number, text))}\n\n"
            while not self.hold.is_set():
                await asyncio.sleep(0.02)
            if self.ends:
                yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


def chunk_of(number: int, text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": {"completion_tokens": number + 1}}


def state_of(streams: int, poll: int, since: int) -> dict[str, Any]:
    """Every stream's numbers move from poll to poll, one stream in ten is parked or comes back at each."""
    turned = [i for i in range(streams) if i % 10 == poll % 10]
    seq = poll * (len(turned) + 1)
    transitions = [
        {"seq": seq + n, "at_s": poll * 0.5, "id": rid_of(i), "what": "park" if poll % 2 else "return", "tokens": 64}
        for n, i in enumerate(turned)
    ]
    return {
        "active": True, "policy": "tokenflow", "release": "0.5.23", "hooks": [], "steps": poll,
        "counters": {"parks": 5 * poll, "returns": 4 * poll, "late_returns": 0, "acks": poll},
        "seq": seq + len(turned), "now_s": poll * 0.5, "streams": [row_of(i, poll) for i in range(streams)],
        "transitions": [t for t in transitions if t["seq"] > since],
        "memory": {
            "device_total_tokens": 120_000, "device_free_tokens": 4_000, "host_total_tokens": 480_000,
            "host_free_tokens": 200_000, "host_degraded": 0, "storing_tokens": 512, "loading_tokens": 0,
        },
        "forecast": {
            "horizon_s": 4.0, "arrivals_per_s": {"fast": 2.4, "slow": 1.1}, "demand_tokens": 3600.4,
            "tokens_per_s": {"fast": 900.0, "slow": 500.0}, "error_ratio": 0.2, "bias_ratio": 0.1, "mode": "steady",
        },
    }  # fmt: skip


def rid_of(i: int) -> str:
    return f"{i:04d}{'abcdef0123456789' * 2}"[:32]


def row_of(i: int, poll: int) -> dict[str, Any]:
    phase = PHASES[(i + (poll if i % 10 == poll % 10 else 0)) % len(PHASES)]
    sent = 0 if phase == "waiting" else 100_000 + 37 * i + 11 * poll
    read = sent * (i % 100) // 100
    return {
        "id": rid_of(i), "class": "reader", "read_rate_tok_s": 6.0 + i % 7, "phase": phase, "parks": i % 4,
        "generated_tokens": sent, "consumed_tokens": float(read), "buffer_tokens": float(sent - read),
        "slack_s": (sent - read) / (6.0 + i % 7),
    }  # fmt: skip
