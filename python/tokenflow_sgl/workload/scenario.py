"""Scenarios: what arrives, and the server settings that make memory the limit, read from TOML.

Owns the file format and its checks. Draws nothing (arrivals.py does) and starts nothing. Invariant: a loaded scenario
is frozen and carries the hash of its text, so that a result can name the exact file it was made from.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCENARIO_DIR = Path(__file__).parent / "scenarios"
ARRIVALS = ("uniform", "poisson")


class ScenarioError(ValueError):
    """A scenario that cannot be used; the message names the field, its value and what is valid."""


@dataclass(frozen=True, slots=True)
class ReadRate:
    """A share of a group's readers: `weight` parts of them read at `tok_s`."""

    tok_s: float
    weight: int


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one kind. Lengths are inclusive ranges in tokens, drawn uniformly.

    arrival "uniform": count requests at random times in [start_s, start_s + over_s].
    arrival "poisson": count requests from start_s on, exponential gaps at per_s requests a second.
    """

    name: str
    count: int
    start_s: float
    arrival: str
    over_s: float | None
    per_s: float | None
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    read_rates: tuple[ReadRate, ...]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What every server of a comparison is started with. Sizes in tokens; host_ratio: host pool over device pool."""

    model: str
    page_tokens: int
    kv_pool_tokens: int
    chunked_prefill_tokens: int
    host_ratio: float
    write_policy: str
    overlap: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """name, what it is about, the groups whose first token is judged, server settings, groups, SHA-256 of the text."""

    name: str
    about: str
    newcomers: tuple[str, ...]
    server: ServerSettings
    groups: tuple[Group, ...]
    sha256: str


def list_scenarios() -> tuple[str, ...]:
    """Names of the scenarios that come with the package, sorted."""
    return tuple(sorted(path.stem for path in SCENARIO_DIR.glob("*.toml")))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A scenario by its name or by the path of a TOML file. Raises ScenarioError."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = SCENARIO_DIR / f"{name_or_path}.toml"
    if not path.is_file():
        raise ScenarioError(f"scenario: {str(name_or_path)!r}, valid: {', '.join(list_scenarios())} or a .toml file")
    return parse_scenario(path.read_text(encoding="utf-8"))


def parse_scenario(text: str) -> Scenario:
    """A scenario from TOML text. Raises ScenarioError naming field, value and what is valid."""
    try:
        table = _Table(tomllib.loads(text), "")
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"scenario: not TOML ({error}), valid: a TOML document") from error
    name, about = table.text("name"), table.text("about")
    newcomers = table.texts("newcomers")
    server = _server(table.table("server"))
    groups = tuple(_group(group) for group in table.tables("group"))
    table.done()
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ScenarioError(f"group.name: {names}, valid: each name once")
    if unknown := set(newcomers) - set(names):
        raise ScenarioError(f"newcomers: {sorted(unknown)}, valid: names of groups ({', '.join(names)})")
    return Scenario(name, about, newcomers, server, groups, hashlib.sha256(text.encode()).hexdigest())


def _server(table: _Table) -> ServerSettings:
    settings = ServerSettings(
        model=table.text("model"),
        page_tokens=table.integer("page_tokens", at_least=1),
        kv_pool_tokens=table.integer("kv_pool_tokens", at_least=1),
        chunked_prefill_tokens=table.integer("chunked_prefill_tokens", at_least=1),
        host_ratio=table.number("host_ratio", above=0.0),
        write_policy=table.choice("write_policy", ("write_through",)),
        overlap=table.flag("overlap"),
    )
    if settings.kv_pool_tokens % settings.page_tokens:
        valid = f"a multiple of page_tokens ({settings.page_tokens})"
        raise ScenarioError(f"server.kv_pool_tokens: {settings.kv_pool_tokens}, valid: {valid}")
    table.done()
    return settings


def _group(table: _Table) -> Group:
    arrival = table.choice("arrival", ARRIVALS)
    group = Group(
        name=table.text("name"),
        count=table.integer("count", at_least=1),
        start_s=table.number("start_s", at_least=0.0),
        arrival=arrival,
        over_s=table.number("over_s", at_least=0.0) if arrival == "uniform" else None,
        per_s=table.number("per_s", above=0.0) if arrival == "poisson" else None,
        prompt_tokens=table.token_range("prompt_tokens"),
        answer_tokens=table.token_range("answer_tokens"),
        read_rates=tuple(_read_rate(rate) for rate in table.tables("read_rate")),
    )
    table.done()
    return group


def _read_rate(table: _Table) -> ReadRate:
    rate = ReadRate(table.number("tok_s", above=0.0), table.integer("weight", at_least=1))
    table.done()
    return rate


class _Table:
    """One TOML table: every key is taken once and checked; `done` refuses what nobody took.

    A misspelt key that is ignored would silently measure something other than what the file says.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._left = dict(table)
        self._where = where
        self._known: list[str] = []

    def done(self) -> None:
        for key, value in self._left.items():
            raise ScenarioError(f"{self._where}{key}: {value!r}, unknown key, valid: {', '.join(self._known)}")

    def refuse(self, key: str, value: object, valid: str) -> ScenarioError:
        return ScenarioError(f"{self._where}{key}: {value!r}, valid: {valid}")

    def text(self, key: str) -> str:
        value = self._take(key, "a text that is not empty")
        if not isinstance(value, str) or not value:
            raise self.refuse(key, value, "a text that is not empty")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._take(key, "a list of texts")
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, value, "a list of texts, not empty")
        return tuple(value)

    def choice(self, key: str, valid: tuple[str, ...]) -> str:
        value = self._take(key, ", ".join(valid))
        if value not in valid:
            raise self.refuse(key, value, ", ".join(valid))
        return str(value)

    def flag(self, key: str) -> bool:
        value = self._take(key, "true, false")
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true, false")
        return value

    def integer(self, key: str, *, at_least: int) -> int:
        value = self._take(key, f"a whole number >= {at_least}")
        if type(value) is not int or value < at_least:
            raise self.refuse(key, value, f"a whole number >= {at_least}")
        return value

    def number(self, key: str, *, at_least: float | None = None, above: float | None = None) -> float:
        valid = f"a number >= {at_least:g}" if at_least is not None else f"a number > {above:g}"
        value = self._take(key, valid)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refuse(key, value, valid)
        if (at_least is not None and value < at_least) or (above is not None and value <= above):
            raise self.refuse(key, value, valid)
        return float(value)

    def token_range(self, key: str) -> tuple[int, int]:
        valid = "[low, high], whole numbers, 1 <= low <= high"
        value = self._take(key, valid)
        if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
            raise self.refuse(key, value, valid)
        if not 1 <= value[0] <= value[1]:
            raise self.refuse(key, value, valid)
        return value[0], value[1]

    def table(self, key: str) -> _Table:
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self.refuse(key, value, "a table")
        return _Table(value, f"{self._where}{key}.")

    def tables(self, key: str) -> list[_Table]:
        value = self._take(key, "a list of tables")
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.refuse(key, value, "a list of tables, not empty")
        return [_Table(item, f"{self._where}{key}[{index}].") for index, item in enumerate(value)]

    def _take(self, key: str, valid: str) -> Any:
        self._known.append(key)
        if key not in self._left:
            raise ScenarioError(f"{self._where}{key}: missing, valid: {valid}")
        return self._left.pop(key)
