"""Runs the identity cases of one engine configuration in this process and writes what it saw as JSON.

    python -m support.identity CONFIG OUT.json        (with tests/ on the path)

Only one engine can live in a process; the tests start this program once for each configuration and assert on its file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from support.copies import FaultyCopies
from support.engine import Engine, Stream, prompt

PAGE = {"overlap-16": 16, "normal-16": 16, "overlap-1": 1, "normal-1": 1}
TOKENS = 300
PUBLISH = 32
# On the fake clock a step takes 20 ms, so a running stream makes 50 tok/s. 12 readers of 30 tok/s ask for more than the
# streams that fit in the pool the policy sees can make: it has to rotate them all the time.
STEP_S = 0.02
RATE = 30.0
SEEN_POOL = 1100
PARK_AT = (40, 90, 140, 190, 240)
WORDS = "( [a-z]{1,6}){200,400}"
# What each of the 12 streams asks for beside 300 greedy tokens.
FEATURES: list[dict[str, Any]] = [
    {}, {}, {}, {},
    {"return_logprob": True, "top_logprobs_num": 3},
    {"return_logprob": True},
    {"regex": WORDS},
    {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "string", "minLength": 500}},
                                "required": ["a"]})},
    {"stop": ["\x00never\x00"]},
    {"stop_from_base": 270},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3, "min_new_tokens": 250},
]  # fmt: skip
PENALTIES = (10, 11)


def asks(stops: dict[int, str]) -> list[dict[str, Any]]:
    """Arguments of Engine.submit for the 12 streams; `stops` holds the stop string of a stream."""
    found = []
    for i, feature in enumerate(FEATURES):
        feature = dict(feature)
        if feature.pop("stop_from_base", None) is not None and i in stops:
            feature["stop"] = [stops[i]]
        own = {"rid": f"s{i}", "prompt": prompt(30 + 5 * i, i), "max_new_tokens": TOKENS, "tokenflow": {"rate": RATE}}
        found.append({**own, **feature})
    return found


def stop_of(engine: Engine, tokens: list[int]) -> str:
    """A stop string for stream 9: the end of its text at token 270."""
    return engine.scheduler.tokenizer.decode(tokens[265:270]).strip()[-6:]


def seen(streams: list[Stream]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": s.tokens,
            "logprobs": s.logprobs,
            "finish": s.finish,
            "completion_tokens": s.completion_tokens,
            "chunk_sizes": sorted({len(c) for c in s.chunks}),
        }
        for s in streams
    ]


def run(engine: Engine, stops: dict[int, str], *, evict: bool) -> dict[str, Any]:
    """One run of the 12 streams. `evict` pushes parked streams off the device all the time they are away, and makes
    copies late and their pages come in random order."""
    ledger = engine.scheduler.ledger
    before = dict(ledger.counters)
    reprefills: list[int] = []

    def each(e: Engine) -> None:
        if evict and any(r.output_ids for r in e.scheduler.waiting_queue):
            e.evict_device()

    first_seq = ledger.seq
    with FaultyCopies(engine, seed=3) as faults:
        if evict:
            faults.delay(0.003, lambda transfer: transfer.number % 2 == 0)
            faults.reorder()
            faults.poison_freed()
        streams = [engine.submit(**a) for a in asks(stops)]
        engine.run_until_done(each=each)
    moves = [t for t in ledger.transitions if t["seq"] > first_seq]
    reprefills = [t["tokens"] for t in moves if t["what"] == "return"]
    parks = {s.rid: sum(t["id"] == s.rid and t["what"] == "park" for t in moves) for s in streams}
    result = {
        "streams": seen(streams),
        "parks": list(parks.values()),
        "reprefills": reprefills,
        "counters": {k: v - before[k] for k, v in ledger.counters.items()},
        "free_tokens": engine.free_tokens(),
        "total_tokens": engine.scheduler.max_total_num_tokens,
        "free_rows": engine.scheduler.req_to_token_pool.available_size(),
        "total_rows": engine.scheduler.req_to_token_pool.size,
    }
    engine.reset()
    return result


def main(config: str, out: Path) -> None:
    from tokenflow_sgl.core.baselines import Fcfs, Scripted, ScriptedPark
    from tokenflow_sgl.core.config import PolicyConfig
    from tokenflow_sgl.core.policy import TokenFlowPolicy

    flags = ["--page-size", str(PAGE[config]), "--max-total-tokens", "8192", "--chunked-prefill-size", "128"]
    if config.startswith("normal"):
        flags.append("--disable-overlap-schedule")
    engine = Engine(flags, {"check_plans": True})
    scheduler = engine.scheduler
    results: dict[str, Any] = {"overlap": bool(scheduler.enable_overlap)}

    engine.use(Fcfs())
    base = run(engine, {}, evict=False)
    stops = {9: stop_of(engine, base["streams"][9]["tokens"])}
    results["stop"] = stops[9]
    results["base"] = run(engine, stops, evict=False)
    results["base_again"] = run(engine, stops, evict=False)

    script = [ScriptedPark("s*", at, 3) for at in PARK_AT]
    engine.use(Scripted(script, publish_interval_tokens=PUBLISH))
    results["forced"] = run(engine, stops, evict=True)

    # A pool that holds a quarter of what the streams need, and a policy that may park after short runs.
    config_ = PolicyConfig(
        swap_share=1.0, min_run_tokens=4,
        min_slack_s=0.1, eps_s=0.1, overhead_s=0.0, return_steps=2, publish_interval_tokens=PUBLISH,
        publish_below=1.0, publish_per_step=4, publish_share=1.0,
    )  # fmt: skip
    engine.use(TokenFlowPolicy(config_))
    engine.fake_clock(STEP_S, prefill_tok_s=1000.0)  # else computing again would cost nothing, and nobody be loaded
    show_smaller_pool(engine, SEEN_POOL)
    results["policy"] = run(engine, stops, evict=True)
    out.write_text(json.dumps(results))
    os._exit(0)


def show_smaller_pool(engine: Engine, total: int) -> None:
    """The policy is shown a pool of `total` tokens: it parks as if memory were short, while upstream's own checks see
    the whole pool, so that nothing but the policy parks anybody."""
    executor = engine.scheduler.executor
    view = executor.view
    held = engine.scheduler.max_total_num_tokens - total

    def smaller() -> Any:
        seen = view()
        seen.device_free_tokens = max(0, seen.device_free_tokens - held)
        seen.device_total_tokens = total
        return seen

    executor.view = smaller


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
