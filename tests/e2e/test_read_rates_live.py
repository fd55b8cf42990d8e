"""What a client says of its reader reaches the scheduler on every route; what it must not say is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

from support.live import LiveStream, Server, read_together, until

pytestmark = pytest.mark.e2e
HEADER = "X-TokenFlow-Read-Rate"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = (CHAT, COMPLETIONS, GENERATE)
# About two seconds of answer: long enough to be seen in the state by a client that asks for it at once.
TOKENS = 600


def body(route: str, *, tokens: int = TOKENS, n: int = 1, stream: bool = True, **extra: Any) -> dict[str, Any]:
    if route == GENERATE:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        sampling |= {"n": n} if n > 1 else {}
        return {"text": "a reader waits", "sampling_params": sampling, "stream": stream, **extra}
    prompt = {"messages": [{"role": "user", "content": "a reader waits"}]} if route == CHAT else {"prompt": "a reader"}
    extra = {"n": n, **extra} if n > 1 else extra
    return {
        "model": "tiny", **prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream, **extra
    }  # fmt: skip


def seen_as(server: Server, stream: LiveStream) -> dict[str, Any]:
    """The state row of a stream, found by the id in its reply header; then the client leaves."""
    rid = stream.wait_reply().headers["x-tokenflow-request-id"]
    row = server.row(rid, lambda r: r["generated_tokens"] > 0)
    stream.hang_up()
    return row


def claims(row: dict[str, Any]) -> tuple[str, float | None]:
    return row["class"], row["read_rate_tok_s"]


@pytest.mark.parametrize("route", ROUTES)
def test_the_header_reaches_the_scheduler(server: Server, route: str) -> None:
    assert claims(seen_as(server, server.post_stream(route, body(route), {HEADER: "8.5"}))) == ("reader", 8.5)


@pytest.mark.parametrize("route", ROUTES)
def test_the_body_field_reaches_the_scheduler(server: Server, route: str) -> None:
    stream = server.post_stream(route, body(route, tokenflow={"read_rate": 12}))
    assert claims(seen_as(server, stream)) == ("reader", 12.0)


@pytest.mark.parametrize("route", ROUTES)
def test_header_and_body_may_agree(server: Server, route: str) -> None:
    stream = server.post_stream(route, body(route, tokenflow={"read_rate": 7}), {HEADER: "7.0"})
    assert claims(seen_as(server, stream)) == ("reader", 7.0)


@pytest.mark.parametrize("route", ROUTES)
def test_a_silent_stream_reads_six_tokens_a_second(server: Server, route: str) -> None:
    assert claims(seen_as(server, server.post_stream(route, body(route)))) == ("reader", 6.0)


@pytest.mark.parametrize("route", ROUTES)
def test_the_rate_inf_is_a_program_without_a_rate(server: Server, route: str) -> None:
    for stream in (
        server.post_stream(route, body(route, tokenflow={"read_rate": "inf"})),
        server.post_stream(route, body(route), {HEADER: "inf"}),
    ):
        row = seen_as(server, stream)
        assert row["class"] == "agent"
        assert row["read_rate_tok_s"] is None or math.isinf(float(row["read_rate_tok_s"]))
        assert (row["buffer_tokens"], row["slack_s"]) == (None, None)


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_that_is_not_streamed_is_batch_whatever_rate_it_names(server: Server, route: str) -> None:
    """The reply comes when it is complete: nobody reads along."""
    # The reading thread stands for the client that waits; the state is looked at meanwhile.
    rid = f"batch{route.replace('/', '-')}"
    request = server.post_stream(route, body(route, stream=False, rid=rid, tokenflow={"read_rate": 9}))
    row = server.row(rid)
    assert claims(row) == ("batch", None)
    assert (row["buffer_tokens"], row["slack_s"], row["consumed_tokens"]) == (None, None, None)
    request.hang_up()


def rows_of(server: Server, count: int) -> list[dict[str, Any]]:
    """The rows of all streams, once there are exactly `count` and all of them have some tokens."""

    def look() -> list[dict[str, Any]] | None:
        rows = server.state()["streams"]
        return rows if len(rows) == count and all(r["generated_tokens"] > 10 for r in rows) else None

    found: list[dict[str, Any]] = until(look, f"{count} streams with tokens")
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_each_of_three_children_carries_the_rate_and_has_a_buffer_of_its_own(server: Server, route: str) -> None:
    stream = server.post_stream(route, body(route, n=3, tokenflow={"read_rate": 4}))
    children = rows_of(server, 3)
    stream.hang_up()
    assert [claims(row) for row in children] == [("reader", 4.0)] * 3
    assert all(row["buffer_tokens"] > 0 for row in children)
    assert len({row["id"] for row in children}) == 3


def test_a_batch_of_prompts_shares_one_reader(server: Server) -> None:
    request = body(GENERATE, tokenflow={"read_rate": 3})
    request["text"] = ["first prompt", "second prompt"]
    stream = server.post_stream(GENERATE, request)
    rows = rows_of(server, 2)
    stream.hang_up()
    assert [claims(row) for row in rows] == [("reader", 3.0)] * 2


def test_the_buffer_grows_with_what_is_made_and_shrinks_with_what_is_read(server: Server) -> None:
    """At 450 tok/s made and 2 tok/s read nearly all that was made lies in the client's buffer."""
    stream = server.stream("a slow reader", 300, rid="slow", tokenflow={"read_rate": 2})
    row = server.row("slow", lambda r: r["generated_tokens"] > 50)
    assert row["buffer_tokens"] + row["consumed_tokens"] == pytest.approx(row["generated_tokens"], abs=8)
    assert row["slack_s"] == pytest.approx(row["buffer_tokens"] / 2, abs=0.01)
    read_together([stream])


