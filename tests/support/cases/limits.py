"""Limits, stop conditions and usage across a park (field report B12)."""

from __future__ import annotations

from typing import Any

from support.engine import Engine
from support.play import Ask, ask, play, scripted

MAX_NEW = (0, 1, 2, 16)
WHERE = {"1": 1, "last-2": -2, "last-1": -1, "last": 0}  # the token to park at; from the end if not positive
VARIANTS = (
    "plain", "stop string", "stop token", "stop token ignored", "eos", "eos ignored", "min_new_tokens",
    "min_new_tokens and stop token",
)  # fmt: skip
STOP_AT = 7  # index of the first of the two tokens that the stop string spans, and of the stop token


def _variants(engine: Engine, oracle: list[int]) -> dict[str, dict[str, Any]]:
    tokenizer = engine.scheduler.tokenizer
    eos = tokenizer.eos_token_id
    # The end of one token's text and the beginning of the next one's: no single token holds it.
    first, second = (tokenizer.decode([t]) for t in oracle[STOP_AT : STOP_AT + 2])
    likely_eos = {"logit_bias": {str(eos): 1000.0}}
    variants = {
        "plain": {},
        "stop string": {"stop": [first[-1] + second[0]]},
        "stop token": {"ignore_eos": False, "stop_token_ids": [oracle[STOP_AT]]},
        "stop token ignored": {"ignore_eos": True, "stop_token_ids": [oracle[STOP_AT]]},
        "eos": {"ignore_eos": False, **likely_eos},
        "eos ignored": {"ignore_eos": True, **likely_eos},
        "min_new_tokens": {"ignore_eos": False, "min_new_tokens": 8, **likely_eos},
        "min_new_tokens and stop token": {
            "ignore_eos": False,
            "stop_token_ids": [oracle[2]],
            "min_new_tokens": 5,
        },
    }
    assert tuple(variants) == VARIANTS
    return variants


def _prompt_with_clean_text(engine: Engine) -> tuple[str, list[int]]:
    """A prompt whose answer has printable ASCII, not seen before, at the tokens that the stop string spans."""
    tokenizer = engine.scheduler.tokenizer
    asks = [ask(f"seek{i}", 20, max(MAX_NEW)) for i in range(64)]
    seen = play(engine, asks)["streams"]
    for rid, stream in seen.items():
        tokens = stream["tokens"]
        texts = [tokenizer.decode([t]) for t in tokens]
        pair = texts[STOP_AT : STOP_AT + 2]
        if not all(t.isascii() and t.isprintable() and len(t) > 1 for t in pair):
            continue
        stop = pair[0][-1] + pair[1][0]
        before = tokenizer.decode(tokens[: STOP_AT + 1])
        if stop not in before and tokens.index(tokens[STOP_AT]) == STOP_AT and tokens.index(tokens[2]) == 2:
            return rid, tokens
    raise AssertionError("no prompt has clean text at the tokens wanted")


def _ask(key: str, rid: str, max_new: int, options: dict[str, Any]) -> Ask:
    options = dict(options)
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], max_new)
    return ask(key, 20, max_new, same_as=rid, **options)


def limits(engine: Engine) -> dict[str, Any]:
    rid, oracle = _prompt_with_clean_text(engine)
    parks: list[tuple[str, int, int]] = []
    cases: dict[str, dict[str, Any]] = {}
    asks: list[Ask] = []
    for name, options in _variants(engine, oracle).items():
        for max_new in MAX_NEW:
            key = f"{name}/{max_new}"
            cases[f"{key}/solo"] = {"variant": name, "max_new": max_new, "park_at": None}
            asks.append(_ask(f"{key}/solo", rid, max_new, options))
    solo = play(engine, asks)
    asks = []
    for name, options in _variants(engine, oracle).items():
        for max_new in MAX_NEW:
            ended = solo["streams"][f"{name}/{max_new}/solo"]["completion_tokens"]
            for where, offset in WHERE.items():
                at = offset if offset > 0 else ended + offset
                key = f"{name}/{max_new}/{where}"
                cases[key] = {"variant": name, "max_new": max_new, "park_at": at, "ended": ended}
                asks.append(_ask(key, rid, max_new, options))
                if at > 0:
                    parks.append((key, at, 4))
    return {"solo": solo, "parked": play(engine, asks, scripted(*parks)), "cases": cases}
