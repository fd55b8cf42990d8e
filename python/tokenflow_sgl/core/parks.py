"""Who may be parked, what that is worth, and who goes when memory runs out.

Owns no state; brings nobody back (returns.py). Invariant: whoever is named has sent its first token, and is weighed
with what its own way back will take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .config import PolicyConfig
from .cost import CostBelief
from .paging import NEARLY_DONE_TOKENS
from .preempt import Victim, relieve
from .streams import Stream, Streams
from .types import EngineView, RequestView, Rid

Rank = Callable[[float], float]  # of slack in seconds


@dataclass(frozen=True, slots=True)
class Parks:
    """One look at those that run. Reads the book of streams, the costs and the settings; changes none of them.

    `swap_credit_s`: engine time that returns may still take beyond their share.
    """

    config: PolicyConfig
    cost: CostBelief
    streams: Streams
    rank: Rank
    view: EngineView
    now_s: float
    swap_credit_s: float

    def victims(self, running: Sequence[RequestView]) -> list[Victim]:
        """Those that may be parked for somebody else."""
        return list(self._weighed(running, self._may_park, turn=self._turn_tokens_per_s()))

    def may_spare(self, running: Sequence[RequestView]) -> bool:
        """Whether there is anybody to park at all: less slack than the minimum is enough for no newcomer."""
        least_s = self.config.min_slack_s
        return any(v.spare_s >= least_s for v in self._weighed(running, self._may_park, turn=self._turn_tokens_per_s()))

    def relief(self, running: Sequence[RequestView], shortage_tokens: int) -> tuple[Rid, ...]:
        """Nothing waits, or nothing fits, and the streams in memory are about to outgrow it.

        If no stream has slack to spare, the engine would retract somebody in the next steps and forget its KV: then
        the one with the most slack is parked whatever it has; those that may not be parked now only after the others,
        and last those whose copy is still open. A prompt under way will take the memory it was promised all the same,
        and the engine dies where it cannot; then as many go as it needs.
        """
        promised = self.view.promised_tokens > 0
        able = self.victims(running)
        park = relieve([v for v in able if v.spare_s > self.config.min_slack_s], shortage_tokens=shortage_tokens)
        anyone = list(self._weighed(running, lambda r, s: r.preemptible and r.output_tokens > 0))
        frees = {v.rid: v.frees_tokens for v in anyone}
        copying = {r.rid for r in running if r.copying_tokens}
        for victims in (able, [v for v in anyone if v.rid not in copying], anyone):
            left = shortage_tokens - sum(frees[rid] for rid in park)
            if left <= 0 or (park and not promised):
                break
            rest = [v for v in victims if v.rid not in park]
            park += relieve(rest, shortage_tokens=left if promised else 1)
        return park

    def _may_park(self, r: RequestView, s: Stream) -> bool:
        return (
            r.copying_tokens == 0
            and r.preemptible
            and r.output_tokens > 0
            and s.parks < self.config.max_parks
            and r.output_tokens - s.output_at_admission >= self.config.min_run_tokens
            and r.max_output_tokens - r.output_tokens > NEARLY_DONE_TOKENS
        )

    def _weighed(
        self, running: Sequence[RequestView], may: Callable[[RequestView, Stream], bool], *, turn: float = 0.0
    ) -> Iterator[Victim]:
        """Those that `may` be parked, with what their return will take: the copy of what is on the host by then, and
        the prefill of the rest. `turn`: tokens they must have made for each second of that."""
        by_rid, now_s, config, return_s = self.streams.by_rid, self.now_s, self.config, self.cost.return_s
        none, at_park = config.copies == "none" or not self.view.host_ok, config.copies == "at_park"
        for r in running:
            s = by_rid.get(r.rid)
            if s is None or not may(r, s):
                continue
            slack_s, spent_s = math.inf, 0.0
            host = 0 if none else r.context_tokens - 1 if at_park else r.backed_tokens
            if turn and r.output_tokens - s.output_at_admission < turn * self._swap_s(r.context_tokens, host):
                continue
            if s.buffer is not None:
                slack_s = s.buffer.slack_s(now_s)
                spent_s = return_s(tail_tokens=r.context_tokens - host, host_tokens=host)
            rank = self.rank(config.batch_turn_s if s.buffer is None else slack_s)
            yield Victim(r.rid, r.frees_tokens, rank, slack_s, spent_s)

    def _turn_tokens_per_s(self) -> float:
        """Tokens that a stream makes for each second of swapping it, if it is to take no more than its share; 0 while
        there is credit. A stream's own part of a step is small, and a swap holds up all: where everybody takes turns
        all the time, short ones would be more swap than run."""
        if self.swap_credit_s > 0.0:
            return 0.0
        return max(1, self.view.running) / (self.cost.step_s * self.config.swap_share)

    def _swap_s(self, context_tokens: int, host_tokens: int) -> float:
        """Of the engine's own time, for a park and a return: what the host lacks, and a publish."""
        return self.cost.prefill_s(context_tokens - host_tokens) + self.cost.publish.seconds(context_tokens)
