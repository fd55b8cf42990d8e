"""One of two scheduler ranks with a real gloo group between them, no HTTP: phase one undisturbed, phase two under load.

    python -m support.two_ranks RANK CLOCK FOLDER OUT.json      CLOCK: tick, or local (each rank stamps its own clock)

The ranks differ as machines do: copies begin 1 ms late on rank 0 and 50 ms late on rank 1, whose host pool is asked to
be one page larger. The load is the same in every run; its times are real. The policy decides by rank 0's clock, so when
it parks differs from run to run, and must not differ between the ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STREAMS = 30
TOKENS = 240
PARKS_WANTED = 20
LOADS_WANTED = 10
POOL = 896
PAGE = 16
COPIES_LATE_S = (0.001, 0.050)
SETTINGS = {
    "min_run_tokens": 8, "min_slack_s": 0.1, "eps_s": 0.05, "overhead_s": 0.0, "return_steps": 4, "publish_below": 1.0,
    "publish_interval_tokens": 32,
}  # fmt: skip


def copy_in_any_case(cost_belief: Any) -> None:
    """Streams here are so short that to compute them again is quicker than a copy that is 50 ms late, and the policy
    learns it; but this is about ranks."""
    cost_belief.load_spares_engine = lambda self, *, host_tokens: True


def main(rank: int, clock: str, folder: Path, out: Path) -> None:
    os.environ.update(SGLANG_CPU_OMP_THREADS_BIND="0|1", SGLANG_ENABLE_RANK_CONSENSUS_CHECKER="1")
    from support.engine import Engine, prompt

    def share(make: Callable[[], Any]) -> Any:
        path = folder / "ports.pickle"
        if rank == 0:
            path.with_suffix(".part").write_bytes(pickle.dumps(make()))
            path.with_suffix(".part").rename(path)
        deadline = time.monotonic() + 120
        while not path.exists():
            assert time.monotonic() < deadline, "rank 0 did not choose ports"
            time.sleep(0.05)
        return pickle.loads(path.read_bytes())

    from support.copies import FaultyCopies
    from tokenflow_sgl.core.cost import CostBelief

    copy_in_any_case(CostBelief)
    flags = ["--tp-size", "2", "--page-size", str(PAGE), "--max-total-tokens", str(POOL), "--grammar-backend", "none"]
    flags += ["--hicache-ratio", str((4 * POOL + PAGE * rank) / POOL)]
    settings = {**SETTINGS, "journal": str(folder / "journal"), "check_plans": True}
    engine = Engine(flags, settings, tp_rank=rank, share_ports=share)
    scheduler = engine.scheduler
    if clock == "local":
        tick = scheduler.ledger.tick
        from dataclasses import replace

        scheduler.ledger.tick = lambda event: tick(replace(event, now_s=time.monotonic()))
    host = scheduler.tree_cache.cache_controller.mem_pool_host
    memory = host.anchor_entry.host_pool.k_data_refs[0].shape[0]
    state = _feed(engine, rank, prompt)
    with FaultyCopies(engine) as faults:
        faults.delay(COPIES_LATE_S[rank])
        scheduler.run_event_loop()
    tokens = {rid: s.tokens for rid, s in engine.streams.items()}
    out.write_text(json.dumps({
        "steps": scheduler._steps, "steps_under_load": scheduler._steps - state["base_steps"],
        "counters": scheduler.ledger.counters, "host_tokens": [memory, scheduler.host_tier.total_tokens, host.size],
        "longest_step_s": state["longest_step_s"],
        "same": [tokens[f"base{i}"] == tokens[f"load{i}"] for i in range(STREAMS)] if rank == 0 else None,
        "lengths": sorted({len(t) for t in tokens.values()}) if rank == 0 else None,
    }))  # fmt: skip
    os._exit(0)


def _feed(engine: Any, rank: int, prompt: Callable[[int, int], list[int]]) -> dict[str, Any]:
    """Rank 0 receives requests as if from the tokenizer; rank 1 gets them by upstream's own broadcast."""
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    rng = random.Random(7)
    plan = [("base", i, 0) for i in range(STREAMS)] + [("load", i, rng.randrange(1, 40)) for i in range(STREAMS)]
    state = {"wait": 0, "ended": False, "base_steps": 0, "longest_step_s": 0.0, "at_s": time.monotonic()}

    def request(kind: str, i: int) -> Any:
        rid = f"{kind}{i}"
        engine.submit(rid, prompt(40 + 2 * i, i), TOKENS, tokenflow={"rate": 10.0 + i})
        message = engine.scheduler._deferred_input_requests.pop()
        message.wrap_pickle_fields()
        return message

    def pull(_self: Any) -> list[Any] | None:
        at_s = time.monotonic()
        state["longest_step_s"] = max(state["longest_step_s"], at_s - state["at_s"])
        state["at_s"] = at_s
        if rank != 0:
            return None
        unfinished = engine.unfinished()
        state["wait"] -= 1
        if plan and plan[0][0] == "base" and not unfinished:  # two at a time: nothing to park for
            return [request(*plan.pop(0)[:2]), request(*plan.pop(0)[:2])]
        if plan and plan[0][0] == "load" and state["wait"] <= 0 and not any(r.startswith("base") for r in unfinished):
            state["base_steps"] = state["base_steps"] or engine.scheduler._steps
            kind, i, state["wait"] = plan.pop(0)
            return [request(kind, i)]
        if not plan and not unfinished and not state["ended"]:
            state["ended"] = True
            return [ShutdownReq()]
        return []

    SchedulerRequestReceiver._pull_raw_reqs = pull
    return state


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
