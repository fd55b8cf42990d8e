"""What the policy believes a step, a prefill, a copy and a publish cost: learned from Tick over a prior.

Owns beliefs only; the simulator's true timings are another object. Invariant: fed the same events, the same beliefs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import PolicyConfig

_GAIN = 0.1  # weight of a new sample; about the last 20 samples count
_PREFILL_GAIN = 0.02  # tails of returns are short and many: what a long prompt takes must not be forgotten over them
_LEAST_SHARE = 0.1  # of a mixed step that is the prefill's
_OUTLIER = 20.0  # a sample this many times the belief is a hiccup of the machine, unless it is the third in a row
_SPREAD = 0.05  # sizes must differ by this share of their mean before they tell what is fixed from what grows


@dataclass(slots=True)
class Line:
    """seconds = fixed_s + per_token_s * tokens, fitted to the latest samples by weighted least squares."""

    fixed_s: float
    per_token_s: float
    samples: int = 0
    outliers: int = 0  # in a row
    mean_tokens: float = 0.0
    mean_s: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    gain: float = _GAIN

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.per_token_s

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens <= 0 or seconds <= 0.0:
            return
        hiccup = self.samples >= 3 and seconds > _OUTLIER * self.seconds(tokens)
        self.outliers = self.outliers + 1 if hiccup else 0
        if 0 < self.outliers < 3:
            return
        self.samples += 1
        gain = max(self.gain, 1.0 / self.samples)
        off_tokens, off_s = tokens - self.mean_tokens, seconds - self.mean_s
        self.mean_tokens += gain * off_tokens
        self.mean_s += gain * off_s
        self.variance = (1.0 - gain) * (self.variance + gain * off_tokens * off_tokens)
        self.covariance = (1.0 - gain) * (self.covariance + gain * off_tokens * off_s)
        self._fit()

    def _fit(self) -> None:
        if self.covariance <= 0.0 or self.variance <= (_SPREAD * self.mean_tokens) ** 2:
            # Sizes all alike tell nothing of the shape: the line keeps its own and is scaled to the mean.
            scale = self.mean_s / (self.fixed_s + self.mean_tokens * self.per_token_s)
            self.fixed_s, self.per_token_s = self.fixed_s * scale, self.per_token_s * scale
            return
        self.per_token_s = self.covariance / self.variance
        self.fixed_s = self.mean_s - self.per_token_s * self.mean_tokens
        if self.fixed_s < 0.0:
            self.fixed_s, self.per_token_s = 0.0, self.mean_s / self.mean_tokens


@dataclass(slots=True)
class CostBelief:
    """Seconds per decode step; of prefills, copies to the host and back, and publish calls, as lines."""

    step_s: float
    prefill: Line  # over the tokens computed
    store: Line  # over the tokens copied to the host
    load: Line  # over the tokens copied back
    publish: Line  # over the stream's whole context
    decode_samples: int = 0
    outliers: int = 0  # in a row

    @classmethod
    def prior(cls, config: PolicyConfig) -> CostBelief:
        return cls(
            config.step_prior_s,
            # Until one is seen: no prefill is quicker than a decode step.
            prefill=Line(config.step_prior_s, 1.0 / config.prefill_prior_tok_s, gain=_PREFILL_GAIN),
            store=Line(0.0, 1.0 / config.load_prior_tok_s),
            load=Line(0.0, 1.0 / config.load_prior_tok_s),
            publish=Line(config.publish_fixed_prior_s, 1.0 / config.publish_prior_tok_s),
        )

    @property
    def store_s_per_token(self) -> float:
        return self.store.per_token_s

    @property
    def load_s_per_token(self) -> float:
        return self.load.per_token_s

    def learn_step(self, seconds: float, *, prefill_tokens: int, decoding: int) -> None:
        """One step took `seconds` and computed `prefill_tokens` new and one token each for `decoding` streams."""
        if seconds <= 0.0:
            return
        if prefill_tokens == 0 and decoding:
            if self._is_hiccup(seconds, self.step_s, self.decode_samples):
                return
            self.decode_samples += 1
            self.step_s += max(_GAIN, 1.0 / self.decode_samples) * (seconds - self.step_s)
        elif prefill_tokens:
            if decoding and self.decode_samples:
                # With mixed chunks others made their tokens in the same step, and these are no cost of the prefill.
                # Something is left of every step: were those of nearly nothing dropped, it would be believed dearer.
                seconds = max(seconds - self.step_s, _LEAST_SHARE * seconds)
            self.prefill.learn(prefill_tokens, seconds)

    def _is_hiccup(self, sample: float, belief: float, samples: int) -> bool:
        self.outliers = self.outliers + 1 if samples >= 3 and sample > _OUTLIER * belief else 0
        return 0 < self.outliers < 3

    def prefill_s(self, uncached_tokens: int) -> float:
        """tau_prefill: seconds to compute that many tokens, in a step of their own."""
        return self.prefill.seconds(uncached_tokens)

    def load_s(self, tokens: int, ahead_tokens: int = 0) -> float:
        """Seconds until `tokens` are back on the device, behind `ahead_tokens` on the same link, and known to be: who
        decides looks once a step."""
        return self.load.seconds(ahead_tokens + tokens) + self.step_s

    def load_spares_engine(self, *, host_tokens: int) -> bool:
        """The learned break-even. The copy passes beside the forwards of others, and computing would hold them all
        up: the queue and the step that notices the end cost them nothing. Where each copy is quicker than its
        prefill, all of them together are quicker than all prefills, which queue as well; were the step counted, a
        slow engine would compute what it could copy, and be slower for it. The tail takes its step either way, so
        what is spared is the time that each token adds."""
        return self.load.seconds(host_tokens) < host_tokens * self.prefill.per_token_s

    def return_s(self, *, tail_tokens: int, host_tokens: int, ahead_tokens: int = 0) -> float:
        """Seconds from the decision to bring a stream back to its next token, by the quicker way: the copy with the
        prefill of the tail, or the prefill of both; then one step."""
        step_s, prefill, load = self.step_s, self.prefill, self.load
        computed_s = prefill.fixed_s + (host_tokens + tail_tokens) * prefill.per_token_s
        if host_tokens > 0:
            loaded_s = load.fixed_s + (ahead_tokens + host_tokens) * load.per_token_s + step_s
            computed_s = min(computed_s, loaded_s + prefill.fixed_s + tail_tokens * prefill.per_token_s)
        return computed_s + step_s

    def stores_within(self, seconds: float) -> int:
        """Tokens whose copy to the host ends within `seconds`, if it starts now on a free link."""
        left_s = seconds - self.store.fixed_s
        if left_s <= 0.0:
            return 0
        per_token_s = self.store.per_token_s
        return 1 << 30 if per_token_s <= 0.0 else min(1 << 30, int(left_s / per_token_s))
