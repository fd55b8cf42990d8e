"""Requests that cannot be served and clients that leave: a clear end, nothing left behind, and nobody else hurt."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.live import OURS, POOL_TOKENS, LiveStream, Server, body_of, read_together, serving, until

pytestmark = pytest.mark.e2e
TOKENS = 400
SLOW = {"read_rate": 0.5}  # a reader that leaves everything in its buffer: nothing is cheaper to park


def text_of(i: int) -> str:
    return f"reader number {i} reads slowly. " * 8


@cache
def _solo(url: str, prompt: str, tokens: int) -> str:
    import httpx

    return httpx.post(f"{url}/generate", json=body_of(prompt, tokens), timeout=60).json()["text"]


def solo(server: Server, prompt: str, tokens: int = TOKENS) -> str:
    """What `prompt` gives when nothing else runs."""
    server.settle()
    return _solo(server.url, prompt, tokens)


def crowd(server: Server, count: int, name: str, *, tokens: int = TOKENS) -> list[LiveStream]:
    """Slow readers whose answers need more than the pool together: with eight or more of them somebody is parked."""
    return [server.stream(text_of(i), tokens, rid=f"{name}-{i}", tokenflow=SLOW) for i in range(count)]


def parked_ids(server: Server, name: str) -> list[str]:
    return [r["id"] for r in server.state()["streams"] if r["phase"] == "parked" and r["id"].startswith(name)]


def first_parked(server: Server, streams: list[LiveStream], name: str) -> LiveStream:
    """A stream that was parked a moment ago, and that the state route showed as such."""
    rid = until(lambda: parked_ids(server, name), "a parked stream")[0]
    return streams[int(rid.rsplit("-", 1)[1])]


def assert_at_baseline(server: Server) -> None:
    """No stream, and after a flush both tiers are free to the last token."""
    server.settle()
    memory = server.flush()
    assert memory["device_free_tokens"] == memory["device_total_tokens"]
    assert memory["host_free_tokens"] == memory["host_total_tokens"]


# ---- requests that do not fit


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_prompt_longer_than_the_pool_is_refused(server: Server, route: str, stream: bool) -> None:
    """And a stream beside it does not notice."""
    expected = solo(server, text_of(0))
    beside = server.stream(text_of(0), TOKENS, tokenflow=SLOW).wait_events(5)
    words = "word " * (POOL_TOKENS + 100)
    if route == "/generate":
        request: dict[str, Any] = body_of(words, 8, stream=stream)
    elif route == "/v1/completions":
        request = {"model": "tiny", "prompt": words, "max_tokens": 8, "stream": stream}
    else:
        request = {"model": "tiny", "messages": [{"role": "user", "content": words}], "max_tokens": 8, "stream": stream}
    reply = server.http.post(route, json=request)
    # Upstream begins the reply of a streaming /generate before the scheduler has judged the length.
    assert reply.status_code == 400 or (reply.status_code == 200 and stream), reply.text
    assert "too long" in reply.text or "longer than" in reply.text or "exceed" in reply.text, reply.text
    if stream and reply.status_code == 200:
        assert "400" in reply.text or "BadRequest" in reply.text, reply.text
    read_together([beside])
    assert beside.text == expected
    assert_at_baseline(server)


@pytest.mark.parametrize("short_by", [100, 40, 33, 32, 31, 17, 16, 15, 8, 7])
def test_a_prompt_that_fills_the_pool_is_served_or_refused_but_never_held_for_ever(
    server: Server, short_by: int
) -> None:
    """Between them lies the prompt that fits with nothing left to grow in."""
    prompt = [100 + i % 800 for i in range(POOL_TOKENS - short_by)]
    reply = server.http.post("/generate", json=body_of(prompt, 4), timeout=30)
    if reply.status_code == 200:
        assert reply.json()["meta_info"]["completion_tokens"] <= 4
    else:
        assert reply.status_code == 400, reply.text
    assert_at_baseline(server)


def test_a_prompt_that_fills_the_pool_waits_for_the_crowd_and_then_runs(server: Server) -> None:
    prompt = [100 + i % 800 for i in range(POOL_TOKENS - 200)]
    alone = server.generate(prompt, 20)["text"]
    expected = [solo(server, text_of(i)) for i in range(3)]
    streams = crowd(server, 3, "before-big")
    streams[-1].wait_events(5)
    big = server.stream(prompt, 20, tokenflow=SLOW)
    read_together([*streams, big])
    assert big.text == alone
    assert [s.text for s in streams] == expected
    assert_at_baseline(server)


def test_an_answer_that_cannot_fit_ends_at_the_pool_and_the_others_do_not_notice(server: Server) -> None:
    """It asks for five pools; upstream cuts that to what the pool can hold."""
    expected = [solo(server, text_of(i)) for i in range(2)]
    endless = server.stream("on and on", 5 * POOL_TOKENS, rid="endless", tokenflow=SLOW)
    endless.wait_events(50)
    streams = crowd(server, 2, "beside-endless")
    read_together(streams)
    assert [s.text for s in streams] == expected
    read_together([endless])
    assert endless.finish["type"] == "length"
    assert POOL_TOKENS - 100 < endless.events[-1]["meta_info"]["completion_tokens"] < POOL_TOKENS
    assert_at_baseline(server)


# ---- clients that leave


@pytest.mark.parametrize("when", ["before the first token", "in mid-stream", "while parked"])
def test_a_client_that_vanishes_leaves_nothing_behind(server: Server, when: str) -> None:
    name = when.replace(" ", "-")
    expected = [solo(server, text_of(i)) for i in range(9)]
    aborts = server.state()["counters"]["aborts"]
    streams = crowd(server, 9, name)
    if when == "while parked":
        gone = first_parked(server, streams, name)
    elif when == "in mid-stream":
        gone = streams[3].wait_events(20)
    else:
        # Five chunks of prompt: there is time to leave in its middle.
        prompt = [100 + i % 700 for i in range(1280)]
        gone = server.stream(prompt, TOKENS, rid=f"{name}-9", tokenflow=SLOW)
        server.row(f"{name}-9")
    rid = gone.events[0]["meta_info"]["id"] if gone.events else f"{name}-9"
    gone.hang_up()
    assert gone.events or when == "before the first token"
    seen_s = time.monotonic()
    until(lambda: rid not in {r["id"] for r in server.state()["streams"]}, f"{rid} gone")
    print(f"{when}: gone after {time.monotonic() - seen_s:.2f} s")
    rest = [s for s in streams if s is not gone]
    read_together(rest)
    wanted = [text for s, text in zip(streams, expected, strict=True) if s is not gone]
    assert [s.text for s in rest] == wanted
    state = server.state()
    assert state["counters"]["aborts"] == aborts + 1
    assert_at_baseline(server)


def test_an_abort_of_a_parked_stream_ends_it_and_no_stream_whose_id_begins_alike(server: Server) -> None:
    """Stock would end job-10 and job-11 with job-1."""
    expected = [solo(server, text_of(i)) for i in range(12)]
    streams = crowd(server, 12, "job")
    until(lambda: "job-1" in parked_ids(server, "job"), "job-1 parked")
    assert server.http.post("/abort_request", json={"rid": "job-1"}).status_code == 200
    streams[1].wait_end()
    assert streams[1].finish["type"] == "abort"
    # What it got before is the beginning of its answer.
    assert len(streams[1].events) > 1 and expected[1].startswith(streams[1].events[-2]["text"])
    rest = [s for i, s in enumerate(streams) if i != 1]
    read_together(rest)
    assert [s.text for s in rest] == [text for i, text in enumerate(expected) if i != 1]
    assert all(s.finish == {"type": "length", "length": TOKENS} for s in rest)
    assert_at_baseline(server)


def test_an_abort_of_all_ends_parked_running_and_waiting_streams(server: Server) -> None:
    streams = crowd(server, 14, "all")
    first_parked(server, streams, "all")
    assert server.http.post("/abort_request", json={"abort_all": True}).status_code == 200
    for stream in streams:
        stream.wait_end()
        assert stream.finish["type"] in ("abort", "length")
    assert sum(s.finish["type"] == "abort" for s in streams) > 8
    assert_at_baseline(server)


# ---- twenty at once (field report B26)

# A process of its own that reads K tokens of each of its streams, says so, and waits to be killed.
READER = """
import socket, sys
port, count, need = map(int, sys.argv[1:4])
request = sys.stdin.buffer.read()
socks = []
for i in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request.replace(b"RID%02d" % 0, b"RID%02d" % i))
    socks.append(sock)
