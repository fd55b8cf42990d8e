"""The record of decisions: it comes back as it went in, and a policy that decides otherwise is found out."""

from __future__ import annotations

import io
import json

import pytest

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core import journal as j
from tokenflow_sgl.core.baselines import Fcfs
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policies import header_of, policy_from_header
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.types import (
    Applied,
    Arrived,
    Emitted,
    Finished,
    Halted,
    Phase,
    Plan,
    ReaderClass,
    Reported,
    Tick,
    Visible,
)

EVENTS = [
    Applied((("a", 5, 0), ("b", 7, 64)), ("c",), (("d", 64), ("e", 0)), ("f",), (("g", 48),), ("h",), 12, 3),
    Tick(0.1 + 0.2, 1e-3, ((64, 0.25), (16, 1 / 3)), ((32, 0.5),), ((600, 1e-4),)),
    Tick(7.0),
    Arrived('odd "id"\n\u00e9', 10, 20, ReaderClass.READER, 2.5, True),
    Arrived("p", 10, 20, ReaderClass.AGENT, None),
    Emitted(("a", "b"), (1, 2)),
    Emitted((), ()),
    Visible("a", 33),
    Reported("a", 12),
    Halted("a", True),
    Finished("a"),
]
PLANS = [
    Plan(),
    Plan(admit=()),
    Plan(park=("a",), publish=(("b", 64),), load=("e",), admit=("c", "d"), reserve_tokens=64, prefill_tokens=0),
]


def written(tmp_path, steps, header=None):
    path = tmp_path / "journal.jsonl"
    journal = j.Journal.open(path, header or header_of("fcfs", PolicyConfig()))
    for events, view, plan in steps:
        journal(events, view, plan)
    journal.close()
    return path


def test_events_views_and_plans_come_back_as_they_went_in(tmp_path):
    requests = [request("a"), request("w", Phase.PARKED, priority=-3), request("l", Phase.LOADING, held_tokens=7)]
    views = [engine(now_s=0.1 + 0.2), engine(requests, host_ok=False, storing_tokens=64, load_slots=1), engine()]
    assert [r.rid for r in views[1].requests()] == ["a", "w", "l"]
    steps = list(zip((EVENTS, EVENTS[:1], []), views, PLANS, strict=True))
    header, read = j.read(written(tmp_path, steps))
    assert header["policy"] == "fcfs" and header["journal"] == 2
    for (events, view, plan), (events_, view_, plan_) in zip(steps, read, strict=True):
        assert events_ == events
        assert plan_ == plan
        assert view_.built == view.built
        for name in j._VIEW_FIELDS:
            assert getattr(view_, name) == getattr(view, name)


def test_a_step_in_which_nothing_happened_is_left_out(tmp_path):
    path = written(tmp_path, [([], engine(), Plan()), ([Tick(1.0)], engine(), Plan())])
    assert len(path.read_text().splitlines()) == 2  # the header and the tick


def test_reasons_are_not_part_of_the_record(tmp_path):
    path = written(tmp_path, [([], engine(), Plan(admit=(), why={"must": 3.0}))])
    assert "why" not in path.read_text()


def test_a_last_line_that_was_torn_ends_the_journal(tmp_path):
    path = written(tmp_path, [([e], engine(), Plan()) for e in EVENTS])
    whole = path.read_text()
    path.write_text(whole[:-20])
    _, steps = j.read(path)
    assert len(list(steps)) == len(EVENTS) - 1
    assert j.replay(path, policy_from_header) == (len(EVENTS) - 1, None)


def test_every_line_is_on_the_disk_when_its_step_is_done():
    class Stream(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = self.getvalue().count("\n")

    stream = Stream()
    journal = j.Journal(stream, {})
    journal([Tick(1.0)], engine(), Plan())
    assert stream.flushed == 2


@pytest.mark.parametrize("text", ["", "\n", "[]\n", '{"journal": 3}\n', '{"policy": "fcfs"}\n', "not json\n"])
def test_what_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ValueError):
        j.read(path)


def test_a_journal_of_another_release_is_refused_by_its_version(tmp_path):
    path = tmp_path / "old"
    path.write_text('{"journal": 1, "policy": "fcfs"}\n')
    with pytest.raises(ValueError, match=r"old: a journal of version 1; this release reads version 2 only"):
        j.read(path)


JOBS = [Job(f"b{i}", 40, 200) for i in range(4)] + [Job(f"n{i}", 60, 20, at_s=4.0) for i in range(4)]


def recorded(tmp_path, config=None):
    config = config or PolicyConfig()
    path = tmp_path / "run.jsonl"
    journal = j.Journal.open(path, header_of("tokenflow", config))
    record = StandIn(TokenFlowPolicy(config), pool_tokens=768, journal=journal).run(JOBS)
    journal.close()
    assert record.parks, "a journal without a park pins nothing"
    return path


def test_a_run_replays_to_the_same_plans(tmp_path):
    path = recorded(tmp_path)
    lines = len(path.read_text().splitlines())
    assert j.replay(path, policy_from_header) == (lines - 1, None)


def test_replay_finds_a_changed_plan(tmp_path):
    path = recorded(tmp_path)
    lines = path.read_text().splitlines()
    number, step = next((i, s) for i, s in enumerate(map(json.loads, lines)) if s.get("plan", {}).get("park"))
    step["plan"]["park"] = []
    lines[number] = json.dumps(step)
    path.write_text("\n".join(lines) + "\n")
    agreed, difference = j.replay(path, policy_from_header)
    assert agreed == number - 1
    assert "park: recorded (), replayed ('b" in difference


def test_replay_finds_a_policy_with_other_settings(tmp_path):
    path = recorded(tmp_path)
    _, difference = j.replay(path, lambda _: TokenFlowPolicy(PolicyConfig(min_slack_s=3600.0)))
    assert difference is not None and difference.startswith("step ")


def test_replay_finds_a_policy_that_looks_where_the_recorded_one_did_not(tmp_path):
    path = written(tmp_path, [([Tick(1.0)], engine([request("a"), request("n", Phase.WAITING)]), Plan())])
    agreed, difference = j.replay(path, lambda _: TokenFlowPolicy(PolicyConfig()))
    assert agreed == 0 and "did not look" in difference


def test_the_header_alone_rebuilds_the_policy(tmp_path):
    config = PolicyConfig(priority="guide", min_run_tokens=20, mu=3.5)
    header, _ = j.read(recorded(tmp_path, config))
    made = policy_from_header(header)
    assert isinstance(made, TokenFlowPolicy) and made.config == config


def test_replaying_fcfs_agrees_on_every_step(tmp_path):
    path = tmp_path / "fcfs.jsonl"
    journal = j.Journal.open(path, header_of("fcfs", PolicyConfig()))
    StandIn(Fcfs(), pool_tokens=2048, journal=journal).run(JOBS)
    journal.close()
    assert j.replay(path, policy_from_header)[1] is None
