"""What is published in the background: whose KV, how much of it, how often, and only where it may be needed.

A step takes 0.03 s and a copy to the host 1e-5 s a token, so that half a step stores 1500 tokens. Pages of 1 token and
readers of 6 tok/s, unless said otherwise.
"""

from __future__ import annotations

import pytest

from support.standin import Job, StandIn
from support.views import engine
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.cost import CostBelief
from tokenflow_sgl.core.paging import Mode, Publisher
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.streams import Streams
from tokenflow_sgl.core.types import Arrived, Emitted, ReaderClass

SETTINGS = {"publish_interval_tokens": 64, "publish_per_step": 1, "publish_below": 0.5}
TIGHT = engine(device_free_tokens=499)  # 499 of 1000 free: hardly below the half


class Book:
    """Streams that run with a prompt of 100 each, which their prefill published, and the publisher that looks at them.

    `look()` is the tick in which the publisher sees all streams; `due()` is asked of a view.
    """

    def __init__(self, *rids, reader=ReaderClass.READER, **settings):
        self.config = PolicyConfig(**(SETTINGS | settings))
        self.streams, self.publisher = Streams(6.0), Publisher(self.config)
        self.cost = CostBelief.prior(self.config)
        for rid in rids:
            rate = 6.0 if reader is ReaderClass.READER else None
            self.streams.arrive(Arrived(rid, 100, 5000, reader, rate), 0.0)
            self.streams.admit(rid)

    def grow(self, **output):
        self.streams.emit(Emitted(tuple(output), tuple(output.values())), 1.0)
        self.streams.settle()
        return self

    def look(self):
        self.publisher._steps = 0
        self.publisher.tick(self.streams, None)
        return self

    def due(self, view=TIGHT, demand=0.0):
        return self.publisher.due(self.streams, view, demand_tokens=demand, cost=self.cost)

    def published(self, rid, up_to):
        self.publisher.published(rid, up_to, self.streams, self.cost)
        self.streams.publish(rid, up_to)


# ---- when


def test_memory_beyond_the_forecast_decides_how_eagerly_is_published():
    # 1000 tokens, publish_below 0.5: headroom 500 and more is rest, below 0 is hard.
    publisher = Book().publisher
    for free, demand, mode in (
        (900, 400.0, Mode.REST),
        (900, 400.1, Mode.STEADY),
        (499, 0.0, Mode.STEADY),
        (400, 400.0, Mode.STEADY),
        (400, 400.1, Mode.HARD),
        (0, 0.0, Mode.STEADY),  # no forecast: free memory alone tells of no rush
    ):
        assert publisher.mode(engine(device_free_tokens=free), demand) is mode, (free, demand)


def test_nothing_is_published_while_memory_is_to_spare():
    b = Book("a").grow(a=500).look()
    assert b.due(engine(device_free_tokens=500)) == ()
    assert b.due(engine(device_free_tokens=499)) == (("a", 599),)
    assert b.due(engine(device_free_tokens=900), demand=401.0) == (("a", 599),)


@pytest.mark.parametrize("settings", [{"copies": "at_park"}, {"copies": "none"}, {"publish_per_step": 0}])
def test_who_wants_no_copies_ahead_has_none(settings):
    b = Book("a", **settings).grow(a=500).look()
    assert b.due() == b.due(demand=900.0) == ()


def test_nothing_is_published_while_the_host_cannot_be_trusted_or_is_full():
    b = Book("a").grow(a=500).look()
    assert b.due(engine(device_free_tokens=400, host_ok=False)) == ()
    assert b.due(engine(device_free_tokens=400, host_free_tokens=0)) == ()
    # 100 are published; the host takes 50 more.
    assert b.due(engine(device_free_tokens=400, host_free_tokens=50)) == (("a", 150),)


# ---- who


def test_a_stream_is_due_when_it_grew_by_the_interval_and_not_a_token_sooner():
    # 100 of the prompt are published. After n tokens the KV of n - 1 is written: due at n = 65, up to token 164.
    b = Book("a").grow(a=64).look()
    assert b.due() == ()
    b.grow(a=65)
    assert b.due() == (("a", 164),)


def test_most_slack_goes_first_and_who_has_no_reader_before_all():
    # At 1 s all tokens have just come: 600 last 100 s, 200 last 33 s.
    b = Book("a", "b", "c", publish_per_step=9).grow(a=200, b=600, c=400)
    b.streams.arrive(Arrived("batch", 100, 5000, ReaderClass.BATCH, None), 0.0)
    b.streams.admit("batch")
    b.grow(batch=200).look()
    assert [rid for rid, _ in b.due()] == ["batch", "b", "c", "a"]


