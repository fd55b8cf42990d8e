"""Streams that end badly, over real sockets: nothing is retried, and what had come is named."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from support.chat_standin import DONE, StandIn, event
from support.live import until
from tokenflow_sgl.client import AsyncClient, Client, RequestRefused, StreamBroken, StreamError, paced

SAID: Any = [{"role": "user", "content": "hello"}]


def read_sync(url: str, got: list[str], rate: float) -> None:
    with Client(url, "key") as client, client.chat(SAID, read_rate=rate) as stream:
        got.extend(stream)


def read_async(url: str, got: list[str], rate: float) -> None:
    async def read() -> None:
        async with AsyncClient(url, "key") as client, client.chat(SAID, read_rate=rate) as stream:
            async for piece in stream:
                got.append(piece)

    asyncio.run(read())


def read_openai(url: str, got: list[str], rate: float) -> None:
    client = paced(openai.OpenAI(base_url=f"{url}/v1", api_key="key"), read_rate=rate)
    with client.chat.completions.create(model="m", messages=SAID, stream=True) as stream:
        got.extend(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)


def read_openai_async(url: str, got: list[str], rate: float) -> None:
    async def read() -> None:
        client = paced(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key"), read_rate=rate)
        async with await client.chat.completions.create(model="m", messages=SAID, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    got.append(chunk.choices[0].delta.content)

    asyncio.run(read())


own = pytest.mark.parametrize("read", [read_sync, read_async])
every = pytest.mark.parametrize("read", [read_sync, read_async, read_openai, read_openai_async])


@every
def test_a_connection_that_ends_without_done_is_a_broken_stream_after_all_that_had_come(
    standin: StandIn, read: Callable[..., None]
) -> None:
    standin.parts = [event("Hel", 1), event("lo", 4)]
    got: list[str] = []
    with pytest.raises(StreamBroken, match=r"stream rid broke: .*received: 4 tokens of choice 0") as broken:
        read(standin.url, got, 1000.0)
    assert got == ["Hel", "lo"] and broken.value.tokens == {0: 4}
    assert len(standin.asked) == 1, "asked again"


@own
def test_a_connection_that_ends_inside_an_event_is_a_broken_stream(standin: StandIn, read: Callable[..., None]) -> None:
    standin.parts = [event("Hel", 1), b'data: {"choi']
    got: list[str] = []
    with pytest.raises(StreamBroken, match="1 tokens of choice 0"):
        read(standin.url, got, math.inf)
    assert got == ["Hel"]


@own
def test_a_body_shorter_than_it_said_is_a_broken_stream(standin: StandIn, read: Callable[..., None]) -> None:
    standin.headers["content-length"] = "9999"
    standin.parts = [event("Hel", 1)]
    with pytest.raises(StreamBroken, match="RemoteProtocolError"):
        read(standin.url, [], math.inf)


@own
def test_an_error_event_is_raised_with_the_openai_error(standin: StandIn, read: Callable[..., None]) -> None:
    error = {"message": "no memory left", "type": "InternalServerError", "param": None, "code": 500}
    standin.parts = [event("Hel", 1), event(error=error), DONE]
    got: list[str] = []
    with pytest.raises(StreamError, match="no memory left") as raised:
        read(standin.url, got, math.inf)
    assert raised.value.error == error and got == ["Hel"]


@pytest.mark.parametrize("read", [read_openai, read_openai_async])
def test_around_openai_an_error_event_is_the_packages_own_error(standin: StandIn, read: Callable[..., None]) -> None:
    standin.parts = [event("Hel", 1), event(error={"message": "no memory left"}), DONE]
    with pytest.raises(openai.APIError, match="no memory left"):
        read(standin.url, [], math.inf)


@own
def test_a_refused_request_says_why_and_is_not_sent_again(standin: StandIn, read: Callable[..., None]) -> None:
    standin.status = 503
    standin.parts = [b'{"error": {"message": "too busy", "code": 503}}']
    with pytest.raises(RequestRefused, match="503: too busy") as refused:
        read(standin.url, [], 8.0)
    assert refused.value.status == 503 and refused.value.error["code"] == 503
    assert len(standin.asked) == 1


@pytest.mark.parametrize("read", [read_openai, read_openai_async])
def test_around_openai_a_refused_stream_is_not_sent_again(standin: StandIn, read: Callable[..., None]) -> None:
    standin.status = 503
    with pytest.raises(openai.InternalServerError):
        read(standin.url, [], 8.0)
    assert len(standin.asked) == 1


@own
def test_a_refusal_that_is_a_bare_text_says_it(standin: StandIn, read: Callable[..., None]) -> None:
    """As upstream's for a wrong key."""
    standin.status, standin.parts = 401, [b'{"error": "Unauthorized"}']
    with pytest.raises(RequestRefused, match="401: Unauthorized"):
        read(standin.url, [], 8.0)


@own
def test_a_refusal_that_is_no_json_is_shown_as_it_is(standin: StandIn, read: Callable[..., None]) -> None:
    standin.status, standin.parts = 502, [b"<html>bad gateway</html>"]
    with pytest.raises(RequestRefused, match="502: <html>bad gateway"):
        read(standin.url, [], 8.0)


@every
def test_a_server_that_takes_no_reports_is_read_all_the_same_and_told_nothing(
    standin: StandIn, read: Callable[..., None]
) -> None:
    standin.headers = {}
    standin.parts = [event("Hel", 1), event("lo", 2), event(reason="stop"), DONE]
    got: list[str] = []
    read(standin.url, got, 100.0)
    assert got == ["Hel", "lo"] and standin.acks == []


