"""Runs the cases of one engine configuration in this process and writes what was seen as JSON.

    python -m support.cases CONFIG OUT.json        (with tests/ on the path)

Only one engine can live in a process; the tests start this program once for each configuration and assert on its file.
A case that raises is written as {"error": ...}; the cases after it run if it left the engine idle.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cases import copies, grammars, inflight, lifecycle, limits, prefixes, pressure, queueing, twins
from support.engine import Engine

Case = Callable[[Engine], dict[str, Any]]


@dataclass(frozen=True)
class Config:
    flags: tuple[str, ...]
    cases: tuple[Case, ...]
    stock: bool = False
    env: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=lambda: {"check_plans": True})


def _flags(
    *, page: int, pool: int, chunk: int = 256, overlap: bool = True, more: tuple[str, ...] = ()
) -> tuple[str, ...]:
    loop = () if overlap else ("--disable-overlap-schedule",)
    sizes = ("--page-size", str(page), "--max-total-tokens", str(pool), "--chunked-prefill-size", str(chunk))
    return (*sizes, *loop, *more)


# Random weights love white space, and a JSON grammar lets them have it.
_COMPACT = ("--constrained-json-disable-any-whitespace",)
_BOTH_LOOPS = (
    inflight.park_in_flight,
    inflight.alone,
    limits.limits,
    prefixes.frees,
    prefixes.frees_at_random,
    prefixes.takes,
    lifecycle.abort_by_exact_id,
    lifecycle.abort_all,
    lifecycle.idle_spell,
    lifecycle.parks_during_a_chunked_prompt,
    lifecycle.upstream_retractions_beside_ours,
    queueing.long_wait,
    grammars.json_schema,
    grammars.first_use_of_a_grammar,
)
_LAST = lifecycle.shutdown_with_parked_streams
_TWIN = (twins.same_work, twins.identity_streams)
_STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
CONFIGS = {
    "overlap": Config(
        _flags(page=16, pool=16384, more=_COMPACT),
        (*_BOTH_LOOPS, grammars.regex, grammars.stop_token_inside, pressure.long_prefill_beside_readers, _LAST),
    ),
    "normal": Config(_flags(page=1, pool=16384, overlap=False, more=_COMPACT), (*_BOTH_LOOPS, _LAST)),
    "pool-512": Config(
        _flags(page=16, pool=512),
        (pressure.too_long, pressure.outgrows_the_pool, pressure.ping_pong, pressure.identity_in_a_small_pool),
    ),
    "pool-1024": Config(_flags(page=16, pool=1024), (pressure.stock_newcomer, pressure.newcomer_against_memory)),
    "parity": Config(_flags(page=16, pool=2048, chunk=512, overlap=False), (pressure.sim_parity,)),
    "pool-2048": Config(_flags(page=16, pool=2048), (pressure.big_one_at_the_head,)),
    "mixed": Config(
        _flags(page=16, pool=2048, chunk=128, more=("--enable-mixed-chunk",)),
        (
            inflight.park_in_flight,
            lifecycle.parks_during_a_chunked_prompt,
            lifecycle.upstream_retractions_beside_ours,
            pressure.identity_in_a_small_pool,
        ),
        env=_STRICT,
    ),
    "copies-16": Config(
        _flags(page=16, pool=4096, more=("--hicache-ratio", "1.01")),
        (
            copies.collected_while_idle,
            copies.reused_while_copied,
            copies.failed_load,
            copies.degraded,
            copies.salts_and_flushes,
            copies.whole_pages,
            copies.lost_store,
            copies.lost_load,
            copies.aborted_while_loading,
        ),
    ),
    "copies-1": Config(
        _flags(page=1, pool=4096, overlap=False, more=("--hicache-ratio", "1.01")),
        (copies.reused_while_copied, copies.failed_load, copies.whole_pages),
    ),
    "copies-64": Config(_flags(page=64, pool=8192), (copies.reused_while_copied, copies.whole_pages)),
    "copies-tight": Config(_flags(page=16, pool=1440), (copies.collected_while_decoding, copies.host_full_once)),
    "queue": Config(
        _flags(page=16, pool=16384, more=("--max-running-requests", "8", "--max-queued-requests", "4")),
        (queueing.full_queue_with_forced_parks, queueing.full_queue_under_the_policy),
    ),
    "priority": Config(
        _flags(
            page=16,
            pool=4096,
            more=("--max-running-requests", "4", "--max-queued-requests", "6", "--enable-priority-scheduling"),
        ),
        (queueing.priority_inside_its_class, queueing.higher_priority_meets_a_full_queue),
    ),
    "stock-overlap": Config(_flags(page=16, pool=4096), _TWIN, stock=True),
    "stock-normal": Config(_flags(page=1, pool=4096, overlap=False), _TWIN, stock=True),
    "fcfs-overlap": Config(_flags(page=16, pool=4096), _TWIN),
    "fcfs-normal": Config(_flags(page=1, pool=4096, overlap=False), _TWIN),
}


def _note_warnings(logger: str, into: list[str]) -> None:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: into.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)


def main(name: str, out: Path) -> None:
    config = CONFIGS[name]
    os.environ.update(config.env)
    started = time.monotonic()
    # As on a machine that lets nobody pin memory (field report B22 b).
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    warnings: list[str] = []
    _note_warnings("tokenflow_sgl.platform.cpu_host_pool", warnings)
    engine = Engine(config.flags, config.settings, stock=config.stock)
    scheduler = engine.scheduler
    results: dict[str, Any] = {
        "engine": {
            "overlap": bool(scheduler.enable_overlap),
            "page": scheduler.page_size,
            "grammar_backend": scheduler.server_args.grammar_backend,
            "started_s": time.monotonic() - started,
            "host_memory_warnings": warnings,
        }
    }
    only = os.environ.get("ONLY_CASE")
    for case in config.cases:
        if only is not None and only != case.__name__:
            continue
        started = time.monotonic()
        try:
            result = case(engine)
        except Exception:
            result = {"error": traceback.format_exc()}
        result["took_s"] = time.monotonic() - started
        results[case.__name__] = result
        print(f"case {name} {case.__name__}: {result['took_s']:.1f} s", result.get("error", ""), flush=True)
        if not scheduler.is_fully_idle():
            results["stopped_after"] = case.__name__
            break
    out.write_text(json.dumps(results))
    # Upstream's threads would keep the process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
