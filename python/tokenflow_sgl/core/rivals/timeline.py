"""A reader's timeline as Andes v2 counts it, and the QoE it would have if its next tokens came at a given pace.

Owns the formula (arXiv 2404.16283 v2; core/qoe.py has the same for whole answers); knows no memory. Invariant: the
prediction from a stream's present equals what core/qoe.py says of the answer that comes out so.

    ideal   T*_i = target + (i - 1) / r
    actual  T_i  = max(delivered_i, T_{i-1} + 1/r), never before T*_i: early tokens earn nothing
    QoE     1 - delay / (delay + area), delay = sum (T_i - T*_i), area = sum (T_n + 1/r - T_i)
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_TOK_S = 5000.0  # the paper's target for the first token: prompt / 5000 s, at least 1 s
TARGET_LEAST_S = 1.0


@dataclass(slots=True)
class Timeline:
    """One reader. Times are seconds since its request arrived."""

    target_s: float
    pace_s: float
    tokens: int = 0
    last_s: float = 0.0  # T of the last token; before the first one, such that the first is due at the target
    sum_s: float = 0.0  # of all T

    @classmethod
    def of(cls, prompt_tokens: int, read_rate_tok_s: float) -> Timeline:
        target_s, pace_s = max(prompt_tokens / TARGET_TOK_S, TARGET_LEAST_S), 1.0 / read_rate_tok_s
        return cls(target_s, pace_s, last_s=target_s - pace_s)

    def deliver(self, at_s: float, output_tokens: int) -> None:
        """`output_tokens` is cumulative."""
        while self.tokens < output_tokens:
            self.last_s = max(at_s, self.last_s + self.pace_s)
            self.sum_s += self.last_s
            self.tokens += 1

    def due_tokens(self, at_s: float) -> int:
        """Tokens that an ideal answer has shown by then."""
        return int((at_s - self.target_s) / self.pace_s) + 1 if at_s >= self.target_s else 0

    def qoe(self, tokens: int, *, start_s: float, step_s: float) -> float:
        """QoE of the first `tokens` tokens if those missing come `step_s` apart, the first one step after `start_s`."""
        n, pace, last, total = self.tokens, self.pace_s, self.last_s, self.sum_s
        missing = tokens - n
        if missing > 0:
            n = tokens
            if step_s <= pace:
                # The reader is the slower one: only the first may be late, and all after it by as much.
                first = max(last + pace, start_s + step_s)
                total += missing * (first + 0.5 * (missing - 1) * pace)
                last = first + (missing - 1) * pace
            else:
                # The first `kept` come in time from what lies unread before them; then the engine sets the pace.
                kept = min(missing, max(0, int((last - start_s) / (step_s - pace))))
                late = missing - kept
                total += kept * last + 0.5 * kept * (kept + 1) * pace
                total += late * start_s + 0.5 * (missing * (missing + 1) - kept * (kept + 1)) * step_s
                last = start_s + missing * step_s if late else last + missing * pace
        if n == 0:
            return 1.0
        delay = total - n * (self.target_s + 0.5 * (n - 1) * pace)
        area = n * (last + pace) - total
        return 1.0 - max(0.0, delay) / (max(0.0, delay) + area)
