"""What a client of this package can raise. Owns the messages. Invariant: each says what was asked, or what had come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TokenFlowError(Exception):
    """All of the below."""


class RequestRefused(TokenFlowError):
    """The server took no stream up. `error` is the OpenAI error object, or what came instead of one."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        self.status, self.error = status, dict(error)
        super().__init__(f"refused with {status}: {error.get('message') or dict(error)}")


class StreamError(TokenFlowError):
    """The server ended a stream with an error event. `error` is the OpenAI error object."""

    def __init__(self, error: Any) -> None:
        self.error = dict(error) if isinstance(error, Mapping) else {"message": str(error)}
        super().__init__(f"ended by the server: {self.error.get('message') or self.error}")


class StreamBroken(TokenFlowError):
    """The connection ended before the answer did. `tokens`: what had come, by choice; nothing is asked for again."""

    def __init__(self, stream_id: str | None, tokens: Mapping[int, int], cause: str) -> None:
        self.stream_id, self.tokens, self.cause = stream_id, dict(tokens), cause
        came = ", ".join(f"{count} tokens of choice {index}" for index, count in sorted(tokens.items()))
        super().__init__(f"stream {stream_id or '(unnamed)'} broke: {cause}; received: {came or 'no token'}")


class MissingExtra(TokenFlowError, ImportError):
    """A transport needs a package that is not installed."""


class Cut(Exception):
    """What a source raises when its connection ends too early; the stream makes a StreamBroken of it."""
