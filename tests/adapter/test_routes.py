"""The routes need the admin key if there is one, and tell errors in the OpenAI shape."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tokenflow_sgl.adapter import messages, rates, routes

STATE = {
    "active": True,
    "seq": 3,
    "streams": [],
    "transitions": [{"seq": n, "at_s": 0.0, "id": "a", "what": "park", "tokens": 1} for n in (1, 2, 3)],
}


class StubManager:
    """A tokenizer manager whose schedulers answer with STATE."""

    rid_to_state: dict[str, Any] = {"live": object()}  # noqa: RUF012
    server_args = SimpleNamespace()
    model_config = SimpleNamespace(vocab_size=1000)

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.asked: list[Any] = []

    def auto_create_handle_loop(self) -> None: ...

    def config_value(self, name: str) -> None: ...

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        self.asked.append(request.rid)
        return [SimpleNamespace(internal_state={"tokenflow": STATE}) for _ in range(self.ranks)]


def client(
    monkeypatch: pytest.MonkeyPatch, manager: StubManager, *, root_path: str = "", **keys: str | None
) -> TestClient:
    add_api_key_middleware = importlib.import_module("sglang.srt.utils.auth").add_api_key_middleware
    monkeypatch.setattr(routes, "_tokenizer_manager", lambda: manager)
    app = FastAPI()

    @app.post("/generate")
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        return body

    routes.install(app)
    routes.install(app)  # a second time changes nothing
    if keys:
        add_api_key_middleware(app, api_key=keys.get("api_key"), admin_api_key=keys.get("admin_api_key"))
    return TestClient(app, root_path=root_path)


def test_state_shows_transitions_after_since_and_asks_for_ours_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = StubManager()
    http = client(monkeypatch, manager)
    assert http.get("/tokenflow/state").json() == STATE
    assert [t["seq"] for t in http.get("/tokenflow/state?since=2").json()["transitions"]] == [3]
    assert manager.asked == [messages.state_rid(0), messages.state_rid(2)]


def test_state_of_several_ranks_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    body = client(monkeypatch, StubManager(ranks=2)).get("/tokenflow/state?since=3").json()
    assert body["active"] is True and [r["transitions"] for r in body["ranks"]] == [[], []]


def test_scheduler_that_is_not_ours_shows_as_inactive() -> None:
    assert routes.state_body([{}], 0) == {"active": False}
    assert routes.state_body([{"tokenflow": STATE}, {}], 0)["active"] is False


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "", "\uff15", "9" * 40, "1 "])
def test_since_that_is_no_integer_is_refused(monkeypatch: pytest.MonkeyPatch, since: str) -> None:
    reply = client(monkeypatch, StubManager()).get("/tokenflow/state", params={"since": since})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "since"


@pytest.mark.parametrize("path", ["/tokenflow/state", "/tokenflow/config"])
@pytest.mark.parametrize(
    "keys, allowed",
    [
        ({"api_key": "user", "admin_api_key": "boss"}, {"boss"}),
        ({"admin_api_key": "boss"}, {"boss"}),
        ({"api_key": "user"}, {"user"}),
    ],
)
def test_routes_need_the_admin_key_if_one_is_set(
    monkeypatch: pytest.MonkeyPatch, path: str, keys: dict[str, str], allowed: set[str]
) -> None:
    http = client(monkeypatch, StubManager(), **keys)
    with http:
        http.post("/generate", json={}, headers={"Authorization": "Bearer user"})
        for key in ("user", "boss", "nobody"):
            status = http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code
            assert status == (200 if key in allowed else 401), key
        assert http.get(path).status_code == 401


@pytest.mark.parametrize("levels", [900, 1000, 1020, 5000])
def test_reports_nested_without_end_are_refused(monkeypatch: pytest.MonkeyPatch, levels: int) -> None:
    nested = "[" * levels + "]" * levels
    for body in (nested, '{"acks": ' + nested + "}", '{"acks": [{"id": ' + nested + "}]}"):
        assert client(monkeypatch, StubManager()).post("/tokenflow/ack", content=body).status_code == 400


def test_the_schema_of_reports_is_what_the_route_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    http = client(monkeypatch, StubManager())
    paths = http.get("/openapi.json").json()["paths"]
    assert {p for p in paths if p.startswith("/tokenflow")} == {f"/tokenflow/{n}" for n in ("ack", "state", "config")}
    schema = paths["/tokenflow/ack"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    item = schema["properties"]["acks"]["items"]
    least = {"id": "a", "token": "b", "consumed_tokens": 0}
    assert set(item["required"]) == set(least)
    most = {key: int(of["maximum"]) if "maximum" in of else "x" * 1024 for key, of in item["properties"].items()}
    for said, status in ((least, 200), (most, 200), ({**least, "more": 1}, 400), ({**most, "index": 1024}, 400)):
        assert http.post("/tokenflow/ack", json={"acks": [said]}).status_code == status


def test_key_is_asked_for_before_the_bridge_looks_at_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    http = client(monkeypatch, StubManager(), api_key="user")
    bad = {"tokenflow": {"read_rate": 0}}
    assert http.post("/generate", json=bad).status_code == 401
    assert http.post("/generate", json=bad, headers={"Authorization": "Bearer user"}).status_code == 400


def test_config_tells_settings_bounds_and_what_the_bridge_did(monkeypatch: pytest.MonkeyPatch) -> None:
    http = client(monkeypatch, StubManager())
    http.post("/generate", json={"stream": True})
    body = http.get("/tokenflow/config").json()
    assert body["policy"] == "tokenflow" and body["config"]["default_read_rate_tok_s"] == 6.0
    assert body["read_rate"] == {"min_tok_s": rates.MIN_RATE_TOK_S, "max_tok_s": rates.MAX_RATE_TOK_S}
    assert body["http"]["bridged_requests"] == 1


def test_bridge_sits_in_the_app_under_a_root_path_and_refuses_live_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    http = client(monkeypatch, StubManager(), root_path="/llm")
    assert http.post("/generate", json={"rid": "live"}).json()["error"]["param"] == "rid"
    reply = http.post("/generate", json={"stream": True, "rid": "mine"})
    assert reply.headers["x-tokenflow-request-id"] == "mine"


@pytest.mark.parametrize("incremental", [False, True])
def test_of_what_waits_for_a_reply_the_last_is_kept_and_all_of_it_where_it_is_increments(
    monkeypatch: pytest.MonkeyPatch, incremental: bool
) -> None:
    def state(parent: str | None) -> SimpleNamespace:
        custom = None if parent is None else {"tokenflow": {"parent": parent}}
        return SimpleNamespace(obj=SimpleNamespace(sampling_params={"custom_params": custom}), out_list=[1, 2, 3])

    states = {"mine": state(None), "child": state("mine"), "other": state("another"), "bare": state(None)}
    manager = SimpleNamespace(rid_to_state=states, incremental_streaming_output=incremental)
    monkeypatch.setattr(routes, "_tokenizer_manager", lambda: manager)
    routes._Trimmer()("mine")
    kept = {rid: s.out_list for rid, s in states.items()}
    few = [1, 2, 3] if incremental else [3]
    assert kept == {"mine": few, "child": few, "other": [1, 2, 3], "bare": [1, 2, 3]}


def test_streams_are_looked_through_once_for_all_ids_of_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand clients that do not read, times a thousand streams, would keep the HTTP process busy."""

    class States(dict[str, Any]):
        looks = 0

        def items(self) -> Any:
            self.looks += 1
            return super().items()

    clock = SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(routes, "time", clock)
    obj = SimpleNamespace(sampling_params=None)
    states = States({rid: SimpleNamespace(obj=obj, out_list=[1, 2, 3]) for rid in ("a", "b", "c")})
    manager = SimpleNamespace(rid_to_state=states, incremental_streaming_output=False)
    monkeypatch.setattr(routes, "_tokenizer_manager", lambda: manager)
    trim = routes._Trimmer()
    for rid in ("a", "b", "c"):
        trim(rid)
    assert states.looks == 1 and [len(s.out_list) for s in states.values()] == [1, 3, 3]
    clock.now_s = 1.0
    trim("a")
    assert states.looks == 2 and [len(s.out_list) for s in states.values()] == [1, 1, 1]
