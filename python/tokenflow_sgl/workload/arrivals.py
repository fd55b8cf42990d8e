"""From a scenario and a seed to the requests that arrive.

Owns the draws. Sends nothing and knows no engine. Invariant: the same scenario, seed and factor give the same requests
on every machine, and the factor of max_tokens changes nothing else.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tokenflow_sgl.workload.scenario import Group, ReadRate, Scenario

# Above the special tokens, below the smallest vocabulary in use: an end marker inside a prompt would be read as one.
PROMPT_ID_LOW = 16
PROMPT_ID_HIGH = 900


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a plan. sent_s: seconds after the run's start; answer_tokens: where the answer ends by itself;
    max_tokens: the limit the client asks for, at least answer_tokens; read_rate_tok_s: tokens a second of its reader.
    """

    rid: str
    group: str
    sent_s: float
    prompt_tokens: tuple[int, ...]
    answer_tokens: int
    max_tokens: int
    read_rate_tok_s: float


def plan_requests(scenario: Scenario, *, seed: int, max_tokens_factor: float = 1.0) -> tuple[Request, ...]:
    """All requests of one run, in order of sending.

    seed: any int. max_tokens_factor: >= 1, how much longer than the answer the client's limit is (clients seldom know).
    Raises ValueError for a factor below 1, which would cut answers and break the count of tokens.
    """
    if not (math.isfinite(max_tokens_factor) and max_tokens_factor >= 1):
        raise ValueError(f"max_tokens_factor: {max_tokens_factor}, valid: a number >= 1")
    requests = [
        request for group in scenario.groups for request in _group_requests(scenario, group, seed, max_tokens_factor)
    ]
    return tuple(sorted(requests, key=lambda request: (request.sent_s, request.rid)))


def deal_rates(rates: tuple[ReadRate, ...], count: int) -> tuple[float, ...]:
    """`count` read rates in the proportion of their weights, largest remainder first, in the order given.

    Dealt and not drawn: a seed that draws many fast readers would ask for more than the engine makes, another regime.
    """
    total = sum(rate.weight for rate in rates)
    shares = [rate.weight * count // total for rate in rates]
    by_remainder = sorted(range(len(rates)), key=lambda index: -(rates[index].weight * count % total))
    for index in by_remainder[: count - sum(shares)]:
        shares[index] += 1
    return tuple(rate.tok_s for rate, share in zip(rates, shares, strict=True) for _ in range(share))


def _group_requests(scenario: Scenario, group: Group, seed: int, factor: float) -> list[Request]:
    # A text seed is the same on every platform; with one generator for all, a group more would change the others.
    rnd = random.Random(f"{scenario.name}/{group.name}/{seed}")
    times = _times(group, rnd)
    rates = list(deal_rates(group.read_rates, group.count))
    rnd.shuffle(rates)
    requests = []
    for index in range(group.count):
        prompt = tuple(rnd.randrange(PROMPT_ID_LOW, PROMPT_ID_HIGH) for _ in range(rnd.randint(*group.prompt_tokens)))
        answer = rnd.randint(*group.answer_tokens)
        # Fixed width: a rid that is a prefix of another one is aborted with it by upstream.
        rid = f"s{seed}-{group.name}-{index:03d}"
        requests.append(
            Request(rid, group.name, times[index], prompt, answer, math.ceil(answer * factor), rates[index])
        )
    return requests


def _times(group: Group, rnd: random.Random) -> list[float]:
    if group.arrival == "uniform":
        assert group.over_s is not None
        return sorted(group.start_s + rnd.random() * group.over_s for _ in range(group.count))
    assert group.per_s is not None
    times, now_s = [], group.start_s
    for _ in range(group.count):
        now_s += rnd.expovariate(group.per_s)
        times.append(now_s)
    return times
