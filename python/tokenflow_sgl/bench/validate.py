"""The simulator against a live server on this machine: step times from one run, everything else compared on another.

Owns the two live runs of each policy and the comparison. Invariant: nothing of the run that is compared goes into the
table of step times.

    python -m tokenflow_sgl.bench.validate --scenario demo-burst-x2-normal
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenflow_sgl.bench import results
from tokenflow_sgl.bench.demo import say_elapsed
from tokenflow_sgl.bench.models import ensure_model
from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.bench.run import RunFailed, measure, parse_seeds
from tokenflow_sgl.bench.servers import ServerFailed, start_server
from tokenflow_sgl.bench.simulate import record_of
from tokenflow_sgl.core.journal import replay
from tokenflow_sgl.core.policies import policy_from_header
from tokenflow_sgl.sim.calibrate import table_of
from tokenflow_sgl.sim.measured import Table
from tokenflow_sgl.sim.rivals import RIVALS
from tokenflow_sgl.sim.world import World, simulate
from tokenflow_sgl.workload.arrivals import plan_requests
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, ServerSettings, load_scenario

# What is compared: (title, where in a row, key).
COMPARED = (
    ("TTFT, median s", "", "ttft_p50_s"),
    ("newcomers' TTFT, median s", "newcomers", "ttft_p50_s"),
    ("newcomers' TTFT, P99 s", "newcomers", "ttft_p99_s"),
    ("raw throughput tok/s", "", "raw_throughput_tok_s"),
    ("makespan s", "", "makespan_s"),
    ("completion, mean s", "", "completion_mean_s"),
    ("stalls", "", "stall_count"),
    ("parks", "", "parks"),
)
POLICIES = {"tokenflow": "tokenflow", "fcfs": "sglang-fcfs"}  # by the server's name, the simulator's


@dataclass(frozen=True, slots=True)
class _Live:
    """Our launcher with a policy and a journal of its own for each turn."""

    policy: str
    scenario: Scenario
    settings: ServerSettings
    model: Path
    journal: Path

    @property
    def name(self) -> str:
        return self.policy

    @contextmanager
    def awake(self) -> Iterator[str]:
        flags = ("--tokenflow-policy", self.policy, "--tokenflow-journal", str(self.journal))
        log = self.journal.with_suffix(".log")
        with start_server("tokenflow", model=self.model, settings=self.settings, log=log, more=flags) as process:
            process.wait_ready()
            yield process.url


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was compared, 1 if a server failed or a journal does not replay, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="scripts/validate_sim", description=__doc__.split("\n")[0])
    parser.add_argument("--scenario", default="demo-burst-x2-normal", help="one with [server] (default %(default)s)")
    parser.add_argument("--seeds", default="31,32", help="seed of the step times, seed compared (default 31,32)")
    parser.add_argument("--out", type=Path, default=Path("out/validate"), help="folder (default out/validate)")
    args = parser.parse_args(argv)
    try:
        scenario = load_scenario(args.scenario)
        seeds = parse_seeds(args.seeds)
        if len(seeds) != 2:
            raise ValueError(f"seeds: {args.seeds!r}, valid: two different ones")
        first, second = seeds
        if scenario.server is None:
            raise ScenarioError(f"server: missing in {scenario.name}, valid: a scenario with a [server] table")
    except ValueError as error:
        parser.error(str(error))
    say = say_elapsed()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    try:
        for policy in POLICIES:
            found[policy] = _validate(policy, scenario, scenario.server, (first, second), out=args.out, say=say)
    except (ServerFailed, RunFailed, OSError, ValueError) as error:
        print(f"validate: {error}", file=sys.stderr)
        return 1
    command = ["python", "-m", "tokenflow_sgl.bench.validate", *(sys.argv[1:] if argv is None else argv)]
    facts = results.provenance(scenario, command=command, max_tokens_factor=1.0)
    results.write_json(args.out / f"{scenario.name}.json", {"provenance": facts, "compared": found})
    print(text(scenario.name, found))
    return 0 if all(one["replayed"] for one in found.values()) else 1


def _validate(
    policy: str, scenario: Scenario, settings: ServerSettings, seeds: tuple[int, int], *, out: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    model = Path("models") / settings.model
    ensure_model(settings.model, model)
    live: list[RunRecord] = []
    journals = [out / f"{scenario.name}-{policy}-seed{seed}.jsonl" for seed in seeds]
    for seed, journal in zip(seeds, journals, strict=True):
        say(f"{policy}, seed {seed}: a live run")
        journal.unlink(missing_ok=True)
        target = _Live(policy, scenario, settings, model, journal)
        live.append(measure(target, scenario, seed=seed, max_tokens_factor=1.0))
    steps, difference = replay(journals[1], policy_from_header)
    say(f"{policy}: {steps} steps replayed, {difference or 'all plans agree'}")
    table = table_of(journals[0], source=f"{scenario.name}, {policy}, seed {seeds[0]}, this machine")
    (out / f"{scenario.name}-{policy}.toml").write_text(table.to_toml(), encoding="utf-8")
    run = simulate_live(policy, scenario, settings, table, seed=seeds[1])
    rows = {"live": results.per_seed(scenario, live[1]), "simulated": results.per_seed(scenario, run)}
    return {"replayed": difference is None, "steps": steps, **rows}


def simulate_live(policy: str, scenario: Scenario, settings: ServerSettings, table: Table, *, seed: int) -> RunRecord:
    """The scenario with a live server's settings, on its measured step times."""
    world = World(
        pool_tokens=settings.kv_pool_tokens,
        page_tokens=settings.page_tokens,
        chunk_tokens=settings.chunked_prefill_tokens,
        max_running=4096,
        host_tokens=int(settings.kv_pool_tokens * settings.host_ratio),
        timing=table,
        store_bytes_s=table.store_tok_s * table.kv_bytes_per_token,
        load_bytes_s=table.load_tok_s * table.kv_bytes_per_token,
    )
    rival = RIVALS[POLICIES[policy]]
    requests = plan_requests(scenario, seed=seed)
    return record_of(policy, seed, simulate(world, rival.make(), world.settings(rival), requests))


def text(name: str, found: dict[str, Any]) -> str:
    """Live beside simulated, with the error of the latter."""
    lines = [f"{name}: {'':24}{'live':>12}{'simulated':>12}{'error':>9}"]
    for policy, one in found.items():
        lines.append(
            f"{policy}: journal of {one['steps']} steps replayed, {'same plans' if one['replayed'] else 'DIFFERENT'}"
        )
        for title, where, key in COMPARED:
            live, simulated = (
                (one[side][where] or {} if where else one[side]).get(key) for side in ("live", "simulated")
            )
            if live is None or simulated is None:
                continue
            error = f"{simulated / live - 1:+9.1%}" if live and math.isfinite(live) else ""
            lines.append(f"  {title:38}{live:>12.3f}{simulated:>12.3f}{error}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
