"""What a server tells of itself, to whom; and that a stock server from the same environment tells and does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from support.live import (
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    OURS,
    POOL_TOKENS,
    Server,
    body_of,
    read_together,
    serving,
    until,
)
from tokenflow_sgl.adapter.hooks import installed_release
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.journal import replay
from tokenflow_sgl.core.policies import policy_from_header

pytestmark = pytest.mark.e2e
SLOW = {"read_rate": 0.5}
API_KEY, ADMIN_KEY = "sesame", "open-sesame"
ROW = {
    "id",
    "phase",
    "class",
    "read_rate_tok_s",
    "generated_tokens",
    "consumed_tokens",
    "buffer_tokens",
    "slack_s",
    "parks",
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def crowded(server: Server, name: str, streams: int = 10) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state before a crowd that has to park, and after it."""
    before = server.state()
    readers = [
        server.stream(f"{name} reader {i}. " * 12, 400, rid=f"{name}-{i}", tokenflow=SLOW) for i in range(streams)
    ]
    read_together(readers)
    return before, server.state(before["seq"])


# ---- /tokenflow/state


def test_the_state_says_that_our_scheduler_is_in_force_with_all_its_hooks(server: Server) -> None:
    state = server.state()
    assert (state["active"], state["policy"], state["release"]) == (True, "tokenflow", installed_release())
    assert "sglang.srt.managers.scheduler.Scheduler" in state["hooks"]
    assert state["memory"]["device_total_tokens"] == POOL_TOKENS
    assert state["steps"] > 0


def test_a_stream_is_in_the_state_from_its_arrival_to_its_end_and_not_longer(server: Server) -> None:
    stream = server.stream("seen from first to last", 300, rid="seen", tokenflow={"read_rate": 5})
    row = server.row("seen")
    assert set(row) == ROW
    read_together([stream])
    server.settle()
    assert server.state()["streams"] == []


def test_parked_streams_are_shown_as_parked_with_slack_and_a_count(server: Server) -> None:
    streams = [server.stream(f"parked reader {i}. " * 12, 400, rid=f"p{i}", tokenflow=SLOW) for i in range(10)]
    row = until(lambda: next((r for r in server.state()["streams"] if r["phase"] == "parked"), None), "a parked stream")
    # At half a token a second two seconds of slack, the least that is parked, are one token.
    assert row["parks"] >= 1 and row["slack_s"] > 2.0 and row["buffer_tokens"] > 1
    read_together(streams)


