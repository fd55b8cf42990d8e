"""An open-loop client of /generate: sends by plan, notes when each token came.

Owns sending, reading and counting. Computes no measure (core/qoe.py does) and paces nothing: a paced reader's display
times follow from the arrivals. Invariant: every planned request becomes exactly one StreamRecord, whatever befell it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from tokenflow_sgl.bench.answer_length import request_fields
from tokenflow_sgl.client.events import EventSplitter
from tokenflow_sgl.core.qoe import StreamRecord
from tokenflow_sgl.workload.arrivals import Request

Clock = Callable[[], float]
SleepUntil = Callable[[float], Awaitable[None]]
# Opens one stream for a body; yields the network's reads as they come.
Transport = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[AsyncIterator[bytes]]]


class StreamFailed(Exception):
    """The server refused a request or ended its stream with an error; the message says how."""


class TokenTimes:
    """One stream's arrival time per token, taken from the server's own running count and never from events.

    Events may carry several tokens or none (a role, usage, a stream that was paused), so their number says nothing.
    """

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.finished = False

    def observe(self, event: bytes, now_s: float) -> None:
        """Take in one event that came at now_s. Raises StreamFailed for what ends a stream badly."""
        if event.strip() == b"[DONE]":
            return
        try:
            message = json.loads(event)
        except ValueError as error:
            raise StreamFailed(f"event is not JSON: {event[:80]!r}") from error
        if not isinstance(message, dict):
            raise StreamFailed(f"event is not an object: {event[:80]!r}")
        if message.get("error"):
            raise StreamFailed(f"error event: {_short(json.dumps(message['error']))}")
        meta = message.get("meta_info") or {}
        usage = message.get("usage") or {}
        if not isinstance(meta, dict) or not isinstance(usage, dict):
            raise StreamFailed(f"meta_info and usage must be objects: {event[:80]!r}")
        count = meta.get("completion_tokens", usage.get("completion_tokens"))
        if count is not None:
            if not isinstance(count, int):
                raise StreamFailed(f"completion_tokens is not a number: {count!r}")
            if count < len(self.arrivals_s):
                raise StreamFailed(f"completion_tokens went back from {len(self.arrivals_s)} to {count}")
            self.arrivals_s.extend([now_s] * (count - len(self.arrivals_s)))
        reason = meta.get("finish_reason")
        if reason:
            if isinstance(reason, dict) and reason.get("type") == "abort":
                raise StreamFailed(f"aborted: {_short(str(reason.get('message')))}")
            self.finished = True


def generate_body(request: Request, *, with_read_rate: bool) -> dict[str, Any]:
    """The JSON body of /generate: greedy, streamed, ending at the request's answer length (answer_length.py).

    with_read_rate: True for servers that know the field. Stock ignores it; it is left out there all the same.
    """
    fields = request_fields(request.answer_tokens)
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": list(request.prompt_tokens),
        "stream": True,
        "sampling_params": {
            "max_new_tokens": request.max_tokens,
            "temperature": 0,
            "custom_params": fields["custom_params"],
        },
        "custom_logit_processor": fields["custom_logit_processor"],
    }
    if with_read_rate:
        body["tokenflow"] = {"read_rate": request.read_rate_tok_s}
    return body


def http_transport(session: aiohttp.ClientSession, url: str) -> Transport:
    """Posts to `url`/generate. Raises StreamFailed for any status but 200."""

    @asynccontextmanager
    async def open_stream(body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        async with session.post(f"{url}/generate", json=body) as response:
            if response.status != 200:
                raise StreamFailed(f"HTTP {response.status}: {_short(await response.text())}")
            yield response.content.iter_any()

    return open_stream


def client_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """A session without a limit on connections: a pool of 100 would make the client closed-loop unnoticed."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))


async def read_stream(
    request: Request, transport: Transport, *, clock: Clock, origin_s: float, with_read_rate: bool
) -> StreamRecord:
    """Send one request now and read it to its end; all times of the record are seconds after origin_s."""
    times, splitter = TokenTimes(), EventSplitter()
    error: str | None = None
    body = generate_body(request, with_read_rate=with_read_rate)
    sent_s = clock() - origin_s
    try:
        async with transport(body) as reads:
            async for read in reads:
                now_s = clock() - origin_s
                for event in splitter.feed(read):
                    times.observe(event, now_s)
        if not times.finished:
            error = "stream ended without a finish reason"
    except TimeoutError:
        error = "timed out"
    except (StreamFailed, aiohttp.ClientError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and len(times.arrivals_s) != request.answer_tokens:
        error = f"{len(times.arrivals_s)} tokens came, {request.answer_tokens} were wanted"
    return StreamRecord(
        rid=request.rid,
        group=request.group,
        sent_s=sent_s,
        arrivals_s=tuple(times.arrivals_s),
        read_rate_tok_s=request.read_rate_tok_s,
        wanted_tokens=request.answer_tokens,
        error=error,
    )


async def run_plan(
    requests: Sequence[Request],
    transport: Transport,
    *,
    clock: Clock = time.perf_counter,
    sleep_until: SleepUntil | None = None,
    with_read_rate: bool,
) -> tuple[StreamRecord, ...]:
    """Send every request at its planned time, whatever became of the earlier ones (open loop).

    requests: in order of sending, sent_s in seconds after this call. clock: seconds, monotonic. sleep_until: waits
    until `clock` shows a time. Returns one record per request, in the plan's order; times count from this call.
    """
    wait = sleep_until or _real_sleep(clock)
    origin_s = clock()
    tasks = []
    for request in requests:
        await wait(origin_s + request.sent_s)
        tasks.append(
            asyncio.create_task(
                read_stream(request, transport, clock=clock, origin_s=origin_s, with_read_rate=with_read_rate)
            )
        )
    return tuple(await asyncio.gather(*tasks))


def send_lateness_s(requests: Iterable[Request], records: Iterable[StreamRecord]) -> float:
    """How late the worst request was sent, in seconds: above some tens of ms the client itself was short of CPU."""
    return max((record.sent_s - request.sent_s for request, record in zip(requests, records, strict=True)), default=0.0)


def _real_sleep(clock: Clock) -> SleepUntil:
    async def sleep_until(at_s: float) -> None:
        await asyncio.sleep(max(at_s - clock(), 0.0))

    return sleep_until


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
