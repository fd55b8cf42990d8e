"""`tokenflow sim`: scenarios on the simulator, one rival after the other, in the table and JSON that the bench prints.

Owns the command. Simulates nothing itself. Invariant: the same command gives the same bytes, but for the provenance.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenflow_sgl.bench.outputs import check_file
from tokenflow_sgl.bench.report import table
from tokenflow_sgl.bench.results import RunRecord, finite, per_seed, provenance, rows_json
from tokenflow_sgl.bench.run import parse_seeds
from tokenflow_sgl.sim.limits import bounds_of
from tokenflow_sgl.sim.rivals import ABLATIONS, RIVALS, TWO_POOLS, rivals_named
from tokenflow_sgl.sim.run import Progress, Run, SimulationStuck
from tokenflow_sgl.sim.two_pools import simulate_two_pools
from tokenflow_sgl.sim.world import World, simulate, world_of
from tokenflow_sgl.workload.arrivals import plan_requests
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, list_scenarios, load_scenario

DEFAULT = "sglang-fcfs,tokenflow"
_MOST_FACTOR = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 if a simulation got stuck, 2 for bad input, 130 when interrupted."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.list:
        for name in simulated():
            print(f"{name:24}{load_scenario(name).about}")
        return 0
    if args.scenario is None:
        parser.error("SCENARIO: missing, valid: a name of --list or a .toml file")
    command = ["tokenflow", "sim", *(sys.argv[1:] if argv is None else argv)]
    try:
        return _simulate(args, command)
    except KeyboardInterrupt:
        print("tokenflow sim: interrupted", file=sys.stderr)
        return 130


def _simulate(args: argparse.Namespace, command: Sequence[str]) -> int:
    try:
        scenario, names, seeds, path = _asked(args)
    except ValueError as error:
        print(f"tokenflow sim: {error}", file=sys.stderr)
        return 2
    try:
        results = compare(
            scenario, names, seeds, command=command, quiet=args.quiet, max_tokens_factor=args.max_tokens_factor
        )
    except (ScenarioError, SimulationStuck) as error:
        print(f"tokenflow sim: {error}", file=sys.stderr)
        return 2 if isinstance(error, ScenarioError) else 1
    text = json.dumps(finite(results), indent=1, allow_nan=False)
    if args.json == "-":
        print(text)
        return 0
    print(table(results))
    print(_bounds_line(results))
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 0


def _asked(args: argparse.Namespace) -> tuple[Scenario, list[str], tuple[int, ...], Path | None]:
    """Scenario, policies, seeds and where the JSON goes. Raises ValueError for what is not valid."""
    seeds = parse_seeds(args.seeds)
    if not 1 <= args.max_tokens_factor <= _MOST_FACTOR:
        raise ValueError(f"max-tokens-factor: {args.max_tokens_factor:g}, valid: a number >= 1, up to {_MOST_FACTOR:g}")
    scenario = load_scenario(args.scenario)
    names = policies_named(args.policy, scenario)
    world_of(scenario)
    return scenario, names, seeds, None if args.json in (None, "-") else check_file(args.json, field="json")


def policies_named(text: str, scenario: Scenario) -> list[str]:
    """What --policy says, in its order; all: what can be simulated of `scenario`. Raises ValueError.

    A name given twice is refused: its runs would count twice in its own medians and totals.
    """
    turns = any(group.session is not None for group in scenario.groups)
    if text == "all":
        return [*RIVALS, *([] if turns else [TWO_POOLS])]
    names = [name.strip() for name in text.split(",")]
    known = (*RIVALS, *ABLATIONS, TWO_POOLS)
    for name in names:
        if name not in known:
            raise ValueError(f"policy: {name!r}, valid: {', '.join(known)}, or all")
        if names.count(name) > 1:
            raise ValueError(f"policy: {name!r} twice in {text!r}, valid: each name once")
    if turns and TWO_POOLS in names:
        raise ValueError(f"policy: {TWO_POOLS!r} does not follow turns, valid for {scenario.name}: the others")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenflow sim", description="A scenario on the simulator, policy by policy.")
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a name of --list, or a .toml file")
    parser.add_argument("--list", action="store_true", help="name the scenarios that can be simulated")
    valid = ", ".join([*RIVALS, TWO_POOLS, *ABLATIONS])
    parser.add_argument("--policy", default=DEFAULT, help=f"list of {valid}; or all (default {DEFAULT})")
    parser.add_argument("--seeds", default="3", help="how many, or a list such as 11,12 (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - prints them instead of the table")
    parser.add_argument(
        "--max-tokens-factor", type=float, default=1.0, metavar="X", help="limit / answer length (default 1)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def simulated() -> list[str]:
    """Names of the scenarios that have a [gpu] table."""
    return [name for name in list_scenarios() if load_scenario(name).gpu is not None]


def compare(
    scenario: Scenario,
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    command: Sequence[str],
    quiet: bool = False,
    max_tokens_factor: float = 1.0,
) -> dict[str, Any]:
    """The JSON of design 1.5."""
    world = world_of(scenario)  # once: a file of it that is edited meanwhile must not reach half of the runs
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    bounds: list[dict[str, float]] = []
    for seed in seeds:
        for name in names:
            bar = None if quiet else _Bar(f"{name}, seed {seed}")
            try:
                row, bound = run_one(
                    scenario, name, seed, world=world, progress=bar, max_tokens_factor=max_tokens_factor
                )
            except SimulationStuck as error:
                raise SimulationStuck(f"{scenario.name}, {name}, seed {seed}: stuck {error}") from error
            rows[name].append(row)
            bounds.append(bound)
    results = rows_json(scenario, rows, provenance(scenario, command=command, max_tokens_factor=max_tokens_factor))
    # The loosest of the seeds: what no server can beat in any of them.
    results["bounds"] = {
        "ttft_p99_s": min(b["ttft_p99_s"] for b in bounds),
        "effective_goodput_tok_s": max(b["effective_goodput_tok_s"] for b in bounds),
    }
    return results


def run_one(
    scenario: Scenario,
    name: str,
    seed: int,
    *,
    world: World,
    progress: Progress | None = None,
    max_tokens_factor: float = 1.0,
) -> tuple[dict[str, Any], dict[str, float]]:
    """One run as a row of the results, and the bounds of its requests. world: that of the scenario.

    Raises ScenarioError where no request arrives: nothing could be measured.
    """
    requests = plan_requests(scenario, seed=seed, max_tokens_factor=max_tokens_factor)
    if not requests:
        valid = "groups of which at least one request arrives with every seed"
        raise ScenarioError(f"group: no request arrives in {scenario.name} with seed {seed}, valid: {valid}")
    if name == TWO_POOLS:
        twins = plan_requests(scenario, seed=seed + 1_000_000, max_tokens_factor=max_tokens_factor)
        settings = world.settings(RIVALS["sglang-fcfs"])
        run = simulate_two_pools(
            requests, twins, settings=settings, timing=world.timing, store_bytes_s=world.store_bytes_s,
            load_bytes_s=world.load_bytes_s, progress=progress,
        )  # fmt: skip
    else:
        rival = rivals_named([name])[name]
        run = simulate(
            world, rival.make(), world.settings(rival), requests, progress=progress, priorities=rival.priorities
        )
    # Two pools have no follow-ups, and their prompts are sent on to the second one later.
    sent_s = {r.rid: r.sent_s for r in requests} if name == TWO_POOLS else run.sent_s
    record = record_of(name, seed, run, max_tokens_factor=max_tokens_factor)
    return per_seed(scenario, record), bounds_of(requests, world, sent_s=sent_s)


def record_of(name: str, seed: int, run: Run, *, max_tokens_factor: float = 1.0) -> RunRecord:
    """A simulated run in the form of a measured one."""
    c = run.counters
    counters = {
        "parked_pages": c.parked_tokens,
        "parked_pages_on_host": c.parked_on_host_tokens,
        "reprefilled_tokens": c.recomputed_tokens,
        "loads": c.loads,
        "retractions": c.retractions,
    }
    return RunRecord(
        name, seed, max_tokens_factor, tuple(run.records), 0.0, 0.0, 0.0, parks=c.parks, resumes=c.returns,
        counters=counters,
    )  # fmt: skip


def _bounds_line(results: dict[str, Any]) -> str:
    bounds = results["bounds"]
    return (
        f"bounds: no server's P99 TTFT over all requests can be below {bounds['ttft_p99_s']:.3f} s, nor its effective "
        f"goodput above {bounds['effective_goodput_tok_s']:.0f} tok/s"
    )


class _Bar:
    """Progress on standard error: a bar twice a second on a terminal, a line every 10 s elsewhere."""

    def __init__(self, what: str) -> None:
        self._what, self._began_s = what, time.monotonic()
        self._every_s = 0.5 if sys.stderr.isatty() else 10.0
        self._next_s = self._began_s + self._every_s

    def __call__(self, done: int, total: int, at_s: float) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s and done < total:
            return
        self._next_s = now_s + self._every_s
        filled = 30 * done // max(1, total)
        text = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {self._what}, {at_s:.0f} s simulated"
        start, end = ("\r", "" if done < total else "\n") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}{text}, took {now_s - self._began_s:.0f} s", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
