"""The guide's own policy (seed text, "Mathematical Formulation of Buffer-Aware Preemption"): its priority to the letter
on TokenFlow's machinery, and none of the guards that were added to it.

Taken from the guide: P = -ln(max(S, delta)) + lambda / (Wait + delta) + mu [unstarted]; eligible iff S >= dt_prefill +
eps; the threshold of 2.0 s; eps 0.5 s; 6 tok/s where no rate is known; parked as soon as eligible and as often as it
takes; KV copied ahead, driven by an EMA of arrivals. It gives no values for delta, lambda and mu: they stay the
config's. What differs and no setting reaches: the guide's subset of highest sum P is served work-conserving here (taken
literally it parks whoever has more than 1 s), its code serves newcomers first in, first out and stops at the first that
finds no victims, parks what it finds even where that does not suffice, and never brings a parked stream back; those are
taken as its text has them. Work without a reader, which the guide does not know, keeps its lead (switch_margin),
without which it would swap places for ever.

Owns settings only. Invariant: what decides is TokenFlowPolicy.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import PolicyConfig
from ..policy import TokenFlowPolicy


def guide_policy(config: PolicyConfig) -> TokenFlowPolicy:
    return TokenFlowPolicy(
        replace(
            config,
            priority="guide",
            default_read_rate_tok_s=6.0,
            eps_s=0.5,
            min_slack_s=2.0,
            min_run_tokens=1,
            max_parks=1_000_000,
            defer_steps=0,
            swap_share=1.0,  # of all time: never used up
            copies="ahead",
        )
    )
