"""Groups of requests as a scenario describes them: when they come, how long they are, who reads them.

Owns the format of [[group]] and its checks. Draws nothing (arrivals.py does). Invariant: a group that exists can be
drawn: every field that its arrival needs is there, and its trace has been read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tokenflow_sgl.workload.lengths import Lengths, Lognormal, Normal, Range, bounds
from tokenflow_sgl.workload.tables import RANGE, Table
from tokenflow_sgl.workload.traces import TRACES_VARIABLE, TraceRow, find_trace, read_trace

MOST_REQUESTS = 10_000_000  # of a group, expected: beyond it nothing would come of a run but waiting
MOST_S = 1e7
LEAST_RATE, MOST_RATE = 1e-6, 1e6  # a second
ARRIVALS = ("uniform", "poisson", "onoff", "trace")
READERS = ("reader", "agent", "batch")
_LENGTHS = f"{RANGE}, or {{ normal = [mean, sd], clip = [low, high] }}, or {{ lognormal = [mu, sigma], clip = .. }}"


@dataclass(frozen=True, slots=True)
class ReadRate:
    """A share of a group's readers: `weight` parts of them read at `tok_s`; infinite = a program."""

    tok_s: float
    weight: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace file. scale: what its times are multiplied with, 0.5 = twice as fast."""

    path: Path
    scale: float
    rows: tuple[TraceRow, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """Each arrival is a conversation. turns: how many, drawn uniformly; think_s: mean of the exponential time from
    the last token read to the next question. shared_prefixes: how many system prompts there are, the k-th drawn 1/k as
    often as the first; shared_tokens: their lengths. 0 and None: no system prompt.
    """

    turns: Range
    think_s: float
    shared_prefixes: int
    shared_tokens: Range | None


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one kind. Times in seconds, lengths in tokens; None for what its arrival does not use.

    arrival "uniform": count requests at random times in [start_s, start_s + over_s].
    arrival "poisson": exponential gaps at per_s requests a second from start_s on, count of them or for for_s.
    arrival "onoff": for for_s, spells of exponential length with mean on_mean_s, poisson at per_s in them, and between
    them silences of mean off_mean_s; a spell comes first.
    arrival "trace": times and lengths of a trace's rows, from start_s on; prompt_tokens and answer_tokens are None.
    max_tokens: the limit that every client asks for; None = its answer's length times the factor of the run.
    reader: "reader", "agent" (a program: as fast as it can) or "batch" (nobody watches).
    """

    name: str
    count: int | None
    start_s: float
    arrival: str
    over_s: float | None
    per_s: float | None
    prompt_tokens: Lengths | None
    answer_tokens: Lengths | None
    read_rates: tuple[ReadRate, ...]
    for_s: float | None = None
    on_mean_s: float | None = None
    off_mean_s: float | None = None
    trace: Trace | None = None
    session: Session | None = None
    max_tokens: int | None = None
    reader: str = "reader"


def parse_group(table: Table, *, beside: Path | None) -> Group:
    """A group from its table; traces are looked up in `beside` first. Raises ScenarioError."""
    arrival = table.choice("arrival", ARRIVALS)
    name = table.text("name")
    count, for_s = _how_many(table, arrival)
    start_s = table.number("start_s", at_least=0.0, at_most=MOST_S)
    over_s = table.number("over_s", at_least=0.0, at_most=MOST_S) if arrival == "uniform" else None
    per_s = table.number("per_s", at_least=LEAST_RATE, at_most=MOST_RATE) if arrival in ("poisson", "onoff") else None
    traced = arrival == "trace"
    reader = table.choice("class", READERS) if table.has("class") else "reader"
    group = Group(
        name=name,
        count=count,
        start_s=start_s,
        arrival=arrival,
        over_s=over_s,
        per_s=per_s,
        prompt_tokens=None if traced else _lengths(table, "prompt_tokens"),
        answer_tokens=None if traced else _lengths(table, "answer_tokens"),
        read_rates=_read_rates(table, reader),
        for_s=for_s,
        on_mean_s=_spell(table, "on_mean_s") if arrival == "onoff" else None,
        off_mean_s=_spell(table, "off_mean_s") if arrival == "onoff" else None,
        trace=_trace(table, beside) if traced else None,
        session=_session(table.table("session")) if not traced and table.has("session") else None,
        max_tokens=table.integer("max_tokens", at_least=1) if table.has("max_tokens") else None,
        reader=reader,
    )
    _check_limit(table, group)
    _check_number(table, group)
    table.done()
    return group


