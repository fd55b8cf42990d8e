"""The policy's admission inside upstream's: its order, its reservation, and nobody it did not name.

Owns the seams PrefillAdder and SchedulePolicy; decides nothing. Invariant: with no order given (policy `fcfs`)
everything here is upstream's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy

from ..core.types import Rid


class Admission:
    """What the plan said about this step, for the objects that upstream makes on the way."""

    def __init__(self) -> None:
        self.rank: dict[Rid, int] | None = None
        self.reserve_tokens: int | None = None
        self.prefill_tokens: int | None = None
        self.refused: list[Rid] = []

    def set(self, order: Sequence[Rid] | None, reserve_tokens: int | None, prefill_tokens: int | None) -> None:
        self.rank = None if order is None else {rid: i for i, rid in enumerate(order)}
        self.reserve_tokens = reserve_tokens
        self.prefill_tokens = prefill_tokens
        self.refused.clear()

    def holds(self, rid: Rid) -> bool:
        return self.rank is not None and rid not in self.rank


class PlannedAdder(PrefillAdder):
    """Reserves what the plan says instead of everybody's estimated future: a scheduler that can park need not."""

    admission: Admission  # set by adder_class()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.admission.reserve_tokens is not None:
            self.memory_budget.total_offset += self.admission.reserve_tokens
        if self.admission.prefill_tokens is not None and self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens = min(self.rem_chunk_tokens, self.admission.prefill_tokens)

    def _get_running_request_total_token_offset(self, req: Any) -> float:
        if self.admission.reserve_tokens is not None:
            return 0
        return super()._get_running_request_total_token_offset(req)

    def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> AddReqResult:
        # A request whose grammar became ready inside this very pass was never seen by the policy.
        if self.admission.holds(req.rid):
            return AddReqResult.OTHER
        result = super().add_one_req(req, *args, **kwargs)
        if result == AddReqResult.NO_TOKEN and not (self.can_run_list and self.can_run_list[-1] is req):
            self.admission.refused.append(req.rid)
        return result

    def _select_prefill_admission(self, req: Any, *, total_tokens: int, **kwargs: Any) -> Any:
        if self.admission.reserve_tokens is None:
            return super()._select_prefill_admission(req, total_tokens=total_tokens, **kwargs)
        # The candidate's own future is part of the plan's reservation already.
        extend_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
        total_tokens = min(total_tokens, extend_tokens + self.per_req_token_overhead)
        selected = super()._select_prefill_admission(req, total_tokens=total_tokens, **kwargs)
        if isinstance(selected, AddReqResult):
            return selected
        return dataclasses.replace(selected, max_new_tokens=0)

    def _update_prefill_budget(
        self, prefix_len: int, extend_input_len: int, max_new_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        if self.admission.reserve_tokens is not None:
            max_new_tokens = 0
        super()._update_prefill_budget(prefix_len, extend_input_len, max_new_tokens, *args, **kwargs)


def adder_class(admission: Admission) -> type[PlannedAdder]:
    """Upstream asks for a class and makes an object of it every step; this binds the scheduler's plan to it."""
    return type("PlannedAdder", (PlannedAdder,), {"admission": admission})


class PlannedOrder(SchedulePolicy):
    """Upstream's order of the waiting queue, unless the plan gives one."""

    admission: Admission

    def calc_priority(self, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
        rank = self.admission.rank
        if rank is None:
            super().calc_priority(waiting_queue, *args, **kwargs)
        else:
            waiting_queue.sort(key=lambda req: rank.get(req.rid, len(rank)))
