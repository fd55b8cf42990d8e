"""Requests and engines as a policy sees them, made by hand. By default streams of 100 tokens whose KV is on the host,
and 1000 tokens free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenflow_sgl.core.types import EngineView, Phase, RequestView


def request(
    rid: str, phase: Phase = Phase.RUNNING, *, context: int = 100, output: int = 50, **fields: Any
) -> RequestView:
    away = phase in (Phase.WAITING, Phase.PARKED, Phase.LOADING)
    values: dict[str, Any] = {
        "rid": rid,
        "phase": phase,
        "context_tokens": context,
        "published_tokens": 0,
        "copying_tokens": 0,
        "backed_tokens": context - 1,
        "frees_tokens": context if phase is Phase.RUNNING else 0,
        "cached_tokens": 0,
        "host_hit_tokens": 0,
        "held_tokens": 0,
        "takes_tokens": context if away else 0,
        "output_tokens": 0 if phase in (Phase.WAITING, Phase.PREFILL) else output,
        "max_output_tokens": 10_000,
        "preemptible": phase is Phase.RUNNING,
    }
    return RequestView(**(values | fields))


def engine(requests: Iterable[RequestView] = (), **fields: Any) -> EngineView:
    requests = list(requests)
    values: dict[str, Any] = {
        "now_s": 0.0,
        "waiting": sum(r.phase in (Phase.WAITING, Phase.PARKED, Phase.LOADING) for r in requests),
        "running": sum(r.phase is Phase.RUNNING for r in requests),
        "device_free_tokens": 1000,
        "device_total_tokens": 1000,
        "host_free_tokens": 10_000,
        "host_total_tokens": 10_000,
        "host_ok": True,
        "storing_tokens": 0,
        "load_slots": 3,
        "max_running": 64,
        "page_tokens": 1,
        "promised_tokens": sum(r.takes_tokens for r in requests if r.phase is Phase.PREFILL),
        "build": lambda: requests,
    }
    return EngineView(**(values | fields))
