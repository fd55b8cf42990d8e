"""Every scenario, every policy, several seeds, on the simulator: one folder, a table and a plot for each scenario.

Owns which runs are made, and what of them is there already. Simulates nothing itself. Invariant: a result on disk is
used again only if scenario and simulator are, byte for byte, those that made it.

    python -m tokenflow_sgl.bench.paper --quick
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenflow_sgl
from tokenflow_sgl.bench import paper_plots, results
from tokenflow_sgl.bench.outputs import check_folder
from tokenflow_sgl.bench.paper_summary import summary
from tokenflow_sgl.bench.report import table
from tokenflow_sgl.bench.simulate import run_one, simulated
from tokenflow_sgl.sim.rivals import ABLATIONS, RIVALS, TWO_POOLS
from tokenflow_sgl.sim.world import World, world_of
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, load_scenario

STRONGEST = ("sglang-fcfs", "vllm-offload", "vlt", "tokenflow")
QUICK = ("guide-burst-4x", "paper-4090-a", "paper-4090-b", "paper-h200-a", "paper-h200-c", "mixed-classes")
HUGE = "multiturn-10k"
ABLATED = "paper-4090-b"  # where the paper has its own ablation
BOUNDS = ("ttft_p99_s", "effective_goodput_tok_s")
PARTS = ("core", "sim", "workload", "bench/simulate.py", "bench/results.py")


@dataclass(frozen=True, slots=True)
class Paper:
    """What does not change from run to run: scenarios and their worlds by name, as they were when the work began, so
    that no result of a file edited meanwhile is filed under the key of the file before."""

    out: Path
    scenarios: Mapping[str, Scenario]
    worlds: Mapping[str, World]
    key: str


@dataclass(frozen=True, slots=True)
class Unit:
    """One run."""

    scenario: str
    policy: str
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every run was made, 1 if one failed, 130 when interrupted; what is done stays and is not done again."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("paper: interrupted; run again to go on", file=sys.stderr)
        return 130


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    command = ["python", "-m", "tokenflow_sgl.bench.paper", *(sys.argv[1:] if argv is None else argv)]
    for name, value, most in (("workers", args.workers, 256), ("seeds", args.seeds, 1000)):
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name} {value}: valid are 1 to {most}")
    try:
        scenarios = scenarios_of(args.scenarios.split(",") if args.scenarios else QUICK if args.quick else simulated())
        worlds = {name: world_of(scenario) for name, scenario in scenarios.items()}
        check_folder(args.out, field="out")
    except ValueError as error:
        parser.error(str(error))
    units = list(units_of(scenarios.values(), seeds=args.seeds or (2 if args.quick else 5)))
    paper = Paper(args.out, scenarios, worlds, source_key())
    return _make(paper, units, workers=args.workers, command=command)


def _make(paper: Paper, units: Sequence[Unit], *, workers: int, command: Sequence[str]) -> int:
    todo = [unit for unit in units if _read(paper, unit) is None]
    print(f"paper: {len(units)} runs, {len(units) - len(todo)} of them done, results in {paper.out}", flush=True)
    try:
        failed = _run(paper, todo, workers=workers)
    except KeyboardInterrupt:
        print("paper: interrupted, tables of what is done:", flush=True)
        write(paper, units, command=command)
        raise
    write(paper, units, command=command)
    return 1 if failed else 0


def scenarios_of(wanted: Iterable[str]) -> dict[str, Scenario]:
    """By their own names, under which results are filed; each once. Raises ScenarioError for two of one name."""
    found: dict[str, Scenario] = {}
    for typed in wanted:
        scenario = load_scenario(typed)
        if found.setdefault(scenario.name, scenario).sha256 != scenario.sha256:
            raise ScenarioError(f"name: {scenario.name!r} in {typed} and in another file, valid: names that differ")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/paper", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--scenarios", help="list of names (default: all that can be simulated)")
    parser.add_argument("--seeds", type=int, help=f"seeds of each (default 5, quick 2; {HUGE}: 1)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("out/paper"), help="folder (default out/paper)")
    return parser


def units_of(scenarios: Iterable[Scenario], *, seeds: int) -> Iterator[Unit]:
    """All runs, those of one scenario together."""
    for scenario in scenarios:
        name, huge = scenario.name, scenario.name == HUGE
        policies = STRONGEST if huge else (*RIVALS, *(ABLATIONS if name == ABLATED else ()), *_two_pools(scenario))
        for seed in range(1, 2 if huge else seeds + 1):
            yield from (Unit(name, policy, seed) for policy in policies)


def _two_pools(scenario: Scenario) -> tuple[str, ...]:
    turns = any(group.session is not None for group in scenario.groups)
    return () if turns else (TWO_POOLS,)


def source_key() -> str:
    """Digest of all that a result depends on but its scenario."""
    digest = hashlib.sha256()
    root = Path(tokenflow_sgl.__file__).parent
    found = [path for part in PARTS for path in ((root / part).rglob("*") if "." not in part else [root / part])]
    for path in sorted(path for path in found if path.suffix in (".py", ".toml")):
        if path.parent.name != "scenarios":
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---- runs


def _run(paper: Paper, todo: Sequence[Unit], *, workers: int) -> int:
    """How many failed. Each result is written as it comes: an abort loses what was under way and no more."""
    pool = ProcessPoolExecutor(max_workers=workers, initializer=_leave_interrupts_to_the_parent)
    try:
        return _collect(pool, paper, todo)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():  # else one would wait for the end of runs under way
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)  # else an abort would wait for all that was asked for


def _leave_interrupts_to_the_parent() -> None:
    """A terminal interrupts all of its processes, and each worker would print a traceback of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collect(pool: ProcessPoolExecutor, paper: Paper, todo: Sequence[Unit]) -> int:
    began_s, failed = time.monotonic(), 0
    if todo:
        under_way = {_submit(pool, paper, unit): unit for unit in todo}
        for number, done in enumerate(as_completed(under_way), start=1):
            unit = under_way[done]
            try:
                row, bounds = done.result()
            except Exception as error:
                failed += 1
                what = f"{unit.scenario}, {unit.policy}, seed {unit.seed}"
                print(f"paper: {what}: {type(error).__name__}: {error}", flush=True)
                continue
            results.write_json(_path(paper, unit), {"key": _key(paper, unit), "row": row, "bounds": bounds})
            took_s = time.monotonic() - began_s
            left_s = took_s / number * (len(todo) - number)
            print(
                f"[{number}/{len(todo)}, {took_s:.0f} s, about {left_s:.0f} s left] {unit.scenario}, {unit.policy}, "
                f"seed {unit.seed}: P99 TTFT {_number(row['ttft_p99_s'])} s, stalls {row['stall_count']}",
                flush=True,
            )
    return failed


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _submit(pool: ProcessPoolExecutor, paper: Paper, unit: Unit) -> Future[tuple[dict[str, Any], dict[str, float]]]:
    scenario, world = paper.scenarios[unit.scenario], paper.worlds[unit.scenario]
    return pool.submit(run_one, scenario, unit.policy, unit.seed, world=world)


