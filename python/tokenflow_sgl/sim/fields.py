"""One table of a TOML or JSON file, read field by field.

Owns the checks and the wording of the errors. Knows no field by name. Invariant: a table read up to `done` holds no key
that nobody took; a misspelt key that is ignored would silently simulate something other than what the file says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Fields:
    """Takes each key once; raises ValueError naming the field, its value and what is valid."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._left = dict(table)
        self._where = where
        self._known: list[str] = []

    def done(self) -> None:
        for key, value in self._left.items():
            raise ValueError(f"{self._where}{key}: {value!r}, unknown key, valid: {', '.join(self._known)}")

    def refuse(self, key: str, value: object, valid: str) -> ValueError:
        return ValueError(f"{self._where}{key}: {value!r}, valid: {valid}")

    def has(self, key: str) -> bool:
        """True where the key is there and is not null."""
        return self._left.get(key) is not None

    def text(self, key: str) -> str:
        value = self._take(key, "a text that is not empty")
        if not isinstance(value, str) or not value:
            raise self.refuse(key, value, "a text that is not empty")
        return value

    def flag(self, key: str, *, missing: bool) -> bool:
        if not self.has(key):
            self._left.pop(key, None)
            self._known.append(key)
            return missing
        value = self._take(key, "true, false")
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true, false")
        return value

    def whole(self, key: str, *, at_least: int) -> int:
        valid = f"a whole number >= {at_least}"
        value = self._take(key, valid)
        if type(value) is not int or value < at_least:
            raise self.refuse(key, value, valid)
        return value

    def number(self, key: str, *, at_least: float) -> float:
        valid = f"a number >= {at_least:g}"
        value = self._take(key, valid)
        if type(value) not in (int, float) or not math.isfinite(value) or value < at_least:
            raise self.refuse(key, value, valid)
        return float(value)

    def wholes(self, key: str) -> tuple[int, ...]:
        value = self._take(key, "a list of whole numbers, not empty")
        if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
            raise self.refuse(key, value, "a list of whole numbers, not empty")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._take(key, "a list of numbers, not empty")
        if not isinstance(value, list) or not value or any(type(item) not in (int, float) for item in value):
            raise self.refuse(key, value, "a list of numbers, not empty")
        return tuple(float(item) for item in value)

    def table(self, key: str) -> Fields:
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self.refuse(key, value, "a table")
        return Fields(value, f"{self._where}{key}.")

    def _take(self, key: str, valid: str) -> Any:
        self._known.append(key)
        if key not in self._left:
            raise ValueError(f"{self._where}{key}: missing, valid: {valid}")
        return self._left.pop(key)
