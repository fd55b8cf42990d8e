"""The demo: the same burst on stock SGLang, on stock tuned to admit eagerly, and on TokenFlow, one after the other.

Owns the plan of the whole run and its progress lines. Measures nothing itself. Invariant: one server lives at a time,
and it is stopped when its turn ends, however it ends.

    python -m tokenflow_sgl.bench.demo
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenflow_sgl.bench import report, results, timeline
from tokenflow_sgl.bench.models import ensure_model
from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.bench.run import RunFailed, parse_seeds, run_all
from tokenflow_sgl.bench.servers import KINDS, ServerFailed, start_server
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, live_scenarios, live_settings, load_scenario

PROGRESS_S = 15.0


class FreshServer:
    """A server started for each of its turns and stopped after it.

    Two processes of one command differ by several percent for as long as they live (where their memory happens to lie):
    kept for the whole demo, one lucky start would look like a faster server in every seed.
    """

    def __init__(self, kind: str, *, model: Path, scenario: Scenario, logs: Path, say: Callable[[str], None]) -> None:
        self.name = kind
        self._model = model
        self._settings = live_settings(scenario)
        self._logs = logs
        self._say = say
        self._turns = 0

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Its URL, once it answers; stopped when the context ends. Raises ServerFailed."""
        self._turns += 1
        log = self._logs / f"{self.name}-turn{self._turns}.log"
        with start_server(self.name, model=self._model, settings=self._settings, log=log) as process:
            process.wait_ready(tick=_progress(self._say, self.name))
            yield process.url


def say_elapsed() -> Callable[[str], None]:
    """A printer that puts the minutes since now in front of each line."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)

    return say


def write_report(
    scenario: Scenario, runs: Sequence[RunRecord], *, facts: Mapping[str, Any], out: Path
) -> tuple[Path, Path]:
    """Print table and thresholds of one factor; write and return the paths of its JSON and PNG.

    facts: results.provenance, taken before the first run: the tree may change meanwhile.
    """
    factor = facts["max_tokens_factor"]
    table = results.results_json(scenario, runs, facts)
    json_path, png_path = out / f"{scenario.name}-x{factor:g}.json", out / f"{scenario.name}-x{factor:g}.png"
    print(f"\n{report.table(table)}\n")
    verdicts = report.check_thresholds(table)
    for verdict in verdicts:
        print(verdict)
    if factor != 1 and verdicts:
        print("(thresholds are judged at max_tokens x1; here they are shown for comparison)")
    results.write_json(json_path, table)
    timeline.draw([run for run in runs if run.seed == runs[0].seed], scenario, png_path)
    return json_path, png_path


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 after a complete measurement, thresholds missed or not; 1 if a server failed; 2: wrong argument."""
    parser = _parser()
    args = parser.parse_args(argv)
    # Ended by a signal without this, it would leave a server behind that holds its port and memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        scenario, seeds = load_scenario(args.scenario), parse_seeds(args.seeds)
        kinds, factors = _kinds(args.servers), _factors(args.max_tokens_factor)
        model_name = live_settings(scenario).model
    except (ScenarioError, ValueError) as error:
        parser.error(str(error))
    say = say_elapsed()
    command = ["python", "-m", "tokenflow_sgl.bench.demo", *(sys.argv[1:] if argv is None else argv)]
    facts = {f: results.provenance(scenario, command=command, max_tokens_factor=f) for f in factors}
    model: Path = args.model or Path("models") / model_name
    try:
        ensure_model(model_name, model)
        say("servers: " + "; ".join(f"{kind}: {KINDS[kind]}" for kind in kinds))
        servers = [
            FreshServer(kind, model=model, scenario=scenario, logs=args.out / "logs" / scenario.name, say=say)
            for kind in kinds
        ]
        raw_dir = args.out / "raw" / scenario.name
        runs = {
            factor: run_all(scenario, servers, seeds=seeds, max_tokens_factor=factor, raw_dir=raw_dir, say=say)
            for factor in factors
        }
    except (ServerFailed, RunFailed, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    paths = [
        path for factor in factors for path in write_report(scenario, runs[factor], facts=facts[factor], out=args.out)
    ]
    say("done; results: " + ", ".join(str(path) for path in paths))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tokenflow_sgl.bench.demo", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--scenario", default="demo-burst", help=f"{', '.join(live_scenarios())}, or a .toml file (default demo-burst)"
    )
    parser.add_argument("--seeds", default="1,2,3", help="how many, or a list (default 1,2,3)")
    parser.add_argument(
        "--servers",
        default="stock,stock-eager,tokenflow",
        help=f"list of {', '.join(KINDS)} (default stock,stock-eager,tokenflow)",
    )
    parser.add_argument("--max-tokens-factor", default="1", help="list of limit / answer length: 1,2,4 (default 1)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for results (default out/demo)")
    parser.add_argument("--model", type=Path, help="folder of the model (default models/<the scenario's model>)")
    return parser


def _kinds(text: str) -> list[str]:
    kinds = [part.strip() for part in text.split(",") if part.strip()]
    if not kinds or len(set(kinds)) != len(kinds) or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"servers: {text!r}, valid: a list of different ones of {', '.join(KINDS)}")
    return kinds


def _factors(text: str) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        factors = []
    if not factors or not all(1 <= factor < float("inf") for factor in factors) or len(set(factors)) != len(factors):
        raise ValueError(f"max-tokens-factor: {text!r}, valid: a list of different numbers >= 1")
    return factors


def _progress(say: Callable[[str], None], kind: str) -> Callable[[float], None]:
    due_s = PROGRESS_S

    def tick(waited_s: float) -> None:
        nonlocal due_s
        if waited_s >= due_s:
            say(f"  {kind} is loading, {waited_s:.0f} s")
            due_s += PROGRESS_S

    return tick


if __name__ == "__main__":
    sys.exit(main())
