"""Step times measured on one machine, as a timing model that is written to TOML and read again.

Owns the table and its file; measures nothing (calibrate.py does). Invariant: a table survives its own TOML.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .fields import Fields
from .timing import Line, StepWork


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times of one machine.

    decode_s: (streams, seconds of a step) with ever more streams; linear between them and beyond the last, never below
    it; below the first, the first. decode_context_token_s: added per KV token read. A prefill step takes
    prefill_fixed_s, plus per new token, plus per squared token: (before + new)^2 - before^2, so that chunks add up to
    the whole. A step with both takes both: how far they overlap was not measured. store_tok_s, load_tok_s: KV tokens
    a second to the host and back.
    """

    source: str
    decode_s: tuple[tuple[int, float], ...]
    decode_context_token_s: float
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_squared_token_s: float
    publish: Line
    kv_bytes_per_token: int
    store_tok_s: float
    load_tok_s: float

    def __post_init__(self) -> None:
        counts = [streams for streams, _ in self.decode_s]
        if not counts or counts[0] < 1 or any(later <= earlier for earlier, later in pairwise(counts)):
            raise ValueError(f"decode.streams: {counts}, valid: whole numbers from 1 on, each above the one before")
        for streams, seconds in self.decode_s:
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"decode.seconds of {streams} streams: {seconds}, valid: a number > 0")
        for name in ("decode_context_token_s", "prefill_fixed_s", "prefill_token_s", "prefill_squared_token_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value}, valid: a number >= 0")
        for name in ("kv_bytes_per_token", "store_tok_s", "load_tok_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: {value}, valid: a number > 0")

    @classmethod
    def from_toml(cls, text: str) -> Table:
        """A table from TOML text. Raises ValueError naming field, value and what is valid."""
        try:
            fields = Fields(tomllib.loads(text), "")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"timing table: not TOML ({error}), valid: a TOML document") from error
        decode, prefill, publish = fields.table("decode"), fields.table("prefill"), fields.table("publish")
        counts, seconds = decode.wholes("streams"), decode.numbers("seconds")
        if len(counts) != len(seconds):
            raise decode.refuse("seconds", list(seconds), f"one number for each of the {len(counts)} in streams")
        table = cls(
            source=fields.text("source"),
            decode_s=tuple(zip(counts, seconds, strict=True)),
            decode_context_token_s=decode.number("context_token_s", at_least=0.0),
            prefill_fixed_s=prefill.number("fixed_s", at_least=0.0),
            prefill_token_s=prefill.number("token_s", at_least=0.0),
            prefill_squared_token_s=prefill.number("squared_token_s", at_least=0.0),
            publish=Line(publish.number("fixed_s", at_least=0.0), publish.number("token_s", at_least=0.0)),
            kv_bytes_per_token=fields.integer("kv_bytes_per_token", at_least=1),
            store_tok_s=fields.number("store_tok_s", at_least=0.0),
            load_tok_s=fields.number("load_tok_s", at_least=0.0),
        )
        for part in (decode, prefill, publish, fields):
            part.done()
        return table

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """A table from a TOML file. Raises ValueError."""
        if not Path(path).is_file():
            raise ValueError(f"timing table: {str(path)!r} is not a file, valid: a .toml file")
        return cls.from_toml(Path(path).read_text(encoding="utf-8"))

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back to an equal table."""
        # A JSON string is a TOML string but for DEL, which TOML wants escaped.
        source = json.dumps(self.source, ensure_ascii=False).replace("\x7f", "\\u007F")
        return f"""source = {source}
kv_bytes_per_token = {self.kv_bytes_per_token}
store_tok_s = {float(self.store_tok_s)!r}
load_tok_s = {float(self.load_tok_s)!r}

[decode]
streams = {[streams for streams, _ in self.decode_s]}
seconds = {[float(seconds) for _, seconds in self.decode_s]}
context_token_s = {float(self.decode_context_token_s)!r}

[prefill]
fixed_s = {float(self.prefill_fixed_s)!r}
token_s = {float(self.prefill_token_s)!r}
squared_token_s = {float(self.prefill_squared_token_s)!r}

[publish]
fixed_s = {float(self.publish.fixed_s)!r}
token_s = {float(self.publish.per_token_s)!r}
"""

    def step_s(self, work: StepWork) -> float:
        seconds = 0.0
        new_tokens = sum(new for new, _ in work.prefill)
        if new_tokens:
            squares = sum(new * (new + 2 * before) for new, before in work.prefill)
            seconds += self.prefill_fixed_s + new_tokens * self.prefill_token_s + squares * self.prefill_squared_token_s
        if work.decoding:
            seconds += self._decode_s(work.decoding) + work.decode_context_tokens * self.decode_context_token_s
        return seconds

    def publish_s(self, context_tokens: int) -> float:
        return self.publish.seconds(context_tokens)

    def pass_s(self, step_s: float, publish_s: float) -> float:
        """One after the other, as where the forwards run on the same cores."""
        return step_s + publish_s

    def least_prefill_s(self, new_tokens: int) -> float:
        """The least that a prompt with this many uncached tokens adds to whatever steps compute it."""
        return new_tokens * self.prefill_token_s + new_tokens * new_tokens * self.prefill_squared_token_s

    def _decode_s(self, streams: int) -> float:
        points = self.decode_s
        if streams <= points[0][0] or len(points) == 1:
            return points[0][1]
        for (low, low_s), (high, high_s) in pairwise(points):
            if streams <= high:
                return low_s + (high_s - low_s) * (streams - low) / (high - low)
        (low, low_s), (high, high_s) = points[-2:]
        return max(high_s, high_s + (high_s - low_s) * (streams - high) / (high - low))
