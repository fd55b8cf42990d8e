"""From a scenario to what the simulator needs: memory, step times, link.

Owns the translation. Invariant: everything but the rival's own settings is the same for every rival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.types import Policy
from ..workload.arrivals import Request
from ..workload.scenario import Scenario, ScenarioError
from .hardware import load_hardware, load_model
from .rivals import Rival
from .run import Run, Simulation
from .settings import EngineSettings
from .timing import Roofline, TimingModel, pool_tokens


@dataclass(frozen=True, slots=True)
class World:
    """Sizes in tokens. store_bytes_s, load_bytes_s: of the link, to the host and back."""

    pool_tokens: int
    page_tokens: int
    chunk_tokens: int
    max_running: int
    host_tokens: int
    timing: TimingModel
    store_bytes_s: float
    load_bytes_s: float

    def settings(self, rival: Rival) -> EngineSettings:
        return EngineSettings(
            pool_tokens=self.pool_tokens,
            page_tokens=self.page_tokens,
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            host_tokens=self.host_tokens,
            batching=rival.batching,
            copies=rival.copies,
            loads=rival.loads,
            conservativeness=rival.conservativeness,
            inserts=rival.inserts,
            host_reserve=rival.host_reserve,
        )


def simulate(world: World, policy: Policy, settings: EngineSettings, requests: Sequence[Request], **more: Any) -> Run:
    """One run in `world`; `more` goes to Simulation."""
    return Simulation(
        policy, requests, settings=settings, timing=world.timing, store_bytes_s=world.store_bytes_s,
        load_bytes_s=world.load_bytes_s, **more,
    ).run()  # fmt: skip


def world_of(scenario: Scenario) -> World:
    """The GPU of the scenario's [gpu] table. Raises ScenarioError for one without."""
    gpu = scenario.gpu
    if gpu is None:
        raise ScenarioError(f"gpu: missing in {scenario.name}, valid: a scenario with a [gpu] table")
    try:
        hardware, model = load_hardware(gpu.hardware), load_model(gpu.model)
        pool = gpu.kv_pool_tokens
        if pool is None:
            assert gpu.mem_fraction is not None
            pool = pool_tokens(hardware, model, mem_fraction=gpu.mem_fraction)
            if pool < gpu.page_tokens:
                valid = f"one that leaves room for a page ({gpu.page_tokens} tokens), it leaves {pool} tokens"
                raise ValueError(f"mem_fraction: {gpu.mem_fraction}, valid: {valid}")
    except ValueError as error:
        raise ScenarioError(f"gpu: {error}") from error
    timing = Roofline(hardware, model)
    return World(
        pool_tokens=pool,
        page_tokens=gpu.page_tokens,
        chunk_tokens=gpu.chunked_prefill_tokens,
        max_running=gpu.max_running,
        host_tokens=int(pool * gpu.host_ratio),
        timing=timing,
        store_bytes_s=hardware.pcie_bytes_s,
        load_bytes_s=hardware.pcie_bytes_s,
    )
