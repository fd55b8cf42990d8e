"""The scenarios that stand for a GPU: the numbers of their sources, and what their comments work out."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest

from tokenflow_sgl.workload.arrivals import plan_requests
from tokenflow_sgl.workload.scenario import list_scenarios, load_scenario

SIMULATED = [name for name in list_scenarios() if load_scenario(name).gpu is not None]
ASKED_FOR = [
    *("guide-burst-4x", "azure-code-onoff", "chat-poisson", "reasoning-jump", "multiturn-10k", "overload-1.5x"),
    *("mixed-classes", "paper-h200-qwen32b-a", "paper-4090-mixed"),
    *(f"paper-4090-rate{rate}" for rate in (20, 25, 30)),
    *(f"paper-{card}-{letter}" for card in ("4090", "h200") for letter in "abcd"),
]
# Table 1: card, setting, requests at once or a second, mean prompt, mean answer.
TABLE_1 = [
    ("4090", "a", 60, 512, 2048),
    ("4090", "b", 80, 1024, 2048),
    ("4090", "c", 2, 512, 2048),
    ("4090", "d", 4, 512, 2048),
    ("h200", "a", 400, 512, 4096),
    ("h200", "b", 200, 1024, 4096),
    ("h200", "c", 5, 512, 4096),
    ("h200", "d", 10, 512, 4096),
]


def test_every_large_scenario_is_there_and_says_in_one_line_what_it_is():
    assert sorted(ASKED_FOR) == SIMULATED
    for name in SIMULATED:
        assert "\n" not in load_scenario(name).about


@pytest.mark.parametrize("name", SIMULATED)
def test_every_stream_fits_the_pool_alone_and_starts_where_its_group_does(name):
    scenario = load_scenario(name)
    starts = {group.name: group.start_s for group in scenario.groups}
    assert scenario.gpu.hardware in ("rtx4090", "a6000", "a100-80g", "h100-80g", "h200")
    assert scenario.gpu.model in ("llama3-8b", "qwen2-7b", "qwen2.5-32b")
    requests = plan_requests(scenario, seed=1)
    assert {request.group for request in requests} == set(starts)
    # The smallest pool is the H100's beside the weights of a 32B model, some 37,000 tokens.
    assert max(request.prompt_len + request.answer_tokens for request in requests) < 16_384
    assert all(request.sent_s >= starts[request.group] for request in requests if request.after is None)


@pytest.mark.parametrize(("card", "letter", "how_many", "prompt", "answer"), TABLE_1)
def test_the_papers_settings_are_those_of_its_table(card, letter, how_many, prompt, answer):
    scenario = load_scenario(f"paper-{card}-{letter}")
    (group,) = scenario.groups
    assert (scenario.gpu.hardware, scenario.gpu.mem_fraction) == {"4090": ("rtx4090", 0.9), "h200": ("h200", 0.3)}[card]
    assert (group.prompt_tokens.mean_tokens, group.answer_tokens.mean_tokens) == (prompt, answer)
    for lengths in (group.prompt_tokens, group.answer_tokens):
        centre = lengths.mean_tokens
        assert (lengths.sd_tokens, lengths.clip) == (centre / 4, (centre / 4, 2 * centre))
    if letter in "ab":
        assert (group.arrival, group.count, group.over_s) == ("uniform", how_many, 0.0)
    else:
        assert (group.arrival, group.per_s, group.for_s) == ("poisson", how_many, 120.0)
    requests = plan_requests(scenario, seed=1)
    # The mean of n lengths strays by mean / 4 / sqrt(n).
    for mean_tokens, drawn in (
        (prompt, [r.prompt_len for r in requests]),
        (answer, [r.answer_tokens for r in requests]),
    ):
        assert abs(mean(drawn) - mean_tokens) < 4 * mean_tokens / 4 / math.sqrt(len(drawn))
    assert {request.read_rate_tok_s for request in requests} == {20.0}


def test_the_papers_mixed_rates_are_dealt_40_to_60():
    rates = [request.read_rate_tok_s for request in plan_requests(load_scenario("paper-4090-mixed"), seed=1)]
    assert (rates.count(15.0), rates.count(20.0)) == (24, 36)


@pytest.mark.parametrize("rate", [20, 25, 30])
def test_the_papers_sweep_changes_the_rate_alone(rate):
    swept, table = load_scenario(f"paper-4090-rate{rate}"), load_scenario("paper-4090-a")
    assert swept.gpu == table.gpu
    assert {request.read_rate_tok_s for request in plan_requests(swept, seed=1)} == {float(rate)}
    (ours,), (theirs,) = swept.groups, table.groups
    assert replace(ours, read_rates=()) == replace(theirs, read_rates=())


def test_the_guides_burst_is_four_times_the_base_for_20_s():
    base, burst = load_scenario("guide-burst-4x").groups
    assert (base.per_s + burst.per_s, burst.for_s) == (pytest.approx(4 * base.per_s), 20.0)
    assert base.start_s == 0 and base.for_s > burst.start_s + burst.for_s
    requests = [r for seed in range(1, 6) for r in plan_requests(load_scenario("guide-burst-4x"), seed=seed)]
    # 500 in and 1,024 out, as its comment reckons. A lognormal's relative deviation is sqrt(e^(sigma^2) - 1), 0.95 and
    # 0.53 here: over some 7,600 requests 1.1% and 0.6%.
    assert len(requests) > 7000
    assert abs(mean(r.prompt_len for r in requests) / 500 - 1) < 4 * 0.011
    assert abs(mean(r.answer_tokens for r in requests) / 1024 - 1) < 4 * 0.006


def test_overload_is_twice_its_base_for_60_s_in_arrivals():
    base, surplus = load_scenario("overload-1.5x").groups
    assert (base.per_s, surplus.for_s) == (surplus.per_s, 60.0)


def test_a_jump_of_reasoning_is_the_fleets_largest():
    base, jump = load_scenario("reasoning-jump").groups
    assert (base.per_s + jump.per_s) / base.per_s == pytest.approx(2.25)
    # Through the quantiles of the sample: ln 204, ln(805 / 204) / 1.2816, ln 799, ln(1581 / 799) / 1.2816.
    assert (base.prompt_tokens.mu, base.prompt_tokens.sigma) == (
        pytest.approx(math.log(204), abs=0.005), pytest.approx(math.log(805 / 204) / 1.2816, abs=0.005),
    )  # fmt: skip
    assert (base.answer_tokens.mu, base.answer_tokens.sigma) == (
        pytest.approx(math.log(799), abs=0.005), pytest.approx(math.log(1581 / 799) / 1.2816, abs=0.005),
    )  # fmt: skip


def test_mixed_classes_have_all_of_them():
    requests = plan_requests(load_scenario("mixed-classes"), seed=1)
    assert {(r.reader, r.read_rate_tok_s) for r in requests} == {
        ("reader", 6.0), ("reader", 3.5), ("agent", math.inf), ("batch", math.inf),
    }  # fmt: skip
