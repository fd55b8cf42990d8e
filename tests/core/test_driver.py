"""The order of a step, and what makes a plan illegal."""

from __future__ import annotations

import pytest

from support.views import engine, request
from tokenflow_sgl.core.driver import HOLD_NOTHING, check_plan, drive_step
from tokenflow_sgl.core.types import Finished, Phase, Plan, Tick


class Tape:
    """Policy and executor that write down what is asked of them."""

    def __init__(self, plan, view=None):
        self.log, self._plan, self._view = [], plan, view or engine()

    def observe(self, event):
        self.log.append(("observe", event))

    def plan(self, view):
        self.log.append(("plan", view is self._view))
        return self._plan

    def view(self):
        self.log.append(("view",))
        return self._view

    def park(self, rid):
        self.log.append(("park", rid))
        return True

    def publish(self, rid, up_to):
        self.log.append(("publish", rid, up_to))
        return up_to

    def load(self, rids):
        self.log.append(("load", rids))
        return rids

    def admit(self, order, *, reserve_tokens, prefill_tokens):
        self.log.append(("admit", order, reserve_tokens, prefill_tokens))


def test_a_step_observes_looks_decides_and_acts_in_that_order():
    verbs = {"park": ("a", "b"), "publish": (("c", 5), ("d", 6)), "load": ("e", "f"), "admit": ("n",)}
    plan = Plan(**verbs, reserve_tokens=7, prefill_tokens=8)
    tape = Tape(plan)
    events = [Tick(1.0), Finished("x")]
    assert drive_step(tape, tape, events) is plan
    assert tape.log == [
        *[("observe", e) for e in events],
        ("view",),
        ("plan", True),
        ("park", "a"),
        ("park", "b"),
        ("publish", "c", 5),
        ("publish", "d", 6),
        ("load", ("e", "f")),
        ("admit", ("n",), 7, 8),
    ]


def test_a_step_with_nothing_to_decide_leaves_admission_to_the_engine_and_builds_no_views():
    tape = Tape(HOLD_NOTHING)
    drive_step(tape, tape, ())
    assert tape.log == [("view",), ("plan", True), ("admit", None, None, None)]
    assert tape._view.built is None


def test_the_journal_is_written_after_the_decision_and_before_the_deed():
    tape = Tape(Plan(park=("a",)))
    drive_step(tape, tape, [Tick(1.0)], lambda events, view, plan: tape.log.append(("journal", len(events), plan.park)))
    assert [entry[0] for entry in tape.log] == ["observe", "view", "plan", "journal", "park", "admit"]
    assert ("journal", 1, ("a",)) in tape.log


RUN = request("run", context=100, output=50, published_tokens=64)
OTHER = request("other", context=100, output=50)
PARKED = request("parked", Phase.PARKED, context=80)
NEW = request("new", Phase.WAITING, context=60)
PREFILL = request("prefill", Phase.PREFILL)
PINNED = request("pinned", preemptible=False)
FRESH = request("fresh", output=0)
HOST = request("host", Phase.PARKED, context=120, host_hit_tokens=80)
HELD = request("held", Phase.PARKED, context=80, host_hit_tokens=16, held_tokens=64)
LOADING = request("loading", Phase.LOADING, context=80)
ALL = [RUN, OTHER, PARKED, NEW, PREFILL, PINNED, FRESH, HOST, HELD, LOADING]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan(park=("ghost",)), "unknown rid 'ghost'"),
        (Plan(publish=(("ghost", 5),)), "unknown rid 'ghost'"),
        (Plan(admit=("ghost",)), "unknown rid 'ghost'"),
        (Plan(park=("run", "run")), "leaves twice"),
        (Plan(admit=("new", "new")), "admitted twice"),
        (Plan(park=("new",)), "new: only a stream whose first token has left can be parked, it is waiting"),
        (Plan(park=("parked",)), "parked: only a stream whose first token has left can be parked, it is parked"),
        (Plan(park=("prefill",)), "prefill: only a stream whose first token has left can be parked, it is prefill"),
        (Plan(park=("fresh",)), "fresh: only a stream whose first token has left"),
        (Plan(park=("pinned",)), "pinned: not preemptible"),
        (Plan(park=("run",), admit=("run",)), "run: admitted in the step it was parked in"),
        (Plan(admit=("run",)), "run: cannot be admitted, it is running"),
        (Plan(admit=("prefill",)), "prefill: cannot be admitted, it is prefill"),
        (Plan(publish=(("parked", 70),)), "parked: cannot publish up to 70 of 80 (parked)"),
        (Plan(publish=(("run", 101),)), "run: cannot publish up to 101 of 100 (running)"),
        (Plan(publish=(("run", 64),)), "run: cannot publish up to 64 of 100 (running)"),
        (Plan(admit=("new", "parked")), "admits 140 tokens into 139 free + 0 freed"),
        (Plan(park=("run",), admit=("new", "parked")), None),  # 139 + 100 hold the 140
        (Plan(admit=("parked",)), None),
        (Plan(park=("run", "other"), publish=(), admit=()), None),
        (Plan(publish=(("run", 65), ("other", 100))), None),
        (HOLD_NOTHING, None),
        (Plan(load=("ghost",)), "unknown rid 'ghost'"),
        (Plan(load=("host", "host")), "loaded twice"),
        (Plan(load=("parked",)), "parked: nothing to load, it is parked with 0 on the host"),
        (Plan(load=("held",)), "held: nothing to load"),
        (Plan(load=("loading",)), "loading: nothing to load, it is loading"),
        (Plan(load=("run",)), "run: nothing to load, it is running"),
        (Plan(load=("host",), admit=("host",)), "host: admitted in the step its load starts in"),
        (Plan(admit=("loading",)), "loading: cannot be admitted, it is loading"),
        (Plan(park=("loading",)), "loading: only a stream whose first token has left can be parked, it is loading"),
        (Plan(load=("host",), admit=("new",)), "admits 140 tokens into 139 free + 0 freed"),  # 80 + 60
        (Plan(park=("run",), load=("host",), admit=("new",)), None),
        (Plan(load=("host",)), None),
    ],
)
def test_each_rule_of_legality_is_named_and_what_is_legal_passes(plan, problem):
    problems = check_plan(engine(ALL, device_free_tokens=139), plan)
    if problem is None:
        assert problems == []
    else:
        assert any(problem in p for p in problems), problems


@pytest.mark.parametrize("fields", [{"load_slots": 0}, {"host_ok": False}])
def test_no_load_is_legal_without_a_slot_or_a_host(fields):
    assert check_plan(engine(ALL, device_free_tokens=139, **fields), Plan(load=("host",)))
    assert not check_plan(engine(ALL, device_free_tokens=139, **fields), Plan())