# What a client may send that is no rate, in either place. JSON has no NaN and no Infinity of its own.
BAD_HEADERS = [
    "-1", "0", "0.0", "-0.0", "1e-300", "1e308", "1" + "0" * 30, "NaN", "nan", "Infinity", "-inf", "INF", "5;6", "5,6",
    "5 6", "fast", "", "0x10", "1_0", "+8", "[]", "true", "0.09", "1000.1", "9" * 5000,
]  # fmt: skip
BAD_BODIES: list[Any] = [
    -1, 0, 0.0, -0.0, 1e-300, 1e308, 2**62, "NaN", "Infinity", "-inf", "8", "fast", "", "5;6", "\uff15", True, False,
    [], {}, [8], {"rate": 8}, None, 0.09, 1000.1, "9" * 5000,
]  # fmt: skip


def refusal(server: Server, route: str, request: Any, headers: Any = ()) -> dict[str, Any]:
    """The error of a request that must be refused with 400 in the OpenAI shape."""
    reply = server.http.post(route, json=request, headers=headers)
    assert reply.status_code == 400, f"{reply.status_code} {reply.text[:300]}"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == 400, error
    return error


@pytest.mark.parametrize("route", ROUTES)
def test_every_bad_header_is_refused_with_its_name_its_value_and_what_is_valid(server: Server, route: str) -> None:
    for text in BAD_HEADERS:
        error = refusal(server, route, body(route, tokens=1), {HEADER: text})
        assert error["param"] == HEADER.lower(), text
        assert HEADER.lower() in error["message"] and repr(text)[:40] in error["message"], error
        assert "0.1 to 1000" in error["message"] and "inf" in error["message"], error


@pytest.mark.parametrize("route", ROUTES)
def test_every_bad_body_value_is_refused_with_its_name_its_value_and_what_is_valid(server: Server, route: str) -> None:
    for value in BAD_BODIES:
        error = refusal(server, route, body(route, tokens=1, tokenflow={"read_rate": value}))
        assert error["param"] == "tokenflow.read_rate", value
        assert repr(value)[:40] in error["message"], error
        assert "0.1 to 1000" in error["message"] and "inf" in error["message"], error


