"""One table of a hardware, model or timing file, read field by field.

Owns what such files have beyond a scenario's tables: null for absent, and lists of numbers. The checks and the wording
of errors are workload/tables.py's. Invariant: as there, `done` refuses what nobody took.
"""

from __future__ import annotations

from ..workload.tables import Table


class Fields(Table):
    """Takes each key once; raises ScenarioError, a ValueError, naming the field, its value and what is valid."""

    def is_given(self, key: str) -> bool:
        """True where the key is there and is not null: a config.json writes null for what a model does not have."""
        return self.has(key) and self._left[key] is not None

    def flag_or(self, key: str, missing: bool) -> bool:
        if self.is_given(key):
            return self.flag(key)
        self._left.pop(key, None)
        return missing

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
