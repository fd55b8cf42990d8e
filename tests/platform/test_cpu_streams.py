"""Streams of a CPU keep CUDA's order, in threads of their own, and no error is lost or told to the wrong event."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tokenflow_sgl.platform import cpu_streams
from tokenflow_sgl.platform.cpu_streams import Event, Stream, current_stream, stream

PATIENCE_S = 30.0


class Gate:
    """A task that tells that it was begun and ends when it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(PATIENCE_S)


def fail(text: str) -> Callable[[], None]:
    def task() -> None:
        raise ValueError(text)

    return task


def recorded(on: Stream) -> Event:
    event = Event()
    event.record(on)
    return event


def test_tasks_of_a_stream_run_in_order_and_in_one_thread_that_is_not_the_callers() -> None:
    seen: list[tuple[int, int]] = []
    s = Stream()
    for i in range(100):
        s.submit(lambda i=i: seen.append((i, threading.get_ident())))  # type: ignore[misc]
    s.synchronize()
    assert [i for i, _ in seen] == list(range(100))
    assert len({t for _, t in seen}) == 1 and seen[0][1] != threading.get_ident()
    assert s.query()


def test_two_streams_run_independently() -> None:
    a, b, gate = Stream(), Stream(), Gate()
    a.submit(gate)
    assert gate.begun.wait(PATIENCE_S)
    done = recorded(b)
    done.synchronize()
    assert not a.query()
    gate.opened.set()
    a.synchronize()


def test_an_event_is_done_only_when_everything_ahead_of_it_is() -> None:
    s, gate = Stream(), Gate()
    s.submit(gate)
    event = recorded(s)
    assert gate.begun.wait(PATIENCE_S) and not event.query()
    gate.opened.set()
    event.synchronize()
    assert event.query() and event.error is None


def test_an_event_that_was_never_recorded_is_done() -> None:
    event = Event()
    assert event.query() and event.error is None
    event.synchronize()
    current_stream().wait_event(event)
    s = Stream()
    s.wait_event(event)
    s.synchronize()


def test_outside_any_stream_a_record_is_done_at_once() -> None:
    event = Event()
    event.record()
    assert event.query()


def test_an_event_recorded_again_is_done_when_the_last_record_is() -> None:
    s, gate, event = Stream(), Gate(), Event()
    event.record()
    s.submit(gate)
    event.record(s)
    assert not event.query()
    gate.opened.set()
    event.synchronize()


def test_a_stream_that_waits_for_an_event_waits_for_the_record_of_that_time_and_no_later_one() -> None:
    a, b, first, second, event = Stream(), Stream(), Gate(), Gate(), Event()
    a.submit(first)
    event.record(a)
    b.wait_event(event)
    after_wait = recorded(b)
    a.submit(second)
    event.record(a)
    first.opened.set()
    after_wait.synchronize()
    assert not event.query()
    second.opened.set()
    event.synchronize()


def test_a_stream_waits_for_another_ones_event_before_it_goes_on() -> None:
    a, b, gate = Stream(), Stream(), Gate()
    a.submit(gate)
    event = recorded(a)
    with stream(b):
        event.wait()
        behind = Event()
        behind.record()
    assert gate.begun.wait(PATIENCE_S) and not behind.query()
    gate.opened.set()
    behind.synchronize()


def test_a_stream_waits_for_another_stream_and_not_for_a_stub_of_torch() -> None:
    a, b, gate = Stream(), Stream(), Gate()
    a.submit(gate)
    b.wait_stream(torch.cpu.Stream())
    recorded(b).synchronize()
    b.wait_stream(a)
    behind = recorded(b)
    assert gate.begun.wait(PATIENCE_S) and not behind.query()
    gate.opened.set()
    behind.synchronize()


def test_a_forward_blocks_until_its_event_is_done() -> None:
    s, gate, passed = Stream(), Gate(), threading.Event()
    s.submit(gate)
    event = recorded(s)

    def forward() -> None:
        current_stream().wait_event(event)
        passed.set()

    thread = threading.Thread(target=forward)
    thread.start()
    assert gate.begun.wait(PATIENCE_S) and not passed.is_set()
    gate.opened.set()
    thread.join(PATIENCE_S)
    assert passed.is_set()


