"""Who parks for whom, on numbers worked out by hand."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow_sgl.core.preempt import Candidate, Victim, relieve, select


def wants(rid, need, *, priority=5.0, window=2.0, margin=0.0, holds_back=False):
    return Candidate(rid, need, priority, window, margin, holds_back)


def runs(rid, frees, *, slack=10.0, priority=None):
    return Victim(rid, frees, -math.log(slack) if priority is None else priority, slack)


def chosen(candidates, victims=(), *, room=0, slots=64):
    s = select(candidates, victims, room_tokens=room, slots=slots)
    return s.admit, s.park


def test_nobody_is_parked_while_all_that_waits_fits():
    s = select([wants("n1", 100), wants("n2", 100)], [runs("a", 500)], room_tokens=200, slots=2)
    assert (s.admit, s.park, s.unserved, s.room_tokens, s.slots) == (("n1", "n2"), (), 0, 0, 0)


def test_one_token_too_few_parks_one_stream():
    # 99 of 100 free: "a" gives 500, 499 stay.
    s = select([wants("n", 100)], [runs("a", 500)], room_tokens=99, slots=1)
    assert (s.admit, s.park, s.room_tokens, s.slots) == (("n",), ("a",), 499, 1)


def test_only_a_stream_with_the_window_in_slack_is_parked():
    # Park-eligible iff S >= dt_prefill + eps: window 2.0.
    assert chosen([wants("n", 100)], [runs("a", 100, slack=1.999)]) == ((), ())
    assert chosen([wants("n", 100)], [runs("a", 100, slack=2.0)]) == (("n",), ("a",))


def test_only_a_stream_that_is_outranked_is_parked_and_by_the_margin():
    assert chosen([wants("n", 100, priority=1.0)], [runs("a", 100, priority=1.0)]) == ((), ())
    assert chosen([wants("n", 100, priority=1.1)], [runs("a", 100, priority=1.0)]) == (("n",), ("a",))
    assert chosen([wants("n", 100, priority=1.5, margin=0.5)], [runs("a", 100, priority=1.0)]) == ((), ())
    assert chosen([wants("n", 100, priority=1.6, margin=0.5)], [runs("a", 100, priority=1.0)]) == (("n",), ("a",))


def test_the_largest_slack_leaves_first():
    victims = [runs("5s", 100, slack=5.0), runs("60s", 100, slack=60.0), runs("20s", 100, slack=20.0)]
    assert chosen([wants("n", 150)], victims) == (("n",), ("60s", "20s"))


def test_a_tie_between_streams_is_broken_by_id_so_that_all_ranks_agree():
    assert chosen([wants("n", 100)], [runs("b", 100), runs("a", 100), runs("c", 100)]) == (("n",), ("a",))


def test_needless_victims_are_pruned():
    # "60s" frees 40, "20s" frees 100: the second alone is enough, so the first may go on.
    assert chosen([wants("n", 100)], [runs("60s", 40, slack=60.0), runs("20s", 100, slack=20.0)]) == (("n",), ("20s",))
    # 40 + 30 + 80: with 80 at least 20 are missing, so only one of the small ones is needless.
    small = [runs("60s", 40, slack=60.0), runs("50s", 30, slack=50.0), runs("20s", 80, slack=20.0)]
    assert chosen([wants("n", 100)], small) == (("n",), ("50s", "20s"))


def test_a_stream_that_frees_nothing_is_not_parked_for_memory():
    assert chosen([wants("n", 100)], [runs("shared", 0, slack=60.0), runs("a", 100)]) == (("n",), ("a",))


def test_nobody_is_parked_when_it_would_not_be_enough():
    s = select([wants("n", 1000)], [runs("a", 100), runs("b", 100)], room_tokens=0, slots=9)
    assert (s.admit, s.park, s.unserved) == ((), (), 1)


def test_a_missing_slot_is_made_like_missing_memory():
    assert chosen([wants("n", 10)], [runs("a", 0, slack=9.0)], room=100, slots=0) == (("n",), ("a",))
    two = [wants("n1", 10), wants("n2", 10)]
    assert chosen(two, [runs("a", 50, slack=9.0)], room=100, slots=0) == (("n1",), ("a",))


def test_memory_freed_for_one_serves_the_next():
    s = select(
        [wants("n1", 100), wants("n2", 100)], [runs("a", 200), runs("b", 200, slack=5.0)], room_tokens=0, slots=9
    )
    assert (s.admit, s.park) == (("n1", "n2"), ("a",))


def test_a_big_one_that_does_not_fit_lets_small_ones_pass():
    assert chosen([wants("big", 1000), wants("small", 50)], room=100) == (("small",), ())


def test_a_big_one_that_waited_long_keeps_the_memory_it_needs_from_those_behind_it():
    assert chosen([wants("big", 1000, holds_back=True), wants("small", 50)], room=100) == ((), ())
    # Those ahead of it are served all the same.
    assert chosen([wants("ahead", 50), wants("big", 1000, holds_back=True)], room=100) == (("ahead",), ())


def test_relief_parks_the_least_wanted_and_no_more_than_needed():
    victims = [runs("5s", 100, slack=5.0), runs("60s", 100, slack=60.0), runs("20s", 100, slack=20.0)]
    assert relieve(victims, shortage_tokens=0) == ()
    assert relieve(victims, shortage_tokens=100) == ("60s",)
    assert relieve(victims, shortage_tokens=101) == ("60s", "20s")
    assert relieve([runs("shared", 0)], shortage_tokens=5) == ()


CANDIDATES = st.lists(
    st.builds(
        lambda need, priority, window, margin, hold: (need, priority, window, margin, hold),
        st.integers(1, 400),
        st.floats(-5.0, 8.0),
        st.floats(0.0, 10.0),
        st.sampled_from([0.0, 0.5]),
        st.booleans(),
    ),
    max_size=12,
)
VICTIMS = st.lists(st.tuples(st.integers(0, 400), st.floats(0.0, 100.0)), max_size=12)


@settings(max_examples=500, deadline=None)
@given(CANDIDATES, VICTIMS, st.integers(-200, 800), st.integers(0, 8))
def test_selection_never_promises_more_than_there_is_and_never_parks_for_nothing(candidates, victims, room, slots):
    cs = [Candidate(f"n{i}", *c) for i, c in enumerate(candidates)]
    vs = [Victim(f"v{i}", frees, -math.log(max(slack, 0.1)), slack) for i, (frees, slack) in enumerate(victims)]
    s = select(cs, vs, room_tokens=room, slots=slots)
    by_rid = {v.rid: v for v in vs}
    need = {c.rid: c.need_tokens for c in cs}
    freed = sum(by_rid[r].frees_tokens for r in s.park)
    taken = sum(need[r] for r in s.admit)
    assert len(set(s.park)) == len(s.park) and len(set(s.admit)) == len(s.admit)
    assert len(s.admit) + s.unserved == len(cs)
    if s.admit:
        assert taken <= room + freed
        assert len(s.admit) <= slots + len(s.park)
        windows = min(c.window_s for c in cs if c.rid in s.admit)
        assert all(by_rid[r].slack_s >= windows for r in s.park)
    else:
        assert not s.park
