"""What the server is told of consumption: which counts, when, and in one request for all streams of a client.

Owns the counts that were taken and not told yet, and the pause between two reports; sends nothing. Invariant: a count
is told once, and a reader that takes nothing is silent: the server knows from silence that it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REQUEST_ID_HEADER, ACK_TOKEN_HEADER = "x-tokenflow-request-id", "x-tokenflow-ack-token"
PATH = "/tokenflow/ack"
INTERVAL_S = 0.5
MAX_ITEMS = 1000  # the server takes no more in one request
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Count:
    """Of choice `index` of the stream `key`, how many tokens its reader has consumed in all."""

    key: Any
    index: int
    consumed_tokens: int


class Reports:
    """`key`: whatever names a stream to who sends the reports; hashable."""

    def __init__(self) -> None:
        self._open: set[Any] = set()
        self._untold: dict[tuple[Any, int], int] = {}
        self._sent_s = self._took_s = -math.inf

    @property
    def open_streams(self) -> int:
        return len(self._open)

    def open(self, key: Any) -> None:
        self._open.add(key)

    def close(self, key: Any) -> None:
        """Its stream ended, or the server knows it no more."""
        self._open.discard(key)
        self._untold = {at: count for at, count in self._untold.items() if at[0] != key}

    def took(self, key: Any, index: int, consumed_tokens: int, now_s: float) -> None:
        if key in self._open:
            self._untold[key, index] = consumed_tokens
            self._took_s = now_s

    def next_s(self) -> float:
        """When to send; infinite while there is nothing to tell.

        As something is taken, so that count and time belong together: a reader of 8 tok/s, told of at another time,
        would look like one of 6 or of 10. After twice the interval without it, what is left is told all the same.
        """
        if not self._untold:
            return math.inf
        return self._took_s if self._took_s - self._sent_s >= INTERVAL_S else self._sent_s + 2 * INTERVAL_S

    def take(self, now_s: float) -> list[Count]:
        """All that is to be told; it counts as told."""
        self._sent_s = now_s
        counts = [Count(key, index, count) for (key, index), count in self._untold.items()]
        self._untold.clear()
        return counts


def bodies_of(counts: Sequence[Count]) -> list[dict[str, Any]]:
    """Bodies of POST /tokenflow/ack; the keys of the counts are (id, token)."""
    items = [
        {"id": count.key[0], "token": count.key[1], "consumed_tokens": count.consumed_tokens, "index": count.index}
        for count in counts
    ]
    return [{"acks": items[i : i + MAX_ITEMS]} for i in range(0, len(items), MAX_ITEMS)]


def key_of(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """None from a server that takes no reports."""
    rid, token = headers.get(REQUEST_ID_HEADER), headers.get(ACK_TOKEN_HEADER)
    return (rid, token) if rid and token else None
