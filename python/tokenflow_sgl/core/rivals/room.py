"""Device memory and slots as one plan gives them out, counted as SGLang's admission counts them.

Owns the arithmetic that all rivals share; chooses nobody. Invariant: a plan made from a Room is legal, and keeps what
the prompts under way and the next steps of the running streams will surely take: without that the engine retracts
somebody in the very next step, and dies where a prompt under way finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..preempt import STEPS_AHEAD, opens_tokens, whole_pages
from ..types import EngineView, Phase, Plan, RequestView, Rid


def is_steady(view: EngineView) -> bool:
    """Nobody waits, and what the running streams can take in the next steps is free: nobody need be looked at."""
    if view.waiting or view.promised_tokens:
        return False
    return view.device_free_tokens >= whole_pages(STEPS_AHEAD, view.page_tokens) * view.running


def is_parkable(r: RequestView) -> bool:
    return r.phase is Phase.RUNNING and r.preemptible and r.output_tokens > 0


def leading(view: EngineView, order: Iterable[RequestView], *, freed_tokens: int = 0) -> tuple[Rid, ...]:
    """The head of `order`, as far as it would fit without any reservation: a plan may name no more, and the engine's
    own reservation stops it earlier. An empty engine tries whoever is first."""
    left = view.device_free_tokens + freed_tokens
    named: list[Rid] = []
    for r in order:
        left -= r.takes_tokens
        if left < 0:
            if not named and not any(x.phase in (Phase.RUNNING, Phase.PREFILL) for x in view.requests()):
                return (r.rid,)
            break
        named.append(r.rid)
    return tuple(named)


class Room:
    """One look at the engine, and what is left of it while a plan is made.

    `held` came back by a copy and must come in first: its pages are taken and nobody else can have them. `waiting` are
    all others that may come in.
    """

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.running: list[RequestView] = []
        self.prefilling: list[RequestView] = []
        self.loading: list[RequestView] = []
        self.held: list[RequestView] = []
        self.waiting: list[RequestView] = []
        running, waiting = self.running, self.waiting
        other = {Phase.PREFILL: self.prefilling, Phase.LOADING: self.loading}
        is_running, is_waiting, is_parked = Phase.RUNNING, Phase.WAITING, Phase.PARKED
        for r in view.requests():  # hundreds: no hash of an enum for each
            phase = r.phase
            if phase is is_running:
                running.append(r)
            elif phase is is_waiting or phase is is_parked:
                (self.held if r.held_tokens else waiting).append(r)
            else:
                other[phase].append(r)
        self.active = len(self.running) + len(self.prefilling)
        self.growth_tokens = opens_tokens([*self.running, *self.prefilling], view.page_tokens)
        self.shortage_tokens = self.growth_tokens + view.promised_tokens - view.device_free_tokens
        self.booked_tokens = sum(self.need_tokens(r) for r in self.loading)  # those on their way back will take it
        self.free_tokens = -self.shortage_tokens - self.booked_tokens
        self.slots = view.max_running - self.active - len(self.loading)
        self.can_load = view.load_slots > 0 and view.host_ok
        self.park: list[Rid] = []
        self.admit: list[Rid] = []
        self.load: list[Rid] = []

    def need_tokens(self, r: RequestView) -> int:
        """One page for rounding, and one token more: the engine admits only what leaves something free."""
        return r.takes_tokens + self.view.page_tokens + 1

    def fits(self, r: RequestView) -> bool:
        return self.slots > 0 and self.need_tokens(r) <= self.free_tokens

    def let_in(self, r: RequestView, *, load: bool = False) -> None:
        """At once, or by a copy from the host first; what it will take is its own from now on."""
        need = self.need_tokens(r)
        self.free_tokens -= need
        self.slots -= 1
        if load:
            self.load.append(r.rid)
            self.booked_tokens += need - r.host_hit_tokens  # the copy takes the rest at once
        else:
            self.admit.append(r.rid)

    def put_away(self, r: RequestView) -> None:
        self.park.append(r.rid)
        self.free_tokens += r.frees_tokens
        self.shortage_tokens -= r.frees_tokens
        self.slots += 1

    def relieve(self, victims: Iterable[RequestView]) -> None:
        """Park in this order until the next steps fit. The last active one stays: there is nobody to give way to."""
        for r in victims:
            if self.shortage_tokens <= 0 or len(self.park) + 1 >= self.active:
                return
            if r.frees_tokens > 0:
                self.put_away(r)

    def plan(self, publish: Sequence[tuple[Rid, int]] = ()) -> Plan:
        gone = set(self.park)
        return Plan(
            park=tuple(self.park),
            publish=tuple(p for p in publish if p[0] not in gone),
            load=tuple(self.load),
            admit=tuple(self.admit),
            reserve_tokens=self.booked_tokens,
        )
