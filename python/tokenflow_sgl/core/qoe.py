"""How a reader's experience is measured: the one definition, shared by benchmark, simulator and page.

Owns the formulas from raw arrival times to measures. Does not own clocks, files or who produced the
times. Invariant: a failed or short request never goes missing; it weighs in as infinite TTFT and
completion, as QoE 0, and its tokens count in raw throughput only.

    arrivals a_j   what the network brought, one time per token
    display  d_j   what the paced reader sees: d_1 = a_1, d_j = max(a_j, d_{j-1} + 1/R)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import sub

STALL_GRACE_S = 0.250
GOODPUT_TTFT_S = 0.500
GOODPUT_TBT_S = 0.200
GOODPUT_TBT_GRACE_S = 0.050
FULL_CREDIT_FRACTION = 0.10
NO_CREDIT_FRACTION = 0.20
ANDES_TTFT_TARGET_S = 1.0

# Without it a gap of exactly the limit would be a stall or not by the rounding of two sums.
_ROUNDING_S = 1e-9

_kept = lru_cache(maxsize=8192)  # asked for by every measure of a record, and for every group that it is in

Measures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One request as its client saw it. All times are seconds on one clock.

    arrivals_s: one time per TOKEN, in order; several tokens of one event share a time.
    read_rate_tok_s: > 0; `inf` is a program that reads as fast as it can.
    wanted_tokens: what a complete answer holds; fewer or more is a failure.
    error: why the stream failed, None if the client saw nothing wrong.
    """

    rid: str
    group: str
    sent_s: float
    arrivals_s: tuple[float, ...]
    read_rate_tok_s: float
    wanted_tokens: int
    error: str | None = None

    def __post_init__(self) -> None:
        if not self.read_rate_tok_s > 0:
            raise ValueError(f"read_rate_tok_s of {self.rid}: {self.read_rate_tok_s}, valid: > 0 (inf allowed)")
        if any(later < earlier for earlier, later in pairwise(self.arrivals_s)):
            raise ValueError(f"arrivals_s of {self.rid} go backwards, valid: times in order of arrival")

    @property
    def failed(self) -> bool:
        """True for an error and for an answer that is not exactly as long as it should be."""
        return self.error is not None or len(self.arrivals_s) != self.wanted_tokens or not self.arrivals_s


