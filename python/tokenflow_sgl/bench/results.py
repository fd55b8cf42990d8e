"""Results on disk: the raw times of each run, and the one JSON that bench and simulator share (design 1.5).

Owns the schema, the provenance and the medians over seeds. Measures nothing. Invariant: every number in the JSON can be
computed again from the raw files beside it, and infinity is written as null, since JSON has no word for it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenflow_sgl.core.qoe import Measures, StreamRecord, span_s, summarize
from tokenflow_sgl.workload.scenario import Scenario

# Totals over all seeds: in a median, one seed's failures would vanish.
TOTALS = ("requests", "failed")
MEASURES = (
    *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "stall_count", "stall_total_s", "stall_longest_s"),
    *("effective_goodput_tok_s", "effective_throughput_tok_s", "raw_throughput_tok_s", "qoe_mean"),
    *("completion_mean_s", "completion_p99_s", "requests", "failed", "parks", "resumes"),
)
PACKAGES = ("tokenflow_sgl", "sglang", "torch", "transformers", "numpy", "aiohttp")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of one server on one seed: raw times, what the server reported meanwhile, and the machine's load.

    transitions: park / return / admit / finish with at_s on the records' clock. samples: answers of /tokenflow/state
    with their own `at_s` on that clock. parks, resumes, counters (what each grew by): None for a server that does not
    report them.
    """

    server: str
    seed: int
    max_tokens_factor: float
    records: tuple[StreamRecord, ...]
    load_before: float
    load_after: float
    send_lateness_s: float
    parks: int | None = None
    resumes: int | None = None
    counters: Mapping[str, int] | None = None
    transitions: tuple[Mapping[str, Any], ...] = field(default=())
    samples: tuple[Mapping[str, Any], ...] = field(default=())

    def summary(self) -> Measures:
        """Measures over all requests of the run."""
        return summarize(self.records, parks=self.parks, resumes=self.resumes)

    def group_summary(self, groups: Iterable[str]) -> Measures:
        """Measures over the requests of some groups; throughputs then are over their own span."""
        names = set(groups)
        return summarize([record for record in self.records if record.group in names])


def results_json(scenario: Scenario, runs: Sequence[RunRecord], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of design 1.5 for the runs of ONE max_tokens factor, in the order in which servers first appear.

    Each measure is the median over seeds (requests and failed: the total); `per_seed` has each run's own, its
    `newcomers` (the groups the scenario judges), `groups`, load and lateness. `newcomers` holds medians over seeds.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        rows.setdefault(run.server, []).append(per_seed(scenario, run))
    order = dict.fromkeys(run.server for run in runs)
    return rows_json(scenario, {server: rows[server] for server in order}, provenance)


def rows_json(
    scenario: Scenario, rows: Mapping[str, Sequence[Mapping[str, Any]]], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The same from what `per_seed` made of each run, by server."""
    results: dict[str, Any] = {}
    for server, mine in rows.items():
        new = [row["newcomers"] for row in mine]
        results[server] = {
            **medians([{key: row[key] for key in MEASURES} for row in mine]),
            "newcomers": None if None in new else medians(new),
            "per_seed": list(mine),
        }
    return {
        "scenario": scenario.name,
        "seeds": sorted({row["seed"] for mine in rows.values() for row in mine}),
        "provenance": dict(provenance),
        "results": results,
        "bounds": {"ttft_p99_s": None, "effective_goodput_tok_s": None},
    }


def medians(rows: Sequence[Measures]) -> Measures:
    """Key by key the median over rows (TOTALS: the sum); None where a row has None."""
    out: Measures = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        present = [value for value in values if value is not None]
        if len(present) < len(values):
            out[key] = None
        else:
            out[key] = sum(present) if key in TOTALS else _median(present)
    return out


def provenance(scenario: Scenario, *, command: Sequence[str], max_tokens_factor: float) -> dict[str, Any]:
    """What a reader needs to judge and repeat a result. No paths of this machine."""
    return {
        "scenario_sha256": scenario.sha256,
        "max_tokens_factor": max_tokens_factor,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": " ".join(command),
        "host": {"cpus": os.cpu_count(), "cpu": _cpu_name(), "system": f"{platform.system()} {platform.machine()}"},
    }


def write_json(path: Path, value: object) -> None:
    """Write JSON that every parser reads: infinite and NaN numbers become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_run(path: Path, run: RunRecord) -> None:
    """Keep a run's raw times, so that a measure defined later can be computed from an old run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(asdict(run)), allow_nan=False) + "\n", encoding="utf-8")


def read_run(path: Path) -> RunRecord:
    """A run as write_run left it (an infinite read rate comes back as infinite)."""
    table = json.loads(path.read_text(encoding="utf-8"))
    table["records"] = tuple(
        StreamRecord(
            **{
                **record,
                "arrivals_s": tuple(record["arrivals_s"]),
                "read_rate_tok_s": math.inf if record["read_rate_tok_s"] is None else record["read_rate_tok_s"],
            }
        )
        for record in table["records"]
    )
    table["transitions"], table["samples"] = tuple(table["transitions"]), tuple(table["samples"])
    return RunRecord(**table)


def per_seed(scenario: Scenario, run: RunRecord) -> dict[str, Any]:
    """One run as a row: its measures, those of its groups and, if the scenario judges any, of its newcomers."""
    present = {record.group for record in run.records}
    newcomers = [name for name in scenario.newcomers if name in present]  # a short spell may bring none at all
    return {
        "seed": run.seed,
        **run.summary(),
        "makespan_s": span_s(run.records),
        "newcomers": run.group_summary(newcomers) if newcomers else None,
        "groups": {group.name: run.group_summary([group.name]) for group in scenario.groups if group.name in present},
        "copies": copies(run),
        "load_before": run.load_before,
        "load_after": run.load_after,
        "send_lateness_s": run.send_lateness_s,
        "errors": [f"{record.rid}: {record.error}" for record in run.records if record.failed],
    }


def copies(run: RunRecord) -> dict[str, float | None]:
    """What parking cost: None where the server does not tell, or nobody was parked."""
    found = run.counters or {}
    pages, on_host = found.get("parked_pages"), found.get("parked_pages_on_host")
    names = (
        *("copy_waits", "late_returns", "loads", "loads_given_up", "reprefilled_tokens", "stored_tokens"),
        "retractions",
    )
    return {
        "on_host_at_park": on_host / pages if pages and on_host is not None else None,
        **{name: found.get(name) for name in names},
    }


def _median(values: Sequence[float]) -> float:
    # statistics.median of (finite, inf) is inf and of (inf, inf) inf: a failure in half of the seeds shows.
    return statistics.median(values)


def finite(value: object) -> object:
    """The same with None for every infinite or undefined number, since JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
