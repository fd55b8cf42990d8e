"""Penalties survive parking: upstream starts their counters from zero whenever a batch is built from requests.

Owns the replay of a request's output into fresh penalizers. Invariant: after it the counters are those of a request
that was never away, for every chunk of a return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def replay(batch: Any, rows: Sequence[tuple[int, Any]]) -> None:
    """Count the output of each (row, request) of `batch` into its penalizers.

    The token that the next forward samples is counted by upstream's own prepare_for_decode, so all of `output_ids` is
    counted here and nothing more.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator is None or not orchestrator.is_required:
        return
    for penalizer in orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        count = _REPLAYS.get(type(penalizer).__name__)
        if count is None:
            raise RuntimeError(
                f"unknown penalizer {type(penalizer).__name__}: a parked stream would lose its penalties"
            )
        for row, req in rows:
            ids = torch.tensor(list(req.output_ids), dtype=torch.int64, device=batch.device)
            count(penalizer, row, ids)


def _frequency(penalizer: Any, row: int, ids: torch.Tensor) -> None:
    penalty = penalizer.frequency_penalties[row].expand(len(ids))
    penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, penalty)


def _presence(penalizer: Any, row: int, ids: torch.Tensor) -> None:
    penalty = penalizer.presence_penalties[row].expand(len(ids))
    penalizer.cumulated_presence_penalties[row].scatter_(0, ids, penalty)


def _repetition(penalizer: Any, row: int, ids: torch.Tensor) -> None:
    penalty = penalizer.repetition_penalties[row].expand(len(ids))
    penalizer.cumulated_repetition_penalties[row].scatter_(0, ids, penalty)


def _min_new_tokens(penalizer: Any, row: int, ids: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] += len(ids)


_REPLAYS = {
    "BatchedFrequencyPenalizer": _frequency,
    "BatchedPresencePenalizer": _presence,
    "BatchedRepetitionPenalizer": _repetition,
    "BatchedMinNewTokensPenalizer": _min_new_tokens,
}
