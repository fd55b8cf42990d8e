"""Innocent streams beside whatever else a server is sent: each answer is compared with the one it gives alone.

Owns the streams, their readers' reports and what a server must be like when all is over; sends nothing hostile.
Invariant: a bystander reports honestly, far below the limit of reports, and asks for nothing out of the ordinary.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from websockets.exceptions import WebSocketException

from support.fuzz import Fuzz
from support.live import Server, until
from support.sockets import chat, hear, open_socket, say, texts

TOKENS = 240
RATE_TOK_S = 8.0
_REPORT_AT = (20, 60, 100)  # tokens received
_TROUBLE = ("Traceback", "Exception in", "hit an exception", " 500 Internal")
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def _prompt(i: int) -> str:
    return f"bystander number {i} reads on. " * 3


class Bystanders:
    """One SSE and one WebSocket stream after the other, each kind `pairs` times side by side, until stop()."""

    def __init__(self, server: Server, pairs: int) -> None:
        self.server = server
        self.rounds: Counter[str] = Counter()
        self.accepted = 0
        self.wrong: list[str] = []
        self._live: dict[str, float] = {}  # id to when it was asked for
        self._stopped = threading.Event()
        kinds = [(over, i) for i in range(pairs) for over in (self._events, self._socket)]
        self._solo = {(over.__name__, i): over(i, f"solo{over.__name__}-{i}") for over, i in kinds}
        self.accepted = 0
        self._threads = [threading.Thread(target=self._go_on, args=kind, daemon=True) for kind in kinds]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(120.0)
            if thread.is_alive():
                self.wrong.append("a bystander did not end")

    def rids(self) -> list[str]:
        return list(self._live)

    def check_consumption(self) -> None:
        """What the scheduler believes was read is no more than the reader could: nobody else reported for it."""
        asked = dict(self._live)
        rows = {row["id"]: row["consumed_tokens"] for row in self.server.state()["streams"]}
        for rid, at_s in asked.items():
            most = 2 * RATE_TOK_S * (time.monotonic() - at_s) + 20
            if (rows.get(rid) or 0) > most:
                self.wrong.append(f"{rid}: {rows[rid]} tokens consumed, {most:.0f} at most")

    def _go_on(self, over: Callable[[int, str], Any], i: int) -> None:
        name, count = over.__name__, 0
        try:
            while not self._stopped.is_set():
                count += 1
                if (got := over(i, f"bystander{name}-{i}-{count}")) != self._solo[name, i]:
                    self.wrong.append(f"{name} {i}, round {count}: another answer than alone: {got}")
                self.rounds[name] += 1
        except Exception as error:
            self.wrong.append(f"{name} {i}, round {count}: {error!r}"[:500])

    def _events(self, i: int, rid: str) -> Any:
        """The token ids of an answer by server-sent events."""
        self._live[rid] = asked_s = time.monotonic()
        stream = self.server.stream(_prompt(i), TOKENS, rid=rid, tokenflow={"read_rate": RATE_TOK_S}).wait_reply()
        for tokens in _REPORT_AT:
            stream.wait_events(1)
            until(lambda n=tokens: stream.closed or stream.events[-1]["meta_info"]["completion_tokens"] >= n, "tokens")
            item = {
                "id": rid,
                "token": stream.headers["x-tokenflow-ack-token"],
                "consumed_tokens": read(asked_s, tokens),
            }
            reply = self.server.http.post("/tokenflow/ack", json={"acks": [item]})
            verdict = reply.json()["acks"][0]["verdict"] if reply.status_code == 200 else reply.text
            self.accepted += verdict == "accepted"
            if verdict not in ("accepted", "not_found"):  # it may have ended meanwhile
                self.wrong.append(f"{rid}: a report: {verdict}")
        stream.wait_end()
        del self._live[rid]
        return stream.ended, stream.events[-1]["output_ids"], stream.finish

    def _socket(self, i: int, rid: str) -> Any:
        """Texts, tokens counted and the end of an answer over a WebSocket."""
        with open_socket(self.server) as ws:
            self._live[rid] = asked_s = time.monotonic()
            body = chat(TOKENS, rid=rid, tokenflow={"read_rate": RATE_TOK_S}, stream_options=USAGE)
            say(ws, {**body, "messages": [{"role": "user", "content": _prompt(i)}]})
            got, due = [hear(ws)], list(_REPORT_AT)
            while got[-1].get("type") not in ("done", "cancelled", "error"):
                got.append(hear(ws))
                tokens = (got[-1].get("usage") or {}).get("completion_tokens", 0)
                if due and due[0] <= tokens < TOKENS:
                    say(ws, {"type": "ack", "consumed_tokens": read(asked_s, due.pop(0))})
                if got[-1].get("type") == "ack" and got[-1]["verdict"] != "not_found":
                    self.wrong.append(f"{rid}: a report: {got[-1]}")
        del self._live[rid]
        chunks = [c for c in got if "type" not in c]
        if {c["id"] for c in chunks} != {rid} or got[0] != {"type": "started", "id": rid}:
            self.wrong.append(f"{rid}: messages of another stream, or none: {got[0]}, {got[-1]}")
        return got[-1], texts(got), chunks[-1]["usage"]["completion_tokens"] if chunks else None


def read(since_s: float, received: int) -> int:
    return min(received, int(RATE_TOK_S * (time.monotonic() - since_s)))


def trial(
    server: Server,
    seed: int,
    messages: int,
    *,
    every: int = 250,
    pairs: int = 1,
    more: Callable[[], None] | None = None,
) -> tuple[Fuzz, Bystanders, list[str]]:
    """So many hostile messages beside bystanders; all that went wrong. `more`: called once, amid the rest."""
    server.settle()
    log_from = server.log.stat().st_size
    beside = Bystanders(server, pairs)
    server.settle()
    before, acks_before = server.state()["counters"]["acks"], accepted(server)
    fuzz = Fuzz(server, seed, beside.rids)
    beside.start()
    left = messages
    try:
        while left > 0:
            fuzz.run(min(every, left))
            left -= every
            beside.check_consumption()
            if more is not None:
                more()
                more = None
            if server.http.get("/health").status_code != 200:
                fuzz.wrong.append("/health")
    except (httpx.HTTPError, OSError, WebSocketException) as error:
        return fuzz, beside, [*fuzz.wrong, *beside.wrong, f"no answer: {error!r}", *logged(server, log_from)]
    fuzz.close()
    beside.stop()
    wrong = [*fuzz.wrong, *beside.wrong]
    server.settle(deadline_s=60.0)
    config = server.http.get("/tokenflow/config").json()["http"]["acks"]
    if config["streams"]:
        wrong.append(f"streams that can still be reported on: {config['streams']}")
    counted, taken = server.state()["counters"]["acks"] - before, accepted(server) - acks_before
    if not beside.accepted <= counted <= taken:
        wrong.append(f"reports: {beside.accepted} accepted of bystanders' events, {counted} counted, {taken} accepted")
    memory = server.flush()
    wrong += [f"{tier} pages taken: {memory}" for tier in ("device", "host") if not is_free(memory, tier)]
    wrong += logged(server, log_from)
    return fuzz, beside, wrong


def logged(server: Server, start: int) -> list[str]:
    with server.log.open(errors="replace") as log:
        log.seek(start)
        return [f"log, {count} times: {what}" for what, count in troubles(log.read()).items()]


def troubles(log: str) -> Counter[str]:
    """What a log tells of failures: of a traceback its last place and its last line."""
    found: Counter[str] = Counter()
    lines = log.splitlines()
    for i, line in enumerate(lines):
        if "Traceback (most recent" in line:
            end = next((n for n in range(i + 1, len(lines)) if not lines[n].startswith((" ", "+"))), len(lines) - 1)
            place = next((text for text in reversed(lines[i:end]) if text.startswith("  File")), "")
            before = next((text for text in reversed(lines[max(0, i - 3) : i]) if text.strip()), "")
            if not is_uvicorns(lines[i:end], lines[end]):
                found[f"{lines[end][:300]} at{place[:200]} after {before[:200]!r}"] += 1
        elif any(text in line for text in _TROUBLE):
            found[line[:200]] += 1
    return found


def is_uvicorns(traceback: list[str], says: str) -> bool:
    """It tells of each text that is no UTF-8 with a traceback, and of one that comes behind its own close with two."""
    told = says.startswith(("UnicodeDecodeError:", "websockets.exceptions.InvalidState:"))
    inside = any("/uvicorn/protocols/websockets/" in line for line in traceback)
    return told and inside and not any("/adapter/" in line or "/sglang/" in line for line in traceback)


def accepted(server: Server) -> int:
    return int(server.http.get("/tokenflow/config").json()["http"]["acks"]["accepted"])


def is_free(memory: dict[str, int], tier: str) -> bool:
    return memory[f"{tier}_free_tokens"] == memory[f"{tier}_total_tokens"]
