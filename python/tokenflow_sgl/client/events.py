"""Server-sent events out of the network's reads, and what a chunk of an OpenAI stream says.

Owns both formats; knows no network and no time. Invariant: a read is no event, and an event is no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Cut, StreamError

DONE = b"[DONE]"


class EventSplitter:
    """Cuts network reads into the data of server-sent events: one event may come in many reads, and many in one.

    Lines end with LF or CRLF only: str.splitlines() would also cut at U+2028, which an answer may hold.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._data: list[bytes] = []

    def feed(self, read: bytes) -> list[bytes]:
        """Data of the events that this read completes; comments and other fields are dropped."""
        self._pending += read
        events: list[bytes] = []
        if b"\n" not in read:
            return events
        *lines, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        for raw in lines:
            line = bytes(raw).removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


@dataclass(frozen=True, slots=True)
class Delta:
    """What one chunk adds. index None: it is of no choice (the usage at the end).

    total_tokens: of its choice so far, None where the server does not count. reasoning: thinking that is streamed.
    content: it carries something that a reader sees, or a tool call.
    """

    index: int | None
    text: str
    reasoning: str
    content: bool
    total_tokens: int | None
    finish_reason: str | None


def delta_of(chunk: Any) -> Delta:
    """Raises StreamError for an error event, Cut for what is no chunk."""
    if not isinstance(chunk, Mapping):
        raise Cut(f"an event is no JSON object: {str(chunk)[:80]!r}")
    if chunk.get("error"):
        raise StreamError(chunk["error"])
    total = (chunk.get("usage") or {}).get("completion_tokens")
    choices = chunk.get("choices") or []
    if len(choices) > 1:
        raise Cut(f"an event holds {len(choices)} choices, valid is one")
    if not choices:
        return Delta(None, "", "", False, None, None)
    choice = choices[0]
    said = choice.get("delta") or choice  # a completion has its text beside the index
    text = said.get("content") or said.get("text") or ""
    reasoning = said.get("reasoning_content") or ""
    content = bool(text or reasoning or said.get("tool_calls"))
    return Delta(choice.get("index") or 0, text, reasoning, content, total, choice.get("finish_reason"))
