"""Every scenario, every policy, several seeds, on the simulator: one folder, a table and a plot for each scenario.

Owns which runs are made, and what of them is there already. Simulates nothing itself. Invariant: a result on disk is
used again only if scenario and simulator are, byte for byte, those that made it.

    python -m tokenflow_sgl.bench.paper --quick
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenflow_sgl
from tokenflow_sgl.bench import paper_plots, results
from tokenflow_sgl.bench.report import table
from tokenflow_sgl.bench.simulate import run_one, simulated
from tokenflow_sgl.sim.rivals import ABLATIONS, RIVALS, TWO_POOLS
from tokenflow_sgl.sim.world import world_of
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, load_scenario

STRONGEST = ("sglang-fcfs", "vllm-offload", "vlt", "tokenflow")
QUICK = ("guide-burst-4x", "paper-4090-a", "paper-4090-b", "paper-h200-a", "paper-h200-c", "mixed-classes")
HUGE = "multiturn-10k"
ABLATED = "paper-4090-b"  # where the paper has its own ablation
PARTS = ("core", "sim", "workload", "bench/simulate.py", "bench/results.py")


@dataclass(frozen=True, slots=True)
class Unit:
    """One run."""

    scenario: str
    policy: str
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every run was made, 1 if one failed; what is done stays and is not done again."""
    parser = _parser()
    args = parser.parse_args(argv)
    out: Path = args.out
    wanted = tuple(args.scenarios.split(",")) if args.scenarios else QUICK if args.quick else tuple(simulated())
    if args.workers < 1 or (args.seeds is not None and args.seeds < 1):
        parser.error(f"--workers {args.workers}, --seeds {args.seeds}: valid are 1 and more")
    try:
        for name in wanted:
            world_of(_scenario(name))
    except ScenarioError as error:
        parser.error(str(error))
    units = list(units_of(wanted, seeds=args.seeds or (2 if args.quick else 5)))
    key = source_key()
    todo = [unit for unit in units if _read(out, unit, key) is None]
    print(f"paper: {len(units)} runs, {len(units) - len(todo)} of them done, results in {out}", flush=True)
    failed = _run(todo, out=out, key=key, workers=args.workers)
    command = ["python", "-m", "tokenflow_sgl.bench.paper", *(sys.argv[1:] if argv is None else argv)]
    write(out, units, key=key, command=command)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/paper", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--scenarios", help="list of names (default: all that can be simulated)")
    parser.add_argument("--seeds", type=int, help=f"seeds of each (default 5, quick 2; {HUGE}: 1)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--out", type=Path, default=Path("out/paper"), help="folder (default out/paper)")
    return parser


def units_of(scenarios: Sequence[str], *, seeds: int) -> Iterator[Unit]:
    """All runs, those of one scenario together."""
    for name in scenarios:
        huge = name == HUGE
        policies = STRONGEST if huge else (*RIVALS, *(ABLATIONS if name == ABLATED else ()), *_two_pools(name))
        for seed in range(1, 2 if huge else seeds + 1):
            yield from (Unit(name, policy, seed) for policy in policies)


def _two_pools(name: str) -> tuple[str, ...]:
    turns = any(group.session is not None for group in _scenario(name).groups)
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


def _run(todo: Sequence[Unit], *, out: Path, key: str, workers: int) -> int:
    """How many failed. Each result is written as it comes: an abort loses what was under way and no more."""
    pool = ProcessPoolExecutor(max_workers=workers)
    try:
        return _collect(pool, todo, out=out, key=key)
    finally:
        pool.shutdown(cancel_futures=True)  # else an abort would wait for all that was asked for


def _collect(pool: ProcessPoolExecutor, todo: Sequence[Unit], *, out: Path, key: str) -> int:
    began_s, failed = time.monotonic(), 0
    if todo:
        under_way = {pool.submit(run_one, unit.scenario, unit.policy, unit.seed): unit for unit in todo}
        for number, done in enumerate(as_completed(under_way), start=1):
            unit = under_way[done]
            try:
                row, bounds = done.result()
            except Exception as error:
                failed += 1
                what = f"{unit.scenario}, {unit.policy}, seed {unit.seed}"
                print(f"paper: {what}: {type(error).__name__}: {error}", flush=True)
                continue
            results.write_json(_path(out, unit), {"key": _key(unit, key), "row": row, "bounds": bounds})
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


