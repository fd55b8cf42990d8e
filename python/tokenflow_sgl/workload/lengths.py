"""Lengths in tokens: a range, or a bell that is cut at both ends.

Owns the distributions. Reads no file and seeds no generator. Invariant: what is drawn is whole and within `bounds`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Range = tuple[int, int]  # [low, high], both included


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal lengths; what falls outside `clip` becomes its nearer end."""

    mean_tokens: float
    sd_tokens: float
    clip: Range


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose natural logarithm is normal (median e^mu); what falls outside `clip` becomes its nearer end."""

    mu: float
    sigma: float
    clip: Range


Lengths = Range | Normal | Lognormal  # a plain range is drawn uniformly


def bounds(lengths: Lengths) -> Range:
    """The shortest and the longest that can be drawn, in tokens."""
    return lengths if isinstance(lengths, tuple) else lengths.clip


def draw_tokens(lengths: Lengths, rnd: random.Random) -> int:
    """One length, in tokens."""
    if isinstance(lengths, tuple):
        return rnd.randint(*lengths)
    if isinstance(lengths, Normal):
        drawn = rnd.normalvariate(lengths.mean_tokens, lengths.sd_tokens)
    else:
        # No float holds e^710, and no clip is as long.
        drawn = math.exp(min(rnd.normalvariate(lengths.mu, lengths.sigma), 700.0))
    low, high = lengths.clip
    return round(min(max(drawn, low), high))
