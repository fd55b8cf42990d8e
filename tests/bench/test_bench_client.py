"""The client against scripts of network reads with exact times (virtual time), and once over real sockets.

A script is a list of (seconds after the request came, bytes of one read); the measures are worked out by hand from it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from virtual_time import VirtualTime

from tokenflow_sgl.bench.client import (
    StreamFailed,
    client_session,
    generate_body,
    http_transport,
    read_stream,
    run_plan,
    send_lateness_s,
)
from tokenflow_sgl.client.events import EventSplitter
from tokenflow_sgl.core import qoe
from tokenflow_sgl.workload.arrivals import Request, Segment


def event(count, finish=None, **more):
    meta = {"id": "r", "completion_tokens": count, "finish_reason": finish}
    return b"data: " + json.dumps({"text": "x" * count, "meta_info": meta, **more}).encode() + b"\n\n"


LENGTH = {"type": "stop", "matched": 2}
DONE = b"data: [DONE]\n\n"
ROLE_ONLY = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


def request(rid="r", *, sent=0.0, tokens=4, rate=10.0, group="g"):
    return Request(rid, group, sent, (Segment.of(rid, (20, 21, 22)),), tokens, 2 * tokens, rate)


def scripted(time, script_of):
    """A transport that plays script_of(rid), or raises what stands in place of a script."""

    @asynccontextmanager
    async def open_stream(body):
        script = script_of(body["rid"])
        if isinstance(script, Exception):
            raise script
        began_s = time.now_s

        async def reads():
            for after_s, data in script:
                await time.sleep_until(began_s + after_s)
                yield data

        yield reads()

    return open_stream


def play(script, *, tokens=4, rate=10.0):
    time = VirtualTime(100.0)
    transport = scripted(time, lambda rid: script)
    plan = [request(tokens=tokens, rate=rate)]
    return time.run(
        lambda: run_plan(plan, transport, clock=time.clock, sleep_until=time.sleep_until, with_read_rate=False)
    )[0]


def test_one_token_per_event():
    record = play([(0.2, event(1)), (0.3, event(2)), (0.4, event(3)), (0.5, event(4, LENGTH)), (0.5, DONE)])
    assert record.error is None
    assert record.arrivals_s == pytest.approx((0.2, 0.3, 0.4, 0.5))
    assert qoe.ttft_s(record) == pytest.approx(0.2)


def test_five_tokens_in_one_event_are_five_tokens():
    record = play([(0.2, event(5)), (1.2, event(10, LENGTH)), (1.2, DONE)], tokens=10)
    assert record.arrivals_s == pytest.approx((0.2,) * 5 + (1.2,) * 5)
    # Shown at 0.2 .. 0.6, then 1.2 instead of 0.7: one stall of 0.5 s; every other gap is 0.1.
    assert qoe.tbt_s(record) == pytest.approx([0.1] * 4 + [0.6] + [0.1] * 4)
    assert qoe.stalls(record).total_s == pytest.approx(0.5)
    # TTFT 0.2; the late token's gap of 0.6 is above 0.2: 9 good tokens in 1.2 s.
    assert qoe.effective_goodput_tok_s([record]) == pytest.approx(9 / 1.2)


def test_an_event_split_at_every_byte_counts_when_its_last_byte_has_come():
    # One byte each ms: the event's closing line end is its last byte.
    data = event(1) + event(2, LENGTH)
    script = [(0.001 * (index + 1), data[index : index + 1]) for index in range(len(data))]
    record = play(script, tokens=2)
    assert record.error is None
    assert record.arrivals_s == pytest.approx((0.001 * len(event(1)), 0.001 * len(data)))


def test_two_events_in_one_read_are_two_events():
    record = play([(0.3, event(1) + event(2)), (0.4, event(3) + event(4, LENGTH) + DONE)])
    assert record.arrivals_s == pytest.approx((0.3, 0.3, 0.4, 0.4))


def test_comments_roles_empty_and_usage_events_are_not_tokens():
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n'
    script = [
        (0.1, b": ping\n\n"),
        (0.2, ROLE_ONLY),
        (0.3, event(0)),
        (0.4, b"event: token\r\nid: 7\r\n" + event(1).replace(b"\n\n", b"\r\n\r\n")),
        (0.5, event(1)),  # a paused stream may send an event with nothing new
        (0.6, event(4, LENGTH)),
        (0.7, usage),
        (0.8, DONE),
    ]
    record = play(script)
    assert record.error is None
    assert record.arrivals_s == pytest.approx((0.4, 0.6, 0.6, 0.6))


def test_a_stall_of_three_seconds_is_measured_as_the_reader_sees_it():
    # R = 10: 5 tokens at 0.1 are shown until 0.5; due again at 0.6, come at 3.1 after 3 s of silence: a stall of 2.5 s.
    record = play([(0.1, event(5)), (3.1, event(6, LENGTH))], tokens=6)
    found = qoe.stalls(record)
    assert (found.count, found.total_s, found.longest_s) == (1, pytest.approx(2.5), pytest.approx(2.5))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (StreamFailed("HTTP 503: busy"), "HTTP 503: busy"),
        (ConnectionRefusedError("refused"), "ConnectionRefusedError"),
        (TimeoutError(), "timed out"),
        ([(0.1, event(2))], "without a finish reason"),
        ([(0.1, event(2, LENGTH))], "2 tokens came, 4 were wanted"),
        ([(0.1, event(5, LENGTH))], "5 tokens came, 4 were wanted"),
        ([(0.1, event(3)), (0.2, event(2))], "went back from 3 to 2"),
        ([(0.1, event(1)), (0.2, b'data: {"error": {"message": "queue is full"}}\n\n')], "queue is full"),
        ([(0.1, event(1)), (0.2, event(1, {"type": "abort", "message": "gone"}))], "aborted: gone"),
        ([(0.1, b"data: {half\n\n")], "not JSON"),
        ([(0.1, b"data: [1]\n\n")], "not an object"),
        ([(0.1, b'data: {"meta_info": [1]}\n\n')], "must be objects"),
        ([(0.1, b'data: {"meta_info": {"completion_tokens": "2"}}\n\n')], "not a number"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failed_record_with_its_reason(script, reason):
    record = play(script)
    assert reason in record.error
    assert record.failed
    assert qoe.summarize([record])["failed"] == 1


def test_failed_requests_are_reported_and_never_averaged_in():
    time = VirtualTime()
    good = [(0.1, event(4, LENGTH))]
    scripts = {"good": good, "refused": StreamFailed("HTTP 503: busy"), "cut": [(0.1, event(1))]}
    plan = [request("good"), request("refused"), request("cut")]
    records = time.run(
        lambda: run_plan(
            plan,
            scripted(time, scripts.__getitem__),
            clock=time.clock,
            sleep_until=time.sleep_until,
            with_read_rate=False,
        )
    )
    found = qoe.summarize(records)
    assert [record.rid for record in records] == ["good", "refused", "cut"]
    assert (found["requests"], found["failed"]) == (3, 2)
    assert found["ttft_mean_s"] == float("inf")


def test_sending_follows_the_plan_while_the_server_stalls():
    # Every answer takes 60 s; the plan sends all 50 within the first second.
    time = VirtualTime(1000.0)
    plan = [request(f"r{index:02d}", sent=0.02 * index) for index in range(50)]
    transport = scripted(time, lambda rid: [(60.0, event(4, LENGTH))])
    records = time.run(
        lambda: run_plan(plan, transport, clock=time.clock, sleep_until=time.sleep_until, with_read_rate=False)
    )
    assert [record.sent_s for record in records] == pytest.approx([0.02 * index for index in range(50)])
    assert send_lateness_s(plan, records) == pytest.approx(0.0)
    assert [qoe.ttft_s(record) for record in records] == pytest.approx([60.0] * 50)


def test_data_over_several_lines_is_one_event():
    assert EventSplitter().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_the_body_names_the_rate_only_to_servers_that_know_it():
    stock = generate_body(request(tokens=7, rate=3.5), with_read_rate=False)
    ours = generate_body(request(tokens=7, rate=3.5), with_read_rate=True)
    assert "tokenflow" not in stock
    assert ours == {**stock, "tokenflow": {"read_rate": 3.5}}
    assert stock["sampling_params"]["max_new_tokens"] == 14
    assert stock["sampling_params"]["custom_params"] == {"answer_tokens": 7}
    assert "ignore_eos" not in stock["sampling_params"]


class HandedOverClock:
    """The server sets the time, sends one piece, and waits until the client has looked at the clock for it.

    So the times are exact although the bytes go through real sockets.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._seen = asyncio.Event()

    def clock(self) -> float:
        self._seen.set()
        return self.now_s

    async def send(self, at_s, response, data):
        self.now_s = at_s
        self._seen.clear()
        await response.write(data)
        await asyncio.wait_for(self._seen.wait(), 30)