def test_transitions_tell_each_stream_once_in_and_once_out_and_every_park_with_its_return(server: Server) -> None:
    before, after = crowded(server, "told")
    mine = [t for t in after["transitions"] if t["id"].startswith("told-")]
    grew = {k: after["counters"][k] - before["counters"][k] for k in after["counters"]}
    assert grew["parks"] > 0
    for i in range(10):
        words = [t["what"] for t in mine if t["id"] == f"told-{i}" and t["what"] not in ("load", "recompute")]
        assert words[0] == "admit" and words[-1] == "finish", words
        assert words[1:-1] == ["park", "return"] * (len(words[1:-1]) // 2), words
    assert sum(t["what"] == "park" for t in mine) == grew["parks"] == grew["returns"]
    assert [t["seq"] for t in after["transitions"]] == list(range(before["seq"] + 1, after["seq"] + 1))
    assert all(a["at_s"] <= b["at_s"] for a, b in pairwise(mine))


def test_since_leaves_out_what_was_told_already(server: Server) -> None:
    server.generate("something happens", 2)
    state = server.state()
    assert server.state(state["seq"])["transitions"] == []
    assert [t["seq"] for t in server.state(state["seq"] - 1)["transitions"]] == [state["seq"]]


@pytest.mark.parametrize("since", ["-1", "1.5", "word", "", "9" * 30, "\uff11"])
def test_a_bad_since_is_refused_by_name(server: Server, since: str) -> None:
    reply = server.http.get("/tokenflow/state", params={"since": since})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "since"


def test_reading_the_state_all_the_time_changes_no_answer(server: Server) -> None:
    expected = server.generate("is it watched", 300)["text"]
    stream = server.stream("is it watched", 300, tokenflow=SLOW)
    until(lambda: server.state() and stream.closed, "its end")
    assert stream.text == expected


def test_the_config_route_shows_every_setting(server: Server) -> None:
    reply = server.http.get("/tokenflow/config").json()
    assert reply["policy"] == "tokenflow" and reply["config"] == PolicyConfig().to_mapping()
    assert "sglang.srt.entrypoints.http_server._setup_and_run_http_server" in reply["http"]["hooks"]
    bridged = reply["http"]["bridged_requests"]
    server.generate("one more through the bridge", 1)
    assert server.http.get("/tokenflow/config").json()["http"]["bridged_requests"] == bridged + 1


# ---- metrics


def test_metrics_say_active_and_count_parks_and_returns(server: Server) -> None:
    assert server.metric("tokenflow:active") == 1
    names = ("parks", "returns", "published_tokens", "reprefilled_tokens")
    counted = {name: server.metric(f"tokenflow:{name}_total") for name in names}
    before, after = crowded(server, "counted")
    for name in names:
        grew = after["counters"][name] - before["counters"][name]
        assert grew > 0, name
        until(
            lambda name=name, grew=grew: server.metric(f"tokenflow:{name}_total") == counted[name] + grew,
            f"{name} in the metrics as in the state",
        )
    server.settle()
    until(lambda: server.metric("tokenflow:parked_streams") == 0, "no parked stream in the metrics")
    assert server.metric("tokenflow:device_total_tokens") == POOL_TOKENS
    assert server.metric("tokenflow:slack_at_park_seconds_count") >= after["counters"]["parks"] - counted["parks"]


# ---- an e2e run, decided again (design: tests that hold the design together, 2)


def test_the_journal_of_all_this_replays_to_the_same_plans(server: Server) -> None:
    assert server.journal is not None
    crowded(server, "journal")
    server.settle()
    agreed, difference = replay(server.journal, policy_from_header)
    assert difference is None
    assert agreed > 100


# ---- keys, and the policy that behaves as stock


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = ("--api-key", API_KEY, "--admin-api-key", ADMIN_KEY)
    folder = tmp_path_factory.mktemp("keyed")
    with serving(OURS, folder, "--page-size", "16", "--tokenflow-policy", "fcfs", *keys) as server:
        yield server


@pytest.fixture
def keyed(keyed_server: Server) -> Server:
    return keyed_server.wake()


@pytest.mark.parametrize("path", ["/tokenflow/state", "/tokenflow/config"])
def test_the_routes_need_the_admin_key(keyed: Server, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(API_KEY), {"authorization": ADMIN_KEY}):
        assert keyed.http.get(path, headers=headers).status_code == 401, headers
    assert keyed.http.get(path, headers=bearer(ADMIN_KEY)).status_code == 200


def test_a_request_without_the_key_is_refused_before_its_rate_is_looked_at(keyed: Server) -> None:
    for headers in ({}, {"x-tokenflow-read-rate": "-1"}):
        assert keyed.http.post("/generate", json=body_of("x", 1), headers=headers).status_code == 401
    bad = {**bearer(API_KEY), "x-tokenflow-read-rate": "-1"}
    assert keyed.http.post("/generate", json=body_of("x", 1), headers=bad).status_code == 400


def test_streams_of_all_clients_are_not_shown_to_those_without_the_admin_key(keyed: Server) -> None:
    """Upstream's /server_info asks the scheduler the same question, and needs less of a key."""
    stream = keyed.stream("not for everybody", 400, rid="secret-rid", headers=bearer(API_KEY))
    stream.wait_events(1)
    reply = keyed.http.get("/server_info", headers=bearer(API_KEY))
    assert "secret-rid" not in reply.text
    read_together([stream])


def test_fcfs_answers_as_stock_and_parks_nobody(stock_answers: dict[str, Any], keyed: Server) -> None:
    headers = bearer(API_KEY)
    reply = keyed.http.post("/generate", json=body_of(GREEDY_PROMPT, GREEDY_TOKENS), headers=headers)
    assert reply.json()["text"] == stock_answers["text"]
    state = keyed.http.get("/tokenflow/state", headers=bearer(ADMIN_KEY)).json()
    assert (state["active"], state["policy"], state["counters"]["parks"]) == (True, "fcfs", 0)


def test_tokenflow_answers_as_stock_when_nobody_has_to_wait(stock_answers: dict[str, Any], server: Server) -> None:
    assert server.generate(GREEDY_PROMPT, GREEDY_TOKENS)["text"] == stock_answers["text"]


# ---- stock


def test_a_stock_server_of_the_same_environment_is_stock(stock_answers: dict[str, Any]) -> None:
    assert (stock_answers["state"], stock_answers["config"]) == (404, 404)
    assert "sglang:" in stock_answers["metrics"] and "tokenflow:" not in stock_answers["metrics"]
    assert not any("tokenflow" in name for name in stock_answers["generate_headers"])
    assert "tokenflow" not in str(stock_answers["server_info"].get("internal_states"))
    # The CPU platform plugin is a platform: it may be named, a scheduler of ours may not.
    assert "TokenFlow" not in stock_answers["log"]
