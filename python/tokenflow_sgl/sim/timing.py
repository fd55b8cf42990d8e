"""How long the world takes: one engine step, and one publish call, as a function of what is in it.

Owns the three timing models and their formulas. Owns no clock and no queue, and is never seen by a policy, which learns
its own beliefs (core/cost.py). Invariant: the same work takes the same time, and no work takes none.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from .fields import Fields
from .hardware import Hardware, Model


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one engine step computes.

    prefill: (new tokens, context before them) per request. decoding: streams that make one token each.
    decode_context_tokens: KV tokens that those streams read, summed.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decoding: int = 0
    decode_context_tokens: int = 0


class TimingModel(Protocol):
    @property
    def kv_bytes_per_token(self) -> int: ...

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step; 0 for no work."""
        ...

    def least_prefill_s(self, new_tokens: int) -> float:
        """The least that a prompt with this many uncached tokens adds to whatever steps compute it."""
        ...

    def publish_s(self, context_tokens: int) -> float:
        """Seconds that one publish call holds the engine's thread, by the context of the stream."""
        ...

    def pass_s(self, step_s: float, publish_s: float) -> float:
        """Seconds of one pass of the engine's loop: a step, and the publish calls made while it runs, or before."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed_s + per_token_s * tokens."""

    fixed_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_s < math.inf and 0 <= self.per_token_s < math.inf):
            raise ValueError(f"line: {self.fixed_s} s + {self.per_token_s} s a token, valid: two numbers >= 0")

    def seconds(self, tokens: int) -> float:
        return self.fixed_s + tokens * self.per_token_s


# Priors. One insert walks the tree along the whole context, on the CPU. SGLang's overlap loop does that, its own work
# for a batch and the policy's while the GPU is busy with the step before; the last two are taken to need this long.
SGLANG_PUBLISH = Line(0.3e-3, 1 / 5e6)
LOOP_S = 4e-3


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU and a model by their data sheets, in bf16.

    A step is its matrix multiplications, then its attention: these are kernels one after the other, so each has its own
    roof, max(FLOPs / (flops_s * mfu), bytes / (memory_bytes_s * mbu)); one roof over both would hide the KV of a large
    decode batch behind multiplications that were over before it was read. Then step_overhead_s.

        multiplications   2 * (body_params * tokens + head_params * sequences) FLOPs; all weights but the input table
        prefill attention 4 * layers * heads * head_dim FLOPs per (token, token before it); the KV of its context
        decode attention  the KV of the contexts: with one query each, never compute-bound
    """

    gpu: Hardware
    model: Model
    publish: Line = SGLANG_PUBLISH
    kv_bytes_per_token: int = field(init=False)
    _weights_s: float = field(init=False, repr=False)
    _kv_token_s: float = field(init=False, repr=False)
    _body_token_s: float = field(init=False, repr=False)
    _head_row_s: float = field(init=False, repr=False)
    _pair_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        model = self.model
        flop_s = 1.0 / (self.gpu.flops_s * self.gpu.mfu)
        byte_s = 1.0 / (self.gpu.memory_bytes_s * self.gpu.mbu)
        read_bytes = model.weight_bytes * (model.body_params + model.head_params) / model.params
        values = {
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "_weights_s": read_bytes * byte_s,
            "_kv_token_s": model.kv_bytes_per_token * byte_s,
            "_body_token_s": 2 * model.body_params * flop_s,
            "_head_row_s": 2 * model.head_params * flop_s,
            "_pair_s": 4 * model.layers * model.heads * model.head_dim * flop_s,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def step_s(self, work: StepWork) -> float:
        tokens, pairs, prefill_kv = work.decoding, 0, 0
        for new, before in work.prefill:
            tokens += new
            pairs += new * before + new * (new + 1) // 2
            prefill_kv += before + new
        if tokens == 0:
            return 0.0
        rows = work.decoding + len(work.prefill)
        multiply_s = max(tokens * self._body_token_s + rows * self._head_row_s, self._weights_s)
        attend_s = max(pairs * self._pair_s, prefill_kv * self._kv_token_s)
        return multiply_s + attend_s + work.decode_context_tokens * self._kv_token_s + self.gpu.step_overhead_s

    def publish_s(self, context_tokens: int) -> float:
        return self.publish.seconds(context_tokens)

    def pass_s(self, step_s: float, publish_s: float) -> float:
        """The overlap loop's: the longer of what the GPU and what the CPU has to do."""
        return max(step_s, LOOP_S + publish_s) if publish_s > 0.0 else step_s

    def least_prefill_s(self, new_tokens: int) -> float:
        """The least that a prompt with this many uncached tokens adds to whatever steps compute it: its FLOPs, the
        weights and the overhead being paid by others. 0 for 0 tokens."""
        if new_tokens == 0:
            return 0.0
        pairs = new_tokens * (new_tokens + 1) // 2
        return new_tokens * self._body_token_s + self._head_row_s + pairs * self._pair_s


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
        except tomllib.TOMLDecodeError as error:
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
        """On a CPU both want the same cores."""
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


class Fixed:
    """Every step takes `step_s`, a prefill step as long as its tokens take if that is longer."""

    __slots__ = ("_prefill_tok_s", "_publish", "_step_s", "kv_bytes_per_token")

    def __init__(
        self, step_s: float, prefill_tok_s: float, *, publish: Line = Line(0.0, 0.0), kv_bytes_per_token: int = 1
    ) -> None:
        for name, value in (("step_s", step_s), ("prefill_tok_s", prefill_tok_s), ("kv_bytes", kv_bytes_per_token)):
            if not value > 0:
                raise ValueError(f"{name} of Fixed: {value}, valid: a number > 0")
        self._step_s, self._prefill_tok_s, self._publish = step_s, prefill_tok_s, publish
        self.kv_bytes_per_token = kv_bytes_per_token

    def step_s(self, work: StepWork) -> float:
        new_tokens = sum(new for new, _ in work.prefill)
        if new_tokens == 0 and work.decoding == 0:
            return 0.0
        return max(self._step_s, new_tokens / self._prefill_tok_s)

    def publish_s(self, context_tokens: int) -> float:
        return self._publish.seconds(context_tokens)

    def pass_s(self, step_s: float, publish_s: float) -> float:
        return step_s + publish_s

    def least_prefill_s(self, new_tokens: int) -> float:
        """The least that a prompt with this many uncached tokens adds to whatever steps compute it."""
        return new_tokens / self._prefill_tok_s


def pool_tokens(hardware: Hardware, model: Model, *, mem_fraction: float) -> int:
    """KV tokens that fit beside the weights. mem_fraction: (weights + KV pool) / device memory, as SGLang's
    --mem-fraction-static; what it leaves is for activations and graphs. Raises ValueError where none fits."""
    if not 0 < mem_fraction <= 1:
        raise ValueError(f"mem_fraction: {mem_fraction}, valid: above 0, up to 1")
    left_bytes = hardware.memory_bytes * mem_fraction - model.weight_bytes
    tokens = int(left_bytes // model.kv_bytes_per_token)
    if tokens < 1:
        least = (model.weight_bytes + model.kv_bytes_per_token) / hardware.memory_bytes
        valid = f"above {least:.3f} for {model.name} on {hardware.name}"
        if least > 1:
            valid = f"none, the weights of {model.name} are larger than the memory of {hardware.name}"
        raise ValueError(f"mem_fraction: {mem_fraction}, valid: {valid}")
    return tokens