@every
def test_the_request_carries_rate_key_and_what_tokens_are_counted_by(
    standin: StandIn, read: Callable[..., None]
) -> None:
    standin.parts = [event("Hel", 1), event(reason="stop"), DONE]
    read(standin.url, [], 8.0)
    read(standin.url, [], math.inf)
    assert [asked["tokenflow"]["read_rate"] for asked in standin.asked] == [8.0, "inf"]
    for asked in standin.asked:
        assert asked["path"] == "/v1/chat/completions" and asked["key"] == "Bearer key" and asked["stream"] is True
        assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_program_sends_no_reports_and_a_reader_does(standin: StandIn) -> None:
    standin.parts, standin.hold = [event("Hel", 1), event("lo", 2)], True
    with Client(standin.url) as client, client.chat(SAID, read_rate=math.inf) as stream:
        assert [next(stream), next(stream)] == ["Hel", "lo"]
    standin.gone.wait(10)
    assert standin.acks == []
    with Client(standin.url) as client, client.chat(SAID, read_rate=100) as stream:
        assert next(stream) == "Hel"
        until(lambda: standin.acks, "a report")
    assert standin.acks[0] == {"id": "rid", "token": "secret", "consumed_tokens": 1, "index": 0}


def test_all_streams_of_a_client_are_reported_on_in_one_request(standin: StandIn) -> None:
    standin.parts, standin.hold = [event("x", i + 1) for i in range(200)], True
    with Client(standin.url) as client:
        streams = []
        for name in ("one", "two", "three"):
            standin.headers["X-TokenFlow-Request-Id"] = name
            streams.append(client.chat(SAID, read_rate=50))
        readers = [threading.Thread(target=list, args=[stream], daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        until(lambda: any(len(request) == 3 for request in standin.ack_requests), "one report of three streams")
        for stream in streams:
            stream.cancel()
    counts = [item["consumed_tokens"] for item in standin.acks if item["id"] == "two"]
    assert counts == sorted(counts) and len(set(counts)) == len(counts)


def test_a_stream_that_the_server_knows_no_more_is_not_reported_again(standin: StandIn) -> None:
    standin.parts, standin.hold, standin.verdict = [event("x", i + 1) for i in range(40)], True, "not_found"
    with Client(standin.url) as client, client.chat(SAID, read_rate=20) as stream:
        for _ in range(40):  # 2 s: four reports of a stream that is known
            next(stream)
    assert len(standin.acks) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_cancelling_hangs_up_while_the_server_says_nothing(standin: StandIn, is_async: bool) -> None:
    standin.parts, standin.hold = [event("Hel", 1)], True

    def cancel() -> list[str]:
        with Client(standin.url) as client:
            stream = client.chat(SAID)
            got = [next(stream)]
            stream.cancel()
            return [*got, *stream]

    async def cancel_async() -> list[str]:
        async with AsyncClient(standin.url) as client:
            stream = client.chat(SAID)
            got = [await anext(stream)]
            await stream.cancel()
            return [*got, *[piece async for piece in stream]]

    assert (asyncio.run(cancel_async()) if is_async else cancel()) == ["Hel"]
    assert standin.gone.wait(10), "the server still thinks that somebody listens"


def test_leaving_the_block_hangs_up(standin: StandIn) -> None:
    standin.parts, standin.hold = [event("Hel", 1)], True
    with Client(standin.url) as client, client.chat(SAID) as stream:
        next(stream)
    assert standin.gone.wait(10)


def test_around_openai_closing_hangs_up_and_usage_comes_when_asked_for(standin: StandIn) -> None:
    client = paced(openai.OpenAI(base_url=f"{standin.url}/v1", api_key="key"))
    usage = event("", 2).replace(b'"choices": [{', b'"choices": [], "unused": [{')
    standin.parts = [event("Hel", 1), event("lo", 2, reason="stop"), usage, DONE]
    stream = client.chat.completions.create(
        model="m", messages=SAID, stream=True, stream_options={"include_usage": True},
        extra_body={"tokenflow": {"read_rate": 500}},
    )  # fmt: skip
    assert [len(chunk.choices) for chunk in stream] == [1, 1, 0]
    assert stream.usage["completion_tokens"] == 2 and stream.read_rate == 500
    assert standin.asked[0]["tokenflow"] == {"read_rate": 500}
    standin.hold = True
    stream = client.with_options(timeout=60).chat.completions.create(model="m", messages=SAID, stream=True)
    next(stream)
    stream.close()
    assert standin.gone.wait(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream": False}, "stream: False is not valid"),
        ({"tokenflow": {"read_rate": 8}}, "tokenflow: .* valid is the argument read_rate"),
        ({"read_rate": 0}, "read_rate: 0 is not valid"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_it_is_sent(
    standin: StandIn, arguments: dict[str, Any], message: str
) -> None:
    with Client(standin.url) as client, pytest.raises(ValueError, match=message):
        client.chat(SAID, **arguments)
    assert standin.asked == []


def test_a_wrong_transport_or_address_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="transport: 'smoke' is not valid; valid is one of http, websocket"):
        Client("http://127.0.0.1:1", transport="smoke")
    with pytest.raises(ValueError, match="base_url: 'localhost:30000' is not valid"):
        AsyncClient("localhost:30000")
