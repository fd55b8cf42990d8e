"""How requests are ranked: the guide's formula, and variants beside it behind one name.

Pure functions of numbers; no request, no clock. Invariant: higher goes first, and more slack never ranks higher.
`slack_s` below 0 is for how long the reader has had nothing to show.
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
    """The guide's formula, but whoever has nothing to show gains ln(1 + T / tau): T is the wait of an unstarted
    request, or for how long a started one has been dry (slack below 0), tau the cost of its prefill or return.

    This is the response ratio of HRRN in the formula's own units: of two that waited as long the cheaper goes first,
    and none is overtaken for ever, because the gain has no bound. mu is a head start: an unstarted request goes before
    one that has been dry for less than e^mu times as long. With something to show, started ones rank as in the guide.
    """
    if slack_s > 0.0 and not unstarted:  # the guide's, spelled out: it is asked for hundreds of streams in a step
        return -math.log(max(slack_s, config.delta_s)) + config.lambda_s / (wait_s + config.delta_s)
    cost_s = max(prefill_s, config.delta_s)
    if unstarted:
        return -math.log(max(slack_s, config.delta_s)) + math.log1p(wait_s / cost_s) + config.mu
    return -math.log(config.delta_s) + config.lambda_s / (wait_s + config.delta_s) + math.log1p(-slack_s / cost_s)


PRIORITIES: dict[str, Priority] = {"guide": guide, "aged": aged}
