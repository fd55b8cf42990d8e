"""Scenario files: what is read, and what is refused with field, value and what is valid."""

from __future__ import annotations

import math

import pytest

from tokenflow_sgl.workload.lengths import Lognormal, Normal
from tokenflow_sgl.workload.scenario import (
    GpuSettings,
    ScenarioError,
    list_scenarios,
    live_scenarios,
    live_settings,
    load_scenario,
    parse_scenario,
)

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
GPU = """
[gpu]
hardware = "h200"
model = "llama3-8b"
mem_fraction = 0.3
page_tokens = 16
chunked_prefill_tokens = 8192
max_running = 256
host_ratio = 2
"""
LARGE = f"""
name = "large"
about = "everything that a simulated scenario can say"
newcomers = []
{GPU}
[[group]]
name = "talk"
start_s = 0
arrival = "poisson"
per_s = 2
for_s = 30
prompt_tokens = {{ normal = [512, 128], clip = [128, 1024] }}
answer_tokens = {{ lognormal = [5.02, 0.86], clip = [7, 1000] }}
session = {{ turns = [1, 6], think_s = 20, shared_prefixes = 20, shared_tokens = [500, 2000] }}
max_tokens = 1000
read_rate = [{{ tok_s = 6, weight = 1 }}, {{ tok_s = "inf", weight = 1 }}]

[[group]]
name = "spells"
class = "agent"
start_s = 5
arrival = "onoff"
on_mean_s = 16.7
off_mean_s = 43
per_s = 9.1
for_s = 600
prompt_tokens = [10, 20]
answer_tokens = [30, 40]

[[group]]
name = "job"
class = "batch"
start_s = 0
arrival = "uniform"
count = 3
over_s = 0
prompt_tokens = [10, 20]
answer_tokens = [30, 40]
read_rate = [{{ tok_s = "inf", weight = 1 }}]
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
        ("host_ratio = 4", f"host_ratio = 1{'0' * 400}", "server.host_ratio", "1000"),
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
        ('["new"]', "[3]", "newcomers", "[3]"),
        ('["new"]', '"new"', "newcomers", "'new'"),
        ('name = "old"', 'name = "new"', "group.name", "each name once"),
        ("[[group]]", "[[groups]]", "group", "missing"),
        ("[server]", "[servers]", "server", "missing"),
        ("count = 3", "", "group[0].count", "missing"),
        ("count = 3", "count = 3\nfor_s = 4", "group[0].for_s", "beside count"),
        ("count = 2", "count = 2\nfor_s = 4", "group[1].for_s", "unknown key"),
        ("count = 2", "count = 2\nmax_tokens = 8", "group[1].max_tokens", "8"),
        ("tok_s = 6", 'tok_s = "fast"', "group[0].read_rate[0].tok_s", "fast"),
        ("count = 2", 'count = 2\nclass = "robot"', "group[1].class", "robot"),
        ("count = 2", 'count = 2\nclass = "agent"', "group[1].read_rate[0].tok_s", "4.0"),
        ("[server]", "[server", "scenario", "not TOML"),
    ],
)
def test_a_wrong_scenario_is_refused_with_field_value_and_what_is_valid(was, becomes, field, value):
    assert was in GOOD
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(GOOD.replace(was, becomes))
    message = str(refused.value)
    assert message.startswith(f"{field}:") and value in message and "valid" in message, message


def test_a_large_scenario_is_read_as_written():
    scenario = parse_scenario(LARGE)
    talk, spells, job = scenario.groups
    assert (scenario.newcomers, scenario.server) == ((), None)
    assert scenario.gpu == GpuSettings("h200", "llama3-8b", 0.3, None, 16, 8192, 256, 2.0)
    assert (talk.count, talk.per_s, talk.for_s, talk.max_tokens, talk.reader) == (None, 2.0, 30.0, 1000, "reader")
    assert talk.prompt_tokens == Normal(512.0, 128.0, (128, 1024))
    assert talk.answer_tokens == Lognormal(5.02, 0.86, (7, 1000))
    assert (talk.session.turns, talk.session.think_s) == ((1, 6), 20.0)
    assert (talk.session.shared_prefixes, talk.session.shared_tokens) == (20, (500, 2000))
    assert [rate.tok_s for rate in talk.read_rates] == [6.0, math.inf]
    assert (spells.on_mean_s, spells.off_mean_s, spells.per_s, spells.for_s) == (16.7, 43.0, 9.1, 600.0)
    assert [(group.reader, group.read_rates[0].tok_s) for group in (spells, job)] == [
        ("agent", math.inf),
        ("batch", math.inf),
    ]


@pytest.mark.parametrize(
    ("was", "becomes", "field", "value"),
    [
        ("mem_fraction = 0.3", "mem_fraction = 1", "gpu.mem_fraction", "1"),
        ("mem_fraction = 0.3", "mem_fraction = 0", "gpu.mem_fraction", "0"),
        ("mem_fraction = 0.3", "", "gpu.mem_fraction", "missing"),
        ("mem_fraction = 0.3", "mem_fraction = 0.3\nkv_pool_tokens = 16", "gpu.kv_pool_tokens", "beside mem_fraction"),
        ("mem_fraction = 0.3", "kv_pool_tokens = 17", "gpu.kv_pool_tokens", "17"),
        ("max_running = 256", "max_running = 0", "gpu.max_running", "0"),
        ("max_running = 256", "max_runing = 256", "gpu.max_running", "missing"),
        ("host_ratio = 2", "host_ratio = -1", "gpu.host_ratio", "-1"),
        ("[512, 128]", "[512, -1]", "group[0].prompt_tokens.normal", "[512, -1]"),
        ("[512, 128]", "[512]", "group[0].prompt_tokens.normal", "[512]"),
        ("[5.02, 0.86]", "[nan, 0.86]", "group[0].answer_tokens.lognormal", "nan"),
        ("normal = [512, 128], ", "", "group[0].prompt_tokens.normal", "missing"),
        (", clip = [128, 1024]", "", "group[0].prompt_tokens.clip", "missing"),
        ("[128, 1024]", "[0, 1024]", "group[0].prompt_tokens.clip", "[0, 1024]"),
        ("normal = [512, 128]", "uniform = [1, 2]", "group[0].prompt_tokens.normal", "missing"),
        ("normal = [512, 128]", "normal = [5, 1], sd = 3", "group[0].prompt_tokens.sd", "unknown key"),
        ("{ normal = [512, 128], clip = [128, 1024] }", '"long"', "group[0].prompt_tokens", "long"),
        ("for_s = 30", "for_s = 0", "group[0].for_s", "0"),
        ("max_tokens = 1000", "max_tokens = 999", "group[0].max_tokens", "999"),
        ("turns = [1, 6]", "turns = [0, 6]", "group[0].session.turns", "[0, 6]"),
        ("think_s = 20, ", "", "group[0].session.think_s", "missing"),
        ("think_s = 20", "think_s = -1", "group[0].session.think_s", "-1"),
        ("shared_prefixes = 20", "shared_prefixes = 0", "group[0].session.shared_prefixes", "0"),
        (", shared_tokens = [500, 2000]", "", "group[0].session.shared_tokens", "missing"),
        ("shared_prefixes = 20, ", "", "group[0].session.shared_tokens", "unknown key"),
        ("on_mean_s = 16.7", "on_mean_s = 0", "group[1].on_mean_s", "0"),
        ("off_mean_s = 43", "", "group[1].off_mean_s", "missing"),
        ("per_s = 9.1", "", "group[1].per_s", "missing"),
        ("for_s = 600", "count = 600", "group[1].for_s", "missing"),
        ('read_rate = [{ tok_s = "inf"', "read_rate = [{ tok_s = 6", "group[2].read_rate[0].tok_s", "6.0"),
    ],
)
def test_a_wrong_large_scenario_is_refused_with_field_value_and_what_is_valid(was, becomes, field, value):
    assert was in LARGE
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(LARGE.replace(was, becomes))
    message = str(refused.value)
    assert message.startswith(f"{field}:") and value in message and "valid" in message, message


def test_live_servers_take_the_scenarios_that_say_how_to_start_them():
    assert {"demo-burst", "gpu-burst"} <= set(live_scenarios()) < set(list_scenarios())
    for name in live_scenarios():
        scenario = load_scenario(name)
        assert live_settings(scenario) is scenario.server
    both = parse_scenario(GOOD.replace("[[group]]", GPU + "[[group]]", 1))
    assert live_settings(both).kv_pool_tokens == 1600 and both.gpu.hardware == "h200"


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("", "", None),
        ('newcomers = ["new"]', "newcomers = []", "newcomers: []"),
        ("over_s = 1", "over_s = 1\nsession = { turns = [1, 2], think_s = 1 }", "group new: session.turns: (1, 2)"),
        ("over_s = 1", "over_s = 1\nsession = { turns = [1, 1] }", None),
        ("tok_s = 10", 'tok_s = "inf"', "group new: read_rate: inf"),
    ],
)
def test_live_servers_refuse_what_their_client_cannot_play(was, becomes, says):
    scenario = parse_scenario(GOOD.replace(was, becomes))
    if says is None:
        assert live_settings(scenario).model == "small"
        return
    with pytest.raises(ScenarioError, match="valid: for live servers") as refused:
        live_settings(scenario)
    assert str(refused.value).startswith(says)


def test_without_server_settings_the_refusal_lists_the_scenarios_that_have_them():
    with pytest.raises(ScenarioError, match=r"^server: missing in scenario large, valid: .*demo-burst, demo-burst-x2"):
        live_settings(parse_scenario(LARGE))


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