@dataclass(frozen=True, slots=True)
class Stalls:
    """Gaps of more than 1/R + 250 ms in what a reader sees; lengths in seconds, less the 1/R that is normal."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0


def display_times(arrivals_s: Sequence[float], read_rate_tok_s: float) -> tuple[float, ...]:
    """When a paced reader shows each token, in seconds: d_1 = a_1, d_j = max(a_j, d_{j-1} + 1/R) (design 1.4)."""
    pace_s = 1.0 / read_rate_tok_s
    shown: list[float] = []
    last_s = -math.inf
    for arrival_s in arrivals_s:  # spelled out: it is called for every token of every run
        due_s = last_s + pace_s
        last_s = arrival_s if arrival_s > due_s else due_s
        shown.append(last_s)
    return tuple(shown)


@_kept
def _shown(arrivals_s: tuple[float, ...], read_rate_tok_s: float) -> tuple[float, ...]:
    return display_times(arrivals_s, read_rate_tok_s)


def ttft_s(record: StreamRecord) -> float:
    """Seconds from sending to the first token; infinite for a failed or short request (design 1.4)."""
    return math.inf if record.failed else record.arrivals_s[0] - record.sent_s


def completion_s(record: StreamRecord) -> float:
    """Seconds from sending to the arrival of the last token; infinite for a failed or short request."""
    return math.inf if record.failed else record.arrivals_s[-1] - record.sent_s


def tbt_s(record: StreamRecord) -> tuple[float, ...]:
    """Seconds between tokens as the reader sees them, d_j - d_{j-1}: one fewer than tokens (design 1.4)."""
    shown = _shown(record.arrivals_s, record.read_rate_tok_s)
    return tuple(map(sub, shown[1:], shown))


def stall_intervals(record: StreamRecord) -> tuple[tuple[float, float], ...]:
    """(from, to) in seconds of each stall: a gap of more than 1/R + 250 ms, counted from when the token was due."""
    pace_s = 1.0 / record.read_rate_tok_s
    shown = _shown(record.arrivals_s, record.read_rate_tok_s)
    limit_s = pace_s + STALL_GRACE_S + _ROUNDING_S
    late = [number for number, gap_s in enumerate(tbt_s(record)) if gap_s > limit_s]
    return tuple((shown[number] + pace_s, shown[number + 1]) for number in late)


@_kept
def stalls(record: StreamRecord) -> Stalls:
    """How often, how long in all and how long at worst a reader waited in `stall_intervals`: the gap less 1/R."""
    lengths = [end_s - begin_s for begin_s, end_s in stall_intervals(record)]
    return Stalls(len(lengths), sum(lengths), max(lengths, default=0.0))


def rebuffer_s(record: StreamRecord) -> float:
    """Seconds the reader found an empty buffer after its first token (TokenFlow paper, 1.3): a stall without grace."""
    pace_s = 1.0 / record.read_rate_tok_s
    return sum(max(gap_s - pace_s, 0.0) for gap_s in tbt_s(record))


def buffer_tokens(record: StreamRecord, times_s: Iterable[float]) -> tuple[int, ...]:
    """For each time, the tokens that have arrived by then and are not yet displayed."""
    shown = _shown(record.arrivals_s, record.read_rate_tok_s)
    return tuple(bisect_right(record.arrivals_s, at_s) - bisect_right(shown, at_s) for at_s in times_s)


def buffers_at_production(record: StreamRecord) -> tuple[int, ...]:
    """For each token, how many earlier ones were still unread when it arrived; the token itself is not counted."""
    shown = _shown(record.arrivals_s, record.read_rate_tok_s)
    return tuple(index - bisect_right(shown, arrival, 0, index) for index, arrival in enumerate(record.arrivals_s))


def span_s(records: Iterable[StreamRecord]) -> float:
    """Seconds from the first request sent to the last token delivered; 0 where no token was delivered."""
    rows = list(records)
    last = max((r.arrivals_s[-1] for r in rows if r.arrivals_s), default=None)
    return 0.0 if last is None else last - min(r.sent_s for r in rows)


def raw_throughput_tok_s(records: Sequence[StreamRecord]) -> float:
    """Delivered tokens / (last token - first request sent), those of cut streams included (design 1.4)."""
    return _per_second(sum(len(r.arrivals_s) for r in records), records)


@_kept
def good_tokens(record: StreamRecord) -> int:
    """Tokens that count in the guide's goodput: TTFT <= 500 ms and the token's own TBT <= max(200 ms, 1/R + 50 ms).

    The first token has no TBT and counts by its TTFT alone.
    """
    if ttft_s(record) > GOODPUT_TTFT_S + _ROUNDING_S:
        return 0
    limit_s = max(GOODPUT_TBT_S, 1.0 / record.read_rate_tok_s + GOODPUT_TBT_GRACE_S) + _ROUNDING_S
    return 1 + sum(gap_s <= limit_s for gap_s in tbt_s(record))


def effective_goodput_tok_s(records: Sequence[StreamRecord]) -> float:
    """The guide's effective goodput: `good_tokens` of all requests over the span of the run (design 1.4)."""
    return _per_second(sum(good_tokens(r) for r in records), records)


def effective_weight(buffered_tokens: int, answer_tokens: int) -> float:
    """What a token is worth by the buffer it met: 1 below 10% of the answer, linear to 0 at 20% (TokenFlow paper)."""
    fraction = buffered_tokens / answer_tokens
    return min(max((NO_CREDIT_FRACTION - fraction) / (NO_CREDIT_FRACTION - FULL_CREDIT_FRACTION), 0.0), 1.0)


def effective_throughput_tok_s(records: Sequence[StreamRecord]) -> float:
    """The paper's effective throughput (TokenFlow, arXiv 2510.02758, evaluation): weighted tokens per second.

    It has no TTFT and no stall term. Failed requests earn nothing: their final length does not exist.
    """
    return _per_second(sum(_earned(r) for r in records if not r.failed), records)


@_kept
def _earned(record: StreamRecord) -> float:
    answer = len(record.arrivals_s)
    buffers = buffers_at_production(record)
    weights = [effective_weight(buffered, answer) for buffered in range(max(buffers, default=0) + 1)]
    return sum([weights[buffered] for buffered in buffers])


