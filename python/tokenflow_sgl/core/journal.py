"""The record of every decision: events seen, views looked at, plans made; and the replay that must agree.

The one part of core that touches a file. Invariant: replaying a journal through the same policy gives the same plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from . import types as t
from .types import EngineView, Event, Phase, Plan, Policy, RequestView

_EVENTS: dict[str, type] = {
    c.__name__: c for c in (t.Arrived, t.Emitted, t.Visible, t.Reported, t.Halted, t.Finished, t.Tick, t.Applied)
}
_ENUMS: dict[str, type[Enum]] = {"phase": Phase, "reader": t.ReaderClass}
_NOTHING = Plan()
_VERSION = 2  # of what crosses the seam
_VIEW_FIELDS = [f.name for f in fields(EngineView) if f.name not in ("build", "built")]


def _plain(record: Any) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: v.value if isinstance(v, Enum) else v for k, v in values.items()}


def _tuples(value: Any) -> Any:
    """JSON has lists only; events and plans hold tuples."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _restore(kind: type, values: dict[str, Any]) -> Any:
    restored = {k: _ENUMS[k](v) if k in _ENUMS else _tuples(v) for k, v in values.items()}
    return kind(**restored)


class Journal:
    """Appends one JSON line a step. Steps in which nothing happened are left out.

    The first line is the header: policy name and settings, enough to rebuild the policy.
    """

    def __init__(self, stream: TextIO, header: dict[str, Any]) -> None:
        self._stream = stream
        self._write({"journal": _VERSION, **header})

    @classmethod
    def open(cls, path: str | Path, header: dict[str, Any]) -> Journal:
        return cls(Path(path).open("w", encoding="utf-8"), header)

    def __call__(self, events: Sequence[Event], view: EngineView, plan: Plan) -> None:
        if not events and view.built is None and plan == _NOTHING:
            return
        record = {
            "events": [[type(e).__name__, _plain(e)] for e in events],
            "view": {name: getattr(view, name) for name in _VIEW_FIELDS},
            "requests": None if view.built is None else [_plain(r) for r in view.built],
            "plan": {k: v for k, v in _plain(plan).items() if k != "why"},
        }
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._stream.write(json.dumps(record, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read(path: str | Path) -> tuple[dict[str, Any], Iterator[tuple[list[Event], EngineView, Plan]]]:
    """The header, and the steps one by one. A torn last line (the server was killed) ends the journal."""
    lines = Path(path).open(encoding="utf-8")  # noqa: SIM115 (steps() reads and closes it)
    header = json.loads(next(lines, "null"))
    version = header.get("journal") if isinstance(header, dict) else None
    if version != _VERSION:
        lines.close()
        if isinstance(version, int):
            raise ValueError(f"{path}: a journal of version {version}; this release reads version {_VERSION} only")
        raise ValueError(f"{path}: not a TokenFlow journal (the first line must be its header)")

    def steps() -> Iterator[tuple[list[Event], EngineView, Plan]]:
        with lines:
            for line in lines:
                if not line.endswith("\n"):
                    return
                yield _step(json.loads(line))

    return header, steps()


def _step(record: dict[str, Any]) -> tuple[list[Event], EngineView, Plan]:
    events = [_restore(_EVENTS[name], values) for name, values in record["events"]]
    requests = record["requests"]
    built = None if requests is None else [_restore(RequestView, r) for r in requests]

    def build() -> Sequence[RequestView]:
        raise LookupError("the recorded policy did not look at the requests in this step, the replayed one does")

    return events, EngineView(**record["view"], build=build, built=built), _restore(Plan, record["plan"])


def replay(path: str | Path, make_policy: Callable[[dict[str, Any]], Policy]) -> tuple[int, str | None]:
    """Steps that agreed, and the first difference or None.

    `make_policy` builds the policy from the journal's header.
    """
    header, steps = read(path)
    policy = make_policy(header)
    agreed = 0
    for events, view, recorded in steps:
        for event in events:
            policy.observe(event)
        try:
            plan = policy.plan(view)
        except LookupError as error:
            return agreed, f"step {agreed}: {error}"
        difference = _difference(recorded, plan)
        if difference:
            return agreed, f"step {agreed} at {view.now_s:.6f} s: {difference}"
        agreed += 1
    return agreed, None


def _difference(recorded: Plan, plan: Plan) -> str | None:
    for f in fields(Plan):
        if f.name != "why" and getattr(recorded, f.name) != getattr(plan, f.name):
            return f"{f.name}: recorded {getattr(recorded, f.name)!r}, replayed {getattr(plan, f.name)!r}"
    return None
