"""Traces of requests that once arrived somewhere: CSV files with one request a row.

Owns the format `arrival_s,prompt_tokens,output_tokens[,session_id]` and where such a file is looked up. Draws nothing.
Invariant: rows come in order of arrival, and every number in them can be used as it is.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenflow_sgl.workload.files import is_file
from tokenflow_sgl.workload.tables import ScenarioError

TRACES_VARIABLE = "TOKENFLOW_TRACES"
NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
COLUMNS = (*NEEDED, "session_id")


class TraceError(ScenarioError):
    """A trace that cannot be used; the message names the file, the line, the field, its value and what is valid."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: seconds from the start of the trace, tokens in and out, and the session the trace puts it in.

    session_id: what the source means by it, a conversation or a client; None where the trace has none.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session_id: str | None = None


def find_trace(name: str, *, beside: Path | None) -> Path | None:
    """The file of a trace: beside the scenario, then in the folder that TOKENFLOW_TRACES names; None if in neither."""
    if Path(name).is_absolute():
        return Path(name) if is_file(Path(name)) else None
    folder = os.environ.get(TRACES_VARIABLE)
    places = (beside, Path(folder) if folder else None)
    return next((place / name for place in places if place is not None and is_file(place / name)), None)


def read_trace(path: Path, *, limit: int | None = None) -> Iterator[TraceRow]:
    """The rows of a trace one by one, the first `limit` of them. Raises TraceError at the row that is wrong."""
    return islice(_rows(path), limit)


def _rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            _check_header(path, header)
            last_s = 0.0
            for fields in reader:
                if fields:
                    row = _row(f"{path} line {reader.line_num}", header, fields, last_s)
                    last_s = row.arrival_s
                    yield row
        except csv.Error as error:
            raise TraceError(f"{path} line {reader.line_num}: not CSV ({error}), valid: a CSV file") from error
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} from line {reader.line_num + 1} on: not text ({error}), valid: UTF-8") from error


def _check_header(path: Path, header: list[str]) -> None:
    wrong = [name for name in header if name not in COLUMNS] or [name for name in NEEDED if name not in header]
    if wrong or len(set(header)) < len(header):
        valid = f"{', '.join(NEEDED)} and, if wanted, session_id, each once"
        raise TraceError(f"{path} line 1: header: {','.join(header)!r}, valid: {valid}")


def _row(where: str, header: list[str], fields: list[str], last_s: float) -> TraceRow:
    if len(fields) != len(header):
        raise TraceError(f"{where}: {len(fields)} fields: {','.join(fields)!r}, valid: {len(header)} as in the header")
    named = dict(zip(header, fields, strict=True))
    arrival_s = _number(named["arrival_s"])
    if not (math.isfinite(arrival_s) and arrival_s >= last_s):
        valid = f"seconds >= {last_s:g}, no earlier than the row before"
        raise TraceError(f"{where}: arrival_s: {named['arrival_s']!r}, valid: {valid}")
    return TraceRow(
        arrival_s, _count(where, named, "prompt_tokens"), _count(where, named, "output_tokens"), named.get("session_id")
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(where: str, named: Mapping[str, str], field: str) -> int:
    text = named[field]
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) >= 1):
        raise TraceError(f"{where}: {field}: {text!r}, valid: a whole number >= 1")
    return int(text)