async def over_sockets(handler, plan_request, clock):
    app = web.Application()
    app.router.add_post("/generate", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with client_session(timeout_s=60) as session:
            return await read_stream(
                plan_request, http_transport(session, url), clock=clock, origin_s=0.0, with_read_rate=False
            )
    finally:
        await runner.cleanup()


def test_over_real_sockets_times_and_tokens_are_the_scripted_ones():
    async def go():
        time = HandedOverClock()
        first = ROLE_ONLY + event(1)

        async def handler(http_request):
            assert (await http_request.json())["input_ids"] == [20, 21, 22]
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http_request)
            for index in range(len(first)):
                await time.send(0.001 * (index + 1), response, first[index : index + 1])
            await time.send(3.5, response, event(3) + event(4))
            await time.send(3.6, response, event(5, LENGTH) + DONE)
            return response

        return len(first), await over_sockets(handler, request(tokens=5), time.clock)

    size, record = asyncio.run(go())
    assert record.error is None
    assert record.arrivals_s == pytest.approx((0.001 * size, 3.5, 3.5, 3.5, 3.6))


def test_over_real_sockets_a_refusal_is_a_record_with_status_and_words():
    async def go():
        async def handler(http_request):
            return web.json_response({"error": "request queue is full"}, status=503)

        return await over_sockets(handler, request(), lambda: 0.0)

    record = asyncio.run(go())
    assert "HTTP 503" in record.error and "queue is full" in record.error
    assert record.arrivals_s == ()


def test_over_real_sockets_a_cut_connection_is_a_record_with_what_had_come():
    async def go():
        time = HandedOverClock()

        async def handler(http_request):
            response = web.StreamResponse()
            await response.prepare(http_request)
            await time.send(0.5, response, event(2))
            http_request.transport.abort()
            return response

        return await over_sockets(handler, request(), time.clock)

    record = asyncio.run(go())
    assert record.failed and record.error
    assert record.arrivals_s == (0.5, 0.5)
