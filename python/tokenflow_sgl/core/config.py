"""Every symbol of the policy as a setting, with unit, bounds and meaning; the flags are made from it.

Owns validation; reads no flag and no file. Invariant: a PolicyConfig that exists is valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _setting(default: Any, help: str, unit: str = "", *, low: float | None = None, high: float | None = None,
             choices: tuple[str, ...] | None = None) -> Any:  # fmt: skip
    return field(default=default, metadata={"help": help, "unit": unit, "min": low, "max": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of TokenFlowPolicy. Symbols are those of the TokenFlow guide: P = -ln(max(S, delta)) + lambda / (Wait + delta) + mu."""

    # fmt: off
    default_read_rate_tok_s: float = _setting(6.0, "read rate of a stream that declares none", "tok/s", low=0.1, high=1000.0)
    priority: str = _setting("aged", "how requests are ranked: `guide` is the formula of the guide to the letter, `aged` "
                             "ranks unstarted requests by wait over prefill cost, so that the oldest is never overtaken for ever",
                             choices=("guide", "aged"))
    delta_s: float = _setting(0.1, "floor of slack and wait in the priority", "s", low=1e-6, high=60.0)
    lambda_s: float = _setting(0.1, "weight of the wait term", "s", low=0.0, high=60.0)
    mu: float = _setting(2.0, "priority bonus of a request that has no token yet", low=0.0, high=100.0)
    eps_s: float = _setting(0.5, "safety margin: slack that must be left when a newcomer's prefill or a return is done", "s",
                            low=0.0, high=60.0)
    overhead_s: float = _setting(0.05, "scheduling overhead added to every prefill or return", "s", low=0.0, high=60.0)
    min_slack_s: float = _setting(2.0, "a stream with less slack is never a candidate for parking", "s", low=0.0, high=3600.0)
    min_run_tokens: int = _setting(32, "tokens a stream must produce after its admission or return before it may be parked",
                                   "tokens", low=1, high=100000)
    max_parks: int = _setting(64, "parks after which a stream is pinned until it ends", low=1, high=1000000)
    growth_tokens: int = _setting(32, "device tokens kept free for the growth of each running stream", "tokens", low=1, high=100000)
    return_steps: int = _setting(48, "decode steps of growth of all running streams that must fit in free memory before a "
                                 "parked stream returns ahead of need", "steps", low=0, high=100000)
    switch_margin: float = _setting(0.5, "priority lead that started or reader-less work needs before it may park a stream "
                                    "(0.5 = 1.65 times the slack)", low=0.0, high=100.0)
    hold_back_s: float = _setting(4.0, "wait after which a request that does not fit keeps freed memory from those behind it",
                                  "s", low=0.0, high=3600.0)
    defer_steps: int = _setting(8, "decode steps that may go before the next prefill chunk while a reader is about to run dry",
                                "steps", low=0, high=1000)
    publish_interval_tokens: int = _setting(96, "tokens a running stream grows before its KV is published again", "tokens",
                                            low=1, high=100000)
    publish_per_step: int = _setting(1, "streams published in one step", low=0, high=1000)
    publish_below: float = _setting(0.5, "publish only while the free share of device memory is below this", low=0.0, high=1.0)
    batch_turn_s: float = _setting(20.0, "virtual slack of work without a reader; it falls while the work waits, so none starves",
                                   "s", low=0.1, high=3600.0)
    prefill_prior_tok_s: float = _setting(2000.0, "prefill speed believed before the first step is seen", "tok/s", low=1.0, high=1e7)
    step_prior_s: float = _setting(0.03, "decode step time believed before the first step is seen", "s", low=1e-5, high=60.0)
    load_prior_tok_s: float = _setting(100000.0, "host-to-device speed believed before the first copy is seen", "tok/s", low=1.0, high=1e9)
    # fmt: on

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.metadata, type(f.default))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PolicyConfig:
        """A config from named values. Raises ValueError naming the field, its value and what is valid."""
        known = {f.name for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"unknown setting {name}={value!r}; valid are {', '.join(sorted(known))}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def _check(name: str, value: Any, meta: Mapping[str, Any], kind: type) -> None:
    if meta["choices"] is not None:
        if value not in meta["choices"]:
            raise ValueError(f"{name}={value!r}: valid are {', '.join(meta['choices'])}")
        return
    valid = f"{kind.__name__} from {meta['min']:g} to {meta['max']:g} {meta['unit']}".rstrip()
    number = isinstance(value, int) or (isinstance(value, float) and kind is float)
    if isinstance(value, bool) or not number or not math.isfinite(value) or not meta["min"] <= value <= meta["max"]:
        raise ValueError(f"{name}={value!r}: valid is a {valid}")
