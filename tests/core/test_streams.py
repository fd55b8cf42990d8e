"""The book of streams. Folding emissions late, in runs, must give the same book as folding each step by itself."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from support.standin import state_of
from tokenflow_sgl.core.streams import Streams
from tokenflow_sgl.core.types import Arrived, Emitted, ReaderClass


def arrived(rid, rate=None, reader=ReaderClass.READER, withheld=False):
    return Arrived(rid, 100, 500, reader, rate, withheld)


def book(*arrivals, now_s=0.0):
    streams = Streams(6.0)
    for a in arrivals:
        streams.arrive(a, now_s)
    return streams


def test_a_silent_reader_gets_the_default_rate_and_others_have_no_buffer():
    s = book(
        arrived("silent"),
        arrived("slow", 2.5),
        arrived("program", reader=ReaderClass.AGENT),
        arrived("batch", reader=ReaderClass.BATCH),
        arrived("thinks", 4.0, withheld=True),
    )
    assert s.by_rid["silent"].buffer.rate_tok_s == 6.0
    assert s.by_rid["slow"].buffer.rate_tok_s == 2.5
    assert [s.by_rid[r].buffer for r in ("program", "batch", "thinks")] == [None, None, None]


def test_no_reader_is_believed_to_be_faster_than_the_limit_whatever_it_declares():
    streams = Streams(60.0, 50.0)
    for event in (
        arrived("silent"),
        arrived("quick", 1000.0),
        arrived("thinks", 80.0, withheld=True),
        arrived("a", 9.0),
    ):
        streams.arrive(event, 0.0)
    streams.reveal("thinks", 10)
    rates = {rid: s.buffer.rate_tok_s for rid, s in streams.by_rid.items()}
    assert rates == {"silent": 50.0, "quick": 50.0, "thinks": 50.0, "a": 9.0}
    quick = streams.by_rid["quick"].buffer
    quick.emit(0.0, 10_000)
    for second in range(1, 9):  # 200 tok/s, as it says
        quick.report(float(second), 200 * second)
    assert quick.rate_tok_s == 50.0


def test_streams_are_kept_in_order_of_arrival():
    s = book(arrived("b"), arrived("a"), arrived("c"))
    assert [x.rid for x in s] == ["b", "a", "c"]


def test_an_arrival_on_an_idle_engine_is_dated_by_the_first_tick_after_it():
    s = book(arrived("a"), now_s=3.0)  # the last clock known is 3 s, from before the idle spell
    s.stamp(500.0)
    assert s.by_rid["a"].wait_s(501.0) == 1.0
    s.stamp(502.0)  # later ticks do not touch it
    assert s.by_rid["a"].wait_s(503.0) == 3.0


def test_a_running_stream_does_not_wait_and_a_parked_one_waits_from_its_park():
    s = book(arrived("a"))
    s.admit("a")
    s.emit(Emitted(("a",), (1,)), 1.0)
    assert s.by_rid["a"].wait_s(9.0) == 0.0
    s.park("a", 10.0)
    assert s.by_rid["a"].wait_s(12.0) == 2.0
    assert s.by_rid["a"].parks == 1


def test_a_run_is_counted_from_the_last_admission():
    s = book(arrived("a"))
    s.admit("a")
    s.emit(Emitted(("a",), (70,)), 1.0)
    s.park("a", 2.0)
    s.admit("a")
    assert s.by_rid["a"].output_at_admission == 70


def test_reasoning_that_was_withheld_does_not_count_as_read():
    s = book(arrived("a", 5.0, withheld=True))
    s.admit("a")
    s.emit(Emitted(("a",), (200,)), 1.0)
    s.reveal("a", 200)
    s.emit(Emitted(("a",), (210,)), 2.0)
    s.settle()
    assert s.by_rid["a"].buffer.generated_tokens == 10
    assert s.by_rid["a"].buffer.slack_s(2.0) == 2.0  # 10 tokens at 5 tok/s


def test_events_of_a_stream_that_is_gone_are_harmless():
    s = book(arrived("a"))
    s.finish("a")
    for forget in (s.finish, s.admit):
        forget("a")
    s.park("a", 1.0)
    s.publish("a", 5)
    s.reveal("a", 5)
    s.emit(Emitted(("a",), (5,)), 1.0)
    s.settle()
    assert not s.by_rid and not s.away


def test_an_id_used_again_inherits_nothing_from_the_stream_that_had_it():
    s = book(arrived("a", 5.0))
    s.admit("a")
    s.emit(Emitted(("a",), (50,)), 1.0)  # nobody is away: kept for later
    s.finish("a")
    s.arrive(arrived("a", 5.0), 2.0)
    s.settle()
    assert s.by_rid["a"].output_tokens == 0
    assert s.by_rid["a"].unstarted
    assert s.by_rid["a"].buffer.slack_s(2.0) == 0.0


def test_reading_the_book_changes_nothing():
    s = book(arrived("a"), arrived("b"))
    s.admit("a"), s.admit("b")
    s.emit(Emitted(("a", "b"), (1, 1)), 1.0)
    before = state_of(copy.deepcopy(s))
    for stream in s:
        stream.wait_s(5.0)
        stream.buffer.slack_s(5.0)
    assert state_of(s) == before


class Eager(Streams):
    """Folds every step at once."""

    def emit(self, event, now_s):
        super().emit(event, now_s)
        self.settle()


OPS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 8 + ["park", "return", "arrive", "finish", "reveal", "publish"]),
        st.integers(0, 7),
        st.floats(0.0, 3.0),
        st.integers(1, 4),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(OPS, st.lists(st.sampled_from([0.1, 2.0, 6.0, 30.0, 1000.0]), min_size=8, max_size=8))
def test_lazy_folding_equals_step_by_step_folding(ops, rates):
    books = (Streams(6.0), Eager(6.0))
    output: dict[str, int] = {}
    running: list[str] = []
    parked: list[str] = []
    now_s, born = 0.0, 0

    def arrive():
        nonlocal born
        rid = f"r{born}"
        kind = (ReaderClass.READER, ReaderClass.READER, ReaderClass.BATCH)[born % 3]
        for b in books:
            b.arrive(Arrived(rid, 10, 500, kind, rates[born % 8], withheld=born % 4 == 1), now_s)
            b.admit(rid)
        born += 1
        output[rid] = 0
        running.append(rid)

    arrive()
    for what, pick, wait_s, tokens in ops:
        now_s += wait_s
        for b in books:
            b.stamp(now_s)
        if what == "step" and running:
            for rid in running:
                output[rid] += tokens
            event = Emitted(tuple(running), tuple(output[r] for r in running))
            for b in books:
                b.emit(event, now_s)
        elif what == "arrive":
            arrive()
        elif what in ("park", "finish", "reveal", "publish") and running:
            rid = running[pick % len(running)]
            for b in books:
                if what == "park":
                    b.park(rid, now_s)
                elif what == "finish":
                    b.finish(rid)
                elif what == "publish":
                    b.publish(rid, output[rid])
                else:
                    b.reveal(rid, output[rid])
            if what in ("park", "finish"):
                running.remove(rid)
            if what == "park":
                parked.append(rid)
        elif what == "return" and parked:
            rid = parked.pop(pick % len(parked))
            for b in books:
                b.admit(rid)
            running.append(rid)
        if now_s > 0.0 and pick == 3:
            for b in books:
                b.settle()
            assert state_of(books[0].by_rid) == state_of(books[1].by_rid)
    for b in books:
        b.settle()
    assert state_of(books[0].by_rid) == state_of(books[1].by_rid)
