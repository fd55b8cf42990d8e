"""Reports of consumption as they come in: whose they are, whether they may count, what the client is told of each.

Owns the tokens of live streams and the rate limit; knows no HTTP framework and no scheduler. Invariant: only who holds
a stream's token can report for it, and no item of a request decides over another.

    {"acks": [{"id": "...", "token": "...", "consumed_tokens": 12, "index": 0}, ...]}

A token is a random secret of one stream and is forgotten with it: an id that is used again has another one. Whether an
id is unknown or its token wrong is not told apart: else ids of others could be tried out.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .rates import BadField

MAX_ITEMS = 1000  # of one request
MAX_INDEX = 1023
_MAX_TOKENS = 2**53  # what a JSON number of any client can hold
_PER_S = 20.0  # reports of one choice of a stream; more are not refused for good: the next one tells all of them
_BURST = 20.0
ACCEPTED, NOT_FOUND, TOO_MANY = "accepted", "not_found", "rate_limited"


# Of a request's body, for the server's /openapi.json; judged is it by items_of and AckBook.
BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["acks"],
    "additionalProperties": False,
    "properties": {
        "acks": {
            "type": "array",
            "maxItems": MAX_ITEMS,
            "items": {
                "type": "object",
                "required": ["id", "token", "consumed_tokens"],
                "additionalProperties": False,
                "properties": {
                    "id": {"type": "string", "minLength": 1, "maxLength": 1024},
                    "token": {"type": "string", "minLength": 1, "maxLength": 1024},
                    "consumed_tokens": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKENS},
                    "index": {"type": "integer", "minimum": 0, "maximum": MAX_INDEX, "default": 0},
                },
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Ack:
    """One report: of choice `index` of stream `rid`, how many of its tokens the reader has consumed in all."""

    rid: str
    index: int
    consumed_tokens: int


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float


@dataclass(slots=True)
class _Live:
    token: str
    choices: int
    buckets: dict[int, _Bucket]


class AckBook:
    """The streams of this HTTP process that can be reported on."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self.accepted = 0
        self.refused = 0

    def __contains__(self, rid: object) -> bool:
        return rid in self._live

    def __len__(self) -> int:
        return len(self._live)

    def open(self, rid: str, choices: int = 1) -> str:
        """The stream's token. `choices`: how many answers it has (n)."""
        token = secrets.token_urlsafe(24)
        self._live[rid] = _Live(token, choices, {})
        return token

    def close(self, rid: str, token: str) -> None:
        """The stream ended. Not where its id already belongs to another."""
        live = self._live.get(rid)
        if live is not None and live.token == token:
            del self._live[rid]

    def judge(
        self, items: list[dict[str, Any]], now_s: float, *, at: str = "acks[{i}]."
    ) -> tuple[list[Ack], list[dict[str, Any]]]:
        """What counts, and a verdict for each item, in order. Raises BadField where an item is no report at all.

        at: how an error names the place of item i.
        """
        parsed = [_parse(at.format(i=i), item) for i, item in enumerate(items)]
        acks: list[Ack] = []
        verdicts: list[dict[str, Any]] = []
        for ack, token in parsed:
            verdict = self._verdict(ack, token, now_s)
            if verdict == ACCEPTED:
                acks.append(ack)
            verdicts.append({"id": ack.rid, "index": ack.index, "verdict": verdict})
        self.accepted += len(acks)
        self.refused += len(parsed) - len(acks)
        return acks, verdicts

    def _verdict(self, ack: Ack, token: str, now_s: float) -> str:
        live = self._live.get(ack.rid)
        if live is None or ack.index >= live.choices:
            return NOT_FOUND
        if not hmac.compare_digest(live.token.encode(), token.encode("utf-8", "surrogatepass")):
            return NOT_FOUND
        bucket = live.buckets.setdefault(ack.index, _Bucket(_BURST, now_s))
        bucket.left = min(_BURST, bucket.left + _PER_S * max(0.0, now_s - bucket.at_s))
        bucket.at_s = now_s
        if bucket.left < 1.0:
            return TOO_MANY
        bucket.left -= 1.0
        return ACCEPTED


def items_of(body: Any) -> list[dict[str, Any]]:
    """The items of a request's body. Raises BadField."""
    if not isinstance(body, Mapping):
        raise BadField("body", body, 'a JSON object such as {"acks": [{"id", "token", "consumed_tokens"}]}')
    for key in body:
        if key != "acks":
            raise BadField(str(key)[:64], body[key], "the key acks only")
    items = body.get("acks")
    if not isinstance(items, list) or len(items) > MAX_ITEMS:
        shown = items if not isinstance(items, list) else f"{len(items)} items"
        raise BadField("acks", shown, f"a list of up to {MAX_ITEMS} items")
    return items


def _parse(where: str, item: Any) -> tuple[Ack, str]:
    if not isinstance(item, Mapping):
        raise BadField(where.rstrip("."), item, "an object with id, token, consumed_tokens and, for n > 1, index")
    for key in item:
        if key not in ("id", "token", "consumed_tokens", "index"):
            raise BadField(f"{where}{str(key)[:64]}", item[key], "the keys id, token, consumed_tokens and index only")
    for key in ("id", "token"):
        if not isinstance(item.get(key), str) or not item[key] or len(item[key]) > 1024:
            raise BadField(f"{where}{key}", item.get(key), "a text of 1 to 1024 characters")
    consumed = _whole(f"{where}consumed_tokens", item.get("consumed_tokens"), _MAX_TOKENS)
    index = _whole(f"{where}index", item.get("index", 0), MAX_INDEX)
    return Ack(item["id"], index, consumed), item["token"]


def _whole(field: str, value: Any, most: int) -> int:
    # type() and not isinstance(): True is an int.
    if type(value) is not int or not 0 <= value <= most:
        raise BadField(field, value, f"a whole number from 0 to {most}")
    return value
