"""How much device memory will be wanted soon: arrivals and growth, averaged over a short and a long time.

Owns the averages and the record of its own errors; looks at no view and no clock. Invariant: without events nothing
changes, and time alone lets the averages fall.

An average is an EMA of samples that lasted `dt`, so its weight is 1 - exp(-dt / tau): steps of any length count for
the time they took.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from .types import Arrived

_FAST_S, _SLOW_S = 2.0, 30.0  # a burst shows in the first within a second; the second knows what is usual
_CHECKS = 8  # predictions kept open at a time, evenly over the horizon
_GAIN = 0.1  # weight of a new comparison in the error


@dataclass(slots=True)
class Pace:
    """Something per second, over the short and the long time."""

    fast: float = 0.0
    slow: float = 0.0

    def add(self, amount: float, dt_s: float) -> None:
        """`amount` in the last `dt_s` seconds."""
        self.fast += (1.0 - math.exp(-dt_s / _FAST_S)) * (amount / dt_s - self.fast)
        self.slow += (1.0 - math.exp(-dt_s / _SLOW_S)) * (amount / dt_s - self.slow)


@dataclass(frozen=True, slots=True)
class Prediction:
    """`tokens` were predicted to be wanted between `made_s` and `made_s` + horizon; `before` were wanted until then."""

    made_s: float
    tokens: float
    before: float


class Forecast:
    """Device tokens wanted within `horizon_s`; 0 = no forecast."""

    def __init__(self, horizon_s: float) -> None:
        self.horizon_s = horizon_s
        self.arrivals = Pace()
        self.tokens = Pace()
        self.error_tokens = 0.0  # mean absolute error, mean error and mean of what was really wanted
        self.bias_tokens = 0.0
        self.actual_tokens = 0.0
        self.compared = 0
        self._now_s: float | None = None
        self._total = 0.0  # tokens wanted so far
        self._arrived = 0  # since the tick before
        self._prompt_tokens = 0
        self._open: deque[Prediction] = deque()

    def arrived(self, event: Arrived) -> None:
        self._arrived += 1
        self._prompt_tokens += event.prompt_tokens

    def tick(self, now_s: float, *, grew_tokens: int, idle: bool) -> None:
        """Time passed; running streams took `grew_tokens`. After an `idle` spell, what arrived belongs to the step that
        begins: spread over the spell a burst would look like nothing, and the spell itself must look like no load."""
        if self.horizon_s <= 0.0:
            return
        dt_s = 0.0 if self._now_s is None else now_s - self._now_s
        self._now_s = now_s
        if dt_s <= 0.0:
            return
        if idle:
            self.arrivals.add(0.0, dt_s)
            self.tokens.add(0.0, dt_s)
        else:
            wanted = self._prompt_tokens + grew_tokens
            self.arrivals.add(self._arrived, dt_s)
            self.tokens.add(wanted, dt_s)
            self._total += wanted
            self._arrived = self._prompt_tokens = 0
        self._compare(now_s, idle=idle)
        if not self._open or now_s - self._open[-1].made_s >= self.horizon_s / _CHECKS:
            self._open.append(Prediction(now_s, self.demand_tokens(self.horizon_s), self._total))

    def demand_tokens(self, horizon_s: float) -> float:
        """Tokens likely wanted within `horizon_s`: by the larger of the two averages, so that a burst counts at once
        and what is usual is not forgotten in a lull."""
        if self.horizon_s <= 0.0:
            return 0.0
        return max(self.tokens.fast, self.tokens.slow) * horizon_s

    def _compare(self, now_s: float, *, idle: bool) -> None:
        while self._open and now_s - self._open[0].made_s >= self.horizon_s:
            made = self._open.popleft()
            # A tick comes a little late, and what came in that little does not count. Nothing came while idle.
            late = 1.0 if idle else self.horizon_s / (now_s - made.made_s)
            actual = (self._total - made.before) * late
            self.compared += 1
            gain = max(_GAIN, 1.0 / self.compared)
            self.error_tokens += gain * (abs(made.tokens - actual) - self.error_tokens)
            self.bias_tokens += gain * (made.tokens - actual - self.bias_tokens)
            self.actual_tokens += gain * (actual - self.actual_tokens)

    def _relative(self, tokens: float) -> float | None:
        return tokens / self.actual_tokens if self.compared and self.actual_tokens > 0.0 else None

    def snapshot(self) -> dict[str, Any]:
        """Per second and in tokens; the errors are shares of what was really wanted, None before the first comparison.

        A positive bias means that more was predicted than came.
        """
        return {
            "horizon_s": self.horizon_s,
            "arrivals_per_s": {"fast": self.arrivals.fast, "slow": self.arrivals.slow},
            "tokens_per_s": {"fast": self.tokens.fast, "slow": self.tokens.slow},
            "demand_tokens": self.demand_tokens(self.horizon_s),
            "error_ratio": self._relative(self.error_tokens),
            "bias_ratio": self._relative(self.bias_tokens),
        }
