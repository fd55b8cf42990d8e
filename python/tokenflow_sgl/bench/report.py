"""Results as text: the table of servers and measures, and whether the burst's thresholds are met.

Owns names, units and rounding for people. Computes no measure. Invariant: failed requests come first, and no number is
shown without its spread over the seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.workload.scenario import Scenario

BASELINE, EAGER, OURS = "stock", "stock-eager", "tokenflow"

# (title, where in a per-seed row, key). "" is all requests; "newcomers" the groups that the scenario judges.
ROWS = (
    ("failed requests", "", "failed"),
    ("newcomers' TTFT, mean s", "newcomers", "ttft_mean_s"),
    ("newcomers' TTFT, P99 s", "newcomers", "ttft_p99_s"),
    ("all TTFT, mean s", "", "ttft_mean_s"),
    ("all TTFT, P99 s", "", "ttft_p99_s"),
    ("stalls", "", "stall_count"),
    ("stall total s", "", "stall_total_s"),
    ("stall longest s", "", "stall_longest_s"),
    ("TBT P99 s", "", "tbt_p99_s"),
    ("effective goodput tok/s", "", "effective_goodput_tok_s"),
    ("effective throughput tok/s", "", "effective_throughput_tok_s"),
    ("raw throughput tok/s", "", "raw_throughput_tok_s"),
    ("makespan s", "", "makespan_s"),
    ("QoE (Andes v2), mean", "", "qoe_mean"),
    ("completion, mean s", "", "completion_mean_s"),
    ("completion, P99 s", "", "completion_p99_s"),
    ("parks", "", "parks"),
    ("resumes", "", "resumes"),
    ("retracted by the engine", "copies", "retractions"),
    ("parked pages on the host by then", "copies", "on_host_at_park"),
    ("forwards that waited for a copy", "copies", "copy_waits"),
    ("returns after running dry", "copies", "late_returns"),
    ("loads ahead", "copies", "loads"),
    ("tokens computed again", "copies", "reprefilled_tokens"),
    ("client late by, worst s", "", "send_lateness_s"),
)

# A load generator this late was itself short of CPU: what it measured is not the server.
LATENESS_LIMIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """One threshold: what was asked, what was measured, and whether it was met."""

    title: str
    asked: str
    measured: str
    met: bool

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'}  {self.title}: {self.measured} (asked: {self.asked})"


def table(results: Mapping[str, Any]) -> str:
    """Measures x servers as text: median over seeds [lowest .. highest], and the ratio to stock's median
    (the first server's, where stock was not measured).

    results: the JSON of results.results_json, infinite numbers as inf or None.
    """
    servers = list(results["results"])
    first = BASELINE if BASELINE in servers else servers[0]
    facts = results["provenance"]
    loads = [row[key] for server in servers for row in _rows(results, server) for key in ("load_before", "load_after")]
    head = (
        f"{results['scenario']}, max_tokens x{facts['max_tokens_factor']:g}, seeds {results['seeds']}, "
        f"{facts['host']['cpus']} CPUs, load {min(loads):.1f} to {max(loads):.1f}: "
        f"median [lowest .. highest], x = ratio to {first}"
    )
    lines = [["", *servers]]
    for title, where, key in ROWS:
        values = {server: _values(results, server, where, key) for server in servers}
        if any(row for row in values.values()):
            base = values[first]
            lines.append([title, *(_cell(values[server], base if server != first else None) for server in servers)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(servers) + 1)]
    body = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    errors = [
        f"failed: {server}, seed {row['seed']}: {text}"
        for server in servers
        for row in _rows(results, server)
        for text in row["errors"]
    ]
    return "\n".join([head, *body, *errors[:20]])


def one_line(run: RunRecord, scenario: Scenario) -> str:
    """A run in one line, for progress."""
    every, new = run.summary(), run.group_summary(scenario.newcomers)
    parts = [
        f"failed {every['failed']}/{every['requests']}",
        f"newcomers' TTFT mean {_number(new['ttft_mean_s'])} s, P99 {_number(new['ttft_p99_s'])} s",
        f"stalls {_number(every['stall_total_s'])} s",
        f"raw {_number(every['raw_throughput_tok_s'])} tok/s",
        f"client late by {_number(run.send_lateness_s)} s",
        f"load {run.load_before:.1f}",
    ]
    if run.parks is not None:
        parts.append(f"parks {run.parks}")
    return ", ".join(parts)


def check_thresholds(results: Mapping[str, Any]) -> list[Verdict]:
    """The burst's thresholds, judged on medians over seeds; empty unless all three servers were measured.

    P99 TTFT of newcomers <= max(0.10 x stock, stock-eager + 0.25 s); total stall <= 0.05 x stock-eager and <= stock's
    + 2 s; raw throughput, median of paired seeds, >= 0.97 x stock. A failed request makes its run's TTFT infinite, and
    misses the first line in any server: a baseline that fails is no baseline.
    """
    if any(server not in results["results"] for server in (BASELINE, EAGER, OURS)):
        return []
    ttft = {s: _median(_values(results, s, "newcomers", "ttft_p99_s")) for s in (BASELINE, EAGER, OURS)}
    stall = {s: _median(_values(results, s, "", "stall_total_s")) for s in (BASELINE, EAGER, OURS)}
    raw = {s: {row["seed"]: row["raw_throughput_tok_s"] for row in _rows(results, s)} for s in (BASELINE, OURS)}
    paired = [raw[OURS][seed] / raw[BASELINE][seed] for seed in raw[OURS] if raw[BASELINE].get(seed)]
    failed = {s: sum(row["failed"] for row in _rows(results, s)) for s in (BASELINE, EAGER, OURS)}
    late_s = max(row["send_lateness_s"] for s in failed for row in _rows(results, s))
    ttft_limit = max(0.10 * ttft[BASELINE], ttft[EAGER] + 0.25)
    stall_limits = (0.05 * stall[EAGER], stall[BASELINE] + 2.0)
    speed = _median(paired)
    return [
        Verdict(
            "failed requests",
            "0 everywhere",
            ", ".join(f"{server} {count}" for server, count in failed.items()),
            not any(failed.values()),
        ),
        Verdict("client late", f"<= {LATENESS_LIMIT_S} s in every run", f"{late_s:.3f} s", late_s <= LATENESS_LIMIT_S),
        Verdict(
            "newcomers' P99 TTFT",
            f"<= {ttft_limit:.3f} s: max(0.10 x stock's {ttft[BASELINE]:.3f}, eager's {ttft[EAGER]:.3f} + 0.25)",
            f"{ttft[OURS]:.3f} s",
            ttft[OURS] <= ttft_limit and math.isfinite(ttft[OURS]),
        ),
        Verdict(
            "total stall against eager",
            f"<= {stall_limits[0]:.2f} s, 0.05 x eager's {stall[EAGER]:.2f}",
            f"{stall[OURS]:.2f} s",
            stall[OURS] <= stall_limits[0],
        ),
        Verdict(
            "total stall against stock",
            f"<= {stall_limits[1]:.2f} s, stock's {stall[BASELINE]:.2f} + 2",
            f"{stall[OURS]:.2f} s",
            stall[OURS] <= stall_limits[1],
        ),
        Verdict("raw throughput, median of paired seeds", ">= 0.970 x stock", f"{speed:.3f} x stock", speed >= 0.97),
    ]


def _rows(results: Mapping[str, Any], server: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = results["results"][server]["per_seed"]
    return rows


def _values(results: Mapping[str, Any], server: str, where: str, key: str) -> list[float]:
    rows = [row[where] if where else row for row in _rows(results, server)]
    if None in rows:
        return []  # the scenario singles out no newcomers
    values = [row[key] for row in rows]
    if where == "copies" or key in ("parks", "resumes", "tbt_p99_s", "qoe_mean"):
        return [value for value in values if value is not None]
    return [math.inf if value is None else value for value in values]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def _cell(values: Sequence[float], base: Sequence[float] | None) -> str:
    if not values:
        return "-"
    text = f"{_number(_median(values))} [{_number(min(values))} .. {_number(max(values))}]"
    if base and math.isfinite(_median(base)) and _median(base) > 0 and math.isfinite(_median(values)):
        return f"{text} {_median(values) / _median(base):5.2f}x"
    return f"{text}       " if base is not None else text


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    if isinstance(value, int) or value == int(value):
        return str(int(value))
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
