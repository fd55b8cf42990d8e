"""Streams and events for a CPU: what SGLang's copies between host and device find in place of torch.cpu's stubs.

Owns the threads that copies run in, and CUDA's order between them: first in first out on a stream, waits across
streams, events that may be recorded again. Does not own what is copied (cpu_host_pool.py) or when. Invariant: no event
is done before everything submitted to its stream ahead of it has ended, well or not; how it ended is the event's error.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Task = Callable[[], None]


def run_task(stream: Stream, task: Task) -> None:
    """Everything a stream's thread does passes here: a Begin, Record or Wait below, or what submit() was given."""
    task()


class Moment:
    """One recording of an event. A waiter holds the moment and not the event, which may be recorded again meanwhile."""

    __slots__ = ("at_s", "done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.at_s = 0.0
        self.error: BaseException | None = None

    def complete(self, error: BaseException | None = None) -> None:
        self.at_s = time.perf_counter()
        self.error = error
        self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            # Whoever waits is about to read what was to be copied.
            raise self.error


class Event:
    """torch.cuda.Event. One that was never recorded counts as done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._moment: Moment | None = None

    def record(self, stream: Stream | ComputeStream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def query(self) -> bool:
        return self._moment is None or self._moment.done.is_set()

    def synchronize(self) -> None:
        """Block the calling thread until done, well or not. Does not raise: upstream's bookkeeping comes here for every
        copy that has ended, and would end the scheduler for what costs one stream a recompute."""
        if self._moment is not None:
            self._moment.done.wait()

    def wait(self, stream: Stream | ComputeStream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds from this event to `other`, each stamped when its stream came to it."""
        for event in (self, other):
            if not event.enable_timing or event._moment is None or not event.query():
                raise RuntimeError("elapsed_time needs two events made with enable_timing=True, recorded and done")
        assert self._moment is not None and other._moment is not None
        return (other._moment.at_s - self._moment.at_s) * 1000.0

    @property
    def error(self) -> BaseException | None:
        """What went wrong ahead of this event in its submission; None while it is not done."""
        return self._moment.error if self._moment is not None else None


class Begin:
    """A submission begins: what failed in the one before is no concern of its events."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __call__(self) -> None:
        self.stream.error = None


class Record:
    """The stream has come to where an event was recorded. Run late or never, the event is late or never done."""

    def __init__(self, stream: Stream, moment: Moment) -> None:
        self.stream = stream
        self.moment = moment

    def __call__(self) -> None:
        self.moment.complete(self.stream.error)


class Wait:
    """The stream stands still until a moment has come, and takes over its error."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def __call__(self) -> None:
        self.moment.wait()


class Stream:
    """torch.cuda.Stream: one thread, started with the first task, that ends with the process."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.error: BaseException | None = None  # of the submission that runs; its own thread alone touches it
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._moved = threading.Condition()
        self._submitted = 0
        self._ended = 0
        Stream._made += 1
        self._name = f"cpu-stream-{Stream._made}"

    def submit(self, task: Task) -> None:
        with self._moved:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._submitted += 1
            self._tasks.put(task)

    def record_event(self, event: Event) -> None:
        moment = Moment()
        event._moment = moment
        self.submit(Record(self, moment))

    def wait_event(self, event: Event) -> None:
        moment = event._moment
        if moment is not None and not (moment.done.is_set() and moment.error is None):
            self.submit(Wait(moment))

    def wait_stream(self, other: Any) -> None:
        _wait_stream(self, other)

    def synchronize(self) -> None:
        """Block until everything submitted so far has ended. Does not raise: errors belong to events."""
        with self._moved:
            so_far = self._submitted
            self._moved.wait_for(lambda: self._ended >= so_far)

    def query(self) -> bool:
        with self._moved:
            return self._ended == self._submitted

    def _work(self) -> None:
        _thread.stream = self
        while True:
            task: Task | None = self._tasks.get()
            assert task is not None
            try:
                run_task(self, task)
            except BaseException as error:
                # A thread that died here would leave every event behind it undone, and the server waiting for ever.
                self.error = error
                logger.error("A copy between host and device failed: %s: %s", type(error).__name__, error)
            task = None  # or an idle stream keeps the tensors of its last copy
            with self._moved:
                self._ended += 1
                self._moved.notify_all()


class ComputeStream:
    """What a thread outside any stream() does: at once, in the thread itself."""

    error: BaseException | None = None

    def submit(self, task: Task) -> None:
        task()

    def record_event(self, event: Event) -> None:
        event._moment = Moment()
        event._moment.complete()

    def wait_event(self, event: Event) -> None:
        # A forward waiting for its pages: going on would read what is not there, yet or at all.
        if event._moment is not None:
            event._moment.wait()

    def wait_stream(self, other: Any) -> None:
        _wait_stream(self, other)

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


def _wait_stream(waiting: Stream | ComputeStream, other: Any) -> None:
    # Upstream's fence is its forward stream, a stub of torch.cpu, and there is nothing to wait for: on a CPU a forward
    # runs in the scheduler's thread, so it has ended whenever that thread does anything else.
    if isinstance(other, Stream):
        event = Event()
        other.record_event(event)
        waiting.wait_event(event)


_compute = ComputeStream()
_thread = threading.local()


def current_stream(device: Any = None) -> Stream | ComputeStream:
    """The calling thread's: that of the innermost stream(); a stream's thread has the stream itself."""
    found: Stream | ComputeStream = getattr(_thread, "stream", _compute)
    return found


class stream:
    """Context manager: one submission to a stream. None, and a stub of torch.cpu, change nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream if isinstance(stream, (Stream, ComputeStream)) else None

    def __enter__(self) -> None:
        self._before = current_stream()
        if self.stream is None:
            return
        if isinstance(self.stream, Stream):
            self.stream.submit(Begin(self.stream))
        _thread.stream = self.stream

    def __exit__(self, *exc: object) -> None:
        _thread.stream = self._before


def install() -> None:
    """Upstream's transfer engine and cache controller use this module for their streams and events.

    To be called before the first of them is made: an event of a stub would count as done at once.
    """
    import sys

    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer

    this = sys.modules[__name__]
    cache_controller.device_module = this
    l2_transfer.device_module = this
    # Whether events can be timed was perhaps asked of the stubs, which cannot.
    l2_transfer._timing_events_supported.cache_clear()
