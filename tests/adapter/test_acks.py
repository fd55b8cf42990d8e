"""Reports of consumption: whose they are, which count, what is refused and by which name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_sgl.adapter.acks import MAX_ITEMS, Ack, AckBook, items_of
from tokenflow_sgl.adapter.ledger import Ledger
from tokenflow_sgl.adapter.rates import BadField
from tokenflow_sgl.core.types import Arrived, Halted, ReaderClass, Reported


def item(rid: str, token: str, consumed: Any = 12, **more: Any) -> dict[str, Any]:
    return {"id": rid, "token": token, "consumed_tokens": consumed, **more}


def verdicts(book: AckBook, items: list[dict[str, Any]], now_s: float = 0.0) -> list[str]:
    return [v["verdict"] for v in book.judge(items, now_s)[1]]


def test_a_report_with_the_streams_token_counts() -> None:
    book = AckBook()
    token = book.open("a")
    acks, told = book.judge([item("a", token)], 0.0)
    assert acks == [Ack("a", 0, 12)]
    assert told == [{"id": "a", "index": 0, "verdict": "accepted"}]


def test_a_foreign_token_is_that_items_verdict_and_nobody_elses() -> None:
    book = AckBook()
    one, two = book.open("a"), book.open("b")
    items = [item("a", two), item("b", two), item("nobody", one), item("a", one[:-1]), item("a", one + "x")]
    acks, told = book.judge(items, 0.0)
    assert [v["verdict"] for v in told] == ["not_found", "accepted", "not_found", "not_found", "not_found"]
    assert acks == [Ack("b", 0, 12)]


def test_tokens_are_long_random_and_different() -> None:
    book = AckBook()
    tokens = {book.open(f"s{i}") for i in range(200)}
    assert len(tokens) == 200 and min(map(len, tokens)) >= 32


def test_an_id_that_is_used_again_has_another_token() -> None:
    book = AckBook()
    old = book.open("a")
    book.close("a", old)
    assert verdicts(book, [item("a", old)]) == ["not_found"]
    new = book.open("a")
    book.close("a", old)  # the end of the first one, told late
    assert verdicts(book, [item("a", old), item("a", new)]) == ["not_found", "accepted"]
    book.close("a", new)
    assert len(book) == 0


def test_each_choice_is_reported_by_its_index_and_there_are_no_others() -> None:
    book = AckBook()
    token = book.open("a", choices=3)
    items = [item("a", token, index=i) for i in (0, 2, 3)]
    acks, told = book.judge(items, 0.0)
    assert [v["verdict"] for v in told] == ["accepted", "accepted", "not_found"]
    assert [a.index for a in acks] == [0, 2]


def test_reports_are_limited_for_each_choice_and_not_for_its_neighbours() -> None:
    book = AckBook()
    a, b = book.open("a", choices=2), book.open("b")
    assert verdicts(book, [item("a", a)] * 21) == ["accepted"] * 20 + ["rate_limited"]
    assert verdicts(book, [item("a", a, index=1), item("b", b)]) == ["accepted", "accepted"]
    assert verdicts(book, [item("a", a)] * 2, now_s=0.05) == ["accepted", "rate_limited"]  # 20 a second


def test_a_hundred_thousand_reports_in_a_second_come_to_forty() -> None:
    book = AckBook()
    token = book.open("a")
    told = [v for k in range(100) for v in verdicts(book, [item("a", token)] * 1000, now_s=k / 100)]
    assert told.count("accepted") == 20 + 19  # what is saved up, and 20 a second until 0.99 s


BAD: list[Any] = [-1, 0.5, 1e308, 10**30, True, None, "5", "\uff15", [], {}, float("nan"), 2**53 + 1]


@pytest.mark.parametrize("value", BAD)
def test_a_count_that_is_none_is_refused_by_name_and_nothing_counts(value: Any) -> None:
    book = AckBook()
    token = book.open("a")
    with pytest.raises(BadField) as refused:
        book.judge([item("a", token), item("a", token, value)], 0.0)
    assert refused.value.field == "acks[1].consumed_tokens" and "valid is a whole number from 0" in str(refused.value)
    assert book.accepted == 0


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("a", "acks[0]"),
        ({"token": "t", "consumed_tokens": 1}, "acks[0].id"),
        ({"id": "", "token": "t", "consumed_tokens": 1}, "acks[0].id"),
        ({"id": "a", "token": 5, "consumed_tokens": 1}, "acks[0].token"),
        ({"id": "a", "token": "t" * 1025, "consumed_tokens": 1}, "acks[0].token"),
        ({"id": "a", "token": "t"}, "acks[0].consumed_tokens"),
        ({"id": "a", "token": "t", "consumed_tokens": 1, "index": -1}, "acks[0].index"),
        ({"id": "a", "token": "t", "consumed_tokens": 1, "priority": 9}, "acks[0].priority"),
    ],
)
def test_an_item_that_is_no_report_is_refused_by_name(bad: Any, field: str) -> None:
    with pytest.raises(BadField) as refused:
        AckBook().judge([bad], 0.0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "body"),
        ([], "body"),
        ({}, "acks"),
        ({"acks": {}}, "acks"),
        ({"acks": [{}] * (MAX_ITEMS + 1)}, "acks"),
        ({"acks": [], "rate": 5}, "rate"),
    ],
)
def test_a_body_that_holds_no_reports_is_refused_by_name(body: Any, field: str) -> None:
    with pytest.raises(BadField) as refused:
        items_of(body)
    assert refused.value.field == field


# ---- on the scheduler's side


def arrived(ledger: Ledger, rid: str, parent: str | None = None) -> Any:
    request = SimpleNamespace(
        rid=rid, output_ids=[1], tokenflow=SimpleNamespace(parent=parent, gone=False, arrived=True)
    )
    ledger.arrived(Arrived(rid, 10, 20, ReaderClass.READER, 6.0), request)
    return request


def reported(ledger: Ledger) -> list[Reported]:
    return [e for e in ledger.drain() if isinstance(e, Reported)]


def test_a_report_is_told_to_the_policy_in_the_order_it_came() -> None:
    ledger = Ledger()
    arrived(ledger, "a")
    for consumed in (5, 3, 9):
        ledger.reported("a", 0, consumed)
    assert reported(ledger) == [Reported("a", 5), Reported("a", 3), Reported("a", 9)]
    assert ledger.counters["acks"] == 3


def test_a_choice_is_found_by_the_id_its_client_knows_and_its_place() -> None:
    ledger = Ledger()
    requests = [arrived(ledger, rid, parent="mine") for rid in ("x0", "x1", "x2")]
    ledger.reported("mine", 2, 7)
    ledger.reported("mine", 3, 7)
    assert reported(ledger) == [Reported("x2", 7)]
    ledger.finished(requests[0])
    ledger.reported("mine", 0, 8)  # it has ended: its place is not given to the next
    ledger.reported("mine", 1, 9)
    assert reported(ledger) == [Reported("x1", 9)]
    for request in requests[1:]:
        ledger.finished(request)
    assert ledger._children == {}


def test_another_ranks_streams_are_nobodys_here() -> None:
    """All data-parallel ranks hear each report."""
    ledger = Ledger()
    request = arrived(ledger, "here")
    ledger.reported("there", 0, 5)
    ledger.halted("there", True)
    ledger.finished(request)
    ledger.reported("here", 0, 5)  # late
    assert not [e for e in ledger.drain() if isinstance(e, Reported | Halted)]
    assert (ledger.counters["acks"], ledger.counters["halts"]) == (0, 0)


def test_reports_of_choices_do_not_count_where_other_ranks_serve_some_of_them() -> None:
    """Of four choices on two ranks, index 1 would be the second choice on one rank and the fourth on the other."""
    ledger = Ledger(knows_places=False)
    for rid in ("x0", "x2"):
        arrived(ledger, rid, parent="mine")
    arrived(ledger, "single")
    ledger.reported("mine", 1, 7)
    ledger.reported("single", 0, 7)
    ledger.halted("mine", True)
    events = [e for e in ledger.drain() if isinstance(e, Reported | Halted)]
    assert events == [Reported("single", 7), Halted("x0", True), Halted("x2", True)]


def test_a_connection_that_stands_still_stops_all_choices_that_come_over_it() -> None:
    ledger = Ledger()
    requests = [arrived(ledger, rid, parent="mine") for rid in ("x0", "x1")]
    arrived(ledger, "other")
    ledger.finished(requests[0])
    ledger.halted("mine", True)
    ledger.halted("other", False)
    assert [e for e in ledger.drain() if isinstance(e, Halted)] == [Halted("x1", True), Halted("other", False)]
    assert ledger.counters["halts"] == 1
