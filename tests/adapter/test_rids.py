"""An abort ends the named request and no other (field report B13 a)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_sgl.adapter.rids import around_create_abort_task, header_value, only_exact


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


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("at_end", "later", "aborted"),
    [
        ({}, {"a": 2}, []),  # ended well, and somebody else has the id two seconds later
        ({"a": 1}, {"a": 1}, ["a"]),  # cut off: its client went away
        ({"a": 1}, {"a": 2}, []),  # cut off, ended by itself, and the id is in use again
        ({"a": 1}, {}, []),
    ],
)
def test_upstreams_delayed_abort_ends_the_request_it_was_made_for_and_not_the_next_owner_of_its_id(
    monkeypatch: pytest.MonkeyPatch, at_end: dict, later: dict, aborted: list[str], batch: bool
) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    states = {1: object(), 2: object()}
    calls: list[str] = []
    manager = SimpleNamespace(rid_to_state={}, abort_request=calls.append)
    # The id is known only when the reply has begun: upstream makes the task first.
    obj = SimpleNamespace(rid=None, is_single=not batch)
    tasks = around_create_abort_task(TokenizerManager.create_abort_task, manager, obj)
    obj.rid = ["a"] if batch else "a"
    manager.rid_to_state = {rid: states[n] for rid, n in at_end.items()}

    async def two_seconds_later(_seconds: float) -> None:
        manager.rid_to_state = {rid: states[n] for rid, n in later.items()}

    monkeypatch.setattr(asyncio, "sleep", two_seconds_later)
    asyncio.run(tasks())
    assert calls == aborted
