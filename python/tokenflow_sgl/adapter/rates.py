"""Read rates: what a client may declare, how it travels to the scheduler, and what the scheduler makes of it.

Owns the rules of the header, of the body field and of `custom_params["tokenflow"]`; knows no HTTP framework and no
SGLang. Invariant: a value that passed here is a finite rate within bounds, or "inf"; nothing else reaches a scheduler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.listening import MAX_RATE_TOK_S, MIN_RATE_TOK_S

HEADER = "x-tokenflow-read-rate"
BODY_FIELD = "tokenflow"
PARAMS_KEY = "tokenflow"
VALID_RATE = f'a number of tokens/s from {MIN_RATE_TOK_S:g} to {MAX_RATE_TOK_S:g}, or "inf"'

# ASCII digits only: float() would also take full-width digits, '1_0' and ' 8'.
_NUMBER = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_SHOWN_CHARS = 64


class BadField(ValueError):
    """A value of the client that is refused with 400. `field` is the header or the path of the body field."""

    def __init__(self, field: str, value: Any, valid: str) -> None:
        self.field = field
        try:
            shown = repr(value)
        except RecursionError:  # orjson reads more levels than Python shows
            shown = "JSON nested too deeply"
        if len(shown) > _SHOWN_CHARS:
            shown = shown[:_SHOWN_CHARS] + "..."
        super().__init__(f"{field}: {shown} is not valid; valid is {valid}")


@dataclass(frozen=True, slots=True)
class Declared:
    """What a request says about its reader. `rate_tok_s` None = nothing was said; math.inf = a program."""

    rate_tok_s: float | None
    reader: str  # reader | agent | batch
    withheld: bool = False

    def to_params(self) -> dict[str, Any]:
        """The flat dict that rides in `custom_params["tokenflow"]`; scalars only, as upstream's wire type demands."""
        out: dict[str, Any] = {"class": self.reader, "withheld": self.withheld}
        if self.rate_tok_s is not None:
            out["rate"] = "inf" if math.isinf(self.rate_tok_s) else self.rate_tok_s
        return out


def parent_of(custom_params: Any) -> str | None:
    """The id under which the client knows a request that upstream gave an id of its own (n > 1, lists of prompts)."""
    said = custom_params.get(PARAMS_KEY) if isinstance(custom_params, Mapping) else None
    parent = said.get("parent") if isinstance(said, Mapping) else None
    return parent if isinstance(parent, str) else None


def _in_bounds(field: str, shown: Any, rate: float) -> float:
    # `not <=` and not `<`: NaN fails every comparison and must be refused.
    if not MIN_RATE_TOK_S <= rate <= MAX_RATE_TOK_S:
        raise BadField(field, shown, VALID_RATE)
    return rate


def parse_header(values: Sequence[str]) -> float | None:
    """The rate of all read-rate headers of a request; None if there is none. Raises BadField."""
    rates = set()
    for text in values:
        text = text.strip(" \t")
        if text == "inf":
            rates.add(math.inf)
        elif _NUMBER.fullmatch(text):
            rates.add(_in_bounds(HEADER, text, float(text)))
        else:
            raise BadField(HEADER, text, VALID_RATE)
    if len(rates) > 1:
        raise BadField(HEADER, ", ".join(values), f"one header, or several that agree: {VALID_RATE}")
    return rates.pop() if rates else None


def parse_body_field(value: Any) -> float | None:
    """The rate in the body's `tokenflow` object; None if it names none. Raises BadField."""
    if not isinstance(value, Mapping):
        raise BadField(BODY_FIELD, value, 'an object such as {"read_rate": 8}')
    for key in value:
        if key != "read_rate":
            raise BadField(f"{BODY_FIELD}.{str(key)[:_SHOWN_CHARS]}", value[key], "the key read_rate only")
    if "read_rate" not in value:
        return None
    rate = value["read_rate"]
    field = f"{BODY_FIELD}.read_rate"
    if rate == "inf":
        return math.inf
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise BadField(field, rate, VALID_RATE)
    if isinstance(rate, int) and rate > MAX_RATE_TOK_S:  # float(10**400) overflows
        raise BadField(field, rate, VALID_RATE)
    return _in_bounds(field, rate, float(rate))


def agree(header: float | None, body: float | None) -> float | None:
    """One rate out of both places. Raises BadField when they disagree: guessing would pace the reader wrongly."""
    if header is not None and body is not None and header != body:
        raise BadField(f"{BODY_FIELD}.read_rate", body, f"{header:g}, as the header {HEADER} says, or one of the two")
    return body if header is None else header


def declare(rate_tok_s: float | None, *, stream: bool, withheld: bool) -> Declared | None:
    """What travels to the scheduler; None when there is nothing to say and the default rate applies."""
    if not stream:
        return Declared(rate_tok_s, "batch")
    if rate_tok_s is None:
        return Declared(None, "reader", True) if withheld else None
    return Declared(rate_tok_s, "agent" if math.isinf(rate_tok_s) else "reader", withheld)


def from_custom_params(custom_params: Any, *, stream: bool, default_rate_tok_s: float) -> Declared:
    """The scheduler's reading of a request; never raises.

    Routes without our bridge (and Engine users) can put anything into custom_params: what is not exactly what the
    bridge writes is ignored, and the default rate applies. A request that is not streamed has no reader, whatever
    it says. The result's rate is None only for class batch.
    """
    if not stream:
        return Declared(None, "batch")
    said = custom_params.get(PARAMS_KEY) if isinstance(custom_params, Mapping) else None
    said = said if isinstance(said, Mapping) else {}
    try:
        rate = parse_body_field({"read_rate": said["rate"]}) if "rate" in said else None
    except BadField:
        rate = None
    if rate is not None and math.isinf(rate):
        return Declared(rate, "agent")
    return Declared(default_rate_tok_s if rate is None else rate, "reader", said.get("withheld") is True)
