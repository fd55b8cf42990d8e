"""A scenario against live servers, seed by seed.

Owns the order of runs, the warm-up and the reading of a server's own state meanwhile. Starts no server (servers.py) and
computes no measure (core/qoe.py). Invariant: every server gets the same arrivals, warm-up and empty cache, and which
server goes first turns with the seeds.

    python -m tokenflow_sgl.bench.run demo-burst --server stock=http://127.0.0.1:30000 --seeds 3 --json out/burst.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from tokenflow_sgl.bench import report, results, timeline
from tokenflow_sgl.bench.client import client_session, http_transport, run_plan, send_lateness_s
from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.bench.watch import StateWatch, WatchFailed
from tokenflow_sgl.workload.arrivals import PROMPT_ID_HIGH, PROMPT_ID_LOW, Request, Segment, plan_requests
from tokenflow_sgl.workload.scenario import Scenario, ScenarioError, live_scenarios, live_settings, load_scenario

STREAM_TIMEOUT_S = 600.0
FLUSH_TIMEOUT_S = 60.0
MOST_SEEDS = 1_000_000
# Sizes that make the engine allocate what the run will need: one alone, then a few at once, short to long.
WARM_UP = ((1, 32, 8), (4, 128, 16), (12, 300, 24))


class Target(Protocol):
    """A server to measure. It is entered for each of its turns, and gives the URL it answers at."""

    @property
    def name(self) -> str: ...
    def awake(self) -> AbstractContextManager[str]: ...


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server that somebody else runs; it is left alone between its turns."""

    name: str
    url: str

    def awake(self) -> AbstractContextManager[str]:
        """Its URL; nothing to do."""
        return nullcontext(self.url)


class RunFailed(RuntimeError):
    """A server cannot be measured; the message names the server and what it answered."""


def turns(targets: Sequence[Target], seeds: Sequence[int]) -> Iterator[tuple[int, Target]]:
    """(seed, server) pairs: seed by seed, the order of servers turned by one each time.

    Whoever always runs last would always meet the warmer or the busier machine.
    """
    for index, seed in enumerate(seeds):
        for place in range(len(targets)):
            yield seed, targets[(place + index) % len(targets)]


def measure(target: Target, scenario: Scenario, *, seed: int, max_tokens_factor: float) -> RunRecord:
    """Warm the server up, empty its cache, play the scenario once. Raises RunFailed if the server cannot be used."""
    requests = plan_requests(scenario, seed=seed, max_tokens_factor=max_tokens_factor)
    with target.awake() as url:
        try:
            return asyncio.run(_measure(target.name, url, requests, seed=seed, max_tokens_factor=max_tokens_factor))
        except (aiohttp.ClientError, OSError, WatchFailed) as error:
            raise RunFailed(f"server {target.name} at {url}: {type(error).__name__}: {error}") from error


async def _measure(
    name: str, url: str, requests: Sequence[Request], *, seed: int, max_tokens_factor: float
) -> RunRecord:
    async with client_session(timeout_s=STREAM_TIMEOUT_S) as session:
        transport = http_transport(session, url)
        watch = await StateWatch.probe(session, url)
        for plan in warm_up_plans():
            records = await run_plan(plan, transport, with_read_rate=watch is not None)
            if failed := [record.error for record in records if record.failed]:
                raise RunFailed(f"server {name}: warm-up failed: {failed[0]}")
        await _flush(session, name, url)
        load_before = os.getloadavg()[0]
        origin_s = time.perf_counter()
        polling = asyncio.create_task(watch.follow(origin_s)) if watch else None
        records = await run_plan(requests, transport, with_read_rate=watch is not None)
        if polling and watch:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await watch.poll(origin_s)
    return RunRecord(
        server=name,
        seed=seed,
        max_tokens_factor=max_tokens_factor,
        records=records,
        load_before=load_before,
        load_after=os.getloadavg()[0],
        send_lateness_s=send_lateness_s(requests, records),
        parks=watch.counted("parks") if watch else None,
        resumes=watch.counted("returns") if watch else None,
        counters=watch.growth() if watch else None,
        transitions=watch.transitions() if watch else (),
        samples=tuple(watch.samples) if watch else (),
    )


def warm_up_plans() -> Iterator[tuple[Request, ...]]:
    """The same few requests for every server: (how many at once, prompt tokens, answer tokens) as WARM_UP says."""
    rnd = random.Random("warm-up")
    for number, (count, prompt, answer) in enumerate(WARM_UP):
        rids = [f"warm-{number}-{index:03d}" for index in range(count)]
        ids = [tuple(rnd.randrange(PROMPT_ID_LOW, PROMPT_ID_HIGH) for _ in range(prompt)) for _ in rids]
        yield tuple(
            Request(
                rid=rid,
                group="warm-up",
                sent_s=0.0,
                segments=(Segment.of(f"in:{rid}", tokens),),
                answer_tokens=answer,
                max_tokens=answer,
                read_rate_tok_s=1000.0,
            )
            for rid, tokens in zip(rids, ids, strict=True)
        )


