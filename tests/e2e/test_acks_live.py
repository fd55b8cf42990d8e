"""Reports of consumption on a live server: they reach the scheduler, teach the read rate, and touch nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from support.live import LiveStream, Server, body_of, until
from support.sockets import CHAT, chat, teach

pytestmark = pytest.mark.e2e
TOKENS = 1200
SLOW = {"read_rate": 0.5}


def ask(server: Server, *, n: int = 1, rate: float = 6.0) -> LiveStream:
    body = chat(TOKENS // n, stream=True, tokenflow={"read_rate": rate}, n=n)
    return server.post_stream(CHAT, body).wait_reply()


def rid_of(stream: LiveStream) -> str:
    return stream.headers["x-tokenflow-request-id"]


def item(stream: LiveStream, consumed: int, **more: Any) -> dict[str, Any]:
    token = stream.headers["x-tokenflow-ack-token"]
    return {"id": rid_of(stream), "token": token, "consumed_tokens": consumed, **more}


def ack(server: Server, *items: dict[str, Any]) -> list[str]:
    reply = server.http.post("/tokenflow/ack", json={"acks": list(items)})
    assert reply.status_code == 200, reply.text
    return [a["verdict"] for a in reply.json()["acks"]]


def test_a_report_moves_what_the_scheduler_believes_and_nothing_else(server: Server) -> None:
    one, two = ask(server), ask(server)
    for stream in (one, two):
        server.row(rid_of(stream), lambda r: r["generated_tokens"] > 100)
    before = server.row(rid_of(two))["consumed_tokens"]
    assert ack(server, item(one, 90)) == ["accepted"]
    assert server.row(rid_of(one), lambda r: r["consumed_tokens"] >= 90)["generated_tokens"] > 100
    assert server.row(rid_of(two))["consumed_tokens"] < before + 60, "6 tok/s and nobody reported"
    one.hang_up()
    two.hang_up()


def test_more_than_was_sent_counts_as_all_that_was_sent_and_never_goes_back(server: Server) -> None:
    stream = ask(server)
    server.row(rid_of(stream), lambda r: r["generated_tokens"] > 50)
    assert ack(server, item(stream, 2**40), item(stream, 0)) == ["accepted", "accepted"]
    row = server.row(rid_of(stream), lambda r: r["consumed_tokens"] > 50)
    assert row["consumed_tokens"] <= row["generated_tokens"]
    stream.hang_up()


def test_a_quick_readers_rate_is_learned_from_its_reports(server: Server) -> None:
    """It declares 6 tok/s and reads 60."""
    stream = ask(server)
    server.row(rid_of(stream), lambda r: r["generated_tokens"] > 200)

    def report(tokens: int) -> None:
        assert ack(server, item(stream, tokens)) == ["accepted"]

    teach(server, rid_of(stream), report)
    stream.hang_up()


def test_foreign_unknown_and_ended_streams_are_that_items_verdict(server: Server) -> None:
    one, two = ask(server), ask(server)
    foreign = {**item(one, 5), "token": two.headers["x-tokenflow-ack-token"]}
    unknown = {**item(one, 5), "id": rid_of(one)[:-1]}
    assert ack(server, foreign, unknown, item(one, 5)) == ["not_found", "not_found", "accepted"]
    one.hang_up()
    until(lambda: ack(server, item(one, 9)) == ["not_found"], "the end of a stream whose client left")
    two.hang_up()


def test_choices_are_reported_by_their_index(server: Server) -> None:
    stream = ask(server, n=2)
    stream.wait_events(40)
    rows = until(lambda: [r for r in server.state()["streams"] if r["generated_tokens"] > 20], "two choices")
    assert ack(server, item(stream, 15, index=1), item(stream, 15, index=2)) == ["accepted", "not_found"]

    def moved() -> list[Any]:
        return [r for r in server.state()["streams"] if (r["consumed_tokens"] or 0) >= 15]

    assert len(rows) <= 2 and len(until(moved, "one of the two")) == 1
    stream.hang_up()


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b'{"acks": 5}', "acks"),
        (b'{"acks": [{"id": "a", "token": "t", "consumed_tokens": -1}]}', "acks[0].consumed_tokens"),
        (b'{"acks": [{"id": "a", "token": "t", "consumed_tokens": NaN}]}', "body"),
        (b'{"acks": "' + b"x" * (1 << 20) + b'"}', "body"),
    ],
)
def test_what_is_no_report_is_refused_by_name(server: Server, data: bytes, field: str) -> None:
    reply = server.http.post("/tokenflow/ack", content=data, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and "valid is" in error["message"]


HOSTILE = [-1, 0.0, 1e-300, 1e308, 10**30, "5", "NaN", True, None, [], {}, "x" * 10_000]


def test_hostile_counts_never_reach_the_scheduler_and_the_stream_goes_on(server: Server) -> None:
    """Field report B43."""
    stream = ask(server).wait_events(5)
    before = server.state()["counters"]["acks"]
    for value in HOSTILE:
        reply = server.http.post("/tokenflow/ack", json={"acks": [{**item(stream, 0), "consumed_tokens": value}]})
        assert reply.status_code == 400, (value, reply.text)
        assert reply.json()["error"]["param"] == "acks[0].consumed_tokens"
    for raw in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        data = b'{"acks": [{"id": "a", "token": "t", "consumed_tokens": ' + raw + b"}]}"
        assert server.http.post("/tokenflow/ack", content=data).status_code == 400
    # Duplicates, backwards, and more than was sent are clamped; then as fast as can be sent.
    many = [verdict for _ in range(20) for verdict in ack(server, *[item(stream, n) for n in (3, 3, 1, 10**9)])]
    assert set(many) == {"accepted", "rate_limited"}
    row = server.row(rid_of(stream))
    assert 3 <= row["consumed_tokens"] <= row["generated_tokens"]
    accepted = many.count("accepted")
    until(lambda: server.state()["counters"]["acks"] == before + accepted, "all that were accepted, and no other")
    stream.wait_events(row["generated_tokens"] + 20)
    stream.hang_up()


def test_a_report_for_a_stream_that_ended_does_not_touch_the_next_owner_of_its_id(server: Server) -> None:
    """Field report B13 d."""
    body = body_of("ends soon", 4, stream=True, rid="reused")
    first = server.post_stream("/generate", body).wait_end()
    second = server.post_stream("/generate", body_of("goes on", TOKENS, stream=True, rid="reused", tokenflow=SLOW))
    row = server.row("reused", lambda r: r["generated_tokens"] > 30)
    assert row["consumed_tokens"] < 20
    assert ack(server, item(first, 25), {**item(first, 25), "token": "guess"}) == ["not_found", "not_found"]
    assert server.row("reused", lambda r: r["generated_tokens"] > 60)["consumed_tokens"] < 20
    assert ack(server, item(second, 25)) == ["accepted"]
    server.row("reused", lambda r: r["consumed_tokens"] >= 25)
    second.hang_up()
