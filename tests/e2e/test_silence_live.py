"""A parked stream is silent, and what is in between must not take it for dead (field report B30)."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.live import OURS, LiveStream, Server, body_of, serving, until

pytestmark = pytest.mark.e2e
IDLE_S = 2.0
# Parked from its 40th token for longer than the proxy waits, and once more before it ends.
STEPS, TOKENS = 3000, 160
SCRIPT = {"parks": [{"rid": "silent*", "at_token": at, "steps": STEPS} for at in (40, 120)]}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    script = folder / "script.json"
    script.write_text(json.dumps(SCRIPT))
    flags = ("--tokenflow-policy", "scripted", "--tokenflow-script", str(script), "--tokenflow-sse-comments", "0.5")
    with serving(OURS, folder, "--page-size", "16", *flags) as server:
        yield server


class IdleProxy:
    """Hangs up on a connection that says nothing for IDLE_S. `hung_up` counts those."""

    def __init__(self, url: str) -> None:
        self.to = (urlsplit(url).hostname, urlsplit(url).port)
        self.hung_up = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self.to)
                server.settimeout(IDLE_S)
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except TimeoutError:
            self.hung_up += counts
        except OSError:
            pass
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(scripted: Server) -> Iterator[IdleProxy]:
    proxy = IdleProxy(scripted.wake().url)
    yield proxy
    proxy.close()


class Busy:
    """A stream that never ends by itself: while it runs the engine makes steps, and the script counts them."""

    def __init__(self, server: Server) -> None:
        self._server, self._made = server, 0
        self._stream = self._next()

    def _next(self) -> LiveStream:
        self._made += 1
        return self._server.stream("keeps the engine busy", 1500, rid=f"busy-{self._made}")

    def keep_on(self) -> bool:
        if self._stream.closed:
            self._stream = self._next()
        return False

    def stop(self) -> None:
        self._stream.hang_up()


def raw_lines(url: str, route: str, body: dict[str, Any], lines: list[bytes]) -> None:
    import httpx

    with httpx.stream("POST", url + route, json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines.extend(line.encode() for line in reply.iter_lines())


def test_a_stream_that_is_parked_for_longer_than_a_proxy_waits_arrives_whole(
    scripted: Server, proxy: IdleProxy
) -> None:
    solo = scripted.generate("a long silence", TOKENS)["text"]
    busy, lines = Busy(scripted), []  # type: tuple[Busy, list[bytes]]
    body = body_of("a long silence", TOKENS, stream=True, rid="silent-1")
    reader = threading.Thread(target=raw_lines, args=(proxy.url, "/generate", body, lines))
    reader.start()
    until(lambda: busy.keep_on() or not reader.is_alive(), "the end of the stream", deadline_s=120)
    busy.stop()
    assert proxy.hung_up == 0
    events = [line for line in lines if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]" and json.loads(events[-2][6:])["text"] == solo
    assert set(lines) - set(events) == {b"", b": still here"}  # nothing else, and none inside an event
    silent = [i for i, line in enumerate(lines) if line == b": still here"]
    print(f"{len(silent)} comments, {len(silent) * 0.5:g} s of silence; the proxy waits {IDLE_S:g} s")
    assert silent and silent[-1] < lines.index(b"data: [DONE]")
    told = [t["what"] for t in scripted.state()["transitions"] if t["id"] == "silent-1"]
    assert (told.count("park"), told.count("return")) == (2, 2), told


def test_the_official_client_does_not_notice_comments(scripted: Server, proxy: IdleProxy) -> None:
    import openai

    client = openai.OpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "prompt": "a long silence", "max_tokens": TOKENS, "temperature": 0}
    more = {"ignore_eos": True}
    solo = client.completions.create(**asked, extra_body=more).choices[0].text
    busy, pieces = Busy(scripted), []  # type: tuple[Busy, list[str]]

    def read() -> None:
        for chunk in client.completions.create(**asked, stream=True, extra_body={**more, "rid": "silent-2"}):
            pieces.append(chunk.choices[0].text)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: busy.keep_on() or not reader.is_alive(), "the end of the stream", deadline_s=120)
    busy.stop()
    assert proxy.hung_up == 0 and "".join(pieces) == solo
