"""What the scheduler tells of itself: the state route's content, and the metrics.

Owns the shapes; changes nothing. Invariant: reading state never changes a decision.
"""

from __future__ import annotations

from typing import Any

from ..core.types import Phase, Rid
from . import hooks, plugin
from .messages import STATE_RID


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
    """Tokens of the two tiers."""
    controller = scheduler.tree_cache.cache_controller
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return {
        "device_total_tokens": int(scheduler.max_total_num_tokens),
        "device_free_tokens": int(free),
        "host_total_tokens": 0 if controller is None else int(controller.mem_pool_host.size),
        "host_free_tokens": scheduler.executor.host_free_tokens(),
    }


def extend(reply: Any, scheduler: Any, recv_req: Any) -> Any:
    """Upstream's internal state plus ours under `tokenflow`; streams of all clients only for the state route."""
    ours: dict[str, Any] = {
        "active": True,
        "policy": scheduler.tokenflow_settings.policy,
        "release": hooks.installed_release(),
        "hooks": plugin.in_force(),
        "counters": dict(scheduler.ledger.counters),
    }
    if recv_req.rid == STATE_RID:
        ours |= {
            "seq": scheduler.ledger.seq,
            "now_s": scheduler.ledger.now_s,
            "steps": scheduler._steps,
            "streams": _streams(scheduler),
            "transitions": list(scheduler.ledger.transitions),
            "memory": memory(scheduler),
            "forecast": None,
        }
    reply.internal_state["tokenflow"] = ours
    return reply


def update_metrics(scheduler: Any) -> None:
    ledger = scheduler.ledger
    slacks, ledger.slack_at_park_s = ledger.slack_at_park_s, ledger.slack_at_park_s.copy()
    ledger.slack_at_park_s.clear()
    scheduler.tokenflow_metrics.update(
        streams=_streams(scheduler), memory=memory(scheduler), counters=ledger.counters, slack_at_park_s=slacks
    )
