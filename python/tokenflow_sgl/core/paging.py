"""What to publish next: a running stream's new KV goes into the radix tree in the background, ahead of any park.

Owns the rotation of running streams; copies nothing. Invariant: at most `publish_per_step` a step, because one publish
costs time in proportion to the stream's context on the engine's own thread.
"""

from __future__ import annotations

from collections import deque

from .config import PolicyConfig
from .streams import Streams
from .types import EngineView, Rid

_LOOK = 4  # streams looked at in one step; the rest wait their turn


class Publisher:
    """Takes running streams in turn; due is who grew by an interval since it was last published."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._turn: deque[Rid] = deque()

    def add(self, rid: Rid) -> None:
        """A stream came in. A stream that comes back keeps one place only."""
        if rid not in self._turn:
            self._turn.append(rid)

    def discard(self, rid: Rid) -> None:
        """It left: finished, or parked."""
        if rid in self._turn:
            self._turn.remove(rid)

    def published(self, rid: Rid) -> None:
        """It had its turn, whatever came of it: a stream the engine refuses to publish must not hold up the rest."""
        self.discard(rid)
        self._turn.append(rid)

    def due(self, streams: Streams, view: EngineView) -> tuple[tuple[Rid, int], ...]:
        """(rid, up to token) of those to publish now; none while memory is to spare: nobody will be parked then."""
        if view.device_free_tokens >= self.config.publish_below * view.device_total_tokens:
            return ()
        return tuple(self._due(streams))

    def _due(self, streams: Streams) -> list[tuple[Rid, int]]:
        found: list[tuple[Rid, int]] = []
        for i in range(min(_LOOK, len(self._turn))):
            s = streams.by_rid.get(self._turn[i])
            if s is None or not s.running or len(found) >= self.config.publish_per_step:
                continue
            # The KV of the newest token is written by the step that reads it.
            known = s.prompt_tokens + s.output_tokens - 1
            if known - s.published_tokens >= self.config.publish_interval_tokens:
                found.append((s.rid, known))
        return found
