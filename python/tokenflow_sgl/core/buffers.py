"""What each client holds unread: G generated, C consumed, R read rate, slack (design: buffers).

Owns the model of consumption; knows no memory and no phase. Invariant: 0 <= C <= G, and no report takes C
back behind an earlier one.

Without reports, C grows at R from the first delivered token and is capped by G:

    C(t) = min(G, anchor_tokens + R * (t - anchor_s))

A reader who runs dry waits: the anchor moves to the moment the next token arrives, else the model would let it
catch up on tokens that did not exist while it was waiting.

A report puts the anchor where the client says it is, and two of them tell how fast it reads (listening.py). A client
that reported and falls silent is taken to have stopped some reports later: a hidden tab reads nothing.

    C(t) = min(G, anchor_tokens + R * min(t - anchor_s, patience_s))

A client that takes nothing off its connection (`halt`) reads nothing: its patience is 0 until it does so again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .listening import MAX_RATE_TOK_S, Listening
from .types import Rid


@dataclass(slots=True)
class ClientBuffer:
    """One reader. `generated_tokens` counts what the client may see; times in seconds of rank 0's clock."""

    rid: Rid
    rate_tok_s: float
    generated_tokens: int = 0
    hidden_tokens: int = 0  # withheld reasoning: emitted, never shown
    anchor_s: float | None = None  # None until the first visible token
    anchor_tokens: float = 0.0
    patience_s: float = math.inf  # past the anchor, for which it is believed to read on without a report
    listening: Listening | None = None  # None until the first report
    max_rate_tok_s: float = MAX_RATE_TOK_S  # no report leads beyond it
    halted: bool = False

    def emit(self, now_s: float, output_tokens: int) -> None:
        """`output_tokens` is cumulative, as the engine counts; it never falls."""
        generated = output_tokens - self.hidden_tokens
        if generated <= self.generated_tokens:
            return
        if self.anchor_s is None:
            self.anchor_s = now_s
        elif self._read(now_s) >= self.generated_tokens:
            self.anchor_s, self.anchor_tokens = now_s, float(self.generated_tokens)
        self.generated_tokens = generated

    def emit_run(self, last_s: float, output_tokens: int) -> bool:
        """Take the end of a run of emissions at once. False when the reader may have run dry on the way: then nothing
        changed and the run must be emitted step by step."""
        if self.anchor_s is None or self._read(last_s) >= self.generated_tokens:
            return False
        self.generated_tokens = max(self.generated_tokens, output_tokens - self.hidden_tokens)
        return True

    def report(self, now_s: float, consumed_tokens: int) -> None:
        """Re-anchor on what the client says, clamped to 0..G and never backwards, and learn from it."""
        if self.anchor_s is None:
            return
        if self.listening is None:
            self.listening = Listening(self.rate_tok_s, self.max_rate_tok_s)
        said = min(float(consumed_tokens), float(self.generated_tokens))
        consumed = max(said, self.listening.tokens if self.listening.reports else self.consumed_tokens(self.anchor_s))
        dry_s = self.runs_dry_at_s()
        self.rate_tok_s = self.listening.hear(now_s, consumed, ran_dry=consumed >= self.generated_tokens)
        self._anchor(now_s, consumed, dry_s)
        self._set_patience()

    def halt(self, now_s: float, halted: bool) -> None:
        """What it holds when it stops is what it holds when it goes on."""
        if self.anchor_s is not None and halted != self.halted:
            self._anchor(now_s, self.consumed_tokens(now_s), self.runs_dry_at_s())
        self.halted = halted
        self._set_patience()

    def _anchor(self, now_s: float, consumed: float, dry_s: float) -> None:
        if consumed < self.generated_tokens:
            self.anchor_s, self.anchor_tokens = now_s, consumed
        else:  # for how long it has been dry must not be forgotten over the report of it
            self.anchor_s, self.anchor_tokens = min(now_s, dry_s), consumed

    def _set_patience(self) -> None:
        heard_s = math.inf if self.listening is None else self.listening.patience_s
        self.patience_s = 0.0 if self.halted else heard_s

    def _read(self, now_s: float) -> float:
        """Tokens it would have read by now, however few there are."""
        assert self.anchor_s is not None
        return self.anchor_tokens + self.rate_tok_s * min(max(0.0, now_s - self.anchor_s), self.patience_s)

    def consumed_tokens(self, now_s: float) -> float:
        return 0.0 if self.anchor_s is None else min(float(self.generated_tokens), self._read(now_s))

    def buffer_tokens(self, now_s: float) -> float:
        """B = G - C, in tokens."""
        return self.generated_tokens - self.consumed_tokens(now_s)

    def slack_s(self, now_s: float) -> float:
        """S = B / R: seconds the client can go on without a new token. 0 before the first one.

        Spelled out: it is asked for hundreds of streams in a step.
        """
        if self.anchor_s is None:
            return 0.0
        past_s = now_s - self.anchor_s
        if past_s > self.patience_s:
            past_s = self.patience_s
        left = self.generated_tokens - self.anchor_tokens
        if past_s > 0.0:
            left -= self.rate_tok_s * past_s
        return left / self.rate_tok_s if left > 0.0 else 0.0

    def lead_s(self, now_s: float) -> float:
        """Slack, or, below 0, for how long the reader has had nothing to show. 0 before the first token."""
        if self.anchor_s is None:
            return 0.0
        slack_s = self.slack_s(now_s)
        return slack_s if slack_s > 0.0 else min(0.0, self.runs_dry_at_s() - now_s)

    def runs_dry_at_s(self) -> float:
        """The moment slack reaches 0 if nothing more is emitted and the client goes on reading; minus infinity before
        the first token."""
        if self.anchor_s is None:
            return -math.inf
        return self.anchor_s + (self.generated_tokens - self.anchor_tokens) / self.rate_tok_s