def _path(paper: Paper, unit: Unit) -> Path:
    return paper.out / "runs" / unit.scenario / f"{unit.policy}-seed{unit.seed}.json"


def _key(paper: Paper, unit: Unit) -> str:
    return f"{paper.scenarios[unit.scenario].sha256}/{paper.key}"


def _read(paper: Paper, unit: Unit) -> dict[str, Any] | None:
    try:
        found = json.loads(_path(paper, unit).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if _is_result(found) and found["key"] == _key(paper, unit) else None


def _is_result(found: object) -> bool:
    """Whether it has all that tables need: half a file would end the paper after hours of work."""
    if not isinstance(found, dict) or "key" not in found:
        return False
    row, bounds = found.get("row"), found.get("bounds")
    if not isinstance(row, dict) or not isinstance(bounds, dict):
        return False
    needed = {*results.MEASURES, "seed", "newcomers", "groups", "copies"}
    return needed <= set(row) and all(isinstance(bounds.get(key), int | float) for key in BOUNDS)


# ---- tables and plots


def write(paper: Paper, units: Sequence[Unit], *, command: Sequence[str]) -> None:
    """Per scenario its JSON, table and plot; over all of them one table and one plot."""
    out, everything = paper.out, {}  # type: tuple[Path, dict[str, dict[str, Any]]]
    for name, scenario in paper.scenarios.items():
        rows: dict[str, list[dict[str, Any]]] = {}
        bounds: list[dict[str, float]] = []
        for unit in (u for u in units if u.scenario == name):
            found = _read(paper, unit)
            if found is not None:
                rows.setdefault(unit.policy, []).append(_with_infinities(found["row"]))
                bounds.append(found["bounds"])
        if not rows:
            continue
        facts = results.provenance(scenario, command=command, max_tokens_factor=1.0)
        table_of = results.rows_json(scenario, rows, facts)
        table_of["asked"] = {
            u.policy: sum(v.scenario == name and v.policy == u.policy for v in units)
            for u in units
            if u.scenario == name
        }
        table_of["bounds"] = {
            "ttft_p99_s": min(b["ttft_p99_s"] for b in bounds),
            "effective_goodput_tok_s": max(b["effective_goodput_tok_s"] for b in bounds),
        }
        results.write_json(out / f"{scenario.name}.json", table_of)
        (out / f"{scenario.name}.txt").write_text(table(table_of) + "\n", encoding="utf-8")
        paper_plots.bars(table_of, out / f"{scenario.name}.png")
        everything[name] = table_of
    (out / "summary.md").write_text(summary(everything, paper.scenarios), encoding="utf-8")
    print(f"paper: {len(everything)} tables; {out / 'summary.md'}", flush=True)


def _with_infinities(row: dict[str, Any]) -> dict[str, Any]:
    """JSON wrote None where a failed request made a measure infinite."""
    infinite = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "completion_mean_s", "completion_p99_s")

    def mend(table: dict[str, Any]) -> dict[str, Any]:
        return {k: float("inf") if k in infinite and v is None else v for k, v in table.items()}

    new = row["newcomers"]
    return {**mend(row), "newcomers": None if new is None else mend(new)}


if __name__ == "__main__":
    sys.exit(main())