for sock in socks[:need]:
    sock.recv(1)
print("read", flush=True)
socks[0].recv(1 << 30, socket.MSG_WAITALL)
"""


def raw_request(rid: str, tokens: int = 2000) -> bytes:
    body = json.dumps(body_of("twenty readers", tokens, stream=True, rid=rid, tokenflow={"read_rate": 1000})).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def assert_cut_short(server: Server, before: dict[str, Any], name: str) -> None:
    """All twenty ended by an abort, each long before its 2,000 tokens; nothing runs."""
    after = server.state(before["seq"])
    ends = {t["id"]: t["tokens"] for t in after["transitions"] if t["what"] == "finish" and t["id"].startswith(name)}
    assert len(ends) == 20 and max(ends.values()) < 1000, ends
    assert after["counters"]["aborts"] == before["counters"]["aborts"] + 20
    until(lambda: server.metric("tokenflow:aborts_total") == after["counters"]["aborts"], "the aborts in the metrics")
    until(lambda: server.metric("sglang:num_running_reqs") == 0, "running 0 in the metrics")


def read_until(socks: list[socket.socket], tokens: int, *, of: int) -> None:
    """Until `of` of the sockets have received that many events."""
    seen = dict.fromkeys(socks, 0)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        deadline = time.monotonic() + 60
        while sum(n >= tokens for n in seen.values()) < of:
            assert time.monotonic() < deadline, seen.values()
            for key, _ in selector.select(1.0):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                seen[sock] += sock.recv(1 << 20).count(b"data: ")


@pytest.mark.parametrize(("tokens", "how"), [(0, "close"), (1, "close"), (50, "close"), (50, "reset"), (1, "half")])
def test_twenty_streams_that_are_cut_off_are_soon_gone(server: Server, tokens: int, how: str) -> None:
    """Of 2,000 tokens each; closed, reset, or closed in one direction only, after so many tokens of the first ones."""
    expected = solo(server, text_of(0))
    port = int(server.url.rsplit(":", 1)[1])
    before = server.state()
    mine = f"beside-{tokens}-{how}"  # stock aborts whoever has the id of a stream that ended 2 s ago
    beside = server.stream(text_of(0), TOKENS, rid=mine, tokenflow={"read_rate": 5})
    socks = []
    for i in range(20):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(raw_request(f"cut-{tokens}-{how}-{i}"))
        socks.append(sock)
    if tokens == 0:
        # All of them are in the scheduler, or their end would be no abort.
        until(lambda: len(server.state()["streams"]) >= 20, "twenty streams", deadline_s=30.0)
    read_until(socks, tokens, of=4)
    since_s = time.monotonic()
    for sock in socks:
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
    until(lambda: {r["id"] for r in server.state()["streams"]} <= {mine}, "no stream of theirs", deadline_s=60.0)
    print(f"{tokens} tokens, {how}: 20 streams gone after {time.monotonic() - since_s:.2f} s")
    read_together([beside])
    assert beside.text == expected
    for sock in socks:
        sock.close()
    assert_cut_short(server, before, f"cut-{tokens}-{how}-")
    assert_at_baseline(server)


def test_streams_of_a_client_process_that_is_killed_are_soon_gone(server: Server) -> None:
    port = server.url.rsplit(":", 1)[1]
    before = server.state()
    client = subprocess.Popen(
        [sys.executable, "-c", READER, port, "20", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin is not None and client.stdout is not None
    client.stdin.write(raw_request("killed-RID00"))
    client.stdin.close()
    assert client.stdout.readline() == b"read\n"
    until(lambda: len(server.state()["streams"]) == 20, "twenty streams")
    client.send_signal(signal.SIGKILL)
    client.wait()
    since_s = time.monotonic()
    until(lambda: not server.state()["streams"], "no stream of theirs")
    print(f"killed: 20 streams gone after {time.monotonic() - since_s:.2f} s")
    assert_cut_short(server, before, "killed-RID")
    assert_at_baseline(server)


# ---- shutdown


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture(scope="module")
def normal_loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second server, page size 1 and without overlap, that the last test here ends."""
    folder = tmp_path_factory.mktemp("normal")
    with serving(OURS, folder, "--page-size", "1", "--disable-overlap-schedule") as server:
        yield server