@functools.cache
def _scenario(name: str) -> Scenario:
    return load_scenario(name)


def _path(out: Path, unit: Unit) -> Path:
    return out / "runs" / _scenario(unit.scenario).name / f"{unit.policy}-seed{unit.seed}.json"


def _key(unit: Unit, key: str) -> str:
    return f"{_scenario(unit.scenario).sha256}/{key}"


def _read(out: Path, unit: Unit, key: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(_path(out, unit).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.get("key") == _key(unit, key) else None


# ---- tables and plots


def write(out: Path, units: Sequence[Unit], *, key: str, command: Sequence[str]) -> None:
    """Per scenario its JSON, table and plot; over all of them one table and one plot."""
    everything: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(unit.scenario for unit in units):
        scenario = _scenario(name)
        rows: dict[str, list[dict[str, Any]]] = {}
        bounds: list[dict[str, float]] = []
        for unit in (u for u in units if u.scenario == name):
            found = _read(out, unit, key)
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
    (out / "summary.md").write_text(summary(everything), encoding="utf-8")
    print(f"paper: {len(everything)} tables; {out / 'summary.md'}", flush=True)


def _with_infinities(row: dict[str, Any]) -> dict[str, Any]:
    """JSON wrote None where a failed request made a measure infinite."""
    infinite = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "completion_mean_s", "completion_p99_s")

    def mend(table: dict[str, Any]) -> dict[str, Any]:
        return {k: float("inf") if k in infinite and v is None else v for k, v in table.items()}

    new = row["newcomers"]
    return {**mend(row), "newcomers": None if new is None else mend(new)}


SUMMARY: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("P99 TTFT s", "ttft_p99_s", lambda v: f"{v:.2f}"),
    ("stall total s", "stall_total_s", lambda v: f"{v:.0f}"),
    ("effective throughput tok/s", "effective_throughput_tok_s", lambda v: f"{v:.0f}"),
    ("effective goodput tok/s", "effective_goodput_tok_s", lambda v: f"{v:.0f}"),
    ("raw throughput tok/s", "raw_throughput_tok_s", lambda v: f"{v:.0f}"),
    ("QoE", "qoe_mean", lambda v: f"{v:.3f}"),
    ("mean completion s", "completion_mean_s", lambda v: f"{v:.1f}"),
)


def summary(everything: dict[str, dict[str, Any]]) -> str:
    """Markdown: one table a scenario, medians over seeds, the best of each column in bold."""
    lines = ["# Scenarios x policies, simulated", ""]
    for name, found in everything.items():
        bounds = found["bounds"]
        lines += [
            f"## {_scenario(name).name}", "", _scenario(name).about + f"; seeds {found['seeds']}. Bounds: P99 TTFT >= "
            f"{bounds['ttft_p99_s']:.2f} s, effective goodput <= {bounds['effective_goodput_tok_s']:.0f} tok/s.", "",
            "| policy | runs | failed requests | " + " | ".join(title for title, _, _ in SUMMARY) + " | parks |",
            "|---" * (len(SUMMARY) + 4) + "|",
        ]  # fmt: skip
        best = {key: _best(found, key) for _, key, _ in SUMMARY}
        for policy, asked in found["asked"].items():
            row = found["results"].get(policy)
            if row is None:
                lines.append(f"| {policy} | 0 of {asked} |" + " - |" * (len(SUMMARY) + 2))
                continue
            runs = len(row["per_seed"])
            cells = []
            for _, key, form in SUMMARY:
                value = row[key]
                text = "-" if value is None else form(value)
                cells.append(f"**{text}**" if value is not None and text == best[key] else text)
            runs_text = f"{runs}" if runs == asked else f"{runs} of {asked}"
            lines.append(
                f"| {policy} | {runs_text} | {row['failed']} | " + " | ".join(cells) + f" | {row['parks']:g} |"
            )
        lines.append("")
    return "\n".join(lines)


def _best(found: dict[str, Any], key: str) -> str:
    form = next(form for _, name, form in SUMMARY if name == key)
    values = [row[key] for row in found["results"].values() if row[key] is not None]
    if not values:
        return ""
    least = key in ("ttft_p99_s", "stall_total_s", "completion_mean_s")
    return form(min(values) if least else max(values))


if __name__ == "__main__":
    sys.exit(main())
