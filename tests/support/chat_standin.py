"""A chat server that says what a test wrote down, for what a real one cannot be made to say.

Owns its sockets and what it heard; judges nothing. Invariant: it answers each request once, and in plain HTTP/1.0.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEADERS = {"X-TokenFlow-Request-Id": "rid", "X-TokenFlow-Ack-Token": "secret"}


def event(text: str = "", total: int | None = None, **more: Any) -> bytes:
    usage = None if total is None else {"completion_tokens": total, "prompt_tokens": 1, "total_tokens": total + 1}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": more.pop("reason", None)}
    chunk = {"id": "rid", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps({**chunk, "usage": usage, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class StandIn:
    """`parts`: the reply of a chat, sent in turn and then cut; `status` and `headers` of it.

    What it got lies in `asked`, `acks` and, one list a request, `ack_requests`. `hold`: set, it keeps the connection
    open behind the parts until the client has gone.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.status = 200
        self.headers = dict(HEADERS)
        self.hold = False
        self.verdict = "accepted"
        self.asked: list[dict[str, Any]] = []
        self.acks: list[dict[str, Any]] = []
        self.ack_requests: list[list[dict[str, Any]]] = []
        self.gone = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        standin = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                standin._ack(self, body) if self.path == "/tokenflow/ack" else standin._chat(self, body)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _ack(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.acks += body["acks"]
        self.ack_requests.append(body["acks"])
        reply = json.dumps({"acks": [{"verdict": self.verdict} for _ in body["acks"]]}).encode()
        request.send_response(200)
        request.send_header("content-length", str(len(reply)))
        request.end_headers()
        request.wfile.write(reply)

    def _chat(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.asked.append({"path": request.path, "key": request.headers.get("authorization"), **body})
        request.send_response(self.status)
        for name, value in {"content-type": "text/event-stream", **self.headers}.items():
            request.send_header(name, value)
        request.end_headers()  # HTTP/1.0: the end of the connection is the end of the reply
        for part in self.parts:
            request.wfile.write(part)
        request.wfile.flush()
        if self.hold and not request.rfile.read(1):
            self.gone.set()
