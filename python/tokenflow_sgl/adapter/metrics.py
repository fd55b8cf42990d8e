"""The `tokenflow:*` metrics on SGLang's own /metrics.

Owns names and shapes; the numbers are the scheduler's. Invariant: labels are upstream's own and one fixed `phase`,
never text from a client, so the number of series does not grow with requests, ids or rates.

Gauges are only ever set: in the multiprocess mode "mostrecent" an .inc() raises, and the scheduler would die of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from ..core.types import Phase

_COUNTERS = {
    "parks": "Times a stream was parked.",
    "returns": "Times a parked stream came back.",
    "late_returns": "Returns whose reader had run dry by then.",
    "reprefilled_tokens": "Tokens computed again because a parked stream's tail was dropped or its KV was lost.",
    "published_tokens": "Tokens of running streams inserted in the radix tree, which starts their host copy.",
    "publishes": "Times a running stream's KV was inserted in the radix tree ahead of a park.",
    "publishes_led_by_forecast": "Of these, in steps in which free memory alone would have called for less.",
    "stored_tokens": "Tokens whose copy to host memory was started, of prompts and of running streams.",
    "loaded_tokens": "Tokens loaded from host memory, ahead of an admission or a return or in it.",
    "loads": "Loads from host memory started ahead of an admission or a return.",
    "loads_given_up": "Loads that came to nothing (failed, overdue, bad pages); each costs a recompute.",
    "loads_failed": "Loads that failed or were overdue.",
    "stores_failed": "Copies to host memory that failed or were overdue.",
    "copies_overdue": "Copies, either way, given up after --tokenflow-copy-deadline.",
    "copy_waits": "Forwards that had to wait for a copy when they were launched.",
    "parked_pages": "Whole pages of context that streams had when they were parked.",
    "parked_pages_on_host": "Of these, on the host by then.",
    "acks": "Reports of consumption that clients sent for live streams.",
    "halts": "Times that a client took nothing off its connection.",
    "aborts": "Live requests ended by an abort: their client went away, or somebody asked for it.",
}
_PUBLISHING = {"rest": 0, "steady": 1, "hard": 2}
_SLACK_BUCKETS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class SchedulerMetrics:
    """Metrics of one scheduler. `labels` are upstream's label names and values for it."""

    def __init__(self, labels: Mapping[str, Any], registry: Any = None) -> None:
        # Here and not at the top: prometheus_client picks its storage at import, and upstream sets the directory late.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = REGISTRY if registry is None else registry
        names = list(labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            made = Gauge(f"tokenflow:{name}", text, [*names, *more], multiprocess_mode="mostrecent", registry=registry)
            return made if more else made.labels(**labels)

        self._labels = dict(labels)
        self._seen = dict.fromkeys(_COUNTERS, 0)
        self._counters = {
            name: Counter(f"tokenflow:{name}_total", text, names, registry=registry).labels(**labels)
            for name, text in _COUNTERS.items()
        }
        self._slack = Histogram(
            "tokenflow:slack_at_park_seconds",
            "Slack a stream had when it was parked.",
            names,
            buckets=_SLACK_BUCKETS_S,
            registry=registry,
        ).labels(**labels)
        self._streams = gauge("streams", "Streams by phase.", "phase")
        self._parked = gauge("parked_streams", "Streams whose memory was given back and whose KV is kept.")
        self._buffer_min = gauge("buffer_seconds_min", "Least slack of a started reader; +Inf without one.")
        self._buffer_median = gauge("buffer_seconds_median", "Median slack of the started readers; +Inf without one.")
        self._memory = {
            key: gauge(key, text)
            for key, text in (
                ("device_total_tokens", "Tokens the device KV pool holds."),
                ("device_free_tokens", "Tokens of it that are free or can be evicted at once."),
                ("host_total_tokens", "Tokens the host KV pool holds."),
                ("host_free_tokens", "Tokens of it that are free."),
                ("host_degraded", "1 while the host tier is not trusted, after failures in a row."),
                ("storing_tokens", "Tokens of copies to the host that are open."),
                ("loading_tokens", "Tokens of copies from the host that are open."),
            )
        }
        self._forecast = {
            key: gauge(f"forecast_{key}", text)
            for key, text in (
                ("arrivals_per_s", "Arrivals per second over the last seconds."),
                ("tokens_per_s", "Device tokens demanded per second over the last seconds."),
                ("demand_tokens", "Device tokens expected to be demanded within --tokenflow-forecast."),
                ("error_ratio", "Mean absolute error of past forecasts over what was demanded; NaN before the first."),
                ("bias_ratio", "Mean signed error of past forecasts over what was demanded; above 0: too much."),
                ("publishing", "What it comes to: 0 rests, 1 publishes at its pace, 2 publishes all it can."),
            )
        }
        # Last, when all the others exist: a dashboard that sees it may rely on them.
        gauge("active", "1 while the scheduler in force is TokenFlow's.").set(1)

    def update(
        self,
        *,
        streams: Sequence[Mapping[str, Any]],
        memory: Mapping[str, int],
        counters: Mapping[str, int],
        slack_at_park_s: Iterable[float] = (),
        forecast: Mapping[str, Any] | None = None,
    ) -> None:
        """Set everything. `streams` are the rows of the state route, `counters` cumulative; call it every few steps.

        slack_at_park_s: slack in seconds of each stream parked since the last call.
        """
        by_phase = {phase.value: 0 for phase in Phase}
        for row in streams:
            by_phase[row["phase"]] += 1
        for phase, count in by_phase.items():
            self._streams.labels(**self._labels, phase=phase).set(count)
        self._parked.set(by_phase[Phase.PARKED.value])
        slacks = [row["slack_s"] for row in streams if row["slack_s"] is not None and row["generated_tokens"] > 0]
        self._buffer_min.set(min(slacks, default=math.inf))
        self._buffer_median.set(median(slacks) if slacks else math.inf)
        for key, metric in self._memory.items():
            metric.set(memory[key])
        for name, counter in self._counters.items():
            counter.inc(counters[name] - self._seen[name])
            self._seen[name] = counters[name]
        if forecast is not None:
            self._set_forecast(forecast)
        for slack_s in slack_at_park_s:
            self._slack.observe(slack_s)

    def _set_forecast(self, forecast: Mapping[str, Any]) -> None:
        gauges = self._forecast
        for key in ("arrivals_per_s", "tokens_per_s"):
            gauges[key].set(forecast[key]["fast"])
        gauges["demand_tokens"].set(forecast["demand_tokens"])
        for key in ("error_ratio", "bias_ratio"):
            gauges[key].set(math.nan if forecast[key] is None else forecast[key])
        gauges["publishing"].set(_PUBLISHING.get(forecast["mode"], 0))