def test_one_stream_after_another_gets_its_turn():
    # Four steps' worth at a time: they share a store.
    b = Book(*"abcdefghi").grow(**{rid: 108 - i for i, rid in enumerate("abcdefghi")}).look()
    seen = []
    while found := b.due():
        seen.append("".join(rid for rid, _ in found))
        for rid, up_to in found:
            b.published(rid, up_to)
    assert seen == ["abcd", "efgh", "i"]


def test_publishes_wait_for_each_other_where_there_is_no_rush():
    b = Book("a", "b").grow(a=102, b=101).look()
    found = []
    for _ in range(8):
        found.append(len(b.due()))
        b.publisher.tick(b.streams, 0.03)
    assert found == [2, 0, 0, 0, 2, 0, 0, 0]
    for _ in range(4):
        b.publisher.tick(b.streams, 0.03)
        assert b.due(demand=2000.0), "a rush waits for nothing"


def test_who_cannot_be_parked_soon_is_not_published():
    # "ends" has 8 tokens left to make, "often" was parked as often as it may be, "away" is parked, "gone" is finished.
    b = Book("ends", "often", "away", "gone", "runs").grow(ends=4992, often=500, away=500, gone=500, runs=400)
    b.streams.by_rid["often"].parks = b.config.max_parks
    b.look()
    b.streams.park("away", 2.0)
    b.streams.finish("gone")
    assert b.due() == (("runs", 499),)
    assert [rid for rid, _ in b.due(demand=900.0)] == ["runs"]


def test_a_stream_that_returned_is_due_only_for_what_it_grew_since():
    # Its return computed and published all 100 + 100; the next is due at 100 + 165 - 1 - 200 = 64.
    b = Book("a").grow(a=100)
    b.streams.park("a", 2.0)
    b.streams.admit("a")
    b.grow(a=164).look()
    assert b.due() == ()
    b.grow(a=165)
    assert b.due() == (("a", 264),)


def test_a_stream_that_the_engine_refuses_to_publish_does_not_hold_up_the_rest():
    for demand in (0.0, 900.0):
        b = Book("a", "b").grow(a=101, b=100).look()
        assert b.due(demand=demand)[0] == ("a", 200)
        b.published("a", 0)  # refused
        assert b.due(demand=demand) == (("b", 199),)
        b.look()  # a second later it is tried again
        assert b.due(demand=demand)[0] == ("a", 200)


def test_in_a_rush_those_who_must_go_are_published_page_by_page_and_the_others_by_the_interval():
    # 499 free and 599 wanted: 100 are missing, and "a", with most slack and 149 tokens, makes up for them alone.
    b = Book("a", "b").grow(a=50, b=49).look()
    assert b.due() == ()  # 49 and 48 are below the interval of 64
    assert b.due(demand=599.0) == (("a", 149),)
    # 200 are missing: "b" must go too.
    assert b.due(demand=699.0) == (("a", 149), ("b", 148))


def test_the_less_is_left_the_less_must_the_next_to_be_parked_have_grown():
    # 64 tokens at a headroom of 500, 32 at 250, a page at 0. "a" grew by 40 of which 39 are written.
    b = Book("a").grow(a=40).look()
    for headroom, due in ((310, False), (300, True), (250, True), (0, True)):
        assert bool(b.due(engine(device_free_tokens=headroom))) is due, headroom
    # Those beyond the 64 with most slack wait for the interval however little is left.
    rids = [f"r{i:02}" for i in range(64)]
    b = Book("a", *rids, publish_per_step=100).grow(a=40, **dict.fromkeys(rids, 500)).look()
    b.cost.store.per_token_s = 0.0
    assert "a" not in b.publisher.likely
    view = engine(device_free_tokens=0, host_free_tokens=1 << 20)
    assert [rid for rid, _ in b.due(view)] == rids[: len(b.due(view))]


# ---- how much


def test_whole_pages_only_and_never_a_part_of_one():
    # Pages of 16: of the prompt of 100 only 96 are in the tree; 199 written are 12 pages, up to 192.
    view = engine(device_free_tokens=400, page_tokens=16)
    b = Book("a", publish_interval_tokens=96).grow(a=100).look()
    assert b.due(view) == (("a", 192),)
    b.published("a", 192)
    # In a rush the next page is due when it is full: 208 written = 100 + 109 - 1.
    b.grow(a=108)
    assert b.due(view, demand=900.0) == ()
    b.grow(a=109)
    assert b.due(view, demand=900.0) == (("a", 208),)


def test_no_more_is_published_than_the_link_stores_in_half_a_step():
    b = Book("a", "b", publish_per_step=9).grow(a=2000, b=1000).look()
    b.cost.store.per_token_s = 0.9999e-5  # 1500 in 0.015 s; 100 of "a" are published, and for "b" nothing is left
    assert b.due() == (("a", 1600),)
    # 1400 are open: 100 more, oldest first.
    assert b.due(engine(device_free_tokens=400, storing_tokens=1400)) == (("a", 200),)
    assert b.due(engine(device_free_tokens=400, storing_tokens=1500)) == ()


