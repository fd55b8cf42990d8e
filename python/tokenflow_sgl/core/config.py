"""Every symbol of the policy as a setting, with unit, bounds and meaning; the flags are made from it.

Owns validation; reads no flag and no file. Invariant: a PolicyConfig that exists is valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


def _setting(
    default: Any,
    unit: str,
    low: float | None,
    high: float | None,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
) -> Any:
    metadata = {"help": help, "unit": unit, "min": low, "max": high, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of TokenFlowPolicy. Symbols are the TokenFlow guide's:

    P = -ln(max(S, delta)) + lambda / (Wait + delta) + mu * [unstarted]; eligible: S >= dt_prefill + eps.
    """

    default_read_rate_tok_s: float = _setting(6.0, "tok/s", 0.1, 1000.0, "read rate of a stream that declares none")
    max_read_rate_tok_s: float = _setting(
        100.0, "tok/s", 0.1, 1000.0,
        "fastest reader that is believed: whoever declares or shows a higher rate is served as one of this rate",
    )  # fmt: skip
    priority: str = _setting(
        "aged", "", None, None,
        "how requests are ranked: `guide` is the guide's formula to the letter; `aged` ranks those with nothing to "
        "show, newcomers and readers that ran dry, by their wait over their cost, so that none is overtaken for ever",
        choices=("guide", "aged"),
    )  # fmt: skip
    delta_s: float = _setting(0.1, "s", 1e-6, 60.0, "floor of slack and wait in the priority")
    lambda_s: float = _setting(0.1, "s", 0.0, 60.0, "weight of the wait term of the priority")
    mu: float = _setting(2.0, "", 0.0, 100.0, "priority bonus of a request that has no token yet")
    eps_s: float = _setting(
        0.5, "s", 0.0, 60.0, "safety margin: slack that must be left when a newcomer's prefill, or a return, is done"
    )
    overhead_s: float = _setting(0.05, "s", 0.0, 60.0, "scheduling overhead added to every prefill or return")
    min_slack_s: float = _setting(2.0, "s", 0.0, 3600.0, "a stream with less slack is never a candidate for parking")
    min_run_tokens: int = _setting(
        32, "tokens", 1, 100_000, "tokens a stream makes after its admission or return before it may be parked"
    )
    swap_share: float = _setting(
        0.1, "", 0.001, 1.0,
        "share of the engine's time that returns may take, for what they compute again; what a quiet time leaves over "
        "is saved for a burst, and beyond it a stream runs longer before it may be parked",
    )  # fmt: skip
    max_parks: int = _setting(
        64,
        "",
        1,
        1_000_000,
        "parks after which a stream stays until it ends, unless memory runs out and nobody else can go",
    )
    growth_tokens: int = _setting(
        16, "tokens", 1, 100_000, "device tokens kept free, at admission, for the growth of each running stream"
    )
    return_steps: int = _setting(
        16, "steps", 0, 100_000,
        "decode steps of growth of all running streams that must fit in free memory before a parked stream returns "
        "ahead of need",
    )  # fmt: skip
    switch_margin: float = _setting(
        0.5, "", 0.0, 100.0,
        "priority lead that work without a reader needs before it may park a stream (0.5: 1.65 times the slack)",
    )  # fmt: skip
    hold_back_s: float = _setting(
        4.0, "s", 0.0, 3600.0,
        "time with nothing to show after which a request that does not fit keeps freed memory from those behind it",
    )  # fmt: skip
    defer_steps: int = _setting(
        8, "steps", 0, 1000,
        "decode steps that may go before the next prefill chunk while a reader is about to run dry",
    )  # fmt: skip
    copies: str = _setting(
        "ahead", "", None, None,
        "when KV is copied to the host: `ahead` in the background while a stream runs; `at_park` when it is parked; "
        "`none` never, what leaves the device is computed again",
        choices=("ahead", "at_park", "none"),
    )  # fmt: skip
    loads: str = _setting(
        "ahead", "", None, None,
        "when KV comes back: `ahead` of admission, beside the forwards of others; `at_admission` in the step the "
        "request comes in, whose forward waits for it",
        choices=("ahead", "at_admission"),
    )  # fmt: skip
    forecast_s: float = _setting(
        4.0, "s", 0.0, 3600.0, "how far ahead page demand is forecast; 0 = no forecast, publish by free memory alone"
    )
    copy_deadline_s: float = _setting(
        2.0, "s", 0.01, 3600.0,
        "a copy still open after this long is given up, whatever it was for is computed again",
    )  # fmt: skip
    publish_interval_tokens: int = _setting(
        96, "tokens", 1, 100_000, "tokens a running stream grows before its KV is published again"
    )
    publish_per_step: int = _setting(
        1, "", 0, 1000,
        "streams published in one step; four times as many while the forecast says that memory runs out",
    )  # fmt: skip
    publish_below: float = _setting(
        0.5, "", 0.0, 1.0,
        "publish only while the share of device memory that is free beyond the forecast is below this",
    )  # fmt: skip
    publish_share: float = _setting(
        0.02, "", 0.0, 1.0,
        "share of step time that publishing may take on the engine's own thread; four times this while the forecast "
        "says that memory runs out; 0 publishes nothing",
    )  # fmt: skip
    batch_turn_s: float = _setting(
        20.0, "s", 0.1, 3600.0,
        "virtual slack of work without a reader; it falls while the work waits, so that none starves",
    )  # fmt: skip
    prefill_prior_tok_s: float = _setting(
        2000.0, "tok/s", 1.0, 1e7, "prefill speed believed before the first step is seen"
    )
    step_prior_s: float = _setting(0.03, "s", 1e-5, 60.0, "decode step time believed before the first step is seen")
    load_prior_tok_s: float = _setting(
        100_000.0, "tok/s", 1.0, 1e9, "speed of copies to the host and back believed before the first one is seen"
    )
    publish_fixed_prior_s: float = _setting(
        0.0003, "s", 0.0, 1.0, "fixed part of the time of one publish believed before the first one is seen"
    )
    publish_prior_tok_s: float = _setting(
        5e6, "tok/s", 1.0, 1e9, "context tokens that a publish goes through in a second, believed likewise"
    )

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
    # NaN fails both comparisons; an integer too large for a float must not be converted.
    if isinstance(value, bool) or not number or not meta["min"] <= value <= meta["max"]:
        raise ValueError(f"{name}={value!r}: valid is a {valid}")
