"""The bounds that no server can beat, for the requests of one run.

Owns what is perfect caching here: a prefix is computed once, by whoever comes first. The bounds themselves are in
bounds.py. Invariant: each is a bound for every policy, since it ignores memory, batching and order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..workload.arrivals import Request
from .bounds import Wanted, goodput_bound_tok_s, ttft_p99_bound_s
from .settings import can_serve
from .world import World


def bounds_of(requests: Sequence[Request], world: World, *, sent_s: Mapping[str, float]) -> dict[str, float]:
    """ttft_p99_s and effective_goodput_tok_s. sent_s: when each was sent; follow-ups as the run had them.

    Requests that no server can serve are left out: they take no time of the engine, and with their arrivals in its span
    the goodput bound would be below what is reached. Where none is left nothing is delivered, and both are 0.
    """
    pool, page = world.pool_tokens, world.page_tokens
    served = [r for r in requests if can_serve(r.prompt_len + r.answer_tokens, pool_tokens=pool, page_tokens=page)]
    if not served:
        return {"ttft_p99_s": 0.0, "effective_goodput_tok_s": 0.0}
    uncached = _uncached(served, sent_s)
    wanted = [
        Wanted(sent_s[r.rid], prompt_tokens=r.prompt_len, new_tokens=new, answer_tokens=r.answer_tokens)
        for r, new in uncached
    ]
    timing = world.timing
    return {
        "ttft_p99_s": ttft_p99_bound_s([(w.arrival_s, w.new_tokens) for w in wanted], prefill_s=timing.least_prefill_s),
        "effective_goodput_tok_s": goodput_bound_tok_s(
            wanted, timing=timing, pool_tokens=world.pool_tokens, max_running=world.max_running
        ),
    }


def _uncached(requests: Sequence[Request], sent_s: Mapping[str, float]) -> list[tuple[Request, int]]:
    """Tokens of each prompt that nobody sent before; at least one is always computed."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for r in sorted(requests, key=lambda r: (sent_s[r.rid], r.rid)):
        path: tuple[str, ...] = ()
        new = 0
        for segment in r.segments:
            path = (*path, segment.key)
            if path not in seen and not segment.key.startswith("out:"):
                new += segment.tokens
            seen.add(path)
        found.append((r, max(1, new)))
    return found
