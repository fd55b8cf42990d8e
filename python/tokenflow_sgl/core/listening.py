"""What the reports of one client tell: how fast it reads, and when it has stopped.

Owns the estimate; the buffer owns the model it feeds. Invariant: a report moves the rate by no more than a fixed
factor, and never out of what counts for a reader: a stranger can say what it likes, and often.

    measured = (C2 - C1) / (t2 - t1)          R <- R + gain * (clip(measured, R / 2, 2 R) - R)

A reader that had read everything may have waited for us: what it read is then no measure of how slow it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_RATE_TOK_S, MAX_RATE_TOK_S = 0.1, 1000.0
_LEAST_S = 0.2  # between two reports that are compared: over less, one token more or less is half of the rate
_GAIN = 0.7  # a reader of twice the rate is known after three reports
_FACTOR = 2.0
_PATIENCE_REPORTS = 4.0  # usual gaps without a report, after which it is taken to have stopped
_LEAST_PATIENCE_S = 2.0
_GAP_GAIN = 0.3


@dataclass(slots=True)
class Listening:
    """`tokens` is the most it said to have consumed; `reports` how often it was heard."""

    rate_tok_s: float
    most_tok_s: float = MAX_RATE_TOK_S
    tokens: float = 0.0
    reports: int = 0
    _from_s: float = -math.inf  # of the comparison under way
    _from_tokens: float = 0.0
    _heard_s: float = -math.inf
    _gap_s: float | None = None

    @property
    def patience_s(self) -> float:
        """Infinite until it was heard twice: a client that reports once may not mean to go on."""
        if self._gap_s is None:
            return math.inf
        return max(_LEAST_PATIENCE_S, _PATIENCE_REPORTS * self._gap_s)

    def hear(self, now_s: float, consumed_tokens: float, *, ran_dry: bool) -> float:
        """The rate, in tok/s, after this report."""
        self.reports += 1
        self.tokens = consumed_tokens
        gap_s, self._heard_s = now_s - self._heard_s, now_s
        if math.isfinite(gap_s):
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + _GAP_GAIN * (gap_s - self._gap_s)
        dt_s = now_s - self._from_s
        if math.isinf(dt_s):
            self._from_s, self._from_tokens = now_s, consumed_tokens
        elif dt_s >= _LEAST_S:
            self._learn((consumed_tokens - self._from_tokens) / dt_s, ran_dry=ran_dry)
            self._from_s, self._from_tokens = now_s, consumed_tokens
        return self.rate_tok_s

    def _learn(self, measured_tok_s: float, *, ran_dry: bool) -> None:
        rate = self.rate_tok_s
        if ran_dry and measured_tok_s < rate:
            return
        bounded = min(max(measured_tok_s, rate / _FACTOR), rate * _FACTOR)
        self.rate_tok_s = min(max(rate + _GAIN * (bounded - rate), MIN_RATE_TOK_S), self.most_tok_s)
