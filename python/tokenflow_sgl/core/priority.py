"""How requests are ranked: the guide's formula, and variants beside it behind one name.

Pure functions of numbers; no request, no clock. Invariant: higher goes first, and more slack never ranks higher.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import PolicyConfig

Priority = Callable[..., float]


def guide(*, slack_s: float, wait_s: float, unstarted: bool, prefill_s: float, config: PolicyConfig) -> float:
    """P = -ln(max(S, delta)) + lambda / (Wait + delta) + mu * [unstarted], the TokenFlow guide's formula to the letter.

    Among unstarted requests the wait term falls with waiting, so it favours the newest.
    """
    del prefill_s
    bonus = config.mu if unstarted else 0.0
    return -math.log(max(slack_s, config.delta_s)) + config.lambda_s / (wait_s + config.delta_s) + bonus


def aged(*, slack_s: float, wait_s: float, unstarted: bool, prefill_s: float, config: PolicyConfig) -> float:
    """The guide's formula, but unstarted requests gain ln(1 + Wait / tau) with tau their prefill cost.

    This is the response ratio of HRRN in the formula's own units: of two that waited as long the cheaper goes first,
    and none is overtaken for ever, because the gain has no bound. Started requests rank as in the guide.
    """
    if not unstarted:  # the guide's, spelled out: it is asked for hundreds of streams in a step
        return -math.log(max(slack_s, config.delta_s)) + config.lambda_s / (wait_s + config.delta_s)
    cost_s = max(prefill_s, config.delta_s)
    return -math.log(max(slack_s, config.delta_s)) + math.log1p(wait_s / cost_s) + config.mu


PRIORITIES: dict[str, Priority] = {"guide": guide, "aged": aged}