def test_the_current_stream_is_the_threads_own_and_comes_back_after_the_block() -> None:
    s, inner = Stream(), Stream()
    elsewhere: list[object] = []
    with stream(s):
        assert current_stream() is s
        with stream(inner):
            assert current_stream() is inner
        assert current_stream() is s
        thread = threading.Thread(target=lambda: elsewhere.append(current_stream()))
        thread.start()
        thread.join()
    assert not isinstance(current_stream(), Stream) and elsewhere == [current_stream()]


def test_an_error_is_on_every_later_event_of_its_submission_and_on_no_earlier_one() -> None:
    s, before, after, last = Stream(), Event(), Event(), Event()
    with stream(s):
        before.record()
        s.submit(fail("lost"))
        after.record()
        s.submit(lambda: None)
        last.record()
    s.synchronize()
    assert before.error is None
    assert str(after.error) == "lost" and last.error is after.error
    assert after.query() and last.query()


def test_the_next_submission_does_not_inherit_an_error_even_when_it_was_queued_before_the_error() -> None:
    s, gate, failed, well = Stream(), Gate(), Event(), Event()
    with stream(s):
        s.submit(gate)
        s.submit(fail("lost"))
        failed.record()
    with stream(s):
        well.record()
    gate.opened.set()
    s.synchronize()
    assert failed.error is not None and well.error is None


def test_a_task_that_raises_does_not_end_the_thread_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    s, ran = Stream(), threading.Event()
    s.submit(fail("lost"))
    s.submit(ran.set)
    s.synchronize()
    assert ran.is_set()
    assert [r.getMessage() for r in caplog.records] == ["A copy between host and device failed: ValueError: lost"]


def test_a_forward_that_waits_for_a_failed_copy_gets_its_error_and_upstreams_bookkeeping_does_not() -> None:
    s, event = Stream(), Event()
    with stream(s):
        s.submit(fail("lost"))
        event.record()
    with pytest.raises(ValueError, match="lost"):
        current_stream().wait_event(event)
    event.synchronize()
    assert isinstance(event.error, ValueError)


def test_a_stream_that_waits_for_an_event_with_an_error_takes_it_over() -> None:
    a, b, failed, behind = Stream(), Stream(), Event(), Event()
    with stream(a):
        a.submit(fail("lost"))
        failed.record()
    with stream(b):
        failed.wait()
        behind.record()
    b.synchronize()
    assert behind.error is failed.error and failed.error is not None


def test_an_event_recorded_again_has_forgotten_its_error() -> None:
    s, event = Stream(), Event()
    with stream(s):
        s.submit(fail("lost"))
        event.record()
    s.synchronize()
    with stream(s):
        event.record()
    event.synchronize()
    assert event.error is None


def test_elapsed_time_is_what_lay_between_the_records_and_needs_both_done() -> None:
    s, gate = Stream(), Gate()
    start, end = Event(enable_timing=True), Event(enable_timing=True)
    start.record(s)
    s.submit(gate)
    end.record(s)
    with pytest.raises(RuntimeError):
        start.elapsed_time(end)
    gate.opened.set()
    end.synchronize()
    assert 0.0 < start.elapsed_time(end) < 1000.0 * PATIENCE_S
    with pytest.raises(RuntimeError):
        Event().elapsed_time(end)


def test_an_idle_stream_keeps_nothing_of_its_last_task_alive() -> None:
    import weakref

    s = Stream()
    gate = Gate()
    gate.opened.set()
    gone = weakref.ref(gate)
    s.submit(gate)
    s.synchronize()
    del gate
    assert gone() is None


def test_upstreams_engine_and_counter_run_on_these_streams_once_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer

    for module in (cache_controller, l2_transfer):
        monkeypatch.setattr(module, "device_module", torch.cpu)
    l2_transfer._timing_events_supported.cache_clear()
    assert not l2_transfer._timing_events_supported()
    cpu_streams.install()
    engine = l2_transfer.L2TransferEngine("kernel")
    assert isinstance(engine.device_to_host_stream, Stream) and l2_transfer._timing_events_supported()
    counter = cache_controller.LayerDoneCounter(2)
    gate = Gate()
    engine.host_to_device_stream.submit(gate)
    counter.set_consumer(counter.update_producer())
    completion = engine.submit_host_to_device(
        [], transfer_layer_id_max=2, on_layer_done=counter.events[counter.consumer_index].complete
    )
    assert not completion.finish_event.query()
    gate.opened.set()
    counter.wait_until(1)
    completion.finish_event.synchronize()
    assert completion.start_event.elapsed_time(completion.finish_event) >= 0.0
    l2_transfer._timing_events_supported.cache_clear()
