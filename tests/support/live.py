"""A real server of this checkout, and clients of it that can stop wherever a test wants.

Owns start, stop and waiting; judges nothing. Invariant: only processes that were started here are ever signalled, and
of the servers started here one at most is awake: an idle SGLang polls without pause.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import httpx

from tokenflow_sgl.bench.models import ensure_model
from tokenflow_sgl.bench.servers import ServerProcess, free_port

MODEL = Path(__file__).parents[2] / "models" / "tiny"
POOL_TOKENS = 2048
OURS, STOCK = "tokenflow_sgl.launch_server", "sglang.launch_server"
START_DEADLINE_S = 180.0
GREEDY_PROMPT, GREEDY_TOKENS = "the same question to every server", 300
_POLL_S = 0.02
_live: list[ServerProcess] = []


def command(module: str, port: int, *flags: str) -> list[str]:
    ensure_model("tiny", MODEL)
    return [
        sys.executable, "-m", module, "--model-path", str(MODEL), "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.1",
        "--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "256", "--hicache-ratio", "4",
        "--skip-server-warmup", "--enable-custom-logit-processor", "--enable-metrics", *flags,
    ]  # fmt: skip


def until(seen: Callable[[], Any], what: str, *, deadline_s: float = 30.0) -> Any:
    """Ask until the answer is true, and return it. AssertionError with `what` after deadline_s seconds."""
    deadline = time.monotonic() + deadline_s
    while not (answer := seen()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(_POLL_S)
    return answer


class Server:
    """One live server."""

    def __init__(self, process: ServerProcess, journal: Path | None) -> None:
        self.process = process
        self.url = process.url
        self.log = process.log
        self.journal = journal
        self.pid = process._process.pid
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def wake(self) -> Server:
        """Let this server run and all others sleep."""
        asleep(but=self.process)
        self.process._signal(signal.SIGCONT)
        return self

    def state(self, since: int = 0) -> dict[str, Any]:
        reply = self.http.get("/tokenflow/state", params={"since": since})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def row(self, rid: str, where: Callable[[dict[str, Any]], Any] = bool, *, deadline_s: float = 30.0) -> Any:
        """The state row of `rid`, once there is one for which `where` holds."""

        def look() -> Any:
            return next((r for r in self.state()["streams"] if r["id"] == rid and where(r)), None)

        return until(look, f"{rid} in the state as wanted", deadline_s=deadline_s)

    def is_at_baseline(self) -> bool:
        state = self.state()
        memory = state["memory"]
        return not state["streams"] and memory["device_free_tokens"] == memory["device_total_tokens"]

    def settle(self, *, deadline_s: float = 30.0) -> None:
        """Until nothing is in flight and the device pool is free or evictable as a whole."""
        until(self.is_at_baseline, "no stream and a free pool", deadline_s=deadline_s)

    def flush(self) -> dict[str, int]:
        """Empty both cache tiers; the memory after that. A page that somebody forgot stays taken."""

        def flushed() -> bool:
            return self.http.post("/flush_cache").status_code == 200

        until(flushed, "an idle server to flush")
        return self.state()["memory"]

    def metrics(self) -> str:
        return self.http.get("/metrics/").text

    def metric(self, name: str) -> float:
        values = [float(line.rsplit(" ", 1)[1]) for line in self.metrics().splitlines() if line.startswith(name + "{")]
        assert len(values) == 1, f"{name}: {values}"
        return values[0]

    def generate(self, prompt: str | list[int], max_new_tokens: int, **extra: Any) -> dict[str, Any]:
        """Greedy, not streamed, without EOS: the reply of /generate."""
        reply = self.http.post("/generate", json=body_of(prompt, max_new_tokens, **extra))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(
        self,
        prompt: str | list[int],
        max_new_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> LiveStream:
        """The same, streamed; `extra` are fields of the body."""
        return self.post_stream("/generate", body_of(prompt, max_new_tokens, stream=True, **extra), headers)

    def post_stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> LiveStream:
        return LiveStream(self.url, path, body, headers or {})


def body_of(prompt: str | list[int], max_new_tokens: int, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **extra.pop("sampling", {})}
    name = "text" if isinstance(prompt, str) else "input_ids"
    return {name: prompt, "sampling_params": sampling, **extra}


@contextmanager
def serving(
    module: str, folder: Path, *flags: str, journal: bool = False, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server, ready and awake. The others sleep from now on, until they are woken."""
    port = free_port()
    path = folder / "journal" if journal else None
    extra = ["--tokenflow-journal", str(path)] if path else []
    asleep()
    with mock.patch.dict(os.environ, env or {}):
        process = ServerProcess(
            module, command(module, port, *flags, *extra), url=f"http://127.0.0.1:{port}", log=folder / "log"
        )
    _live.append(process)
    try:
        process.wait_ready(deadline_s=START_DEADLINE_S)
        yield Server(process, path)
    finally:
        _live.remove(process)
        # Killed: asked, upstream takes 5 to 10 s to notice. How a server ends when it is asked has a test of its own.
        process._signal(signal.SIGKILL)
        process.stop()


