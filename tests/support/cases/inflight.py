"""A park while a step is in flight (field report B04): once, twice, and on two consecutive steps."""

from __future__ import annotations

from typing import Any

from support.engine import Engine
from support.play import Ask, ask, play, scripted

INDICES = range(1, 13)
TOKENS = 24
# Tokens at which stream k is parked, for five steps each.
MODES: dict[str, list[int]] = {"once": [0], "twice": [0, 6], "consecutive": [0, 1], "same token": [0, 0]}


def _asks() -> list[Ask]:
    return [ask(f"k{k}", 20 + 3 * k, TOKENS, return_logprob=True, top_logprobs_num=3) for k in INDICES]


def park_in_flight(engine: Engine) -> dict[str, Any]:
    report: dict[str, Any] = {"solo": play(engine, _asks())}
    for mode, offsets in MODES.items():
        script = [(f"k{k}", k + offset, 5) for k in INDICES for offset in offsets]
        report[mode] = play(engine, _asks(), scripted(*script))
    return report


def alone(engine: Engine) -> dict[str, Any]:
    """The oracle above is a batch: is it what each of its streams says when it is alone?"""
    return {"one by one": [play(engine, [a])["streams"][a["rid"]]["tokens"] for a in _asks()]}
