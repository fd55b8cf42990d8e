"""SuperInfer's RotaSched (MLSys'26, arXiv 2601.20309): requests rotate between device and host by Virtual Lag Time,
largest first.

    waiting      ReLU(now - arrival    - bF * SLO_ttft)
    rotated out  a * ReLU(now - last token - bB * SLO_tbt)
    running      -(now - when it came in)

Taken from the paper as noted by others: the lag, a = 3, bF = 0.5, bB = 0; where all that wait fits, first come first
served; else from the largest lag down those that fit into free memory and a transfer budget come in, and as much goes
out from the other end, who ran longest first; each full block is copied to the host as it fills, so that only the last
one is moved when its stream goes; 16 tokens a block and 2400 blocks a step at most. No reader and no buffer is known.
The authors' repository holds a later scheduler without SLOs (who waited longest for who ran longest), not used here.

Assumed: SLO_ttft is the 0.5 s that our readers are measured by (the paper's 5 s is that of its own tests), SLO_tbt the
reader's 1/R (bB = 0 leaves it without effect). The budget is what the link is believed to carry in one step, the
paper's 2400 blocks at most: on a slow link a large one undid the paper's own results; the first in order is exempt, or
one larger than the budget would wait for ever. Rotated streams come back in rounds, at least a decode step apart: with
returns in every step the engine does little else, and all it is measured by is worse (overload-1.5x: P99 TTFT 4.7 s for
0.1). A stream runs min_run_tokens before it goes. What is not in a full block is computed again instead of moved.

Owns when each came, left and came in. Invariant: nobody is parked while all that waits fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import PolicyConfig
from ..cost import CostBelief
from ..driver import HOLD_NOTHING
from ..preempt import Candidate, Victim, select
from ..types import Applied, Arrived, EngineView, Event, Finished, Phase, Plan, RequestView, Rid, Tick
from .blocks import BLOCK_TOKENS, FullBlocks
from .room import Room, is_parkable, is_steady

SLO_TTFT_S = 0.5
ALPHA, BETA_F, BETA_B = 3.0, 0.5, 0.0
TRANSFER_BLOCKS = 2400
ROUND_STEPS = 1


@dataclass(slots=True)
class Turn:
    """One request. `since_s` is when it came in, left, or arrived, on rank 0's clock; the last token of one that left
    is taken to have come when it left, for a running stream makes one in every decode step."""

    arrived_s: float
    since_s: float
    slo_tbt_s: float
    running: bool = False
    started: bool = False
    decodes_at_start: int = 0


class VirtualLag:
    copies = "ahead"

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.cost = CostBelief.prior(config)
        self.blocks = FullBlocks()
        self.turns: dict[Rid, Turn] = {}  # in order of arrival
        self.recompute: set[Rid] = set()  # a load of theirs failed: they come in once without
        self.now_s = 0.0
        self.decodes = 0
        self.round_at = -ROUND_STEPS  # decode steps when the last rotated stream came back
        self._last_batch = (0, 0)
        self._unstamped: list[Turn] = []

    # ---- observe

    def observe(self, event: Event) -> None:
        self.blocks.observe(event)
        if isinstance(event, Tick):
            self._tick(event)
        elif isinstance(event, Applied):
            self._applied(event)
        elif isinstance(event, Arrived):
            rate = event.read_rate_tok_s or self.config.default_read_rate_tok_s
            turn = Turn(self.now_s, self.now_s, 1.0 / rate)
            self.turns.pop(event.rid, None)
            self.turns[event.rid] = turn
            self._unstamped.append(turn)
        elif isinstance(event, Finished):
            self.turns.pop(event.rid, None)
            self.recompute.discard(event.rid)

    def _tick(self, tick: Tick) -> None:
        if tick.last_step_s is None:  # the clock stood still: who came meanwhile came now
            for turn in self._unstamped:
                turn.arrived_s = tick.now_s
        self._unstamped.clear()
        self.now_s = tick.now_s
        if tick.last_step_s is not None:
            prefill_tokens, decoding = self._last_batch
            self.cost.learn_step(tick.last_step_s, prefill_tokens=prefill_tokens, decoding=decoding)
        for tokens, seconds in tick.loads_s:
            self.cost.load.learn(tokens, seconds)

    def _applied(self, event: Applied) -> None:
        self._last_batch = event.timed_batch
        self.decodes += event.decoding > 0
        for rid in event.parked:
            turn = self.turns.get(rid)
            if turn is not None and turn.running:
                turn.running, turn.since_s = False, self.now_s
        for rid, _, _ in event.admitted:
            turn = self.turns.get(rid)
            if turn is None:
                continue
            if turn.started:
                self.round_at = self.decodes
            turn.running, turn.started, turn.since_s = True, True, self.now_s
            turn.decodes_at_start = self.decodes
            self.recompute.discard(rid)
        self.recompute.update(rid for rid in event.unloaded if rid in self.turns)

    # ---- plan

    def plan(self, view: EngineView) -> Plan:
        publish = self.blocks.publish(view)
        if is_steady(view):
            return Plan(publish=publish) if publish else HOLD_NOTHING
        room = Room(view)
        if room.shortage_tokens > 0:
            room.relieve(sorted((r for r in room.running if is_parkable(r)), key=self._rank, reverse=True))
        for r in sorted(room.held, key=self._rank):
            if room.fits(r):
                room.let_in(r)
        if not room.park:
            self._rotate(room)
        return room.plan(publish)

    def _rotate(self, room: Room) -> None:
        waiting = [r for r in room.waiting if room.can_load or not self._loads(room, r)]
        if sum(room.need_tokens(r) for r in waiting) <= room.free_tokens and len(waiting) <= room.slots:
            for r in sorted(waiting, key=lambda r: self._arrival(r.rid)):
                room.let_in(r, load=self._loads(room, r))
            return
        if room.active and self.decodes - self.round_at < ROUND_STEPS:
            waiting = [r for r in waiting if r.phase is Phase.WAITING]
        candidates = self._within_budget(sorted(waiting, key=self._rank), room)
        victims = [Victim(r.rid, r.frees_tokens, self.lag_s(r), float("inf")) for r in room.running if self._may_go(r)]
        chosen = select(candidates, victims, room_tokens=room.free_tokens, slots=room.slots)
        by_rid = {r.rid: r for r in room.view.requests()}
        for rid in chosen.park:
            room.put_away(by_rid[rid])
        for rid in chosen.admit:
            room.let_in(by_rid[rid], load=self._loads(room, by_rid[rid]))

    def _within_budget(self, order: Sequence[RequestView], room: Room) -> list[Candidate]:
        """As much, from the front, as fits into what is free and what may be moved in one step."""
        step_tokens = int(max(0.0, self.cost.step_s - self.cost.load.fixed_s) / max(1e-9, self.cost.load_s_per_token))
        left = max(0, room.free_tokens) + min(TRANSFER_BLOCKS * BLOCK_TOKENS, step_tokens)
        found: list[Candidate] = []
        for r in order:
            need = room.need_tokens(r)
            if need > left and found:
                continue
            left -= need
            # A lag of 0 is above that of all who run.
            found.append(Candidate(r.rid, need, self.lag_s(r), window_s=0.0, margin=0.0, holds_back=False))
        return found

    def _loads(self, room: Room, r: RequestView) -> bool:
        return r.host_hit_tokens > 0 and r.rid not in self.recompute and room.view.host_ok

    def _may_go(self, r: RequestView) -> bool:
        turn = self.turns.get(r.rid)
        if turn is None or not turn.running or not is_parkable(r) or r.copying_tokens:
            return False
        return self.decodes - turn.decodes_at_start >= self.config.min_run_tokens

    def lag_s(self, r: RequestView) -> float:
        """The Virtual Lag Time in seconds; the larger, the sooner."""
        turn = self.turns.get(r.rid)
        if turn is None:
            return 0.0
        if r.phase is Phase.RUNNING:
            return -(self.now_s - turn.since_s)
        if turn.started:
            return ALPHA * max(0.0, self.now_s - turn.since_s - BETA_B * turn.slo_tbt_s)
        return max(0.0, self.now_s - turn.arrived_s - BETA_F * SLO_TTFT_S)

    def _arrival(self, rid: Rid) -> tuple[float, Rid]:
        turn = self.turns.get(rid)
        return (self.now_s if turn is None else turn.arrived_s, rid)

    def _rank(self, r: RequestView) -> tuple[float, float, Rid]:
        return (-self.lag_s(r), *self._arrival(r.rid))