def asleep(but: ServerProcess | None = None) -> None:
    """All servers of this test run stop where they are, but one, until Server.wake()."""
    for process in _live:
        if process is not but:
            process._signal(signal.SIGSTOP)


class LiveStream:
    """A streaming request, read by a thread; the client can wait for what it needs and hang up whenever it likes."""

    def __init__(self, url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error_body = ""
        self.ended = False  # by the server, with [DONE]
        self.closed = False
        self._changed = threading.Condition()
        at = urlsplit(url)
        assert at.hostname is not None
        self._connection = http.client.HTTPConnection(at.hostname, at.port, timeout=120)
        data = json.dumps(body).encode()
        self._connection.request("POST", path, data, {"content-type": "application/json", **headers})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with suppress(OSError, http.client.HTTPException, ValueError):
                self._read_reply(self._connection.getresponse())
        finally:
            with self._changed:
                self.closed = True
                self._changed.notify_all()
            self._connection.close()

    def _read_reply(self, reply: http.client.HTTPResponse) -> None:
        with self._changed:
            self.status, self.headers = reply.status, {k.lower(): v for k, v in reply.getheaders()}
            self._changed.notify_all()
        if reply.status != 200:
            self.error_body = reply.read().decode()
            return
        for line in reply:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            with self._changed:
                if payload == b"[DONE]":
                    self.ended = True
                else:
                    self.events.append(json.loads(payload))
                self._changed.notify_all()

    def _wait(self, seen: Callable[[], bool], what: str, deadline_s: float) -> None:
        with self._changed:
            ok = self._changed.wait_for(lambda: seen() or self.closed, deadline_s)
        assert ok and seen(), (
            f"{what}: {len(self.events)} events, status {self.status} {self.error_body}, {self.closed}"
        )

    def wait_reply(self, *, deadline_s: float = 30.0) -> LiveStream:
        self._wait(lambda: self.status != 0, "no reply", deadline_s)
        return self

    def wait_events(self, count: int, *, deadline_s: float = 60.0) -> LiveStream:
        self._wait(lambda: len(self.events) >= count, f"not {count} events", deadline_s)
        return self

    def wait_end(self, *, deadline_s: float = 60.0) -> LiveStream:
        """Until the server ends the reply, with [DONE] or a refusal."""
        self._wait(lambda: self.closed, "no end", deadline_s)
        return self

    def hang_up(self) -> None:
        """The client vanishes: its connection ends in both directions."""
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(2)
        self._thread.join(10)

    @property
    def text(self) -> str:
        """What a reader of /generate has seen: its texts are cumulative."""
        return self.events[-1]["text"] if self.events else ""

    @property
    def finish(self) -> Any:
        return self.events[-1]["meta_info"]["finish_reason"]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.error_body)["error"]


def read_together(streams: Sequence[LiveStream], *, deadline_s: float = 120.0) -> None:
    """Until every stream has ended by itself."""
    for stream in streams:
        stream.wait_end(deadline_s=deadline_s)
        assert stream.ended, f"status {stream.status} {stream.error_body}, {len(stream.events)} events, no [DONE]"