def andes_qoe(record: StreamRecord, *, ttft_target_s: float = ANDES_TTFT_TARGET_S) -> float:
    """Andes v2 QoE (arXiv 2404.16283v2): 1 - S_delay / S_whole, in 0..1; 0 for a failed request.

    T_ideal_i = target + (i-1)/R; T_actual_i = max(delivery_i, T_actual_{i-1} + 1/R) and never before T_ideal_1, since
    early tokens earn nothing. S_delay = sum(T_actual - T_ideal); S_whole = S_delay + the area under the actual curve,
    taken up to 1/R after the last token so that an answer of one token has an area. The paper's target is
    max(prompt_tokens / 5000, 1) seconds: 1 for every prompt up to 5,000 tokens.
    """
    if record.failed:
        return 0.0
    if math.isinf(record.read_rate_tok_s):
        raise ValueError(f"andes_qoe of {record.rid}: read_rate_tok_s is inf, valid: a finite rate")
    pace_s = 1.0 / record.read_rate_tok_s
    sent_s = record.sent_s
    waits = [arrival_s - sent_s for arrival_s in record.arrivals_s]
    since_sent = [wait_s if wait_s > ttft_target_s else ttft_target_s for wait_s in waits]
    actual = display_times(since_sent, record.read_rate_tok_s)
    end_s = actual[-1] + pace_s
    delay = sum([shown_s - (ttft_target_s + index * pace_s) for index, shown_s in enumerate(actual)])
    area = sum([end_s - shown_s for shown_s in actual])
    return 1.0 - max(delay, 0.0) / (max(delay, 0.0) + area)


def paper_qos(
    records: Sequence[StreamRecord],
    *,
    alpha: float,
    ttft_weight: float,
    rebuffer_weight: float,
    tau_fraction: float = FULL_CREDIT_FRACTION,
) -> float:
    """The paper's QoS per second (TokenFlow, arXiv 2510.02758); -inf once a request failed and TTFT has weight.

    (1/T) sum_i (sum_j w_ij - ttft_weight TTFT_i - rebuffer_weight Rebuffer_i), w = 1 while the buffer B is at most
    tau = tau_fraction x the answer, else max(1 - alpha (B - tau), 0). The paper publishes none of the weights, so none
    has a default here.
    """
    total = 0.0
    for record in records:
        tau = tau_fraction * record.wanted_tokens
        total += sum(1.0 if b <= tau else max(1.0 - alpha * (b - tau), 0.0) for b in buffers_at_production(record))
        total -= ttft_weight * ttft_s(record) if ttft_weight else 0.0
        total -= rebuffer_weight * rebuffer_s(record)
    return _per_second(total, records) if math.isfinite(total) else total


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank: the smallest value with at least `percent` % of the values at or below it.

    Not linear: interpolating towards an infinite TTFT would turn every neighbour of a failure into infinity or NaN.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent: {percent}, valid: above 0, up to 100")
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of no values")
    # 99 * 100 / 100 in floats may land a hair above the rank.
    return ordered[max(math.ceil(percent * len(ordered) / 100 - 1e-9), 1) - 1]


def summarize(records: Sequence[StreamRecord], *, parks: int | None = None, resumes: int | None = None) -> Measures:
    """One row of results under the names of the shared JSON schema (design 1.5); times may be infinite.

    parks, resumes: what the engine reports; None where it has no such thing. `qoe_mean` is Andes v2 over the readers of
    finite rate, None where there are none; `tbt_p99_s` is over all tokens, None where no answer has two of them.
    """
    if not records:
        raise ValueError("summarize needs at least one record")
    first_waits = [ttft_s(r) for r in records]
    completions = [completion_s(r) for r in records]
    gaps = [gap for r in records for gap in tbt_s(r)]
    stalled = [stalls(r) for r in records]
    qoe = [andes_qoe(r) for r in records if math.isfinite(r.read_rate_tok_s)]
    return {
        "ttft_mean_s": sum(first_waits) / len(records),
        "ttft_p50_s": percentile(first_waits, 50),
        "ttft_p99_s": percentile(first_waits, 99),
        "tbt_p99_s": percentile(gaps, 99) if gaps else None,
        "stall_count": sum(s.count for s in stalled),
        "stall_total_s": sum(s.total_s for s in stalled),
        "stall_longest_s": max(s.longest_s for s in stalled),
        "effective_goodput_tok_s": effective_goodput_tok_s(records),
        "effective_throughput_tok_s": effective_throughput_tok_s(records),
        "raw_throughput_tok_s": raw_throughput_tok_s(records),
        "qoe_mean": sum(qoe) / len(qoe) if qoe else None,
        "completion_mean_s": sum(completions) / len(records),
        "completion_p99_s": percentile(completions, 99),
        "requests": len(records),
        "failed": sum(r.failed for r in records),
        "parks": parks,
        "resumes": resumes,
    }


def _per_second(tokens: float, records: Iterable[StreamRecord]) -> float:
    span = span_s(records)
    return tokens / span if span > 0 else 0.0
