"""More than a server may take: each request ends, in exactly one way, and says which (field report B35)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.live import OURS, Server, body_of, serving, until

pytestmark = pytest.mark.e2e
REQUESTS, QUEUED, RUNNING, TOKENS = 1000, 42, 8, 24
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Eight run and 42 wait: a capacity of 50."""
    flags = ("--max-queued-requests", str(QUEUED), "--max-running-requests", str(RUNNING), "--page-size", "16")
    with serving(OURS, tmp_path_factory.mktemp("small"), *flags) as server:
        yield server


def body(route: str, i: int, *, stream: bool) -> dict[str, Any]:
    if route == "/generate":
        return body_of(f"number {i}", TOKENS, stream=stream)
    more = {"prompt": f"number {i}"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    return {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": stream, **more}


def outcome(reply: httpx.Response, *, stream: bool) -> str:
    """What the client is told. AssertionError for an end that says nothing, or two things."""
    if reply.status_code != 200:
        assert reply.status_code in (429, 503) and int(reply.headers["retry-after"]) >= 1, reply.text
        assert "queue is full" in reply.text
        return "refused"
    if not stream:
        return "answered" if "queue is full" not in reply.text else "unclear"
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", reply.text[-200:]
    said = [json.loads(event) for event in events[:-1]]
    refused = [
        e for e in said if "error" in e or (e.get("meta_info", {}).get("finish_reason") or {}).get("status_code")
    ]
    assert not refused or len(said) == len(refused) == 1, said
    return "error event" if refused else "answered"


async def ask_all(url: str) -> list[tuple[bool, str]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=180.0, limits=limits) as client:

        async def ask(i: int) -> tuple[bool, str]:
            route, stream = ROUTES[i % 3], i % 2 == 0
            return stream, outcome(await client.post(route, json=body(route, i, stream=stream)), stream=stream)

        return await asyncio.gather(*[ask(i) for i in range(REQUESTS)])


def test_of_a_thousand_at_once_each_is_answered_or_refused_and_told_so(small: Server) -> None:
    outcomes = Counter(asyncio.run(ask_all(small.url)))
    print(outcomes)
    assert sum(outcomes.values()) == REQUESTS
    assert set(outcomes) <= {(s, o) for s in (True, False) for o in ("answered", "refused", "error event")}
    assert outcomes[True, "answered"] + outcomes[False, "answered"] >= QUEUED
    assert outcomes[True, "error event"] and outcomes[False, "refused"]
    small.settle()
    until(lambda: small.metric("sglang:num_queue_reqs") == 0, "an empty queue in the metrics")
    assert small.generate("one more", 5)["meta_info"]["completion_tokens"] == 5
