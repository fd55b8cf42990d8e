"""What the scheduler tells of itself: the state route's content, and the metrics.

Owns the shapes; changes nothing. Invariant: reading state never changes a decision.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..core.types import Phase, Rid
from . import hooks, plugin


def slack_s(scheduler: Any, rid: Rid) -> float | None:
    """A stream's slack in seconds as the policy believes; None if it has no reader or the policy keeps no buffers."""
    belief = getattr(scheduler.tokenflow_policy, "slack_of", None)
    return None if belief is None else belief(rid, scheduler.ledger.now_s)


def _streams(scheduler: Any) -> list[dict[str, Any]]:
    beliefs = getattr(scheduler.tokenflow_policy, "snapshot", None)
    known = {row["id"]: row for row in beliefs(scheduler.ledger.now_s)} if beliefs is not None else {}
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for phase, req in _phases(scheduler):
        if req.rid in seen or req.finished_reason is not None:
            continue
        seen.add(req.rid)
        state = req.tokenflow
        row = {
            "id": req.rid,
            "class": state.reader.value,
            "consumed_tokens": None,
            "buffer_tokens": None,
            "slack_s": None,
            "read_rate_tok_s": state.read_rate_tok_s,
            **known.get(req.rid, {}),
            "phase": phase.value,
            "generated_tokens": len(req.output_ids),
            "parks": state.parks,
        }
        rows.append(row)
    return rows


def _phases(scheduler: Any) -> list[tuple[Phase, Any]]:
    pairs = [(Phase.RUNNING, r) for r in scheduler.running_batch.reqs]
    pairs += [(Phase.PARKED if r.output_ids else Phase.WAITING, r) for r in scheduler.waiting_queue]
    if scheduler.last_batch is not None:
        pairs += [(Phase.PREFILL, r) for r in scheduler.last_batch.reqs if not r.is_retracted]
    if scheduler.chunked_req is not None:
        pairs.append((Phase.PREFILL, scheduler.chunked_req))
    return pairs


def memory(scheduler: Any) -> dict[str, int]:
    """Tokens of the two tiers, and of copies that are open."""
    controller = scheduler.tree_cache.cache_controller
    pool = None if controller is None else controller.mem_pool_host
    tier = scheduler.host_tier
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return {
        "device_total_tokens": int(scheduler.max_total_num_tokens),
        "device_free_tokens": int(free),
        "host_total_tokens": 0 if pool is None else int(pool.size),
        "host_free_tokens": 0 if pool is None else int(pool.available_size()),
        "host_degraded": int(tier is not None and not tier.ok),
        "storing_tokens": 0 if tier is None else tier.storing_tokens,
        "loading_tokens": 0 if tier is None else sum(len(load.device_tokens) for load in tier.loads),
    }


def forecast(scheduler: Any) -> dict[str, Any] | None:
    """What the policy expects of the next seconds; None if it does not look ahead."""
    snapshot = getattr(scheduler.tokenflow_policy, "forecast_snapshot", None)
    return None if snapshot is None else snapshot(scheduler.executor.last_view)


@cache
def _identity() -> dict[str, Any]:
    """What does not change while the process lives; looking it up costs milliseconds."""
    return {"release": hooks.installed_release(), "hooks": plugin.in_force()}


def summary(scheduler: Any) -> dict[str, Any]:
    """What anybody with the ordinary key may see, in upstream's own internal state: no stream is named."""
    policy = scheduler.tokenflow_settings.policy
    return {"active": True, "policy": policy, **_identity(), "counters": dict(scheduler.ledger.counters)}


def state(scheduler: Any, since: int) -> dict[str, Any]:
    """The content of /tokenflow/state, with the transitions after number `since`."""
    ledger = scheduler.ledger
    transitions: list[dict[str, Any]] = []
    for transition in reversed(ledger.transitions):
        if transition["seq"] <= since:
            break
        transitions.append(transition)
    return {
        **summary(scheduler),
        "seq": ledger.seq,
        "now_s": ledger.now_s,
        "steps": scheduler._steps,
        "streams": _streams(scheduler),
        "transitions": transitions[::-1],
        "memory": memory(scheduler),
        "forecast": forecast(scheduler),
    }


def update_metrics(scheduler: Any) -> None:
    ledger = scheduler.ledger
    slacks, ledger.slack_at_park_s = ledger.slack_at_park_s, ledger.slack_at_park_s.copy()
    ledger.slack_at_park_s.clear()
    scheduler.tokenflow_metrics.update(
        streams=_streams(scheduler),
        memory=memory(scheduler),
        counters=ledger.counters,
        slack_at_park_s=slacks,
        forecast=forecast(scheduler),
    )
