"""Step times as they were, from the journal of a live run: the table that the simulator is given for the same machine.

Owns the fit. Invariant: only what the journal holds is used; nothing of what the simulation is later compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..core import journal
from ..core.types import Applied, Arrived, Emitted, EngineView, Event, Finished, Plan, Tick
from .measured import Table
from .timing import Line

_LEAST = 3  # samples of a batch size
_KEPT = 0.98  # of the samples, the quickest: the rest are hiccups of the machine


@dataclass(slots=True)
class Samples:
    """decode: (streams, KV tokens read, seconds). prefill: (new tokens, seconds). The others (tokens, seconds)."""

    decode: list[tuple[int, int, float]] = field(default_factory=list)
    prefill: list[tuple[int, float]] = field(default_factory=list)
    stores: list[tuple[int, float]] = field(default_factory=list)
    loads: list[tuple[int, float]] = field(default_factory=list)
    publishes: list[tuple[int, float]] = field(default_factory=list)


def table_of(path: str | Path, *, source: str) -> Table:
    """Raises ValueError for a journal with too few steps."""
    _, steps = journal.read(path)
    return fit(gather(steps), source=source)


def gather(steps: Iterable[tuple[list[Event], EngineView, Plan]]) -> Samples:
    """Each step's size with the time that the tick beside it gives for it."""
    found = Samples()
    prompts: dict[str, int] = {}
    for events, _, _ in steps:
        size: Applied | None = None
        tick: Tick | None = None
        read = 0  # KV tokens, by the tokens that came of the step that is timed
        for event in events:
            if isinstance(event, Applied):
                size = event
            elif isinstance(event, Tick):
                tick = event
            elif isinstance(event, Arrived):
                prompts[event.rid] = event.prompt_tokens
            elif isinstance(event, Emitted) and size is not None and len(event.rids) == size.decoding:
                read = sum(prompts.get(rid, 0) + n - 1 for rid, n in zip(event.rids, event.output_tokens, strict=True))
            elif isinstance(event, Finished):
                prompts.pop(event.rid, None)
        if tick is not None:
            _timed(found, size, tick, read)
    return found


def _timed(found: Samples, size: Applied | None, tick: Tick, read_tokens: int) -> None:
    found.stores += tick.stores_s
    found.loads += tick.loads_s
    found.publishes += tick.publishes_s
    if size is None or tick.last_step_s is None:
        return
    own_s = tick.last_step_s - sum(s for _, s in tick.publishes_s)
    if size.prefill_tokens:
        found.prefill.append((size.prefill_tokens, own_s))
    elif size.decoding and read_tokens:
        found.decode.append((size.decoding, read_tokens, own_s))


def fit(found: Samples, *, source: str) -> Table:
    """Medians by batch size, least squares for the rest."""
    if len(found.decode) < 50 or len(found.prefill) < 5:
        raise ValueError(f"journal: {len(found.decode)} decode and {len(found.prefill)} prefill steps, valid: 50 and 5")
    limit_s = float(np.quantile([s for _, _, s in found.decode], _KEPT))
    decode = [d for d in found.decode if d[2] <= limit_s]
    n, context, seconds = (np.array(column, dtype=float) for column in zip(*decode, strict=True))
    per_context_s = max(0.0, float(_lstsq([np.ones_like(n), n, context], seconds)[2]))
    by_size: dict[int, list[float]] = {}
    for streams, read, s in decode:
        by_size.setdefault(streams, []).append(s - read * per_context_s)
    points: list[tuple[int, float]] = []
    for streams, values in sorted(by_size.items()):
        if len(values) >= _LEAST:
            points.append((streams, max(1e-6, statistics.median(values))))
    fixed_s, token_s = _line(found.prefill)
    return Table(
        source=source, decode_s=tuple(points), decode_context_token_s=per_context_s, prefill_fixed_s=fixed_s,
        prefill_token_s=token_s, prefill_squared_token_s=0.0, publish=Line(*_line(found.publishes)),
        kv_bytes_per_token=1, store_tok_s=_speed(found.stores), load_tok_s=_speed(found.loads),
    )  # fmt: skip


def _lstsq(columns: list[np.ndarray], values: np.ndarray) -> np.ndarray:
    solution: np.ndarray = np.linalg.lstsq(np.stack(columns, axis=1), values, rcond=None)[0]
    return solution


def _line(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per token), neither below 0; (0, 0) for none."""
    if not samples:
        return 0.0, 0.0
    tokens, seconds = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    keep = seconds <= np.quantile(seconds, _KEPT)
    fixed_s, token_s = _lstsq([np.ones_like(tokens[keep]), tokens[keep]], seconds[keep])
    if fixed_s < 0 or token_s < 0:
        return (0.0, float(seconds.sum() / tokens.sum())) if fixed_s < 0 else (float(seconds.mean()), 0.0)
    return float(fixed_s), float(token_s)


def _speed(samples: list[tuple[int, float]]) -> float:
    """Tokens a second; without a sample, so quick that it does not count."""
    seconds = sum(s for _, s in samples)
    return sum(t for t, _ in samples) / seconds if seconds > 0 else 1e9
