"""One request as the simulated engine holds it.

Owns its counts and phase. Decides nothing. Invariant: while it decodes, its counts follow from the engine's number of
decode steps, so that a step costs the same however many streams decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..core.types import ReaderClass, RequestView, Rid
from ..workload.arrivals import Request
from .tree import Node


@dataclass(slots=True, eq=False)
class Load:
    """One shared copy back to the device."""

    reqs: list[SimRequest]
    tokens: int


@dataclass(slots=True, eq=False)
class SimRequest:
    """`path` ends with the node of its own output. Pages in the tree are the tree's, the rest `private`."""

    request: Request
    rid: Rid
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    arrived_s: float
    path: list[Node]
    reader: ReaderClass
    priority: int = 0
    output_tokens: int = 0  # as of `joined_ct`, while it decodes
    joined_ct: int | None = None  # decode steps made when it joined those who decode
    kv_tokens: int = 0  # written, while it prefills
    target_tokens: int = 0  # context that the prefill under way has to reach
    in_tree_pages: int = 0  # of its own KV, while it holds pages
    loading: Load | None = None
    loading_pages: int = 0
    load_until_pages: int = 0  # of its path, on the device when the load is done
    held_pages: int = 0  # loaded back and kept for it
    view: RequestView | None = None  # while it waits, and nothing on its path changed
    derived: tuple[int, int, int] | None = None  # tokens: freed without its tail, backed, copying; likewise
    pinned: bool = False  # parked: its host copies stay
    admitted_seq: int = 0
    finished: bool = False
    spans: list[float | tuple[int, int]] = field(default_factory=list)  # times of its tokens: one, or a run of steps

    @property
    def read_rate_tok_s(self) -> float | None:
        return self.request.read_rate_tok_s if math.isfinite(self.request.read_rate_tok_s) else None

    def output_at(self, decodes: int) -> int:
        return self.output_tokens if self.joined_ct is None else self.output_tokens + decodes - self.joined_ct

    def kv_at(self, decodes: int) -> int:
        """The newest token's KV is written by the step that reads it."""
        return self.prompt_tokens + self.output_at(decodes) - 1
