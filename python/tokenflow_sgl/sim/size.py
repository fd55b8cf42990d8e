"""How many readers one GPU serves within a service level, by bisection on simulated runs.

Owns the search. Invariant: what it recommends is a run that met the level in every seed, never an extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.qoe import percentile, stalls, ttft_s
from ..workload.arrivals import plan_requests
from ..workload.scenario import parse_scenario
from .hardware import Hardware, Model
from .rivals import rivals_named
from .run import Run
from .timing import Roofline, StepWork, pool_tokens
from .world import World, simulate

_STEPS = 9  # of bisection: 1 part in 500
_TURNS = 4  # of an answer's reading time: arrivals go on until memory holds what it will hold


@dataclass(frozen=True, slots=True)
class Demand:
    """Who comes. Lengths in tokens: means, with a spread of a quarter (normal)."""

    read_rate_tok_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Level:
    """What must hold in every seed. stalled: share of the requests that may stall at all."""

    ttft_p99_s: float
    stalled: float


@dataclass(frozen=True, slots=True)
class Point:
    """One arrival rate as simulated: the worst of the seeds."""

    per_s: float
    ttft_p99_s: float
    stalled: float
    most_streams: int
    most_running: int
    most_host_tokens: int

    def meets(self, level: Level) -> bool:
        return self.ttft_p99_s <= level.ttft_p99_s and self.stalled <= level.stalled


@dataclass(frozen=True, slots=True)
class Size:
    """best: the highest rate that met the level, None if none did. points: all that were tried, by rate."""

    policy: str
    pool_tokens: int
    best: Point | None
    points: tuple[Point, ...]


Report = Callable[[str, Point], None]


def size_gpu(
    hardware: Hardware,
    model: Model,
    demand: Demand,
    level: Level,
    *,
    policy: str,
    mem_fraction: float,
    host_ratio: float = 4.0,
    seeds: Sequence[int] = (1, 2),
    report: Report | None = None,
) -> Size:
    """Raises ValueError for a model that does not fit, or an answer longer than the pool."""
    timing = Roofline(hardware, model)
    pool = pool_tokens(hardware, model, mem_fraction=mem_fraction)
    if pool < 2 * (demand.prompt_tokens + demand.answer_tokens):
        raise ValueError(
            f"mem_fraction: {mem_fraction}, valid: one that leaves room for 2 requests, it leaves {pool} tokens"
        )
    world = World(
        pool_tokens=pool, page_tokens=16, chunk_tokens=8192, max_running=1024, host_tokens=int(pool * host_ratio),
        timing=timing, store_bytes_s=hardware.pcie_bytes_s, load_bytes_s=hardware.pcie_bytes_s,
    )  # fmt: skip
    high = most_per_s(world, demand)
    points: list[Point] = []

    def tried(per_s: float) -> Point:
        point = _point(world, demand, per_s, policy=policy, seeds=seeds)
        points.append(point)
        if report is not None:
            report(policy, point)
        return point

    low, best = 0.0, None
    for _ in range(_STEPS):
        per_s = (low + high) / 2
        point = tried(per_s)
        if point.meets(level):
            low, best = per_s, point
        else:
            high = per_s
    return Size(policy, pool, best, tuple(sorted(points, key=lambda p: p.per_s)))


def most_per_s(world: World, demand: Demand) -> float:
    """The highest rate that is tried: what the GPU makes with memory full of half-done answers."""
    context = demand.prompt_tokens + demand.answer_tokens // 2
    streams = max(1, min(world.max_running, world.pool_tokens // context))
    step_s = world.timing.step_s(StepWork(decoding=streams, decode_context_tokens=streams * context))
    return 1.0 / (demand.answer_tokens * step_s / streams + world.timing.least_prefill_s(demand.prompt_tokens))


def _point(world: World, demand: Demand, per_s: float, *, policy: str, seeds: Sequence[int]) -> Point:
    runs = [_simulate(world, demand, per_s, policy=policy, seed=seed) for seed in seeds]
    return Point(
        per_s=per_s,
        ttft_p99_s=max(percentile([ttft_s(r) for r in run.records], 99) for run in runs),
        stalled=max(sum(stalls(r).count > 0 for r in run.records) / len(run.records) for run in runs),
        most_streams=max(run.most_live for run in runs),
        most_running=max(run.most_running for run in runs),
        most_host_tokens=max(run.most_host_tokens for run in runs),
    )


def _simulate(world: World, demand: Demand, per_s: float, *, policy: str, seed: int) -> Run:
    rival = rivals_named([policy])[policy]
    requests = plan_requests(parse_scenario(_scenario(demand, per_s)), seed=seed)
    return simulate(world, rival.make(), world.settings(rival), requests)


def _scenario(demand: Demand, per_s: float) -> str:
    """Poisson arrivals, long enough for the queue to settle."""
    for_s = max(60.0, _TURNS * demand.answer_tokens / demand.read_rate_tok_s)

    def normal(mean: int) -> str:
        return f"{{ normal = [{mean}, {mean / 4:g}], clip = [{max(1, mean // 4)}, {mean * 2}] }}"

    count = max(20, math.ceil(per_s * for_s))
    return f"""
name = "size"
about = "Poisson arrivals"
newcomers = []
[gpu]
hardware = "h200"
model = "llama3-8b"
kv_pool_tokens = 16
page_tokens = 16
chunked_prefill_tokens = 8192
max_running = 1024
host_ratio = 1
[[group]]
name = "all"
count = {count}
start_s = 0
arrival = "poisson"
per_s = {per_s!r}
prompt_tokens = {normal(demand.prompt_tokens)}
answer_tokens = {normal(demand.answer_tokens)}
read_rate = [{{ tok_s = {demand.read_rate_tok_s!r}, weight = 1 }}]
"""
