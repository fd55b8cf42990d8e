"""Who waits to come in, in which order, and how: by a copy ahead of admission, or at once.

Owns no state; parks nobody. Invariant: a started stream is due early enough for the way it takes, and a copy is begun
only where it is quicker than computing the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from .config import PolicyConfig
from .cost import CostBelief
from .preempt import Candidate
from .streams import Stream, Streams
from .types import EngineView, Phase, RequestView, Rid

_SLACK = itemgetter(0)
_FAR_S = 5.0  # of slack beyond what a return can take: such streams need no order among those that are due
Rank = Callable[[Stream, float, float, float], float]  # of (stream, slack, wait, prefill), in seconds


@dataclass(frozen=True, slots=True)
class Way:
    """How one comes in. `copy_s` passes beside the forwards of others, `compute_s` is the engine's own."""

    loads: bool
    copy_s: float
    compute_s: float
    other_s: float | None = None  # what computing all of it takes, if a copy is better but none may start now


@dataclass(slots=True)
class Queue:
    """Those that wait: groups in the order in which they come in. `loads` are those that come by a copy first.

    `due` readers run dry soon, or did so a moment ago (eps), and a return is quick: in a short dip it is them who come
    first. `dry` ones have had nothing to show for longer, or wait for their first token: were all that ran dry before
    newcomers, newcomers would wait for ever where readers want more than the engine makes.
    """

    held: list[Candidate] = field(default_factory=list)
    due: list[Candidate] = field(default_factory=list)
    dry: list[Candidate] = field(default_factory=list)
    other: list[Candidate] = field(default_factory=list)
    early: list[tuple[float, RequestView, Stream]] = field(default_factory=list)  # (slack, ..): not weighed yet
    ahead_s: float = 0.0  # of engine time before the next
    dry_s: float = 0.0  # of that, for those that are dry
    ahead_tokens: int = 0  # of copies before it
    loads: set[Rid] = field(default_factory=set)
    loading: int = 0
    booked_tokens: int = 0  # free memory that those under way will still take

    @property
    def must(self) -> list[Candidate]:
        return [*self.held, *self.due, *self.dry, *self.other]

    def memory_order(self, owed: Callable[[Candidate], bool]) -> list[Candidate]:
        """The order in which memory is given out: that of `must`, but one piece of work without a reader that is `owed`
        its turn is given its own before readers that are dry. Else readers that keep coming, each taking what the last
        one freed, would starve it."""
        first = next((c for c in self.other if owed(c)), None)
        if first is None:
            return self.must
        return [*self.held, *self.due, first, *self.dry, *(c for c in self.other if c is not first)]


