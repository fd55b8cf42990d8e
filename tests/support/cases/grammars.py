"""Structured output parked at every token (field report B10)."""

from __future__ import annotations

import json
from typing import Any

from support.engine import Engine
from support.play import ask, play, scripted, tokenflow

INDICES = range(1, 61)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 12},
        "inner": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 160, "maxLength": 180}, "flag": {"type": "boolean"}},
            "required": ["text", "flag"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["one", "two"]},
    },
    "required": ["name", "inner", "kind"],
    "additionalProperties": False,
}
REGEX = "([0-9][a-z]){40} (ab|cd){20}"


def _asks(kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    return [ask(f"{kind}-{i}", 16 + i % 20, 200, ignore_eos=False, **options) for i in INDICES]


def _every_index(engine: Engine, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Stream i is parked at its token i, for three steps."""
    script = [(f"{kind}-{i}", i, 3) for i in INDICES]
    solo = play(engine, _asks(kind, options))
    parked = play(engine, _asks(kind, options), scripted(*script))
    return {"solo": solo, "parked": parked, "texts": _texts(engine, parked)}


def _texts(engine: Engine, report: dict[str, Any]) -> dict[str, str]:
    decode = engine.scheduler.tokenizer.decode
    return {rid: decode(s["tokens"], skip_special_tokens=True) for rid, s in report["streams"].items()}


def json_schema(engine: Engine) -> dict[str, Any]:
    return _every_index(engine, "json", {"json_schema": json.dumps(SCHEMA)})


def regex(engine: Engine) -> dict[str, Any]:
    return _every_index(engine, "regex", {"regex": REGEX})


def stop_token_inside(engine: Engine) -> dict[str, Any]:
    """The answer ends at a stop token in the middle of what the grammar asks for."""
    options = {"regex": REGEX}
    first = play(engine, _asks("stop", options))["streams"]["stop-1"]["tokens"]
    stop = next(t for i, t in enumerate(first) if i >= 25 and t not in first[:i])
    return {**_every_index(engine, "stop", {**options, "stop_token_ids": [stop]}), "stop": stop}


def first_use_of_a_grammar(engine: Engine) -> dict[str, Any]:
    """Upstream queues a request whose grammar was compiled just now while it forms a batch, and admits it in it."""
    policy = tokenflow(publish_below=1.0, publish_interval_tokens=16, publish_share=1.0)  # the model is quick
    return play(engine, [ask("fresh", 20, 120, ignore_eos=False, regex="([a-f][0-9]){40}")], policy)
