"""SGLang's `--schedule-policy hrrn` (PR #32911; managers/schedule_policy.py of the 0.5.23 release): among those that
wait the highest response ratio next, with the engine's own reservation. Nobody is parked.

Taken from the source: the ratio counts tokens, not seconds, 1 + prefilled since it queued / uncached prompt; the
answer's own length plays no part; who is cached whole goes first; ties by id; who is retracted queues anew; above 128
that wait, the queue is left as it stands.

Not on the seam: prompts are not shown, so two that wait with the same prefix are not told from each other, where
upstream puts the second last until the first is in.

Owns the count and where each stood in it. Invariant: what is planned is an order only.
"""

from __future__ import annotations

from ..driver import HOLD_NOTHING
from ..types import Applied, Arrived, EngineView, Event, Finished, Phase, Plan, RequestView, Rid
from .room import leading

MATCHED_AT_MOST = 128  # upstream's WAITING_QUEUE_PREFIX_MATCH_MAX


class Hrrn:
    copies = "none"  # what the executor must be set to: see PolicyConfig.copies

    def __init__(self) -> None:
        self.prefilled_tokens = 0
        self.queued_at: dict[Rid, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Applied):
            for rid in event.parked:
                if rid in self.queued_at:
                    self.queued_at[rid] = self.prefilled_tokens
            self.prefilled_tokens += event.prefill_tokens
        elif isinstance(event, Arrived):
            self.queued_at[event.rid] = self.prefilled_tokens
        elif isinstance(event, Finished):
            self.queued_at.pop(event.rid, None)

    def plan(self, view: EngineView) -> Plan:
        if view.waiting == 0:
            return HOLD_NOTHING
        waiting = [r for r in view.requests() if r.phase in (Phase.WAITING, Phase.PARKED)]
        if len(waiting) <= MATCHED_AT_MOST:
            waiting.sort(key=self._key)
        return Plan(admit=leading(view, waiting))

    def _key(self, r: RequestView) -> tuple[float, Rid]:
        prompt_tokens = r.context_tokens - r.output_tokens
        uncached = prompt_tokens - r.cached_tokens - r.host_hit_tokens
        if uncached <= 0:
            return (float("-inf"), r.rid)
        waited = self.prefilled_tokens - self.queued_at.get(r.rid, self.prefilled_tokens)
        return (-waited / uncached, r.rid)