@dataclass(frozen=True, slots=True)
class Returns:
    """One look at those that wait. Reads the book of streams, the costs and the settings; changes none of them."""

    config: PolicyConfig
    cost: CostBelief
    streams: Streams
    rank: Rank
    view: EngineView
    now_s: float

    def queue(self, waiting: Sequence[RequestView]) -> Queue:
        """Held ones first, for their memory is taken already; then due readers, dry readers, work without a reader;
        and who may return early.

        Inside a class the client's own priority decides first, then those that waited so long that they hold back the
        rest, then rank, then cost. A started stream is due when its slack, less the time its return takes after the
        returns before it, nears eps.
        """
        q = Queue()
        near: list[tuple[float, RequestView, Stream]] = []
        parked: list[tuple[float, RequestView, Stream]] = []
        ahead_tokens = 0  # of copies before this one
        first_tokens = 0  # to be computed for those that come in before anybody else
        most = copied = 0
        by_rid, now_s, is_loading = self.streams.by_rid, self.now_s, Phase.LOADING
        for r in waiting:
            if r.phase is is_loading:
                q.loading += 1
                ahead_tokens += max(0, r.context_tokens - r.cached_tokens - r.takes_tokens)
                first_tokens += r.takes_tokens
                q.booked_tokens += self.need_tokens(r)
                continue
            s = by_rid.get(r.rid)
            first_tokens += r.takes_tokens if r.held_tokens else 0
            if s is None:
                continue
            if s.refused_until_s > now_s:
                q.booked_tokens += self.need_tokens(r) if r.held_tokens else 0
                continue
            buffer = s.buffer
            left_s = self.virtual_slack_s(s) if buffer is None else buffer.slack_s(now_s)
            if left_s <= 0.0 and buffer is not None:
                left_s = buffer.lead_s(now_s)
            (parked if s.output_tokens and not r.held_tokens else near).append((left_s, r, s))
            context = r.context_tokens
            if context > most:
                most = context
            copied += r.host_hit_tokens
        q.ahead_s = self.cost.prefill_s(first_tokens) if first_tokens else 0.0
        q.ahead_tokens = ahead_tokens
        longest_s = self._longest_s(most, ahead_tokens + copied)
        # Most of those that are parked are far from due: what their return takes need not be known.
        far_s = longest_s + _FAR_S
        far = [entry for entry in parked if entry[0] > far_s]
        near += [entry for entry in parked if entry[0] <= far_s]
        self._place_all(q, near, longest_s)
        if far and min(map(_SLACK, far)) - q.ahead_s > longest_s:
            q.early += far
        else:
            self._place_all(q, far, longest_s)
        self._sort(q, waiting)
        return q

    def least_tokens(self, waiting: Sequence[RequestView]) -> float:
        """Free memory without which none of them can come in, whoever they are."""
        least = min([r.takes_tokens for r in waiting if r.phase is not Phase.LOADING], default=math.inf)
        held = any(r.held_tokens for r in waiting)  # their memory is taken already
        return -math.inf if held else least + self._beside_tokens

    def _place_all(self, q: Queue, entries: list[tuple[float, RequestView, Stream]], longest_s: float) -> None:
        entries.sort(key=_by_slack)
        for entry in entries:
            slack_s, r, s = entry
            if slack_s - q.ahead_s > longest_s and not r.held_tokens and not s.unstarted:
                q.early.append(entry)
            else:
                self._place(q, slack_s, r, s)

    def _place(self, q: Queue, slack_s: float, r: RequestView, s: Stream) -> None:
        way = self.way_in(r, s, q.ahead_tokens)
        waits = way.other_s is not None and self._may_wait(s, way, way.other_s)
        if way.other_s is not None and not waits:
            way = Way(False, 0.0, way.other_s)
        in_s = way.copy_s + way.compute_s
        group = self._group(q, r, s, slack_s, slack_s - q.ahead_s - in_s - self.cost.step_s)
        if group is None:
            q.early.append((slack_s, r, s))
            return
        if waits:
            q.booked_tokens += 0 if s.unstarted else self.need_tokens(r)  # a newcomer must not take it meanwhile
            return
        group.append(self._candidate(r, s, slack_s, in_s + self.config.overhead_s))
        if way.loads:
            q.loads.add(r.rid)
        if s.unstarted or group is q.held:
            return
        more_s = way.compute_s + self.cost.step_s
        if group is q.dry:
            # They come after those that are due, but some are let in in this step or the next. No more than eps of them
            # counts: a crowd would make full buffers look due.
            if q.dry_s >= self.config.eps_s:
                return
            q.dry_s += more_s
        q.ahead_s += more_s
        q.ahead_tokens += r.host_hit_tokens if way.loads else 0

    def _longest_s(self, most: int, copied: int) -> float:
        """Slack with which nobody is due, whichever way each comes in and whoever comes before; `most` tokens are the
        context of the longest, `copied` those of all copies."""
        in_s = self.cost.load_s(most, copied) + self.cost.prefill_s(most) + self.cost.load.seconds(copied + most)
        return in_s + self.cost.step_s + self.config.eps_s + self.config.overhead_s

    def early(self, q: Queue) -> Iterator[Candidate]:
        """Those that no reader needs yet, weighed one by one as they are asked for.

        Who has most left to make goes first: else the last to return run on alone, in steps that cost nearly as much
        as full ones.
        """
        for slack_s, r, s in sorted(q.early, key=self._early_order):
            way = self.way_in(r, s, q.ahead_tokens)
            if way.other_s is None:  # else it waits for a transfer to end
                if way.loads:
                    q.loads.add(r.rid)
                yield self._candidate(r, s, slack_s, way.copy_s + way.compute_s + self.config.overhead_s)

    def _early_order(self, entry: tuple[float, RequestView, Stream]) -> tuple[int, bool, int, Rid]:
        slack_s, r, s = entry
        shows = slack_s > 0.0 and s.buffer is not None  # then nobody waits, and nobody holds back
        return (-r.priority, shows or not self._holds_back(r, s), r.output_tokens - r.max_output_tokens, r.rid)

    def _holds_back(self, r: RequestView, s: Stream) -> bool:
        """Memory kept for one that can never fit would be lost to all. It comes in alone at the latest, and then it
        needs no room for the growth of others."""
        waited_s = s.wait_s(self.now_s)
        if s.buffer is not None and s.buffer.anchor_s is not None:
            waited_s = min(waited_s, -s.buffer.lead_s(self.now_s))  # while there is something to show nobody waits
        return waited_s >= self.config.hold_back_s and r.takes_tokens <= self.view.device_total_tokens

    def _group(self, q: Queue, r: RequestView, s: Stream, slack_s: float, left_s: float) -> list[Candidate] | None:
        """None for an early return. `left_s`: slack that is left when it is back."""
        if r.held_tokens:
            return q.held
        if not s.unstarted and left_s > self.config.eps_s + self.config.overhead_s:
            return None
        if s.buffer is None:
            return q.other
        if s.unstarted:
            return q.dry
        # The guide's formula lets nobody gain by being dry: in one line with newcomers such a one would starve.
        lines_up = self.config.priority != "guide" and slack_s <= -self.config.eps_s
        return q.dry if lines_up else q.due

    def _sort(self, q: Queue, waiting: Sequence[RequestView]) -> None:
        if not q.dry and not q.other:
            return
        own = {r.rid: -r.priority for r in waiting}
        started = {r.rid for r in waiting if r.output_tokens}
        highest = min(own.values())

        def place(c: Candidate) -> tuple[float, bool, float, int, Rid]:
            # Newcomers of a higher priority must not keep an answer that began from ever going on.
            first = highest if c.holds_back and c.rid in started else own[c.rid]
            return first, not c.holds_back, -c.priority, c.need_tokens, c.rid

        for group in (q.dry, q.other):
            group.sort(key=place)

    def way_in(self, r: RequestView, s: Stream, ahead_tokens: int) -> Way:
        cost, host = self.cost, r.host_hit_tokens
        tail = max(1, r.context_tokens - r.cached_tokens - host)
        if host == 0:
            return Way(False, 0.0, cost.prefill_s(tail))
        if self.config.loads == "at_admission":
            # The forward it comes in with waits for the copy, and everybody for the forward.
            return Way(False, 0.0, cost.load.seconds(ahead_tokens + host) + cost.prefill_s(tail))
        computed = Way(False, 0.0, cost.prefill_s(host + tail))
        if s.recompute or r.held_tokens or not self.view.host_ok:
            return computed
        other_s = computed.compute_s if self.view.load_slots <= 0 else None
        loaded = Way(other_s is None, cost.load_s(host, ahead_tokens), cost.prefill_s(tail), other_s)
        return loaded if cost.load_spares_engine(host_tokens=host) else computed

    def _may_wait(self, s: Stream, way: Way, other_s: float) -> bool:
        """Whether it waits for a transfer to end. A started stream does, even one that ran dry: the slot comes free
        sooner than its KV is computed, and computing would hold up everybody. An unstarted reader does until it waited
        for as long as computing would have taken."""
        return not s.unstarted or s.wait_s(self.now_s) + way.copy_s + way.compute_s < other_s

    def need_tokens(self, r: RequestView) -> int:
        return r.takes_tokens + self._beside_tokens

    @property
    def _beside_tokens(self) -> int:
        """One page for rounding, and one token more: the engine admits only what leaves something free."""
        return self.config.growth_tokens + self.view.page_tokens + 1

    def _candidate(self, r: RequestView, s: Stream, slack_s: float, in_s: float) -> Candidate:
        wait_s = s.wait_s(self.now_s)
        return Candidate(
            rid=r.rid,
            need_tokens=self.need_tokens(r),
            priority=self.rank(s, slack_s, wait_s, in_s),
            window_s=max(in_s + self.config.eps_s, self.config.min_slack_s),
            # Without a lead, work that has no reader would swap places with its like for ever.
            margin=self.config.switch_margin if s.buffer is None else 0.0,
            holds_back=self._holds_back(r, s),
        )

    def virtual_slack_s(self, s: Stream) -> float:
        """Of work without a reader: it falls while it waits, below 0 as well, so that none starves."""
        return self.config.batch_turn_s - s.wait_s(self.now_s)


def _by_slack(known: tuple[float, RequestView, Stream]) -> tuple[bool, float, Rid]:
    return known[0] <= 0.0, known[0], known[1].rid
