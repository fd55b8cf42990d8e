"""Streams for threads: one thread reads the connection, the user's loop takes pieces as they are due.

Owns threads and waiting; what is due is the answer's, and how bytes come the source's. Invariant: the connection is
read whether or not the loop consumes: else a full socket would hold the server up, and its view of the reader.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from .answer import Answer, Facts
from .reports import Count, Reports

T = TypeVar("T")


class Source(Protocol):
    """One reply. Iterating yields its chunks until it is complete; raises Cut, or the error to show, if it is not."""

    key: Any  # for reports; None: nobody wants them

    def __iter__(self) -> Iterator[Any]: ...

    def hang_up(self) -> None:
        """End the connection, from any thread, while another reads it."""


class Sender:
    """Sends the reports of all streams of a client from one thread, which lives while there are streams.

    deliver: sends counts, returns the keys that the server knows no more.
    """

    def __init__(self, deliver: Callable[[Sequence[Count]], Sequence[Any]]) -> None:
        self._deliver = deliver
        self._reports = Reports()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def open(self, key: Any) -> None:
        with self._changed:
            self._reports.open(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tokenflow-reports", daemon=True)
                self._thread.start()

    def close(self, key: Any) -> None:
        with self._changed:
            self._reports.close(key)
            self._changed.notify_all()

    def took(self, key: Any, index: int, consumed_tokens: int) -> None:
        with self._changed:
            self._reports.took(key, index, consumed_tokens, time.monotonic())
            self._changed.notify_all()

    def _run(self) -> None:
        while (counts := self._wait()) is not None:
            gone: Sequence[Any] = ()
            with suppress(Exception):  # a report that fails must not make a stream fail; the next one tells it all
                gone = self._deliver(counts)
            for key in gone:
                self.close(key)

    def _wait(self) -> list[Count] | None:
        """The counts of the next report; None when there are no streams left."""
        with self._changed:
            while self._reports.open_streams:
                left_s = self._reports.next_s() - time.monotonic()
                if left_s <= 0.0:
                    return self._reports.take(time.monotonic())
                self._changed.wait(None if math.isinf(left_s) else left_s)
            self._thread = None
            return None


class Stream(Facts[T], Generic[T]):
    """Iterate it to read; leave its `with` block, or cancel it, to let the server forget it."""

    def __init__(self, answer: Answer[T], source: Source, sender: Sender | None) -> None:
        self._answer, self._source = answer, source
        self._key = source.key if sender is not None and math.isfinite(answer.schedule.read_rate) else None
        self._sender = sender
        self._changed = threading.Condition()
        if self._sender is not None and self._key is not None:
            self._sender.open(self._key)
        threading.Thread(target=self._read, name="tokenflow-stream", daemon=True).start()

    def _read(self) -> None:
        error: Exception | None = None
        try:
            for chunk in self._source:
                with self._changed:
                    self._answer.hear(chunk, time.monotonic())
                    self._changed.notify_all()
        except Exception as failure:  # for the loop that waits: raised in this thread, nobody would see it
            error = failure
            self._source.hang_up()
        with self._changed:
            if not self._answer.ended:
                self._answer.end(error)
            self._changed.notify_all()
        self._end_reports()

    def _end_reports(self) -> None:
        if self._sender is not None and self._key is not None:
            self._sender.close(self._key)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        asked_s = time.monotonic()
        with self._changed:
            while (wait_s := self._answer.wait_s(now_s := time.monotonic())) is not None:
                if (shown := self._answer.show(asked_s, now_s)) is not None:
                    break
                self._changed.wait(None if math.isinf(wait_s) else wait_s)
            else:
                self._answer.raise_error()
                raise StopIteration
        if self._sender is not None and self._key is not None and shown.index is not None:
            self._sender.took(self._key, shown.index, shown.consumed_tokens)
        return shown.item

    def cancel(self) -> None:
        """Hang up: the server stops and frees what it holds for this stream; the loop ends without an error."""
        with self._changed:
            was_read_to_its_end = self._answer.ended
            self._answer.cancel()
            self._changed.notify_all()
        if not was_read_to_its_end:
            self._source.hang_up()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
