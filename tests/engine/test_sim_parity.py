"""The simulator against the real engine, one script of arrivals through both on the same fake times: the same plans.

The engine runs first; when its requests arrived is told by its journal. Then the simulator gets the same requests at
the same times. Compared is what each plan wished for, in order: for which kind of stream. Which of six readers with
the same slack goes first depends on how much of each was published by then, and real copies take their own time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenflow_sgl.core import journal
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policies import make_policy
from tokenflow_sgl.core.types import Applied, Arrived, Plan, Tick
from tokenflow_sgl.sim.measured import Table
from tokenflow_sgl.sim.run import Simulation
from tokenflow_sgl.sim.settings import EngineSettings
from tokenflow_sgl.sim.timing import Line
from tokenflow_sgl.workload.arrivals import Request, Segment

Results = Callable[[str], dict[str, Any]]


def verbs(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {
        "park": plan.park,
        "load": plan.load,
        "admit": plan.admit or (),
        "publish": tuple(r for r, _ in plan.publish),
    }


def wishes(plans: list[Plan], what: str) -> list[str]:
    """Every rid that was named, once for each run of plans that name it: a wish that must wait is repeated."""
    found: list[str] = []
    before: tuple[str, ...] = ()
    for plan in plans:
        now = verbs(plan)[what]
        found += [rid for rid in now if rid not in before]
        before = now
    return found


def kinds(plans: list[Plan], what: str) -> list[str]:
    return [rid.rstrip("0123456789") for rid in wishes(plans, what)]


@pytest.mark.parametrize("config", [pytest.param("parity", marks=pytest.mark.engine("support.cases", "parity"))])
def test_the_simulator_parks_and_returns_whom_the_engine_does(results: Results, config: str, tmp_path: Path) -> None:
    found = results("sim_parity")
    (tmp_path / "journal.jsonl").write_text(found["journal"])
    _, steps = journal.read(tmp_path / "journal.jsonl")
    lived: list[Plan] = []
    arrivals: dict[str, float] = {}
    untimed: list[str] = []  # arrived on an idle engine, before its first tick
    for events, _, plan in steps:
        tick = next((e for e in events if isinstance(e, Tick)), None)
        if tick is not None and untimed:
            size = next(e for e in events if isinstance(e, Applied)).prefill_tokens
            began_s = tick.now_s - found["step_s"] - size / found["prefill_tok_s"]
            arrivals.update(dict.fromkeys(untimed, began_s))
            untimed = []
        new = [e.rid for e in events if isinstance(e, Arrived)]
        if tick is None:
            untimed += new
        else:
            arrivals.update(dict.fromkeys(new, tick.now_s))
        lived.append(plan)
    simulated = _simulated(found, arrivals)
    for what in ("park", "load", "admit"):
        print(what, wishes(lived, what), wishes(simulated, what))
        assert kinds(simulated, what) == kinds(lived, what) != []
    # Whoever was parked is who comes back.
    for plans in (lived, simulated):
        parked = sorted(wishes(plans, "park"))
        assert sorted(wishes(plans, "load")) == sorted(wishes(plans, "admit")[-len(parked) :]) == parked


def _simulated(found: dict[str, Any], arrivals: dict[str, float]) -> list[Plan]:
    step_s, prefill_tok_s, page = found["step_s"], found["prefill_tok_s"], found["page_tokens"]
    timing = Table(
        source="the engine's fake clock", decode_s=((1, step_s),), decode_context_token_s=0.0, prefill_fixed_s=step_s,
        prefill_token_s=1.0 / prefill_tok_s, prefill_squared_token_s=0.0, publish=Line(0.0, 0.0), kv_bytes_per_token=1,
        store_tok_s=1e6, load_tok_s=1e6,
    )  # fmt: skip
    requests = [
        Request(
            a["rid"], "all", arrivals[a["rid"]], (Segment(a["rid"], a["prompt_tokens"]),), a["max_new_tokens"],
            a["max_new_tokens"], a["rate_tok_s"],
        )
        for a in found["asks"]
    ]  # fmt: skip
    plans: list[Plan] = []
    settings = EngineSettings(
        pool_tokens=found["pool_tokens"], page_tokens=page, chunk_tokens=found["chunk_tokens"], max_running=64,
        host_tokens=found["host_tokens"],
    )  # fmt: skip
    Simulation(
        make_policy("tokenflow", PolicyConfig()), requests, settings=settings, timing=timing, store_bytes_s=1e6,
        load_bytes_s=1e6, journal=lambda events, view, plan: plans.append(plan), check=True,
    ).run()  # fmt: skip
    return plans