def test_streams_are_parked_and_come_back_in_the_normal_loop_with_pages_of_one(normal_loop: Server) -> None:
    expected = [solo(normal_loop, text_of(i)) for i in range(9)]
    streams = crowd(normal_loop, 9, "normal")
    gone = first_parked(normal_loop, streams, "normal")
    gone.hang_up()
    rest = [s for s in streams if s is not gone]
    read_together(rest)
    assert [s.text for s in rest] == [t for s, t in zip(streams, expected, strict=True) if s is not gone]
    assert_at_baseline(normal_loop)


def test_a_server_told_to_stop_with_parked_streams_serves_them_to_the_end_and_leaves_no_process(
    normal_loop: Server,
) -> None:
    """Upstream's SIGTERM drains: it takes nobody new, looks every 5 s whether all are done, and then ends."""
    server = normal_loop
    expected = [solo(server, text_of(i)) for i in range(12)]
    streams = crowd(server, 12, "last")
    first_parked(server, streams, "last")
    family = [server.pid, *descendants(server.pid)]
    assert len(family) >= 3, family
    began_s = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    status = server.process._process.wait(timeout=90)
    print(f"SIGTERM with parked streams: ended with {status} after {time.monotonic() - began_s:.1f} s")
    until(lambda: not any(map(alive, family)), f"no process of {family} left", deadline_s=20.0)
    read_together(streams)
    assert [s.text for s in streams] == expected
    assert status in (0, -signal.SIGTERM)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=5)
