"""Upstream's output streamer, without the empty events of parked streams.

Owns one filter. Invariant: no token is held back; a request with anything unsent passes.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer


class ParkAwareStreamer(SchedulerOutputStreamer):
    """A batch in flight lists a stream that was parked meanwhile; its token is dropped: there is nothing to send."""

    def stream_output(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
        unsent = [r for r in reqs if not (r.is_retracted and r.send_token_offset == len(r.output_ids))]
        super().stream_output(unsent, *args, **kwargs)
