"""The prompts of a request's body: how many there are, and whether their token ids exist.

Owns nothing else of a request. Invariant: no id that is not in the model's vocabulary passes. SGLang 0.5.23 looks it
up in the embedding without asking, and the scheduler ends, with every stream in it.
"""

from __future__ import annotations

from typing import Any

from .rates import BadField


def is_batch(body: dict[str, Any]) -> bool:
    """Whether the request holds several prompts: a list of texts, or a list of lists of token ids."""
    return isinstance(_prompt(body), list) and isinstance(_prompt(body)[0], str | list)


def count(body: dict[str, Any]) -> int:
    return len(_prompt(body)) if is_batch(body) else 1


def check_token_ids(body: dict[str, Any], vocab_size: int) -> None:
    """Raises BadField."""
    for field in ("input_ids", "prompt"):
        given = body.get(field)
        if not isinstance(given, list) or (field == "prompt" and all(isinstance(item, str) for item in given)):
            continue
        bare = [item for item in given if not isinstance(item, list)]
        for row in (bare, *(item for item in given if isinstance(item, list))):
            _check_row(field, row, vocab_size)


def _check_row(field: str, row: list[Any], vocab_size: int) -> None:
    if not row or (set(map(type, row)) == {int} and min(row) >= 0 and max(row) < vocab_size):
        return
    for item in row:
        # Upstream's models make numbers of texts, and whole ones of 5.0.
        if not isinstance(item, int | float) or not 0 <= item < vocab_size:
            raise BadField(field, item, f"token ids from 0 to {vocab_size - 1}")


def _prompt(body: dict[str, Any]) -> Any:
    return next((body[key] for key in ("text", "input_ids", "input_embeds", "prompt") if body.get(key)), None)