def test_where_steps_are_quicker_than_the_start_of_a_store_half_of_its_time_is_copy():
    # A start of 0.02 s is more than half a step of 0.03 s; in 0.02 s more 2000 tokens are stored at 1e-5 s each.
    b = Book("a").grow(a=4000).look()
    b.cost.store.fixed_s, b.cost.store.per_token_s = 0.02, 0.9999e-5
    assert b.due() == (("a", 2100),)
    assert b.due(engine(device_free_tokens=400, storing_tokens=16)) == ()


def test_a_link_slower_than_a_page_a_step_stores_a_page_at_a_time():
    # 500 tok/s: 7.5 tokens in half a step, a page is 16.
    b = Book("a", load_prior_tok_s=500.0).grow(a=200).look()
    assert b.due(engine(device_free_tokens=400, page_tokens=16)) == (("a", 112),)
    assert b.due(engine(device_free_tokens=400, page_tokens=16, storing_tokens=16)) == ()


# ---- how often


def test_no_more_than_the_set_number_is_published_in_a_step_and_four_times_as_many_in_a_rush():
    rids = [f"r{i}" for i in range(9)]
    b = Book(*rids).grow(**dict.fromkeys(rids, 100)).look()
    assert len(b.due()) == 4  # of four steps
    assert len(b.due(demand=2000.0)) == 4


def test_publishing_takes_no_more_than_its_share_of_step_time():
    # 2% of 0.03 s is 0.6 ms a step. A publish of 599 tokens takes 0.3 + 599 / 5000 = 0.42 ms; after a saved-up second
    # (20 ms) is spent, 0.6 / 0.42 = 1.43 publishes a step are earned.
    rids = [f"r{i:02}" for i in range(40)]
    b = Book(*rids, publish_per_step=100, publish_interval_tokens=1).grow(**dict.fromkeys(rids, 500)).look()
    b.cost.store.per_token_s = 0.0
    each_s = b.cost.publish.seconds(599)
    spent = 0.0
    for step in range(1000):
        b.grow(**dict.fromkeys(rids, 501 + step)).publisher.tick(b.streams, 0.03)
        for rid, up_to in b.due():
            spent += b.cost.publish.seconds(b.streams.by_rid[rid].prompt_tokens + 500 + step)
            b.published(rid, up_to)
    # One publish may overdraw the credit.
    assert 0.99 * (1000 * 0.0006) < spent <= 0.020 + 1000 * 0.0006 + 2 * each_s


def test_in_a_rush_publishing_may_take_four_times_its_share_and_the_quiet_after_it_pays_back_no_more_than_that():
    rids = [f"r{i:02}" for i in range(40)]
    b = Book(*rids, publish_per_step=100).grow(**dict.fromkeys(rids, 500)).look()
    assert b.publisher.hard_credit_s == pytest.approx(0.08)  # 4 x 2% of the second that may be saved up
    for _ in range(1000):
        b.published("r00", 599)
    # Debt ends at 4 x 2% of a second: 100 ms of debt and credit, at 0.6 ms a step, are paid back in 133 steps.
    assert b.publisher.credit_s == b.publisher.hard_credit_s == pytest.approx(-0.08)
    b.look()
    steps = 0
    while not b.due():
        b.publisher.tick(b.streams, 0.03)
        steps += 1
    assert steps == pytest.approx(0.08 / 0.0006, abs=4)


def test_an_idle_spell_earns_nothing():
    b = Book("a")
    b.publisher.credit_s = 0.0
    b.publisher.tick(b.streams, None)
    assert b.publisher.credit_s == 0.0


def test_asking_changes_nothing():
    b = Book("a").grow(a=500).look()
    assert b.due() == b.due() == (("a", 599),)


# ---- a burst on the stand-in engine


def test_in_a_burst_nearly_all_whole_pages_of_parked_streams_are_on_the_host_and_publishing_is_cheap():
    """Eight streams fill the pool before newcomers come, in two waves. A publish takes 0.3 ms and 0.2 ms for 1000
    tokens of context, as the prior believes."""
    policy = TokenFlowPolicy(PolicyConfig())
    e = StandIn(policy, pool_tokens=4096, publish_s=lambda context: 0.0003 + 2e-7 * context)
    streams = [Job(f"s{i}", 100, 700, at_s=0.2 * i) for i in range(8)]
    waves = [Job(f"n{w}{i}", 100, 60, at_s=(9.0, 14.0)[w]) for w in range(2) for i in range(10)]
    record = e.run([*streams, *waves])
    assert len(record.parks) >= 8
    written = sum(whole for whole, _ in record.park_tokens)
    backed = sum(done for _, done in record.park_tokens)
    assert backed >= 0.95 * written, (backed, written, record.park_tokens)
    assert record.publish_s < 0.02 * e.now_s, (record.publish_s, e.now_s)
    assert not record.retractions
