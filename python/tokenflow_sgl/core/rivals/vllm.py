"""vLLM V1's scheduler, first come first served (v1/core/sched/scheduler.py as of 0.32, default settings).

Taken from the source: requests come in by arrival, the preempted before all others and the last preempted first, as
long as the whole sequence fits (scheduler_reserve_full_isl) and nothing more (watermark 0, no growth is reserved); the
first that does not fit ends it. When the next step lacks a block, the LAST admitted goes until it does not, nobody
comes in in such a step, and what was preempted is computed again but for what the prefix cache still holds of it.

Assumed: "the next step" is three steps here, because SGLang takes memory that far ahead (preempt.STEPS_AHEAD), and
admission leaves that much, else who is preempted would be back at once. A prompt under way keeps what it still takes:
vLLM can preempt it instead, SGLang cannot. vLLM's prefix cache holds every full block; here decode tokens must be
published first, which is done for the one that would go next, when memory nears its end.

Not on the seam: vLLM computes prompts and decodes in one batch; how batches are made is the executor's.

Owns the queue's order and that of admission. Invariant: who came in earlier is never parked before who came in later.
"""

from __future__ import annotations

from ..driver import HOLD_NOTHING
from ..types import Applied, Arrived, EngineView, Event, Finished, Plan, RequestView, Rid
from .blocks import BLOCK_TOKENS
from .room import Room, is_parkable, is_steady


class Vllm:
    copies = "none"

    def __init__(self) -> None:
        self.place: dict[Rid, int] = {}  # in the queue: those that arrive count up, the preempted down from its head
        self.admitted: dict[Rid, None] = {}  # those in memory, in order of admission
        self.arrived = 0
        self.preempted = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, Applied):
            for rid in event.parked:
                if rid in self.admitted:
                    del self.admitted[rid]
                    self.preempted += 1
                    self.place[rid] = -self.preempted
            for rid, _, _ in event.admitted:
                self.admitted.pop(rid, None)
                self.admitted[rid] = None
        elif isinstance(event, Arrived):
            self.arrived += 1
            self.place[event.rid] = self.arrived
            self.admitted.pop(event.rid, None)
        elif isinstance(event, Finished):
            self.place.pop(event.rid, None)
            self.admitted.pop(event.rid, None)

    def plan(self, view: EngineView) -> Plan:
        publish = self._filled(view)
        if is_steady(view) and view.device_free_tokens >= BLOCK_TOKENS * view.running:
            return Plan(publish=publish) if publish else HOLD_NOTHING
        room = Room(view)
        by_rid = {r.rid: r for r in room.running if is_parkable(r)}
        last_first = [by_rid[rid] for rid in reversed(self.admitted) if rid in by_rid]
        room.relieve(last_first)
        if not room.park:
            for group in (room.held, room.waiting):
                group.sort(key=lambda r: self.place.get(r.rid, self.arrived + 1))
            self._let_in(room)
        return room.plan(publish or self._next_to_go(room, last_first))

    def _filled(self, view: EngineView) -> tuple[tuple[Rid, int], ...]:
        return ()

    def _next_to_go(self, room: Room, last_first: list[RequestView]) -> tuple[tuple[Rid, int], ...]:
        """The full blocks of whoever goes next: parked unpublished, they would not be in the cache."""
        r = next((r for r in last_first if r.rid not in room.park), None)
        if r is None:
            return ()
        end = r.context_tokens - 1
        end -= end % max(BLOCK_TOKENS, room.view.page_tokens)
        return ((r.rid, end),) if end > r.published_tokens else ()

    def _let_in(self, room: Room) -> None:
        for r in (*room.held, *room.waiting):
            if not room.fits(r):
                return
            room.let_in(r)