async def _flush(session: aiohttp.ClientSession, name: str, url: str) -> None:
    async with session.post(f"{url}/flush_cache", params={"timeout": FLUSH_TIMEOUT_S}) as response:
        if response.status != 200:
            text = await response.text()
            raise RunFailed(f"server {name}: /flush_cache: HTTP {response.status}: {text[:200]}")


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "3" is seeds 1, 2, 3; "1,2,7" (or "7,") is exactly those. Raises ValueError."""
    try:
        seeds = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        seeds = ()
    how_many = seeds[0] if seeds and "," not in text else 1
    if not seeds or len(set(seeds)) != len(seeds) or not 1 <= how_many <= MOST_SEEDS or max(map(abs, seeds)) > 10**12:
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        valid = f"how many (3 = seeds 1,2,3), up to {MOST_SEEDS}, or a list of different ones (1,2,7), up to 10^12 each"
        raise ValueError(f"seeds: {shown!r}, valid: {valid}")
    return seeds if "," in text else tuple(range(1, seeds[0] + 1))


def raw_path(folder: Path, run: RunRecord) -> Path:
    """Where a run's raw times are kept; one folder a scenario."""
    return folder / f"{run.server}-seed{run.seed}-x{run.max_tokens_factor:g}.json"


def run_all(
    scenario: Scenario,
    targets: Sequence[Target],
    *,
    seeds: Sequence[int],
    max_tokens_factor: float,
    raw_dir: Path | None,
    say: Callable[[str], None],
) -> list[RunRecord]:
    """All runs of one factor in turned order; raw times are written as each run ends, so an abort loses one run."""
    plan = list(turns(targets, seeds))
    runs: list[RunRecord] = []
    for number, (seed, target) in enumerate(plan, start=1):
        after = f"{plan[number][1].name} seed {plan[number][0]}" if number < len(plan) else "the results"
        say(f"run {number}/{len(plan)}: {target.name}, seed {seed}, max_tokens x{max_tokens_factor:g}; then {after}")
        run = measure(target, scenario, seed=seed, max_tokens_factor=max_tokens_factor)
        runs.append(run)
        if raw_dir:
            results.write_run(raw_path(raw_dir, run), run)
        say("  " + report.one_line(run, scenario))
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 after a complete measurement, 1 if a server failed, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m tokenflow_sgl.bench.run", description="Measure live servers.")
    parser.add_argument("scenario", help=f"{', '.join(live_scenarios())}, or a .toml file")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL", help="repeat for more servers")
    parser.add_argument("--seeds", default="3", help="how many, or a list: 1,2,7 (default 3)")
    parser.add_argument("--max-tokens-factor", type=float, default=1.0, help="limit / answer length (default 1)")
    parser.add_argument("--json", type=Path, help="write the results here, raw times in a folder beside it")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a timeline of the first seed here")
    args = parser.parse_args(argv)
    try:
        scenario, seeds, targets = load_scenario(args.scenario), parse_seeds(args.seeds), parse_servers(args.server)
        live_settings(scenario)
    except (ScenarioError, ValueError) as error:
        parser.error(str(error))
    command = ["python", "-m", "tokenflow_sgl.bench.run", *(sys.argv[1:] if argv is None else argv)]
    facts = results.provenance(scenario, command=command, max_tokens_factor=args.max_tokens_factor)
    raw_dir = args.json.with_suffix(".raw") if args.json else None
    try:
        runs = run_all(
            scenario, targets, seeds=seeds, max_tokens_factor=args.max_tokens_factor, raw_dir=raw_dir, say=print
        )
    except RunFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    table = results.results_json(scenario, runs, facts)
    print(report.table(table))
    if args.json:
        results.write_json(args.json, table)
    if args.plot:
        print(timeline.draw([run for run in runs if run.seed == seeds[0]], scenario, args.plot / "timeline.png"))
    return 0


def parse_servers(texts: Iterable[str]) -> list[RemoteServer]:
    """NAME=URL pairs. Raises ValueError."""
    servers = []
    for text in texts:
        name, found, url = text.partition("=")
        if not (name and found and url.startswith("http")):
            raise ValueError(f"server: {text!r}, valid: NAME=http://HOST:PORT")
        servers.append(RemoteServer(name, url.rstrip("/")))
    if len({server.name for server in servers}) != len(servers):
        raise ValueError(f"server: {[server.name for server in servers]}, valid: each name once")
    return servers


if __name__ == "__main__":
    sys.exit(main())
