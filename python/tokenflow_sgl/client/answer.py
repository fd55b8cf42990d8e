"""What is known of one stream, and what of it is due: the state behind sync and async streams alike.

Owns counts, ids, reasons and the schedule; the drivers (threads.py, tasks.py) own waiting, and the reports of
consumption are reports.py's. Invariant: an error is raised after all that came before it was shown, not instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .errors import Cut, StreamBroken
from .events import Delta, delta_of
from .pacing import Schedule, Shown, Stalls

T = TypeVar("T")


class Piece(str):
    """Text of one chunk. Joined, the pieces of a choice are its answer.

    choice: its index. chunk: the OpenAI chunk, as it came. reasoning: thinking that was streamed in this chunk; a
    chunk of thinking, or of a tool call, is a piece without text.
    """

    choice: int
    chunk: dict[str, Any]
    reasoning: str


def piece_of(chunk: Any, delta: Delta) -> Piece | None:
    """None for a chunk that shows nothing: a role, a reason, usage; its tokens join the next piece."""
    if not delta.content or delta.index is None:
        return None
    piece = Piece(delta.text)
    piece.choice, piece.chunk, piece.reasoning = delta.index, chunk, delta.reasoning
    return piece


class Answer(Generic[T]):
    """`item_of(chunk, delta)`: what the user gets for a chunk, None for nothing. `as_dict`: a chunk as a mapping."""

    def __init__(
        self,
        read_rate: float,
        item_of: Callable[[Any, Delta], T | None],
        *,
        as_dict: Callable[[Any], Any] = lambda chunk: chunk,
        on_stall: Callable[[float], None] | None = None,
    ) -> None:
        self.schedule: Schedule[T] = Schedule(read_rate)
        self.id: str | None = None
        self.usage: dict[str, Any] | None = None
        self.finish_reasons: dict[int, str] = {}
        self.ended = False
        self.cancelled = False
        self._item_of, self._as_dict, self._on_stall = item_of, as_dict, on_stall
        self._counted: dict[int, int] = {}
        self._error: Exception | None = None

    def hear(self, raw: Any, now_s: float) -> None:
        """A chunk came. Raises StreamError, Cut."""
        chunk = self._as_dict(raw)
        delta = delta_of(chunk)
        self.id = self.id or chunk.get("id")
        if delta.index is None:
            self.usage = chunk.get("usage") or self.usage
        else:
            counted = self._counted.get(delta.index, 0)
            more = counted + delta.content if delta.total_tokens is None else delta.total_tokens
            self._counted[delta.index] = max(counted, more)
            if delta.finish_reason:
                self.finish_reasons[delta.index] = delta.finish_reason
        item = self._item_of(raw, delta)
        if item is not None:
            self.schedule.put(
                delta.index, item, self._counted.get(delta.index, 0) if delta.index is not None else 0, now_s
            )

    @property
    def complete(self) -> bool:
        """Whether all that belongs to an answer has come, as far as chunks tell."""
        return self.usage is not None or (bool(self._counted) and self._counted.keys() <= self.finish_reasons.keys())

    def end(self, error: Exception | None) -> None:
        """Nothing more will come. `error`: why too early, None at the end of the answer."""
        self.ended = True
        self._error = StreamBroken(self.id, self._counted, str(error)) if isinstance(error, Cut) else error

    def cancel(self) -> None:
        """The reader left: nothing more is shown, and no error raised."""
        self.cancelled = self.ended = True
        self._error = None
        self.schedule.drop()

    def wait_s(self, now_s: float) -> float | None:
        """For how long nothing happens unless something comes; None where nothing will."""
        if self.cancelled or (self.ended and self.schedule.empty):
            return None
        return max(self.schedule.due_s() - now_s, 0.0)

    def show(self, asked_s: float, now_s: float) -> Shown[T] | None:
        shown = self.schedule.show(asked_s, now_s)
        if shown is not None and shown.stall_s and self._on_stall is not None:
            self._on_stall(shown.stall_s)
        return shown

    def raise_error(self) -> None:
        """Why it ended, if it ended badly; once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class Facts(Generic[T]):
    """What a stream tells its user; the drivers add how it is read."""

    _answer: Answer[T]

    @property
    def id(self) -> str | None:
        """The server's id of the request."""
        return self._answer.id

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage object of the whole answer, once it has come."""
        return self._answer.usage

    @property
    def finish_reason(self) -> str | None:
        """Of choice 0; `finish_reasons` has them all by index."""
        return self._answer.finish_reasons.get(0)

    @property
    def finish_reasons(self) -> dict[int, str]:
        return dict(self._answer.finish_reasons)

    @property
    def stalls(self) -> Stalls:
        """Count, total_s and longest_s of the reader's waits so far."""
        return self._answer.schedule.stalls

    @property
    def received_tokens(self) -> dict[int, int]:
        """What has come, by choice, whether it was shown or not."""
        return self._answer.schedule.received_tokens

    @property
    def read_rate(self) -> float:
        """Tokens per second. Set it when the reader speeds up or slows down: it counts from the next piece on."""
        return self._answer.schedule.read_rate

    @read_rate.setter
    def read_rate(self, read_rate: float) -> None:
        self._answer.schedule.read_rate = read_rate
        self._wake()

    def _wake(self) -> None:
        raise NotImplementedError


def on_the_wire(read_rate: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(read_rate) else read_rate
