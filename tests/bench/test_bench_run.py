"""The runner against a mock server in this process: order, warm-up, flush, the state route, results."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter

import pytest
from aiohttp import web

from tokenflow_sgl.bench import results, run
from tokenflow_sgl.bench.run import RemoteServer, RunFailed, parse_seeds, parse_servers, turns
from tokenflow_sgl.workload.scenario import parse_scenario

SCENARIO = parse_scenario(
    """
name = "mini"
about = "a few requests at once"
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
count = 2
start_s = 0
arrival = "uniform"
over_s = 0
prompt_tokens = [10, 20]
answer_tokens = [5, 9]
read_rate = [{ tok_s = 6, weight = 1 }]
[[group]]
name = "new"
count = 3
start_s = 0
arrival = "uniform"
over_s = 0
prompt_tokens = [10, 20]
answer_tokens = [3, 4]
read_rate = [{ tok_s = 6, weight = 1 }]
"""
)


class MockServer:
    """Answers at once with the wanted length (or one token short); with `state` it is a TokenFlow server."""

    def __init__(self, *, state: bool, short: bool = False, flush_status: int = 200) -> None:
        self.state, self.short, self.flush_status = state, short, flush_status
        self.calls: list[str] = []
        self.bodies: list[dict] = []
        self.polls = 0
        self.url = ""

    async def generate(self, request):
        body = await request.json()
        self.calls.append("warm-up" if body["rid"].startswith("warm") else "generate")
        self.bodies.append(body)
        count = body["sampling_params"]["custom_params"]["answer_tokens"]
        if self.short and self.calls[-1] == "generate":
            count -= 1
        meta = {"completion_tokens": count, "finish_reason": {"type": "stop"}}
        text = f"data: {json.dumps({'meta_info': meta})}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def flush(self, request):
        self.calls.append("flush")
        return web.Response(status=self.flush_status, text="busy")

    async def tokenflow(self, request):
        if not self.state:
            raise web.HTTPNotFound
        # The first poll of a run sees the warm-up's counters and must not count them.
        self.polls += 1
        since = int(request.query["since"])
        events = [{"seq": 41 + self.polls, "at_s": 5000.0, "id": "s1-old-000", "what": "park", "tokens": 8}]
        return web.json_response(
            {
                "seq": 41 + self.polls,
                "active": True,
                "policy": "tokenflow",
                "now_s": 5000.0,
                "streams": [],
                "transitions": [entry for entry in events if entry["seq"] > since],
                "memory": {},
                "counters": {"parks": 10 * self.polls, "returns": 5 * self.polls},
            }
        )

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_get("/tokenflow/state", self.tokenflow)
        self._runner = web.AppRunner(app)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    async def _start(self):
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def test_which_server_goes_first_turns_with_the_seeds():
    servers = [RemoteServer(name, "http://x") for name in "abc"]
    order = [(seed, server.name) for seed, server in turns(servers, (1, 2, 3))]
    assert order == [(1, "a"), (1, "b"), (1, "c"), (2, "b"), (2, "c"), (2, "a"), (3, "c"), (3, "a"), (3, "b")]
    assert Counter(order) == Counter({(seed, name): 1 for seed in (1, 2, 3) for name in "abc"})


def test_seeds_are_a_number_of_them_or_a_list():
    assert parse_seeds("3") == (1, 2, 3)
    assert parse_seeds("1,2,7") == (1, 2, 7)
    assert parse_seeds("7,") == (7,)


@pytest.mark.parametrize("text", ["", "0", "-2", "x", "1,1", "1,x", ","])
def test_wrong_seeds_are_refused_with_their_value(text):
    with pytest.raises(ValueError, match="seeds:"):
        parse_seeds(text)


@pytest.mark.parametrize("texts", [["stock"], ["=http://x"], ["a=ftp://x"], ["a=http://x", "a=http://y"]])
def test_wrong_servers_are_refused(texts):
    with pytest.raises(ValueError, match="server:"):
        parse_servers(texts)


def test_a_stock_server_gets_no_read_rate_and_reports_no_parks():
    with MockServer(state=False) as server:
        record = run.measure(RemoteServer("stock", server.url), SCENARIO, seed=1, max_tokens_factor=2.0)
    assert (record.parks, record.resumes, record.samples) == (None, None, ())
    assert not any("tokenflow" in body for body in server.bodies)
    assert [entry.failed for entry in record.records] == [False] * 5
    measured = [body for body in server.bodies if not body["rid"].startswith("warm")]
    assert all(
        body["sampling_params"]["max_new_tokens"] == 2 * body["sampling_params"]["custom_params"]["answer_tokens"]
        for body in measured
    )


def test_warm_up_comes_first_then_an_empty_cache_then_the_measured_requests():
    with MockServer(state=False) as server:
        run.measure(RemoteServer("stock", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)
    warm = sum(count for count, _, _ in run.WARM_UP)
    assert server.calls == ["warm-up"] * warm + ["flush"] + ["generate"] * 5


def test_every_server_gets_the_same_bodies_but_for_the_read_rate():
    with MockServer(state=False) as stock, MockServer(state=True) as ours:
        for server in (stock, ours):
            run.measure(RemoteServer("x", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)
    assert all(body["tokenflow"]["read_rate"] > 0 for body in ours.bodies)

    def plain(bodies):
        return {body["rid"]: {key: body[key] for key in body if key != "tokenflow"} for body in bodies}

    assert plain(stock.bodies) == plain(ours.bodies)


def test_parks_and_transitions_of_a_run_are_those_after_its_start():
    with MockServer(state=True) as server:
        record = run.measure(RemoteServer("ours", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)
    # Poll 1 is the probe, poll 2 opens the run (20 parks by then), the last closes it; each adds 10 parks, 5 returns.
    later = server.polls - 2
    assert later >= 1
    assert (record.parks, record.resumes) == (10 * later, 5 * later)
    assert len(record.transitions) == later
    assert len(record.samples) == later + 1
    # The server's clock reads 5000 whenever asked, so its events fall on the time of the earliest answer.
    assert all(event["at_s"] == pytest.approx(record.samples[0]["at_s"]) for event in record.transitions)


def test_an_answer_of_the_wrong_length_fails_the_request_in_any_server():
    with MockServer(state=False, short=True) as server:
        record = run.measure(RemoteServer("stock", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)
    assert record.summary()["failed"] == 5
    assert "were wanted" in record.records[0].error


def test_a_cache_that_cannot_be_emptied_stops_the_measurement():
    with MockServer(state=False, flush_status=400) as server, pytest.raises(RunFailed, match="flush_cache: HTTP 400"):
        run.measure(RemoteServer("stock", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)


@pytest.mark.parametrize(
    ("status", "state", "says"), [(401, {}, "HTTP 401"), (200, {"active": True, "ranks": []}, "several ranks")]
)
def test_a_state_route_that_answers_otherwise_is_not_taken_for_stock(status, state, says, monkeypatch):
    async def answer(self, request):
        return web.json_response(state, status=status)

    monkeypatch.setattr(MockServer, "tokenflow", answer)
    with MockServer(state=True) as server, pytest.raises(RunFailed, match=says):
        run.measure(RemoteServer("ours", server.url), SCENARIO, seed=1, max_tokens_factor=1.0)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(RunFailed, match=r"server gone at http://127\.0\.0\.1:9"):
        run.measure(RemoteServer("gone", "http://127.0.0.1:9"), SCENARIO, seed=1, max_tokens_factor=1.0)


def test_the_command_writes_json_raw_times_and_a_picture(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mini.toml"
    path.write_text(_text_of(SCENARIO))
    with MockServer(state=False) as stock, MockServer(state=True) as ours:
        arguments = [str(path), "--server", f"stock={stock.url}", "--server", f"tokenflow={ours.url}"]
        arguments += ["--seeds", "2", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path)]
        assert run.main(arguments) == 0
    table = json.loads((tmp_path / "r.json").read_text())
    assert (table["scenario"], table["seeds"], sorted(table["results"])) == ("mini", [1, 2], ["stock", "tokenflow"])
    assert table["bounds"] == {"ttft_p99_s": None, "effective_goodput_tok_s": None}
    assert [row["seed"] for row in table["results"]["stock"]["per_seed"]] == [1, 2]
    assert table["results"]["stock"]["requests"] == 10
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    raw = results.read_run(tmp_path / "r.raw" / "tokenflow-seed1-x1.json")
    again = results.results_json(SCENARIO, [raw], {})["results"]["tokenflow"]["per_seed"][0]
    assert again == table["results"]["tokenflow"]["per_seed"][0]
    assert "newcomers' TTFT, P99 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["no-such", "--server", "a=http://x"], "no-such"),
        (["guide-burst-4x", "--server", "a=http://x"], "server: missing in scenario guide-burst-4x, valid: a scenario"),
        (["demo-burst", "--server", "a"], "server: 'a'"),
        (["demo-burst", "--server", "a=http://x", "--seeds", "x"], "seeds: 'x'"),
    ],
)
def test_a_wrong_argument_exits_with_2_and_names_itself(arguments, names, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert names in capsys.readouterr().err


def _text_of(scenario):
    def pair(values):
        return f"[{values[0]}, {values[1]}]"

    lines = [f'name = "{scenario.name}"', f'about = "{scenario.about}"', 'newcomers = ["new"]', "[server]"]
    lines += ['model = "small"', "page_tokens = 16", "kv_pool_tokens = 1600", "chunked_prefill_tokens = 512"]
    lines += ["host_ratio = 4", 'write_policy = "write_through"', "overlap = true"]
    for group in scenario.groups:
        lines += ["[[group]]", f'name = "{group.name}"', f"count = {group.count}", "start_s = 0"]
        lines += ['arrival = "uniform"', "over_s = 0", f"prompt_tokens = {pair(group.prompt_tokens)}"]
        lines += [f"answer_tokens = {pair(group.answer_tokens)}", "read_rate = [{ tok_s = 6, weight = 1 }]"]
    return "\n".join(lines)
