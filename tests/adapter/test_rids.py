"""An abort ends the named request and no other (field report B13 a)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_sgl.adapter.rids import header_value, only_exact


def scheduler_with(**places: list[Any]) -> Any:
    return SimpleNamespace(
        waiting_queue=places.get("waiting", []),
        grammar_manager=SimpleNamespace(grammar_queue=places.get("grammar", [])),
        chunked_req=next(iter(places.get("chunked", [])), None),
        collect_inflight_reqs=lambda: places.get("running", []),
    )


def requests(*names: str) -> list[Any]:
    return [SimpleNamespace(rid=name) for name in names]


@pytest.mark.parametrize("place", ["waiting", "grammar", "chunked", "running"])
def test_abort_of_u1_matches_u1_alone_wherever_the_others_are(place: str) -> None:
    others = requests("u10", "u100", "v1")
    target = requests("u1")
    scheduler = scheduler_with(waiting=target)
    everyone = target + others
    for other in others:
        scheduler = scheduler_with(**{place: [other], **({} if place == "waiting" else {"waiting": target})})
        with only_exact(scheduler, "u1"):
            matched = [r.rid for r in (*target, other) if r.rid.startswith("u1")]  # stock's own test
        assert matched == ["u1"]
    assert [r.rid for r in everyone] == ["u1", "u10", "u100", "v1"]


def test_request_listed_in_two_places_gets_its_id_back() -> None:
    shared = requests("u10")
    with only_exact(scheduler_with(chunked=shared, running=shared), "u1"):
        assert not shared[0].rid.startswith("u1")
    assert shared[0].rid == "u10"


def test_ids_come_back_when_the_abort_raises() -> None:
    other = requests("u10")
    with pytest.raises(RuntimeError), only_exact(scheduler_with(waiting=other), "u1"):
        raise RuntimeError
    assert other[0].rid == "u10"


def test_reply_header_is_ascii_without_line_breaks_for_any_id() -> None:
    value = header_value("a b\r\nx: y\u2028\ud800é")
    assert value.isascii() and b"\n" not in value and b" " not in value
