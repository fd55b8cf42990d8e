"""Other policies on the same seam: the engine's own admission, and scripted parks for tests.

Owns nothing of TokenFlow's ranking. Invariant: `fcfs` wishes for nothing, so the engine behaves as stock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .driver import HOLD_NOTHING
from .types import Applied, EngineView, Event, Finished, Phase, Plan, Rid


class Fcfs:
    """SGLang's own order and admission; never parks."""

    def observe(self, event: Event) -> None:
        return None

    def plan(self, view: EngineView) -> Plan:
        return HOLD_NOTHING


@dataclass(frozen=True, slots=True)
class ScriptedPark:
    """Park `rid` as soon as it has `at_token` output tokens; let it return after `steps` more steps.

    `rid` may end in `*` and then names every request that begins with what stands before it.
    """

    rid: Rid
    at_token: int
    steps: int

    def matches(self, rid: Rid) -> bool:
        return rid.startswith(self.rid[:-1]) if self.rid.endswith("*") else rid == self.rid


class Scripted:
    """Parks what the script says, when it says; admits everyone else in arrival order, at once."""

    def __init__(self, script: Iterable[ScriptedPark], *, publish_interval_tokens: int = 64) -> None:
        self.script = tuple(script)
        self.publish_interval_tokens = publish_interval_tokens
        self.step = 0
        self.done: set[tuple[int, Rid]] = set()
        self.returns_at: dict[Rid, int] = {}
        self.planned: Plan = HOLD_NOTHING

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Scripted:
        """From JSON: {"parks": [{"rid": "a*", "at_token": 10, "steps": 5}, ...], "publish_interval_tokens": 64}.

        Raises ValueError for anything else.
        """
        try:
            parks = [ScriptedPark(str(p["rid"]), int(p["at_token"]), int(p["steps"])) for p in values["parks"]]
            return cls(parks, publish_interval_tokens=int(values.get("publish_interval_tokens", 64)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            valid = '{"parks": [{"rid": "a*", "at_token": 10, "steps": 5}, ...], "publish_interval_tokens": 64}'
            raise ValueError(f"script: {error!r}; valid is {valid}") from error

    def observe(self, event: Event) -> None:
        if isinstance(event, Applied):
            self.step += 1
            for rid in event.parked:
                # The park is done only when the engine says so: a refused one is wished for again.
                entry = self._pending(rid)
                if entry is not None:
                    self.done.add((entry, rid))
                    self.returns_at[rid] = self.step + self.script[entry].steps
            for rid, _, _ in event.admitted:
                self.returns_at.pop(rid, None)
        elif isinstance(event, Finished):
            self.returns_at.pop(event.rid, None)

    def _pending(self, rid: Rid) -> int | None:
        """The script entry due next for `rid`, by token."""
        entries = [i for i, p in enumerate(self.script) if p.matches(rid) and (i, rid) not in self.done]
        return min(entries, key=lambda i: self.script[i].at_token, default=None)

    def plan(self, view: EngineView) -> Plan:
        park: list[Rid] = []
        publish: list[tuple[Rid, int]] = []
        load: list[Rid] = []
        admit: list[Rid] = []
        can_load = view.load_slots > 0 and view.host_ok
        for r in view.requests():
            if r.phase is Phase.RUNNING and r.output_tokens > 0:
                entry = self._pending(r.rid)
                if entry is not None and r.preemptible and r.output_tokens >= self.script[entry].at_token:
                    park.append(r.rid)
                elif r.context_tokens - 1 - r.published_tokens >= self.publish_interval_tokens:
                    publish.append((r.rid, r.context_tokens - 1))
            elif r.phase in (Phase.WAITING, Phase.PARKED) and self.step >= self.returns_at.get(r.rid, 0):
                (load if r.host_hit_tokens and can_load else admit).append(r.rid)
        return Plan(
            park=tuple(park),
            publish=tuple(publish),
            load=tuple(load),
            admit=tuple(admit),
            reserve_tokens=view.page_tokens * view.running,
        )