@pytest.mark.parametrize("route", ROUTES)
def test_bad_values_are_refused_for_requests_that_are_not_streamed_too(server: Server, route: str) -> None:
    error = refusal(server, route, body(route, tokens=1, stream=False), {HEADER: "0"})
    assert error["param"] == HEADER.lower() and "0" in error["message"]
    error = refusal(server, route, body(route, tokens=1, stream=False, tokenflow={"read_rate": -3}))
    assert error["param"] == "tokenflow.read_rate" and "-3" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_header_and_body_that_disagree_are_refused(server: Server, route: str) -> None:
    error = refusal(server, route, body(route, tokens=1, tokenflow={"read_rate": 8}), {HEADER: "9"})
    assert error["param"] == "tokenflow.read_rate"
    assert HEADER.lower() in error["message"] and "8" in error["message"] and "9" in error["message"]
    error = refusal(server, route, body(route, tokens=1, tokenflow={"read_rate": "inf"}), {HEADER: "9"})
    assert "inf" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_two_headers_that_disagree_are_refused(server: Server, route: str) -> None:
    error = refusal(server, route, body(route, tokens=1), [(HEADER, "8"), (HEADER, "9")])
    assert error["param"] == HEADER.lower() and "8, 9" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_full_width_digits_in_the_header_are_no_number(server: Server, route: str) -> None:
    error = refusal(server, route, body(route, tokens=1), [(HEADER.encode(), "\uff15".encode())])
    assert error["param"] == HEADER.lower()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", [8, "8", [8], None, True])
def test_a_tokenflow_field_that_is_no_object_is_refused(server: Server, route: str, value: Any) -> None:
    error = refusal(server, route, body(route, tokens=1, tokenflow=value))
    assert error["param"] == "tokenflow" and "read_rate" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_key_in_tokenflow_is_refused_by_name(server: Server, route: str) -> None:
    error = refusal(server, route, body(route, tokens=1, tokenflow={"read_rate": 8, "speed": 3}))
    assert error["param"] == "tokenflow.speed" and "read_rate" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_bare_nan_and_infinity_in_the_body_are_no_json(server: Server, route: str) -> None:
    """Python's json writes and reads them; a scheduler that did arithmetic with one would be lost."""
    for value in (math.nan, math.inf, 10**30):
        text = json.dumps(body(route, tokens=1, tokenflow={"read_rate": value}))
        reply = server.http.post(route, content=text, headers={"content-type": "application/json"})
        assert reply.status_code in (400, 422), f"{value}: {reply.status_code} {reply.text[:200]}"


def test_a_megabyte_in_the_header_or_the_field_is_refused(server: Server) -> None:
    error = refusal(server, CHAT, body(CHAT, tokens=1, tokenflow={"read_rate": "8" * 1_000_000}))
    assert len(error["message"]) < 1000
    try:
        status = server.http.post(CHAT, json=body(CHAT, tokens=1), headers={HEADER: "8" * 1_000_000}).status_code
    except httpx.TransportError:
        status = 400  # the HTTP server hung up on it
    assert 400 <= status < 500


def test_rates_and_ids_of_clients_do_not_become_metric_series(server: Server) -> None:
    def series() -> int:
        return sum(line.startswith("tokenflow:") for line in server.metrics().splitlines())

    server.generate("warm", 1)
    before = series()
    for i in range(30):
        server.generate("warm", 1, rid=f"distinct-{i}", tokenflow={"read_rate": 1 + i / 7})
    assert series() == before


def test_the_official_client_passes_the_rate_in_extra_body_or_header(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    more = {"ignore_eos": True}
    for extra_body, extra_headers in (
        ({"tokenflow": {"read_rate": 11}, **more}, {}),
        (more, {HEADER: "11"}),
    ):
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, stream=True, max_tokens=TOKENS, temperature=0, extra_body=extra_body,
            extra_headers=extra_headers,
        )  # fmt: skip
        rid = chunks.response.headers["x-tokenflow-request-id"]
        first = next(iter(chunks))
        assert first.id == rid
        assert claims(server.row(rid)) == ("reader", 11.0)
        chunks.close()
    with pytest.raises(openai.BadRequestError, match=r"tokenflow\.read_rate.*-1.*0\.1 to 1000") as refused:
        client.chat.completions.create(
            model="tiny", messages=messages, stream=True, extra_body={"tokenflow": {"read_rate": -1}}
        )
    assert refused.value.param == "tokenflow.read_rate"
    whole = client.completions.create(
        model="tiny", prompt="hello", max_tokens=8, temperature=0, extra_body={"tokenflow": {"read_rate": 5}, **more}
    )
    assert whole.usage is not None and whole.usage.completion_tokens == 8