def _how_many(table: Table, arrival: str) -> tuple[int | None, float | None]:
    """(count, for_s): what ends the arrivals."""
    if arrival == "trace":
        return None, None
    ends = table.one_of("count", "for_s") if arrival == "poisson" else "count" if arrival == "uniform" else "for_s"
    if ends == "count":
        return table.integer("count", at_least=1, at_most=MOST_REQUESTS), None
    return None, table.number("for_s", above=0.0, at_most=MOST_S)


def _spell(table: Table, key: str) -> float:
    return table.number(key, at_least=1 / MOST_RATE, at_most=MOST_S)


def _lengths(table: Table, key: str) -> Lengths:
    if not table.holds_table(key):
        return table.token_range(key, valid=_LENGTHS)
    inner = table.table(key)
    shape = inner.one_of("normal", "lognormal")
    centre, spread = inner.spread(shape)
    clip = inner.token_range("clip")
    inner.done()
    return Normal(centre, spread, clip) if shape == "normal" else Lognormal(centre, spread, clip)


def _read_rates(table: Table, reader: str) -> tuple[ReadRate, ...]:
    if reader != "reader" and not table.has("read_rate"):
        return (ReadRate(math.inf, 1),)
    return tuple(_read_rate(rate, reader) for rate in table.tables("read_rate"))


def _read_rate(table: Table, reader: str) -> ReadRate:
    rate = ReadRate(table.rate("tok_s", at_least=LEAST_RATE, at_most=MOST_RATE), table.integer("weight", at_least=1))
    if reader != "reader" and not math.isinf(rate.tok_s):
        raise table.refuse("tok_s", rate.tok_s, f'"inf", or no read_rate, in a group of class {reader}')
    table.done()
    return rate


def _trace(table: Table, beside: Path | None) -> Trace:
    name = table.text("file")
    scale = table.number("scale", above=0.0, at_most=MOST_S) if table.has("scale") else 1.0
    limit = table.integer("limit", at_least=1) if table.has("limit") else None
    path = find_trace(name, beside=beside)
    if path is None:
        valid = f"a CSV file beside the scenario, or in the folder that the variable {TRACES_VARIABLE} names"
        raise table.refuse("file", name, valid)
    rows = tuple(read_trace(path, limit=limit))
    if not rows:
        raise table.refuse("file", name, "a trace with at least one row")
    return Trace(path, scale, rows)


def _session(table: Table) -> Session:
    turns = table.token_range("turns")
    # What would be drawn and never used may still be written down: turns = [1, 1] is how one tries a scenario without.
    think_s = table.number("think_s", at_least=0.0, at_most=MOST_S) if turns[1] > 1 or table.has("think_s") else 0.0
    prefixes = 0
    if table.has("shared_prefixes"):
        prefixes = table.integer("shared_prefixes", at_least=1, at_most=MOST_REQUESTS)
    session = Session(turns, think_s, prefixes, table.token_range("shared_tokens") if prefixes else None)
    table.done()
    return session


def _check_limit(table: Table, group: Group) -> None:
    """A limit below an answer's length would cut answers and break the count of tokens."""
    if group.max_tokens is None:
        return
    longest = max(row.output_tokens for row in group.trace.rows) if group.trace else 0
    if group.answer_tokens is not None:
        longest = bounds(group.answer_tokens)[1]
    if group.max_tokens < longest:
        raise table.refuse("max_tokens", group.max_tokens, f"a whole number >= {longest}, the longest answer")


def _check_number(table: Table, group: Group) -> None:
    """A rate and a time that are each valid may together be more than any machine draws."""
    if group.for_s is None or group.per_s is None:
        return
    expected = group.per_s * group.for_s
    spells = group.for_s / (group.on_mean_s + group.off_mean_s) if group.on_mean_s and group.off_mean_s else 0.0
    if max(expected, spells) > MOST_REQUESTS:
        valid = f"a time in which at most {MOST_REQUESTS} requests, and spells, are expected"
        raise table.refuse("for_s", group.for_s, valid)
