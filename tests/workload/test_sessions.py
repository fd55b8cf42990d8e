"""Conversations: what their turns share, who reads them, and what a plan holds in memory."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest

from tokenflow_sgl.workload.arrivals import (
    PROMPT_ID_HIGH,
    PROMPT_ID_LOW,
    Request,
    Segment,
    plan_requests,
    token_ids,
)
from tokenflow_sgl.workload.groups import Group, ReadRate, Session
from tokenflow_sgl.workload.scenario import Scenario, load_scenario

COUNT = 3000
TALK = Group(
    name="talk",
    count=COUNT,
    start_s=0.0,
    arrival="poisson",
    over_s=None,
    per_s=10.0,
    prompt_tokens=(5, 20),
    answer_tokens=(10, 30),
    read_rates=(ReadRate(6.0, 1),),
    session=Session(turns=(1, 4), think_s=20.0, shared_prefixes=4, shared_tokens=(50, 90)),
)


def scenario(*groups):
    return Scenario("made-up", "", (), None, None, groups, "")


def first_turns(requests):
    return [request for request in requests if request.after is None]


def test_a_follow_up_repeats_the_turn_before_and_its_answer():
    requests = plan_requests(scenario(TALK), seed=1)
    before = {}
    for request in requests:
        if request.after is not None:
            # A KeyError here would be a follow-up that comes ahead of what it follows.
            asked = before[request.after]
            assert request.segments[:-1] == (*asked.segments, Segment(f"out:{asked.rid}", asked.answer_tokens))
            assert (request.group, request.read_rate_tok_s) == (asked.group, asked.read_rate_tok_s)
            assert request.sent_s == 0.0
        assert 5 <= request.segments[-1].tokens <= 20
        assert request.prompt_len == sum(segment.tokens for segment in request.segments)
        before[request.rid] = request
    starts = [request.sent_s for request in first_turns(requests)]
    assert len(starts) == COUNT and starts == sorted(starts)


def test_the_tokens_of_a_follow_up_start_with_the_prompt_before():
    requests = plan_requests(scenario(replace(TALK, count=20)), seed=1)
    by_rid = {request.rid: request for request in requests}
    follow_ups = [request for request in requests if request.after is not None]
    assert follow_ups
    for request in follow_ups:
        asked = by_rid[request.after].prompt_tokens
        assert request.prompt_tokens[: len(asked)] == asked
        assert len(request.prompt_tokens) == request.prompt_len


def test_turns_and_thinking_times_are_drawn_as_asked():
    requests = plan_requests(scenario(TALK), seed=1)
    # Turns 1 to 4 alike: mean 2.5, variance 1.25, so 7,500 in all, give or take sqrt(3000 x 1.25) = 61.
    assert abs(len(requests) - 7500) < 4 * 61
    turns = Counter(request.rid.split("t")[-1] for request in requests)
    assert turns["1"] == COUNT and set(turns) == {"1", "2", "3", "4"}
    thinking = [request.think_s for request in requests if request.after is not None]
    # Exponential: the mean of about 4,500 strays by 20 / sqrt(4500) = 0.3, and e^-1 = 37% are above it (+- 0.7%).
    assert abs(sum(thinking) / len(thinking) - 20) < 4 * 0.3
    assert abs(sum(think_s > 20 for think_s in thinking) / len(thinking) - math.exp(-1)) < 4 * 0.0072
    assert all(request.think_s == 0.0 for request in first_turns(requests))


def test_system_prompts_are_shared_the_first_most_often():
    heads = [request.segments[0] for request in first_turns(plan_requests(scenario(TALK), seed=1))]
    used = Counter(head.key for head in heads)
    # Weights 1, 1/2, 1/3, 1/4 add up to 25/12: shares of 0.48, 0.24, 0.16, 0.12.
    for rank, share in enumerate((0.48, 0.24, 0.16, 0.12), start=1):
        assert abs(used[f"shared:s1-talk-{rank}"] / COUNT - share) < 4 * math.sqrt(share * (1 - share) / COUNT)
    assert sum(used.values()) == COUNT and len(used) == 4
    # One length for each, whoever uses it.
    assert len(set(heads)) == 4 and all(50 <= head.tokens <= 90 for head in heads)


def test_nothing_but_system_prompts_is_shared_between_conversations():
    seen = Counter(segment.key for request in first_turns(plan_requests(scenario(TALK), seed=1))
                   for segment in request.segments[1:])  # fmt: skip
    assert set(seen.values()) == {1}


def test_one_turn_with_a_shared_prompt_is_no_conversation():
    alone = replace(TALK, session=Session((1, 1), 0.0, 2, (50, 90)))
    requests = plan_requests(scenario(alone), seed=2)
    assert len(requests) == COUNT and not any(request.after for request in requests)
    assert {len(request.segments) for request in requests} == {2}
    assert (requests[0].rid, requests[-1].rid) == ("s2-talk-0000", "s2-talk-2999")


def test_a_conversation_without_shared_prompts_starts_with_its_own():
    plain = replace(TALK, count=50, session=Session((2, 2), 0.0, 0, None))
    requests = plan_requests(scenario(plain), seed=1)
    assert [len(request.segments) for request in requests] == [1, 3] * 50
    assert {request.think_s for request in requests} == {0.0}
    assert (requests[0].rid, requests[1].rid, requests[1].after) == ("s1-talk-000t1", "s1-talk-000t2", "s1-talk-000t1")


def test_another_seed_shares_other_prompts():
    def heads(seed):
        return {request.segments[0].key for request in plan_requests(scenario(TALK), seed=seed)}

    assert not heads(1) & heads(2)


def test_tokens_come_from_the_key_alone_and_stay_clear_of_markers():
    assert token_ids(Segment("a", 8)) == token_ids(Segment("a", 8))
    assert token_ids(Segment("a", 8))[:5] == token_ids(Segment("a", 5))
    assert token_ids(Segment("a", 8)) != token_ids(Segment("b", 8))
    assert token_ids(Segment.of("a", [20, 21])) == (20, 21)
    ids = token_ids(Segment("many", 20_000))
    # 884 ids, each missed by all 20,000 draws with odds of e^-22.6.
    assert (min(ids), max(ids)) == (PROMPT_ID_LOW, PROMPT_ID_HIGH - 1)


@pytest.mark.parametrize(
    ("reader", "rate", "is_a"),
    [
        ("reader", 6.0, "reader"),
        ("reader", math.inf, "agent"),
        ("agent", math.inf, "agent"),
        ("batch", math.inf, "batch"),
    ],
)
def test_who_takes_tokens_as_they_come_is_a_program_or_nobody(reader, rate, is_a):
    group = replace(TALK, count=3, reader=reader, read_rates=(ReadRate(rate, 1),))
    requests = plan_requests(scenario(group), seed=1)
    assert {(request.reader, request.read_rate_tok_s) for request in requests} == {(is_a, rate)}


def test_a_limit_of_the_group_is_everybodys_whatever_the_factor():
    group = replace(TALK, max_tokens=64)
    for factor in (1.0, 2.0):
        requests = plan_requests(scenario(group), seed=1, max_tokens_factor=factor)
        assert {request.max_tokens for request in requests} == {64}


def test_ten_thousand_conversations_hold_no_tokens_until_asked():
    tracemalloc.start()
    requests = plan_requests(load_scenario("multiturn-10k"), seed=1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first_turns(requests)) == 10_000
    assert all(segment.ids is None for request in requests for segment in request.segments)
    # 35,000 prompts of some 1,900 tokens would be 530 MB of pointers alone.
    assert sum(request.prompt_len for request in requests) * 8 > 400e6
    assert peak_bytes < 80e6


@pytest.mark.parametrize("change", [{}, {"count": None, "for_s": 3.0, "session": None}])
def test_only_plain_groups_hold_their_tokens(change):
    requests = plan_requests(scenario(replace(TALK, **change)), seed=1)
    assert requests and all(segment.ids is None for request in requests for segment in request.segments)


def test_a_plain_request_is_one_segment_of_given_tokens():
    request = plan_requests(load_scenario("demo-burst"), seed=1)[0]
    assert isinstance(request, Request) and len(request.segments) == 1
    assert request.prompt_tokens == request.segments[0].ids
    assert (request.reader, request.after, request.think_s) == ("reader", None, 0.0)
