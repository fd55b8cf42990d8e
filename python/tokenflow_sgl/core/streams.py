"""The policy's book of streams: who each is, what its client holds, when it last ran.

Owns what was learned from events; looks at no view. Invariant: reading it never changes it, and settling what
is pending early or late gives the same book.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .buffers import ClientBuffer
from .listening import MAX_RATE_TOK_S
from .types import Arrived, Emitted, ReaderClass, Rid

_PENDING_LIMIT = 8  # steps whose emissions may wait to be folded while nobody needs to know slack


@dataclass(slots=True)
class Stream:
    """One request that the policy knows. Times in seconds of rank 0's clock."""

    rid: Rid
    reader: ReaderClass
    prompt_tokens: int
    max_output_tokens: int
    read_rate_tok_s: float | None
    buffer: ClientBuffer | None  # None while nobody reads: agents, batch, withheld reasoning
    away_since_s: float  # when it arrived or was parked
    running: bool = False
    output_tokens: int = 0
    output_at_admission: int = 0
    published_tokens: int = 0  # as the engine reported
    parks: int = 0
    refused_until_s: float = 0.0
    recompute: bool = False  # a load of it failed: it is admitted once without before another is tried

    @property
    def unstarted(self) -> bool:
        return self.output_tokens == 0

    def wait_s(self, now_s: float) -> float:
        """Seconds since it last ran; 0 while it runs."""
        return 0.0 if self.running else max(0.0, now_s - self.away_since_s)

    def row(self, now_s: float) -> dict[str, Any]:
        """Its buffer as the state route and the metrics show it: tokens, seconds, tok/s; None where nobody reads."""
        reader = ReaderClass.BATCH if self.reader is ReaderClass.READER and self.buffer is None else self.reader
        buffer = self.buffer
        return {
            "id": self.rid,
            "class": reader.value,
            "generated_tokens": self.output_tokens,
            "consumed_tokens": None if buffer is None else buffer.consumed_tokens(now_s),
            "buffer_tokens": None if buffer is None else buffer.buffer_tokens(now_s),
            "slack_s": None if buffer is None else buffer.slack_s(now_s),
            "read_rate_tok_s": self.read_rate_tok_s if buffer is None else buffer.rate_tok_s,
            "parks": self.parks,
        }


class Streams:
    """Streams by rid, in order of arrival."""

    def __init__(self, default_read_rate_tok_s: float, max_read_rate_tok_s: float = MAX_RATE_TOK_S) -> None:
        self.default_read_rate_tok_s = default_read_rate_tok_s
        self.max_read_rate_tok_s = max_read_rate_tok_s
        self.by_rid: dict[Rid, Stream] = {}
        self.away: dict[Rid, Stream] = {}
        self._unstamped: list[Stream] = []
        self._pending: list[tuple[float, Emitted]] = []

    def __iter__(self) -> Iterator[Stream]:
        return iter(self.by_rid.values())

    def arrive(self, event: Arrived, now_s: float) -> None:
        rate = event.read_rate_tok_s
        if event.reader is ReaderClass.READER and rate is None:
            rate = self.default_read_rate_tok_s
        if rate is not None:
            rate = min(rate, self.max_read_rate_tok_s)
        reads = event.reader is ReaderClass.READER and not event.withheld
        buffer = self._buffer(event.rid, rate) if reads and rate is not None else None
        stream = Stream(event.rid, event.reader, event.prompt_tokens, event.max_output_tokens, rate, buffer, now_s)
        self.by_rid[event.rid] = stream
        self.away[event.rid] = stream
        self._unstamped.append(stream)

    def stamp(self, now_s: float) -> None:
        """A tick came. An arrival on an idle engine precedes its first tick, so its time is known only now."""
        for stream in self._unstamped:
            stream.away_since_s = now_s
        self._unstamped.clear()

    def admit(self, rid: Rid) -> None:
        stream = self.by_rid.get(rid)
        if stream is None:
            return
        self.away.pop(rid, None)
        stream.running = True
        stream.recompute = False
        stream.output_at_admission = stream.output_tokens
        stream.published_tokens = stream.prompt_tokens + stream.output_tokens  # a prefill publishes what it computed

    def park(self, rid: Rid, now_s: float) -> None:
        stream = self.by_rid.get(rid)
        if stream is None:
            return
        if not stream.running:
            return  # it was away all the time: what it lost is a load, and neither a turn nor its place
        self.settle()
        self.away[rid] = stream
        stream.running = False
        stream.away_since_s = now_s
        stream.parks += 1

    def unload(self, rid: Rid) -> None:
        """Its load failed, or came too late, or could not start."""
        stream = self.by_rid.get(rid)
        if stream is not None and not stream.running:
            stream.recompute = True

    def publish(self, rid: Rid, up_to: int) -> None:
        stream = self.by_rid.get(rid)
        if stream is not None:
            stream.published_tokens = max(stream.published_tokens, up_to)

    def finish(self, rid: Rid) -> None:
        self.settle()  # else a new request with the same id would be handed this one's tokens
        self.by_rid.pop(rid, None)
        self.away.pop(rid, None)

    def reveal(self, rid: Rid, output_tokens: int) -> None:
        """Withheld reasoning is over: from here on there is a reader, and nothing before counts as read."""
        stream = self.by_rid.get(rid)
        if stream is None or stream.buffer is not None or stream.read_rate_tok_s is None:
            return
        stream.buffer = self._buffer(rid, stream.read_rate_tok_s, hidden_tokens=output_tokens)

    def _buffer(self, rid: Rid, rate_tok_s: float, hidden_tokens: int = 0) -> ClientBuffer:
        return ClientBuffer(rid, rate_tok_s, hidden_tokens=hidden_tokens, max_rate_tok_s=self.max_read_rate_tok_s)

    def hear(self, rid: Rid) -> ClientBuffer | None:
        """The buffer that a client's report is about, with all that was emitted before in it; None without one."""
        stream = self.by_rid.get(rid)
        if stream is None or stream.buffer is None:
            return None
        self.settle()
        return stream.buffer

    def emit(self, event: Emitted, now_s: float) -> None:
        """Kept for later: per stream and step this is the hottest place of the policy."""
        self._pending.append((now_s, event))
        if self.away or len(self._pending) >= _PENDING_LIMIT:
            self.settle()

    def settle(self) -> None:
        """Fold pending emissions into the buffers, runs of the same batch at once."""
        pending, self._pending = self._pending, []
        start = 0
        while start < len(pending):
            end = start + 1
            while end < len(pending) and pending[end][1].rids == pending[start][1].rids:
                end += 1
            self._fold(pending[start:end])
            start = end

    def _fold(self, run: list[tuple[float, Emitted]]) -> None:
        last_s, last = run[-1]
        by_rid = self.by_rid
        for i, rid in enumerate(last.rids):
            stream = by_rid.get(rid)
            if stream is None:
                continue
            stream.output_tokens = last.output_tokens[i]
            buffer = stream.buffer
            if buffer is not None and not buffer.emit_run(last_s, last.output_tokens[i]):
                for at_s, event in run:
                    buffer.emit(at_s, event.output_tokens[i])
