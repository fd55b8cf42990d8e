"""What is published in the background, in turn, and only where it may be needed."""

from __future__ import annotations

from support.views import engine
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.paging import Publisher
from tokenflow_sgl.core.streams import Streams
from tokenflow_sgl.core.types import Arrived, Emitted, ReaderClass

TIGHT = engine(device_free_tokens=400)  # 400 of 1000 free: below the half
CONFIG = PolicyConfig(publish_interval_tokens=64, publish_per_step=1, publish_below=0.5)


def running(*rids, config=CONFIG, output=0):
    """A book and a publisher in which every rid runs, with a prompt of 100 that its prefill published."""
    streams, publisher = Streams(6.0), Publisher(config)
    for rid in rids:
        streams.arrive(Arrived(rid, 100, 5000, ReaderClass.READER, 6.0), 0.0)
        streams.admit(rid)
        publisher.add(rid)
    grow(streams, *rids, output=output)
    return streams, publisher


def grow(streams, *rids, output):
    streams.emit(Emitted(rids, (output,) * len(rids)), 1.0)
    streams.settle()


def test_a_stream_is_due_when_it_grew_by_the_interval_and_not_a_token_sooner():
    # 100 of the prompt are published. After n tokens the KV of n - 1 is written: due at n = 65, up to token 164.
    streams, publisher = running("a", output=64)
    assert publisher.due(streams, TIGHT) == ()
    grow(streams, "a", output=65)
    assert publisher.due(streams, TIGHT) == (("a", 164),)


def test_nothing_is_published_while_memory_is_to_spare():
    streams, publisher = running("a", output=500)
    assert publisher.due(streams, engine(device_free_tokens=500)) == ()
    assert publisher.due(streams, engine(device_free_tokens=499)) == (("a", 599),)


def test_streams_take_turns():
    streams, publisher = running("a", "b", "c", output=100)
    seen = []
    for _ in range(4):
        ((rid, _),) = publisher.due(streams, TIGHT)
        seen.append(rid)
        publisher.published(rid)
    assert seen == ["a", "b", "c", "a"]


def test_a_stream_that_the_engine_refuses_to_publish_does_not_hold_up_the_rest():
    streams, publisher = running("a", "b", output=100)
    publisher.published("a")  # refused: the book was not told of a new end
    assert publisher.due(streams, TIGHT) == (("b", 199),)


def test_no_more_than_the_set_number_is_published_in_a_step():
    config = PolicyConfig(publish_interval_tokens=64, publish_per_step=2)
    streams, publisher = running("a", "b", "c", config=config, output=100)
    assert publisher.due(streams, TIGHT) == (("a", 199), ("b", 199))
    streams, publisher = running("a", config=PolicyConfig(publish_per_step=0), output=500)
    assert publisher.due(streams, TIGHT) == ()


def test_who_left_is_not_published_and_who_came_back_has_one_place():
    streams, publisher = running("a", "b", output=100)
    publisher.discard("a")
    streams.park("a", 2.0)
    assert publisher.due(streams, TIGHT) == (("b", 199),)
    streams.admit("a")
    publisher.add("a")
    publisher.add("a")
    grow(streams, "a", "b", output=300)
    for rid in ("b", "a"):
        assert publisher.due(streams, TIGHT)[0][0] == rid
        publisher.published(rid)


def test_a_stream_that_returned_is_due_only_for_what_it_grew_since():
    # Its return computed and published all 100 + 100; the next is due at 100 + 265 - 1 - 200 = 164 >= 64, not before.
    streams, publisher = running("a", output=100)
    publisher.discard("a")
    streams.park("a", 2.0)
    streams.admit("a")
    publisher.add("a")
    grow(streams, "a", output=164)
    assert publisher.due(streams, TIGHT) == ()
    grow(streams, "a", output=165)
    assert publisher.due(streams, TIGHT) == (("a", 264),)


def test_leaving_twice_and_asking_twice_is_harmless():
    streams, publisher = running("a", output=100)
    assert publisher.due(streams, TIGHT) == publisher.due(streams, TIGHT)
    publisher.discard("a")
    publisher.discard("a")
    assert publisher.due(streams, TIGHT) == ()
