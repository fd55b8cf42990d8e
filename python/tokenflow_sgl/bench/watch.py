"""What a TokenFlow server tells about itself while it is measured.

Owns the polling of GET /tokenflow/state and the bridge from the server's clock to the client's. Judges nothing.
Invariant: transitions and samples are on the same clock as the client's records, and hold this run only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

POLL_S = 1.0


class WatchFailed(RuntimeError):
    """The state route stopped answering; the message says how."""


class StateWatch:
    """What a TokenFlow server tells about itself during a run (GET /tokenflow/state?since=N)."""

    def __init__(self, session: aiohttp.ClientSession, url: str, first: Mapping[str, Any]) -> None:
        self._session = session
        self._url = url
        self._seq = first["seq"]
        self._counters_before: dict[str, float] | None = None
        self._counters: Mapping[str, float] = first.get("counters", {})
        self._transitions: list[Mapping[str, Any]] = []
        self._offset_s = float("inf")
        self.samples: list[Mapping[str, Any]] = []

    @classmethod
    async def probe(cls, session: aiohttp.ClientSession, url: str) -> StateWatch | None:
        """A watch, or None for a server without that route (stock).

        Raises WatchFailed for any other answer: taken for stock, a TokenFlow server behind a key would get no rates.
        """
        async with session.get(f"{url}/tokenflow/state", params={"since": 0}) as response:
            if response.status == 404:
                return None
            if response.status != 200:
                raise WatchFailed(f"/tokenflow/state: HTTP {response.status}")
            state = await response.json()
        if "seq" not in state:
            raise WatchFailed("/tokenflow/state: several ranks, or a scheduler that is not TokenFlow's")
        return cls(session, url, state)

    async def follow(self, origin_s: float) -> None:
        """Ask every POLL_S seconds until cancelled. The first answer ends the warm-up's share of the counters."""
        while True:
            await self.poll(origin_s)
            await asyncio.sleep(POLL_S)

    async def poll(self, origin_s: float) -> None:
        """Ask once; keep the streams with the client's time, and what happened since the last answer."""
        async with self._session.get(f"{self._url}/tokenflow/state", params={"since": self._seq}) as response:
            if response.status != 200:
                raise WatchFailed(f"/tokenflow/state: HTTP {response.status}")
            state = await response.json()
        at_s = time.perf_counter() - origin_s
        self._seq = state["seq"]
        self._counters = state["counters"]
        # The shortest way from the server's clock to ours is the least delayed answer.
        self._offset_s = min(self._offset_s, at_s - state["now_s"])
        if self._counters_before is None:
            self._counters_before = dict(state["counters"])
        else:
            self._transitions += state["transitions"]
        keep = ("now_s", "streams", "memory", "counters")
        self.samples.append({"at_s": at_s, **{key: state[key] for key in keep if key in state}})

    def counted(self, name: str) -> int:
        """How much a counter grew during the run."""
        before = self._counters_before or {}
        return int(self._counters.get(name, 0) - before.get(name, 0))

    def growth(self) -> dict[str, int]:
        """How much each counter grew during the run."""
        return {name: self.counted(name) for name in self._counters}

    def transitions(self) -> tuple[Mapping[str, Any], ...]:
        """All transitions of the run, at_s in seconds after its start on the client's clock."""
        return tuple({**event, "at_s": event["at_s"] + self._offset_s} for event in self._transitions)
