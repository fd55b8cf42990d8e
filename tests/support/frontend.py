"""Programs in SGLang's frontend language, as its users write them: they know nothing of TokenFlow.

Owns the programs; judges nothing. Invariant: each answers the same on every server that decodes greedily.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sglang as sgl

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"pages": {"type": "integer"}, "kind": {"enum": ["book", "letter"]}},
        "required": ["pages", "kind"],
        "additionalProperties": False,
    }
)
GREEDY = {"temperature": 0, "ignore_eos": True}


@sgl.function
def _gen(s: Any, question: str) -> None:
    s += "Question: " + question + "\nAnswer: "
    s += sgl.gen("answer", max_tokens=40, **GREEDY)
    s += "\nIn short: "
    s += sgl.gen("short", max_tokens=12, stop="\n", **GREEDY)


@sgl.function
def _chat(s: Any) -> None:
    s += sgl.system("You help.")
    s += sgl.user("Name a stone.")
    s += sgl.assistant(sgl.gen("stone", max_tokens=16, **GREEDY))
    s += sgl.user("Another.")
    s += sgl.assistant(sgl.gen("another", max_tokens=16, **GREEDY))


@sgl.function
def _select(s: Any) -> None:
    s += "To find the way I need "
    s += sgl.select("tool", choices=["a calculator", "a search engine", "a map"], temperature=0)
    s += ". It says " + sgl.gen("use", max_tokens=16, **GREEDY)


@sgl.function
def _fork_join(s: Any) -> None:
    s += "Tips for staying well.\n"
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"Tip {i + 1}: "
        fork += sgl.gen("tip", max_tokens=24, **GREEDY)
    tips = [f"Tip {i + 1}: " + fork["tip"] for i, fork in enumerate(forks)]
    forks.join()
    s.set_var("tips", "\n".join(tips))
    s += "\n".join(tips) + "\nIn summary, " + sgl.gen("summary", max_tokens=24, **GREEDY)


@sgl.function
def _regex(s: Any) -> None:
    s += "The code is " + sgl.gen("code", max_tokens=32, regex=r"[0-9]{3}-[a-f]{4}", temperature=0)


@sgl.function
def _json_schema(s: Any) -> None:
    s += "As JSON: " + sgl.gen("reply", max_tokens=64, json_schema=SCHEMA, temperature=0)


@sgl.function
def _typed(s: Any) -> None:
    s += "How many? " + sgl.gen("count", max_tokens=8, dtype=int, temperature=0)


@sgl.function
def _long(s: Any, i: int) -> None:
    s += f"Story number {i}: " + sgl.gen("story", max_tokens=300, **GREEDY)


def _stream() -> dict[str, str]:
    state = _gen.run(question="What flows?", stream=True)
    pieces = list(state.text_iter(var_name="answer"))
    return {"streamed": "".join(pieces), "whole": state["answer"], "pieces": str(len(pieces))}


def _vars(program: Any, *names: str, **arguments: Any) -> dict[str, str]:
    state = program.run(**arguments)
    return {name: state[name] for name in names}


def _batch() -> dict[str, str]:
    states = _long.run_batch([{"i": i} for i in range(12)], num_threads=12)
    return {str(i): state["story"] for i, state in enumerate(states)}


PROGRAMS: dict[str, Callable[[], dict[str, str]]] = {
    "gen": lambda: _vars(_gen, "answer", "short", question="What is a page?"),
    "chat": lambda: _vars(_chat, "stone", "another"),
    "select": lambda: _vars(_select, "tool", "use"),
    "fork_join": lambda: _vars(_fork_join, "tips", "summary"),
    "regex": lambda: _vars(_regex, "code"),
    "json_schema": lambda: _vars(_json_schema, "reply"),
    "typed": lambda: _vars(_typed, "count"),
    "batch": _batch,
    "stream": _stream,
}


def run_program(name: str) -> dict[str, str]:
    """The variables of a program by name, on SGLang's default backend."""
    return PROGRAMS[name]()
