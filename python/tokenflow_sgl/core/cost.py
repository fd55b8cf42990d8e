"""What the policy believes a step, a prefill and a copy cost: learned from Tick over a prior.

Owns beliefs only; the simulator's true timings are another object. Invariant: fed the same events, the same beliefs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import PolicyConfig

_GAIN = 0.1  # weight of a new sample; about the last 20 samples count
_MIN_PREFILL_TOKENS = 32  # below this a prefill step's time says more about overhead than about speed
_OUTLIER = 20.0  # a sample this many times the belief is a hiccup of the machine, unless it is the third in a row


@dataclass(slots=True)
class CostBelief:
    """Seconds per decode step, prefill tokens per second, loaded tokens per second."""

    step_s: float
    prefill_s_per_token: float
    load_s_per_token: float
    decode_samples: int = 0
    prefill_samples: int = 0
    outliers: int = 0  # in a row

    @classmethod
    def prior(cls, config: PolicyConfig) -> CostBelief:
        return cls(config.step_prior_s, 1.0 / config.prefill_prior_tok_s, 1.0 / config.load_prior_tok_s)

    def learn_step(self, seconds: float, *, prefill_tokens: int, decoding: int) -> None:
        """One step took `seconds` and computed `prefill_tokens` new and one token each for `decoding` streams."""
        if seconds <= 0.0:
            return
        if prefill_tokens == 0 and decoding:
            if self._is_hiccup(seconds, self.step_s, self.decode_samples):
                return
            self.decode_samples += 1
            self.step_s += max(_GAIN, 1.0 / self.decode_samples) * (seconds - self.step_s)
        elif prefill_tokens >= _MIN_PREFILL_TOKENS:
            sample, belief = seconds / prefill_tokens, self.prefill_s_per_token
            if self._is_hiccup(sample, belief, self.prefill_samples):
                return
            self.prefill_samples += 1
            self.prefill_s_per_token += max(_GAIN, 1.0 / self.prefill_samples) * (sample - belief)

    def _is_hiccup(self, sample: float, belief: float, samples: int) -> bool:
        self.outliers = self.outliers + 1 if samples >= 3 and sample > _OUTLIER * belief else 0
        return 0 < self.outliers < 3

    def learn_copy(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0.0:
            self.load_s_per_token += _GAIN * (seconds / tokens - self.load_s_per_token)

    def prefill_s(self, uncached_tokens: int) -> float:
        """tau_prefill: seconds to compute that many tokens, never less than a step."""
        return max(self.step_s, uncached_tokens * self.prefill_s_per_token)

    def return_s(self, *, tail_tokens: int, host_tokens: int) -> float:
        """Seconds from the decision to bring a stream back to its next token: load, prefill of the tail, one step."""
        return host_tokens * self.load_s_per_token + self.prefill_s(tail_tokens) + self.step_s
