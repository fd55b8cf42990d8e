"""Scenario files: what is read, and what is refused with field, value and what is valid."""

from __future__ import annotations

import pytest

from tokenflow_sgl.workload.scenario import ScenarioError, list_scenarios, load_scenario, parse_scenario

GOOD = """
name = "mini"
about = "two groups"
newcomers = ["new"]

[server]
model = "small"
page_tokens = 16
kv_pool_tokens = 1600
chunked_prefill_tokens = 512
host_ratio = 4
write_policy = "write_through"
overlap = true

[[group]]
name = "old"
count = 3
start_s = 0
arrival = "poisson"
per_s = 2.0
prompt_tokens = [10, 20]
answer_tokens = [30, 40]
read_rate = [{ tok_s = 6, weight = 1 }]

[[group]]
name = "new"
count = 2
start_s = 1.5
arrival = "uniform"
over_s = 1
prompt_tokens = [5, 5]
answer_tokens = [7, 9]
read_rate = [{ tok_s = 4, weight = 2 }, { tok_s = 10, weight = 1 }]
"""


def test_a_scenario_is_read_as_written():
    scenario = parse_scenario(GOOD)
    old, new = scenario.groups
    assert (scenario.name, scenario.newcomers) == ("mini", ("new",))
    assert (scenario.server.kv_pool_tokens, scenario.server.host_ratio, scenario.server.overlap) == (1600, 4.0, True)
    assert (old.arrival, old.per_s, old.over_s) == ("poisson", 2.0, None)
    assert (new.start_s, new.over_s, new.prompt_tokens, new.answer_tokens) == (1.5, 1.0, (5, 5), (7, 9))
    assert [(rate.tok_s, rate.weight) for rate in new.read_rates] == [(4.0, 2), (10.0, 1)]


@pytest.mark.parametrize(
    ("was", "becomes", "field", "value"),
    [
        ("page_tokens = 16", "page_tokens = 0", "server.page_tokens", "0"),
        ("page_tokens = 16", "page_tokens = 16.0", "server.page_tokens", "16.0"),
        ("page_tokens = 16", "page_tokens = true", "server.page_tokens", "True"),
        ("kv_pool_tokens = 1600", "kv_pool_tokens = 1601", "server.kv_pool_tokens", "1601"),
        ("host_ratio = 4", "host_ratio = nan", "server.host_ratio", "nan"),
        ("host_ratio = 4", "host_ratio = 0", "server.host_ratio", "0"),
        ('"write_through"', '"write_back"', "server.write_policy", "write_back"),
        ("overlap = true", 'overlap = "yes"', "server.overlap", "yes"),
        ("overlap = true", "overlap = true\nspeed = 3", "server.speed", "unknown key"),
        ("about =", "abuot =", "about", "missing"),
        ("count = 3", "count = -3", "group[0].count", "-3"),
        ("start_s = 1.5", "start_s = -1", "group[1].start_s", "-1"),
        ("start_s = 1.5", "start_s = inf", "group[1].start_s", "inf"),
        ('"poisson"', '"sometimes"', "group[0].arrival", "sometimes"),
        ("per_s = 2.0", "over_s = 2.0", "group[0].per_s", "missing"),
        ("[10, 20]", "[20, 10]", "group[0].prompt_tokens", "[20, 10]"),
        ("[10, 20]", "[10]", "group[0].prompt_tokens", "[10]"),
        ("[7, 9]", "[0, 9]", "group[1].answer_tokens", "[0, 9]"),
        ("tok_s = 6", "tok_s = 0", "group[0].read_rate[0].tok_s", "0"),
        ("weight = 2", "weight = 0.5", "group[1].read_rate[0].weight", "0.5"),
        ('["new"]', '["nwe"]', "newcomers", "nwe"),
        ('["new"]', "[]", "newcomers", "[]"),
        ('name = "old"', 'name = "new"', "group.name", "each name once"),
        ("[[group]]", "[[groups]]", "group", "missing"),
        ("[server]", "[server", "scenario", "not TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_with_field_value_and_what_is_valid(was, becomes, field, value):
    assert was in GOOD
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(GOOD.replace(was, becomes))
    message = str(refused.value)
    assert message.startswith(f"{field}:") and value in message and "valid" in message, message


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ScenarioError, match="demo-burst"):
        load_scenario("demo-brust")


def test_a_path_is_read_like_a_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_scenario(path) == parse_scenario(GOOD)


def test_the_hash_names_the_text():
    assert parse_scenario(GOOD).sha256 != parse_scenario(GOOD + "# a word\n").sha256


@pytest.mark.parametrize("name", list_scenarios())
def test_every_scenario_of_the_package_loads_under_its_own_name(name):
    assert load_scenario(name).name == name


def test_the_demo_is_the_reference_burst():
    scenario = load_scenario("demo-burst")
    old, new = scenario.groups
    assert (old.count, old.start_s, old.over_s) == (16, 0.0, 4.0)
    assert (old.prompt_tokens, old.answer_tokens) == ((150, 250), (700, 900))
    assert (new.count, new.start_s, new.over_s) == (24, 16.0, 2.0)
    assert (new.prompt_tokens, new.answer_tokens) == ((80, 160), (60, 120))
    assert {rate.tok_s for group in scenario.groups for rate in group.read_rates} == {6.0}
    assert (scenario.server.page_tokens, scenario.server.kv_pool_tokens) == (16, 12288)
