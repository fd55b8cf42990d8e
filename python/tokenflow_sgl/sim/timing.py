"""How long the world takes: one engine step, and one publish call, as a function of what is in it.

Owns what a timing model is, and two of the three: by data sheet, and fixed (measured.py has the third). Owns no clock
and no queue, and is never seen by a policy, which learns its own beliefs (core/cost.py). Invariant: the same work takes
the same time, and no work takes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

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


# A prior: one insert walks the tree along the whole context, on the CPU.
SGLANG_PUBLISH = Line(0.3e-3, 1 / 5e6)
# Assumed, in a step that publishes: what SGLang's loop and the policy do on the CPU besides, while the GPU is busy.
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