@pytest.mark.parametrize("route", ROUTES)
def test_the_reply_names_the_request_in_a_header(server: Server, route: str) -> None:
    """A fresh id each, or the client's own; the id in the body is the same."""
    ids = set()
    for stream in (True, False):
        for own in (None, f"own-{stream}-{route.rpartition('/')[2]}"):
            request = body(route, tokens=2, stream=stream, **({"rid": own} if own else {}))
            reply = server.http.post(route, json=request)
            assert reply.status_code == 200, reply.text
            rid = reply.headers["x-tokenflow-request-id"]
            assert own is None or rid == own
            ids.add(rid)
            first = json.loads(reply.text.split("\n")[0].removeprefix("data: ") if stream else reply.text)
            assert rid == (first["meta_info"]["id"] if route == GENERATE else first["id"])
    assert len(ids) == 4


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("asked", [True, False])
def test_usage_comes_once_and_only_when_asked_for(server: Server, route: str, asked: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asked else {}
    stream = server.post_stream(route, body(route, tokens=40, tokenflow={"read_rate": 5}, **options))
    read_together([stream])
    usages = [e["usage"] for e in stream.events if e.get("usage")]
    assert len(usages) == int(asked)
    if asked:
        assert stream.events[-1]["usage"] == usages[0] and stream.events[-1]["choices"] == []
        assert usages[0]["completion_tokens"] == 40
        assert usages[0]["total_tokens"] == usages[0]["prompt_tokens"] + 40


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_cannot_forge_what_the_bridge_writes(server: Server, route: str) -> None:
    forged = {"custom_params": {"tokenflow": {"rate": 900, "class": "batch"}}}
    request = body(route, tokens=1)
    (request["sampling_params"] if route == GENERATE else request).update(forged)
    assert refusal(server, route, request)["param"] == "custom_params.tokenflow"


@pytest.mark.parametrize("rid", ["a/b", "50%", "%2F..", "white space", "Grüße", "u?x=1#y", "x" * 256])
def test_a_strange_id_is_opaque(server: Server, rid: str) -> None:
    stream = server.stream("strange id", TOKENS, rid=rid)
    stream.wait_events(1)
    assert stream.events[0]["meta_info"]["id"] == rid
    assert server.row(rid)["id"] == rid
    aborted = server.http.post("/abort_request", json={"rid": rid})
    assert aborted.status_code == 200
    stream.wait_end()
    assert stream.finish["type"] == "abort"


@pytest.mark.parametrize("rid", ["", "line\nbreak", "nul\x00", "x" * 10_000, "HEALTH_CHECK_mine"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_id_that_cannot_be_handled_is_refused(server: Server, route: str, rid: str) -> None:
    error = refusal(server, route, body(route, tokens=1, rid=rid))
    assert error["param"] == "rid" and "1 to 256 characters" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_second_request_with_a_live_id_is_refused_and_the_first_goes_on(server: Server, route: str) -> None:
    rid = f"taken{route.replace('/', '-')}"
    solo = server.generate("the first one", 200)["text"]
    first = server.stream("the first one", 200, rid=rid).wait_events(1)
    error = refusal(server, route, body(route, tokens=1, rid=rid))
    assert error["param"] == "rid" and rid in error["message"]
    read_together([first])
    assert first.text == solo
    # Its end frees the id.
    assert server.generate("again", 1, rid=rid)["meta_info"]["id"] == rid


def test_a_stream_that_reuses_the_id_of_one_that_ended_is_not_aborted_for_it(server: Server) -> None:
    read_together([server.stream("ends at once", 1, rid="used-again")])
    second = server.stream("the next owner", 1500, rid="used-again")
    read_together([second])
    assert second.finish == {"type": "length", "length": 1500}
