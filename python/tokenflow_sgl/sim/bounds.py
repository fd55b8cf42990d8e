"""What no scheduler can beat: a lower bound on P99 TTFT and an upper bound on effective goodput.

Owns the two bounds and the reasons why they hold. Simulates nothing. Invariant: each is on the safe side. Both take
the arrivals of a run as they were: when a follow-up turn is sent depends on when the answer before it was read, so
with other arrivals come other bounds, and what holds for one policy's run need not be that of another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .timing import StepWork, TimingModel

_PERCENT = 99
_CLOSE_S = 1e-6


def ttft_p99_bound_s(jobs: Sequence[tuple[float, int]], *, prefill_s: Callable[[int], float]) -> float:
    """Seconds that P99 TTFT (nearest rank, as core/qoe.percentile) cannot go below, at most 1e-6 too low.

    jobs: (arrival_s, prompt tokens that no cache can hold), at least one. prefill_s: the least time that so many tokens
    take of the one engine (`least_prefill_s` of a timing model), whatever else is in their steps.

    Clairvoyant and without a memory limit: each prompt needs its time on one server, from its arrival on, and its first
    token is not out before. Steps that compute several prompts at once are no way round, since each prompt still has
    its least share of them; nor is preempting. Of n jobs, those above the rank may come at any time.
    """
    if not jobs:
        raise ValueError("ttft_p99_bound_s of no jobs, valid: at least one")
    ordered = sorted(jobs)
    arrivals_s = [arrival_s for arrival_s, _ in ordered]
    needs_s = [prefill_s(tokens) for _, tokens in ordered]
    # The rank of core/qoe.percentile, its guard against rounding included.
    rank = max(math.ceil(_PERCENT * len(jobs) / 100 - 1e-9), 1)
    return least_limit_s(arrivals_s, needs_s, late=len(jobs) - rank)


def least_limit_s(arrivals_s: Sequence[float], needs_s: Sequence[float], *, late: int) -> float:
    """The smallest T, at most 1e-6 too low, such that all jobs but `late` can end by their arrival + T on one server.

    arrivals_s in order; bisection, as fewer are late the longer T is.
    """
    if fewest_late(arrivals_s, needs_s, within_s=0.0, stop_above=late) <= late:
        return 0.0
    low_s, high_s, free_s = 0.0, 0.0, -math.inf
    for arrival_s, need_s in zip(arrivals_s, needs_s, strict=True):
        free_s = max(free_s, arrival_s) + need_s
        high_s = max(high_s, free_s - arrival_s)
    while high_s - low_s > max(_CLOSE_S, 1e-12 * high_s):
        middle_s = (low_s + high_s) / 2
        if fewest_late(arrivals_s, needs_s, within_s=middle_s, stop_above=late) <= late:
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def fewest_late(arrivals_s: Sequence[float], needs_s: Sequence[float], *, within_s: float, stop_above: int) -> int:
    """How many jobs end later than `within_s` after their arrival, at the least; any number above `stop_above` stands
    for all above it.

    All have the same time, so who comes first is due first, and Kise, Ibaraki and Mine (Operations Research 26, 1978)
    hold: take jobs in order of arrival; when one would end late, drop the one of all so far whose absence lets the
    rest end soonest. The rest is then on time, as many as can be, and free as soon as can be.
    """
    busy = _BusyPeriod(len(arrivals_s))
    dropped = 0
    for arrival_s, need_s in zip(arrivals_s, needs_s, strict=True):
        if busy.add(arrival_s, need_s) <= arrival_s + within_s:
            continue
        dropped += 1
        if dropped > stop_above:
            break
        busy.drop_one()
    return dropped


class _BusyPeriod:
    """Jobs served one after the other in order of arrival, since the server last had nothing to do.

    Jobs before that cannot make room for a later one any more.

        begin - arrive = wait; the jobs after i can move up by no more than the least wait among them
    """

    def __init__(self, size: int) -> None:
        self._arrive, self._begin, self._need = np.empty(size), np.empty(size), np.empty(size)
        self._jobs = 0
        self._free_s = -math.inf

    def add(self, arrival_s: float, need_s: float) -> float:
        """When this job ends."""
        if arrival_s >= self._free_s:
            self._jobs, self._free_s = 0, arrival_s
        last = self._jobs
        self._arrive[last], self._begin[last], self._need[last] = arrival_s, self._free_s, need_s
        self._jobs += 1
        self._free_s += need_s
        return self._free_s

    def drop_one(self) -> None:
        """Drop the job whose absence frees the server soonest; the jobs after it move up."""
        jobs = self._jobs
        arrive, begin, need = self._arrive[:jobs], self._begin[:jobs], self._need[:jobs]
        wait = np.maximum(begin - arrive, 0.0)
        gain = need.copy()
        gain[:-1] = np.minimum(need[:-1], np.minimum.accumulate(wait[::-1])[::-1][1:])
        out = int(np.argmax(gain))
        moved_up = np.minimum(np.minimum.accumulate(wait[out + 1 :]), need[out])
        begin[out:-1] = begin[out + 1 :] - moved_up
        arrive[out:-1], need[out:-1] = arrive[out + 1 :].copy(), need[out + 1 :].copy()
        self._free_s -= float(gain[out])
        self._jobs -= 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request as the goodput bound sees it. new_tokens: of the prompt, what no cache can hold: computed for it, and
    in memory for it alone."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    answer_tokens: int


def goodput_bound_tok_s(wanted: Sequence[Wanted], *, timing: TimingModel, pool_tokens: int, max_running: int) -> float:
    """Tokens a second that effective goodput (core/qoe.py) cannot exceed where every request is answered in full:
    the smaller of what is wanted and what the engine can make."""
    if not wanted:
        raise ValueError("goodput_bound_tok_s of no requests, valid: at least one")
    most_tok_s = capacity_tok_s(wanted, timing=timing, pool_tokens=pool_tokens, max_running=max_running)
    return min(demand_tok_s(wanted, timing=timing), most_tok_s)


def demand_tok_s(wanted: Sequence[Wanted], *, timing: TimingModel) -> float:
    """All wanted tokens over the shortest span: from the first arrival to the end of whoever would end last if each
    had the engine to itself."""
    first_s = min(request.arrival_s for request in wanted)
    span_s = max(request.arrival_s + _alone_s(request, timing) for request in wanted) - first_s
    return sum(request.answer_tokens for request in wanted) / span_s if span_s > 0 else math.inf


def capacity_tok_s(wanted: Sequence[Wanted], *, timing: TimingModel, pool_tokens: int, max_running: int) -> float:
    """The most tokens a second of the timing model over batch sizes, prefill taken as free.

    Each decode token reads its own context, so the mean over all of them is the same in every schedule. What is read
    beyond the batch being linear, no mix of steps beats the best single batch size with that mean. Streams hold at
    least what is theirs alone, so on average no more than pool_tokens / mean(own tokens) of them decode together; that
    the average limits each step needs times that are convex in the batch size, as the roofline's are.
    """
    decoded = sum(request.answer_tokens - 1 for request in wanted)
    if decoded <= 0:
        return math.inf
    read_tokens = sum(_summed_context(request.prompt_tokens, request.answer_tokens) for request in wanted)
    own_tokens = sum(_summed_context(request.new_tokens, request.answer_tokens) for request in wanted)
    most = max_running
    if own_tokens > 0:
        most = max(min(max_running, math.ceil(pool_tokens * decoded / own_tokens)), 1)
    best_tok_s = max(
        streams / timing.step_s(StepWork(decoding=streams, decode_context_tokens=streams * read_tokens // decoded))
        for streams in range(1, most + 1)
    )
    # The first token of each answer comes from its prefill.
    return best_tok_s * (decoded + len(wanted)) / decoded


def _summed_context(prompt_tokens: int, answer_tokens: int) -> int:
    """Tokens before it, summed over the decode tokens of an answer: prompt + 0, prompt + 1, ..."""
    decoded = answer_tokens - 1
    return decoded * prompt_tokens + decoded * (decoded - 1) // 2


def _alone_s(request: Wanted, timing: TimingModel) -> float:
    """The least seconds from sending to the last token: one prefill step, and a decode step for each further token."""
    new = max(request.new_tokens, 1)
    first_s = timing.step_s(StepWork(prefill=((new, request.prompt_tokens - new),)))
    each_s = timing.step_s(StepWork(decoding=1, decode_context_tokens=request.prompt_tokens))
    return first_s + (request.answer_tokens - 1) * each_s
