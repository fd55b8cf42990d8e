"""vLLM V1 with its native OffloadingConnector (--kv-offloading-size; offloading/scheduler.py): see vllm.py, and every
full block of every stream goes to the host as it fills, decode tokens too, so that whoever was preempted finds its
prefix there.

Taken from the source: one GPU block is one offloaded block (blocks_per_chunk 1, 16 tokens); blocks are stored in order
of their filling, whoever's they are; a prefix found on the host, of a new request too, is always loaded, never weighed
against computing it, in a transfer beside the forwards; meanwhile those behind it may come in, and it stands before
them when it is back; blocks for the whole sequence are its own from the start of the transfer.

Not on the seam: at a preemption vLLM waits for the victim's open stores; here a victim whose store is open frees less,
and another goes as well. A load that fails is computed again (kv_load_failure_policy "recompute").

Owns, beside the queue, which blocks are to be stored. Invariant: as of Vllm.
"""

from __future__ import annotations

from ..types import Applied, EngineView, Event, Finished, RequestView, Rid
from .blocks import FullBlocks
from .room import Room
from .vllm import Vllm


class VllmOffload(Vllm):
    copies = "ahead"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = FullBlocks()
        self.recompute: set[Rid] = set()  # a load of theirs failed: they come in once without

    def observe(self, event: Event) -> None:
        super().observe(event)
        self.blocks.observe(event)
        if isinstance(event, Applied):
            self.recompute.update(rid for rid in event.unloaded if rid in self.place)
            self.recompute.difference_update(rid for rid, _, _ in event.admitted)
        elif isinstance(event, Finished):
            self.recompute.discard(event.rid)

    def _filled(self, view: EngineView) -> tuple[tuple[Rid, int], ...]:
        return self.blocks.publish(view)

    def _next_to_go(self, room: Room, last_first: list[RequestView]) -> tuple[tuple[Rid, int], ...]:
        return ()  # its full blocks are published already

    def _let_in(self, room: Room) -> None:
        for r in (*room.held, *room.waiting):
            on_host = r.host_hit_tokens > 0 and r.rid not in self.recompute and room.view.host_ok
            if on_host and not room.can_load:
                continue  # asked again in the next step; meanwhile those behind it may come in
            if not room.fits(r):
                return
            room.let_in(r, load=on_host)
