"""One TOML table, each key taken once and checked.

Owns the checks that every field shares and the words of a refusal. Knows no scenario. Invariant: `done` refuses what
nobody took, so that a misspelt key cannot silently measure something other than what the file says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

MOST = 10**18  # of any number: beyond it a product of a few no longer fits a float
MOST_TOKENS = 10_000_000  # of one length
RANGE = f"[low, high], whole numbers, 1 <= low <= high <= {MOST_TOKENS}"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_SHOWN = 200  # characters of a wrong value


class ScenarioError(ValueError):
    """A scenario that cannot be used; the message names the field, its value and what is valid."""


class Table:
    """A table and the path of its keys (`where`, with its dot). Every method raises ScenarioError for a wrong value."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._left = dict(table)
        self._where = where
        self._known: list[str] = []

    def done(self) -> None:
        """Refuse the keys that nobody took."""
        for key, value in self._left.items():
            raise ScenarioError(f"{self._where}{key}: {shown(value)}, unknown key, valid: {', '.join(self._known)}")

    def refuse(self, key: str, value: object, valid: str) -> ScenarioError:
        """The error to raise for a value that is wrong beside others."""
        return ScenarioError(f"{self._where}{key}: {shown(value)}, valid: {valid}")

    def has(self, key: str) -> bool:
        """Whether an optional key is there; either way it is known from now on."""
        if key not in self._known:
            self._known.append(key)
        return key in self._left

    def holds_table(self, key: str) -> bool:
        """Whether the value of a key is a table."""
        return isinstance(self._left.get(key), dict)

    def one_of(self, *keys: str) -> str:
        """Which of these keys is there: exactly one must be."""
        given = [key for key in keys if self.has(key)]
        valid = f"exactly one of {', '.join(keys)}"
        if not given:
            raise ScenarioError(f"{self._where}{keys[0]}: missing, valid: {valid}")
        if len(given) > 1:
            raise ScenarioError(f"{self._where}{given[1]}: beside {given[0]}, valid: {valid}")
        return given[0]

    def text(self, key: str) -> str:
        value = self._take(key, "a text that is not empty")
        if not isinstance(value, str) or not value:
            raise self.refuse(key, value, "a text that is not empty")
        return value

    def file_name(self, key: str) -> str:
        """A text that results are filed under: with a slash in it they would be written outside of their folder."""
        valid = "1 to 100 letters, digits, '.', '_' or '-', the first no '.'"
        value = self._take(key, valid)
        if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
            raise self.refuse(key, value, valid)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._take(key, "a list of texts")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, value, "a list of texts")
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

    def integer(self, key: str, *, at_least: int, at_most: int = MOST) -> int:
        valid = f"a whole number >= {at_least}, up to {at_most:.12g}"
        value = self._take(key, valid)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.refuse(key, value, valid)
        return value

    def number(
        self, key: str, *, at_least: float | None = None, above: float | None = None, at_most: float = MOST
    ) -> float:
        valid = f"a number >= {at_least:g}" if at_least is not None else f"a number > {above:g}"
        valid += f", up to {at_most:.12g}"
        value = self._take(key, valid)
        if not _is_number(value) or value > at_most:
            raise self.refuse(key, value, valid)
        if (at_least is not None and value < at_least) or (above is not None and value <= above):
            raise self.refuse(key, value, valid)
        return float(value)

    def share(self, key: str) -> float:
        """A number between 0 and 1, both left out."""
        valid = "a number > 0 and < 1"
        value = self._take(key, valid)
        if not _is_number(value) or not 0 < value < 1:
            raise self.refuse(key, value, valid)
        return float(value)

    def rate(self, key: str, *, at_least: float, at_most: float) -> float:
        """The text "inf" is infinite."""
        valid = f'a number > 0, {at_least:g} to {at_most:g}, or "inf"'
        value = self._take(key, valid)
        if value == "inf":
            return math.inf
        if not _is_number(value) or not at_least <= value <= at_most:
            raise self.refuse(key, value, valid)
        return float(value)

    def spread(self, key: str) -> tuple[float, float]:
        """[centre, spread] of a distribution."""
        valid = "[centre, spread], numbers, spread >= 0"
        value = self._take(key, valid)
        if not isinstance(value, list) or len(value) != 2 or not all(_is_number(item) for item in value):
            raise self.refuse(key, value, valid)
        if value[1] < 0:
            raise self.refuse(key, value, valid)
        return float(value[0]), float(value[1])

    def token_range(self, key: str, *, valid: str = RANGE) -> tuple[int, int]:
        value = self._take(key, valid)
        if not isinstance(value, list) or len(value) != 2 or not all(type(item) is int for item in value):
            raise self.refuse(key, value, valid)
        if not 1 <= value[0] <= value[1] <= MOST_TOKENS:
            raise self.refuse(key, value, valid)
        return value[0], value[1]

    def table(self, key: str) -> Table:
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self.refuse(key, value, "a table")
        return Table(value, f"{self._where}{key}.")

    def tables(self, key: str) -> list[Table]:
        value = self._take(key, "a list of tables")
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.refuse(key, value, "a list of tables, not empty")
        return [Table(item, f"{self._where}{key}[{index}].") for index, item in enumerate(value)]

    def _take(self, key: str, valid: str) -> Any:
        if not self.has(key):
            raise ScenarioError(f"{self._where}{key}: missing, valid: {valid}")
        return self._left.pop(key)


def _is_number(value: object) -> bool:
    # Compared and not converted: a whole number of 400 digits fits in no float. NaN fails every comparison.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST


def shown(value: object) -> str:
    """On one line of sensible length."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        return f"{type(value).__name__} with more digits than can be printed"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
