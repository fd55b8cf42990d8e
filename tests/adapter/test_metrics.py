"""The metrics tell the streams, and their number of series does not grow."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from tokenflow_sgl.adapter.ledger import COUNTERS
from tokenflow_sgl.adapter.metrics import SchedulerMetrics

MEMORY = {
    "device_total_tokens": 512, "device_free_tokens": 100, "host_total_tokens": 2048, "host_free_tokens": 1000,
    "host_degraded": 1, "storing_tokens": 32, "loading_tokens": 48,
}  # fmt: skip
FORECAST = {
    "arrivals_per_s": {"fast": 3.0, "slow": 1.0}, "tokens_per_s": {"fast": 400.0, "slow": 90.0},
    "demand_tokens": 1600.0, "error_ratio": 0.25, "bias_ratio": None, "mode": "hard",
}  # fmt: skip


def row(phase: str, slack_s: float | None, generated: int = 5) -> dict[str, Any]:
    return {"phase": phase, "slack_s": slack_s, "generated_tokens": generated}


def text(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_numbers_of_the_scheduler_are_on_the_page() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics({"model_name": "m"}, registry)
    counters = dict.fromkeys(COUNTERS, 0)
    metrics.update(streams=[], memory=MEMORY, counters=counters)
    assert 'tokenflow:active{model_name="m"} 1.0' in text(registry)
    assert 'tokenflow:buffer_seconds_min{model_name="m"} +Inf' in text(registry)

    streams = [
        row("running", 4.0),
        row("parked", 2.0),
        row("parked", 9.0),
        row("waiting", 0.0, 0),
        row("running", None),
    ]
    counters |= {"parks": 3, "loaded_tokens": 70}
    metrics.update(streams=streams, memory=MEMORY, counters=counters, slack_at_park_s=[3.0])
    metrics.update(streams=streams, memory=MEMORY, counters=counters, forecast=FORECAST)
    page = text(registry)
    for line in (
        'tokenflow:streams{model_name="m",phase="parked"} 2.0',
        'tokenflow:parked_streams{model_name="m"} 2.0',
        'tokenflow:buffer_seconds_min{model_name="m"} 2.0',
        'tokenflow:buffer_seconds_median{model_name="m"} 4.0',
        'tokenflow:device_free_tokens{model_name="m"} 100.0',
        'tokenflow:host_free_tokens{model_name="m"} 1000.0',
        'tokenflow:host_degraded{model_name="m"} 1.0',
        'tokenflow:storing_tokens{model_name="m"} 32.0',
        'tokenflow:loading_tokens{model_name="m"} 48.0',
        'tokenflow:forecast_arrivals_per_s{model_name="m"} 3.0',
        'tokenflow:forecast_demand_tokens{model_name="m"} 1600.0',
        'tokenflow:forecast_error_ratio{model_name="m"} 0.25',
        'tokenflow:forecast_bias_ratio{model_name="m"} NaN',
        'tokenflow:forecast_publishing{model_name="m"} 2.0',
        'tokenflow:parks_total{model_name="m"} 3.0',
        'tokenflow:loaded_tokens_total{model_name="m"} 70.0',
        'tokenflow:slack_at_park_seconds_count{model_name="m"} 1.0',
    ):
        assert line in page


def test_series_do_not_grow_with_streams() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics({"model_name": "m"}, registry)
    counters = dict.fromkeys(COUNTERS, 0)
    metrics.update(streams=[], memory=MEMORY, counters=counters)
    before = len(text(registry).splitlines())
    for i in range(1000):
        metrics.update(streams=[{**row("running", float(i)), "id": f"r{i}"}], memory=MEMORY, counters=counters)
    assert len(text(registry).splitlines()) == before
