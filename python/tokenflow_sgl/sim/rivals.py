"""The servers that are compared: a policy on the seam, and how its engine batches, copies and loads.

Owns the names that people type. Invariant: on one scenario all of them get the same memory, link, step times and
requests; only what is listed here differs.

What each policy takes from where is told in its own module (core/rivals, core/policy, core/baselines).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.config import PolicyConfig
from ..core.policies import make_policy
from ..core.types import Policy


@dataclass(frozen=True, slots=True)
class Rival:
    """policy: its name in core.policies. The rest are EngineSettings that differ from one server to another."""

    about: str
    policy: str
    batching: str = "prefill_first"
    copies: str = "ahead"
    loads: str = "ahead"
    conservativeness: float = 1.0
    inserts: bool = (
        True  # publishing is an insert in a radix tree on the engine's thread; else blocks are copied as such
    )
    host_reserve: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)  # that clients give, by the class of their reader

    def make(self) -> Policy:
        return make_policy(
            self.policy, PolicyConfig.from_mapping({"copies": self.copies, "loads": self.loads, **self.config})
        )


RIVALS: dict[str, Rival] = {
    "sglang-fcfs": Rival("SGLang as it is, with its hierarchical cache", "fcfs", loads="at_admission"),
    "sglang-eager": Rival(
        "the same with --schedule-conservativeness 0.2", "fcfs", loads="at_admission", conservativeness=0.2
    ),
    "sglang-mixed": Rival(
        "SGLang with mixed chunked prefill, as Sarathi-Serve", "fcfs", loads="at_admission", batching="mixed_chunk"
    ),
    "sglang-hrrn": Rival("SGLang with --schedule-policy hrrn", "hrrn", loads="at_admission"),
    "sglang-priority": Rival(
        "SGLang with priority preemption: readers before programs before batch",
        "priority",
        loads="at_admission",
        priorities={"reader": 20, "agent": 0, "batch": -20},
    ),
    "vllm": Rival("vLLM: FCFS, preempts the last admitted, computes again", "vllm", batching="mixed", copies="none"),
    "vllm-offload": Rival(
        "vLLM with KV offloading: blocks stored as they fill", "vllm-offload", batching="mixed", inserts=False
    ),
    "andes": Rival("Andes v2: QoE knapsack, swap or recompute", "andes", copies="at_park"),
    "vlt": Rival("SuperInfer's rotation by virtual lag time", "vlt", batching="mixed", inserts=False),
    "tokenflow-paper": Rival("TokenFlow as the paper describes it", "tokenflow-paper", host_reserve=True),
    "tokenflow-guide": Rival("TokenFlow with the guide's priority to the letter", "tokenflow-guide", host_reserve=True),
    "tokenflow-mixed": Rival("ours with --enable-mixed-chunk", "tokenflow", batching="mixed_chunk", host_reserve=True),
    "tokenflow": Rival("ours", "tokenflow", host_reserve=True),
}
# The paper's ablation, as the live servers' names (bench/servers.py).
ABLATIONS: dict[str, Rival] = {
    "tokenflow-no-offload": Rival(
        "ours, what leaves the device is computed again", "tokenflow", host_reserve=True, copies="none"
    ),
    "tokenflow-no-publishing": Rival("ours, copied when parked", "tokenflow", host_reserve=True, copies="at_park"),
    "tokenflow-no-overlap": Rival(
        "ours, loaded by the forward that needs it", "tokenflow", host_reserve=True, loads="at_admission"
    ),
    "tokenflow-no-forecast": Rival(
        "ours, without the burst forecast", "tokenflow", host_reserve=True, config={"forecast_s": 0.0}
    ),
}
TWO_POOLS = "distserve"  # not on the seam: two engines (two_pools.py)


def rivals_named(names: Sequence[str]) -> dict[str, Rival]:
    """In the order given. Raises ValueError for an unknown name."""
    known = {**RIVALS, **ABLATIONS}
    for name in names:
        if name not in known:
            raise ValueError(f"policy: {name!r}, valid: {', '.join(known)}")
    return {name: known[name] for name in names}
