"""What is remembered of one copy between the tiers, which of its pages failed, and whether copies can be trusted.

Owns no lock and no page. Invariant: all ranks call a copy failed, and a page bad, when one of them does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import TreeLock

logger = logging.getLogger(__name__)
STORE, LOAD = "to the host", "from the host"
_STRIKES = 3  # failures in a row after which the tier is not trusted
_RETRY_S = 30.0  # until one more copy is tried
Agree = Callable[[torch.Tensor], torch.Tensor]  # the greatest of each value over all ranks


@dataclass(slots=True)
class Store:
    """One acknowledgement upstream waits for; `host_tokens` are the host slots it fills."""

    ack: Any
    host_tokens: torch.Tensor
    since_s: float


@dataclass(slots=True)
class Load:
    """One stream's part of a transfer, from token `start` of its context. `req` is None when nobody waits for it."""

    req: Any | None
    start: int
    node: Any
    host_tokens: torch.Tensor
    device_tokens: torch.Tensor
    since_s: float
    lock: TreeLock
    pin: Any
    ack: Any = None


class Trust:
    """Three failures in a row in one direction, and no copy is made in either until one more is tried."""

    def __init__(self) -> None:
        self.strikes = {STORE: 0, LOAD: 0}
        self.lost_at_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.lost_at_s is None

    def judge(self, direction: str, failed: bool, now_s: float) -> None:
        """One transfer ended, whatever number of streams it was for."""
        self.strikes[direction] = self.strikes[direction] + 1 if failed else 0
        if self.strikes[direction] >= _STRIKES and self.ok:
            self.lost_at_s = now_s
            logger.error(
                "host tier degraded: %d transfers in a row failed (%s); next try in %g s", _STRIKES, direction, _RETRY_S
            )

    def try_again(self, now_s: float) -> bool:
        """Whether the time has come. One more failure is then enough to lose trust again."""
        if self.lost_at_s is None or now_s - self.lost_at_s < _RETRY_S:
            return False
        self.lost_at_s = None
        self.strikes = dict.fromkeys(self.strikes, _STRIKES - 1)
        return True


def failed_slots(copies: Sequence[tuple[Any, torch.Tensor]], agree: Agree) -> list[torch.Tensor]:
    """For each (acknowledgement, host slots) that ended: a mask of the slots that failed on any rank.

    A platform tells of a failure by an `error` on the finish event; its `host_tokens`, if it has them, are the slots
    that are wrong, else all of the copy are.
    """
    errors = [getattr(ack.finish_event, "error", None) for ack, _ in copies]
    masks = [torch.zeros(len(slots), dtype=torch.uint8) for _, slots in copies]
    if not agree(torch.tensor([any(e is not None for e in errors)], dtype=torch.uint8)).item():
        return masks
    for error, mask, (_, slots) in zip(errors, masks, copies, strict=True):
        if error is not None:
            logger.error("copy of %d tokens failed: %s", len(slots), error)
            wrong = getattr(error, "host_tokens", None)
            mask |= 1 if wrong is None else torch.isin(slots, torch.as_tensor(wrong)).to(torch.uint8)
    return list(agree(torch.cat(masks)).split([len(mask) for mask in masks]))


def seconds(ack: Any) -> float | None:
    """What a copy took where it ran; None where that is not measured, or it failed."""
    if not ack.timing_enabled or getattr(ack.finish_event, "error", None) is not None:
        return None
    return float(ack.start_event.elapsed_time(ack.finish_event)) / 1000.0
