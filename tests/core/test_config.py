"""A configuration that exists is valid; a bad value is named together with what is valid."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import pytest

from tokenflow_sgl.core.config import PolicyConfig

NUMBERS = [f for f in fields(PolicyConfig) if f.metadata["choices"] is None]


def refused(name, value):
    with pytest.raises(ValueError) as caught:
        PolicyConfig.from_mapping({name: value})
    return str(caught.value)


def test_the_defaults_are_valid_and_survive_a_round_trip():
    config = PolicyConfig()
    assert PolicyConfig.from_mapping(config.to_mapping()) == config
    assert PolicyConfig.from_mapping({}) == config


def test_every_setting_says_what_it_is_for():
    for f in fields(PolicyConfig):
        assert f.metadata["help"], f.name
        assert f.metadata["choices"] or f.metadata["min"] < f.metadata["max"], f.name


def test_settings_differ_in_more_than_their_unit():
    # Flags leave the unit out: two settings that differ by it alone would be one flag, and the launcher dies of it.
    units = ("_tok_s", "_tokens", "_steps", "_s")
    bare = [next((f.name.removesuffix(u) for u in units if f.name.endswith(u)), f.name) for f in fields(PolicyConfig)]
    assert len(set(bare)) == len(bare)


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.name)
def test_a_number_may_stand_on_its_bounds_and_not_beyond(f):
    kind, low, high = type(f.default), f.metadata["min"], f.metadata["max"]
    for value in (kind(low), kind(high)):
        assert getattr(PolicyConfig(**{f.name: value}), f.name) == value
    below, above = (
        (low - 1, high + 1) if kind is int else (math.nextafter(low, -math.inf), math.nextafter(high, math.inf))
    )
    for value in (kind(below), kind(above)):
        message = refused(f.name, value)
        assert f.name in message and repr(value) in message and f"{low:g}" in message and f"{high:g}" in message


BAD = [math.nan, math.inf, -math.inf, "5", "", None, True, [1], {}]


@pytest.mark.parametrize("f", NUMBERS, ids=lambda f: f.name)
@pytest.mark.parametrize("value", BAD, ids=lambda v: str(v)[:12])
def test_what_is_no_number_is_refused_by_name(f, value):
    message = refused(f.name, value)
    assert f.name in message and type(f.default).__name__ in message


@pytest.mark.parametrize("name", ["max_parks", "mu"])
def test_a_whole_number_larger_than_any_float_is_refused_by_name(name):
    assert name in refused(name, 10**400)


@pytest.mark.parametrize("f", [f for f in NUMBERS if type(f.default) is int], ids=lambda f: f.name)
def test_a_whole_number_is_asked_for_where_one_is_needed(f):
    assert f.name in refused(f.name, float(f.default))
    assert f.name in refused(f.name, f.default + 0.5)


def test_an_unknown_ranking_is_refused_with_those_that_are_known():
    message = refused("priority", "newest")
    assert "priority='newest'" in message and "guide" in message and "aged" in message
    assert "priority=3" in refused("priority", 3)


def test_an_unknown_setting_is_refused_with_those_that_are_known():
    message = refused("lamda_s", 0.1)
    assert "lamda_s=0.1" in message and "lambda_s" in message


def test_a_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        PolicyConfig().mu = 3.0
