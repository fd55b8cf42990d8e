"""SGLang's `--enable-priority-scheduling` (managers/schedule_policy.py of the 0.5.23 release): those that wait in order
of (the client's priority, time of queueing), and a newcomer may evict running requests whose priority is lower by more
than a threshold, lowest first and of these the latest, only if enough comes free. What is evicted is computed again.

Taken from the source: order, threshold 10, the clip of 4096 tokens on what a newcomer may still make, and that an
evicted or retracted request queues anew and so falls behind its like.

Assumed: a request without a priority has 0, as the seam shows it (upstream's is below all); the engine's new-token
ratio cannot be seen, and the eviction counts with its starting value of 0.7, which is above what it decays to, so
nobody is evicted for one that then does not fit. Stronger than the release, which asks only when it runs out of request
slots (where tokens run out its loop ends first) and counts as freed only what a victim still had reserved: here a
shortage of tokens evicts too, and a victim's own KV counts.

Where nobody sets a priority this is SGLang's first come, first served, exactly: no wish is made, as by `fcfs`.

Owns the order of queueing. Invariant: nobody is evicted for one whose priority is not above its own by the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..driver import HOLD_NOTHING
from ..types import Applied, Arrived, EngineView, Event, Finished, Phase, Plan, RequestView, Rid
from .room import is_parkable, leading

PREEMPTION_THRESHOLD = 10  # --priority-scheduling-preemption-threshold
CLIP_NEW_TOKENS = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
NEW_TOKEN_RATIO = 0.7  # SGLANG_INIT_NEW_TOKEN_RATIO


class ClientPriority:
    copies = "none"

    def __init__(self) -> None:
        self.queued: dict[Rid, int] = {}  # the how-many-th to queue
        self.count = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._queue(event.rid)
        elif isinstance(event, Applied):
            for rid in event.parked:
                if rid in self.queued:
                    self._queue(rid)
        elif isinstance(event, Finished):
            self.queued.pop(event.rid, None)

    def _queue(self, rid: Rid) -> None:
        self.count += 1
        self.queued[rid] = self.count

    def plan(self, view: EngineView) -> Plan:
        if view.waiting == 0:
            return HOLD_NOTHING
        requests = view.requests()
        if len({r.priority for r in requests}) <= 1:
            return HOLD_NOTHING
        waiting = [r for r in requests if r.phase in (Phase.WAITING, Phase.PARKED)]
        waiting.sort(key=lambda r: (-r.priority, self.queued.get(r.rid, self.count)))
        park = self._evict(view, waiting)
        gone = set(park)
        freed = sum(r.frees_tokens for r in requests if r.rid in gone)
        return Plan(park=park, admit=leading(view, waiting, freed_tokens=freed))

    def _evict(self, view: EngineView, waiting: Sequence[RequestView]) -> tuple[Rid, ...]:
        """Victims for those at the head of the queue, one by one, until one finds neither room nor victims."""
        active = [r for r in view.requests() if r.phase in (Phase.RUNNING, Phase.PREFILL)]
        victims = sorted((r for r in active if is_parkable(r)), key=lambda r: (r.priority, -self.queued.get(r.rid, 0)))
        room = view.device_free_tokens - view.promised_tokens - sum(NEW_TOKEN_RATIO * _future(r) for r in active)
        slots = view.max_running - len(active)
        park: list[Rid] = []
        for r in waiting:
            need = r.takes_tokens + _future(r) + view.page_tokens
            chosen: list[RequestView] = []
            for v in victims:
                if (need < room and slots > 0) or r.priority - v.priority <= PREEMPTION_THRESHOLD:
                    break
                chosen.append(v)
                room += v.frees_tokens + NEW_TOKEN_RATIO * _future(v)
                slots += 1
            if need >= room or slots <= 0:
                return tuple(park)
            victims = victims[len(chosen) :]
            park += [v.rid for v in chosen]
            room -= need
            slots -= 1
        return tuple(park)


def _future(r: RequestView) -> int:
    """Tokens that the engine reserves for what is still to come of an answer."""
    return min(max(0, r.max_output_tokens - r.output_tokens), CLIP_NEW_TOKENS)
