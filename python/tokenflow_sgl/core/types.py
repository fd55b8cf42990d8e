"""All that crosses the seam between deciding and doing: views, events and the plan.

Owns the vocabulary; decides nothing. Invariant: events and plans are immutable facts and wishes,
views are borrowed and valid for one step only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

Rid = str


class Phase(Enum):
    """Where a request stands. One word per idea; upstream's words differ (see the adapter)."""

    WAITING = "waiting"  # no KV of its own: new, or dropped
    PREFILL = "prefill"  # part of its context computed, first token not out
    RUNNING = "running"  # decodes every step
    PARKED = "parked"  # published pages in the tree, on device or host; the unpublished tail dropped
    LOADING = "loading"  # its pages are on their way back from the host: not admissible yet


class ReaderClass(Enum):
    """Who takes the tokens. Only a reader has a buffer that can run dry."""

    READER = "reader"  # paces itself at a read rate
    AGENT = "agent"  # a program that reads as fast as it can (rate `inf`)
    BATCH = "batch"  # nobody watches: non-streaming, or reasoning that is withheld


@dataclass(slots=True)
class RequestView:
    """One request as the engine holds it now. All token counts; 0 <= published <= context."""

    rid: Rid
    phase: Phase
    context_tokens: int  # KV it needs in order to decode
    published_tokens: int  # of these, in the radix tree; the rest is the tail
    copying_tokens: int  # of these, copies to the host still open; 0 = parking frees at once
    backed_tokens: int  # of these, on the host with no copy open: not lost when the device evicts them
    frees_tokens: int  # usable in this very step if parked now: unshared, no open copy on its path, plus the tail
    cached_tokens: int  # device hit if admitted now (waiting, parked)
    host_hit_tokens: int  # host hit beyond it: costs a copy, not a prefill; 0 while the host tier cannot be trusted
    held_tokens: int  # of the device hit, loaded back for it and kept until it comes in
    takes_tokens: int  # free tokens its admission takes: context less what running streams hold of its prefix
    output_tokens: int
    max_output_tokens: int  # the limit given; the true length is never shown to a policy
    preemptible: bool  # False for what the engine cannot park safely
    priority: int = 0  # the client's own; higher first, inside its class


@dataclass(slots=True)
class EngineView:
    """The engine at the top of a step. `requests()` is built on demand: a steady step never asks.

    `waiting` counts requests without KV of their own, new and parked.
    """

    now_s: float  # rank 0's clock, carried by Tick
    waiting: int
    running: int
    device_free_tokens: int  # free or evictable at once
    device_total_tokens: int
    host_free_tokens: int  # free at once; the executor keeps some free while finished prefixes can go
    host_total_tokens: int
    host_ok: bool  # False after failures in a row: no copy in either direction until it is tried again
    storing_tokens: int  # of copies to the host that are open
    load_slots: int  # shared transfers back that may start now; 0 = wait
    max_running: int
    page_tokens: int
    promised_tokens: int  # what prompts under way still have to compute, and will take
    build: Callable[[], Sequence[RequestView]]
    built: Sequence[RequestView] | None = None  # what the policy looked at, for the journal; None if it never asked

    def requests(self) -> Sequence[RequestView]:
        if self.built is None:
            self.built = self.build()
        return self.built


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request entered the waiting queue. `read_rate_tok_s` is its reader's; None for AGENT and BATCH."""

    rid: Rid
    prompt_tokens: int
    max_output_tokens: int
    reader: ReaderClass
    read_rate_tok_s: float | None
    withheld: bool = False  # reasoning is not shown: batch until Visible


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens handed to the clients' streams by one step; parallel tuples, `output_tokens` cumulative."""

    rids: tuple[Rid, ...]
    output_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Visible:
    """The first token that the client may see has left; `output_tokens` were withheld before it."""

    rid: Rid
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reported:
    """The client says how many tokens it has consumed: a hint from a stranger."""

    rid: Rid
    consumed_tokens: int


@dataclass(frozen=True, slots=True)
class Halted:
    """The client takes nothing off its connection, or does so again: what is sent meanwhile nobody reads."""

    rid: Rid
    halted: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The request left the engine, by its end, an abort or a refusal."""

    rid: Rid


@dataclass(frozen=True, slots=True)
class Tick:
    """Rank 0's clock and timings, and the only event that carries time: what happened since the tick before is
    taken to have happened at this one. Without it clocks and learned costs would differ between ranks.

    `last_step_s` is the time since the tick before, None after an idle spell. The others hold (tokens, seconds) of
    what finished since the tick before: copies to the host, copies back, and calls of publish on the engine's own
    thread, whose cost grows with the stream's whole context and not with what is new.
    """

    now_s: float
    last_step_s: float | None = None
    stores_s: tuple[tuple[int, float], ...] = ()
    loads_s: tuple[tuple[int, float], ...] = ()
    publishes_s: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """What the last plan came to; an event of the NEXT step.

    `admitted` holds (rid, tokens computed in this step, tokens loaded from the host).
    `prefill_tokens` and `decoding` describe the batch just formed; `timed` is the same of the batch whose time the next
    Tick carries, where that is another one: an overlap loop waits for the batch before.
    """

    admitted: tuple[tuple[Rid, int, int], ...] = ()
    parked: tuple[Rid, ...] = ()  # also those that the engine itself retracted
    published: tuple[tuple[Rid, int], ...] = ()  # (rid, up to token); 0 = refused
    refused: tuple[Rid, ...] = ()  # admissions that did not fit
    loaded: tuple[tuple[Rid, int], ...] = ()  # (rid, tokens): back on the device and held for it
    unloaded: tuple[Rid, ...] = ()  # loads that failed, came too late, or could not start: recompute
    prefill_tokens: int = 0
    decoding: int = 0
    timed: tuple[int, int] | None = None

    @property
    def timed_batch(self) -> tuple[int, int]:
        """Prefill tokens and decoding streams of the batch whose time the next Tick carries."""
        return (self.prefill_tokens, self.decoding) if self.timed is None else self.timed


Event = Arrived | Emitted | Visible | Reported | Halted | Finished | Tick | Applied


@dataclass(frozen=True, slots=True)
class Plan:
    """A wish. What was refused shows as an unchanged phase in the next view."""

    park: tuple[Rid, ...] = ()
    publish: tuple[tuple[Rid, int], ...] = ()  # (rid, up to token): insert in the tree, which starts the copy
    load: tuple[Rid, ...] = ()  # copy back ahead of admission, all in one transfer
    admit: tuple[Rid, ...] | None = (
        None  # new and returning, in ONE order; who is not named is held. None = the engine's own
    )
    reserve_tokens: int | None = None  # growth kept free for all running and admitted; None = the engine's estimate
    prefill_tokens: int | None = None  # cap for this step; 0 = decode now, prefill later
    why: Mapping[str, float] = field(default_factory=dict)  # for metrics and the page; no driver reads it


class Policy(Protocol):
    """Decides. `observe` is the only method that changes it; `plan` is pure."""

    def observe(self, event: Event) -> None: ...

    def plan(self, view: EngineView) -> Plan: ...


class Executor(Protocol):
    """Does. The engine, real or simulated. A verb that returns False refused and changed nothing."""

    def view(self) -> EngineView: ...

    def park(self, rid: Rid) -> bool: ...

    def publish(self, rid: Rid, up_to: int) -> int: ...

    def load(self, rids: Sequence[Rid]) -> Sequence[Rid]: ...  # those that started

    def admit(self, order: Sequence[Rid] | None, *, reserve_tokens: int | None, prefill_tokens: int | None) -> None: ...
