"""What the page's server lets through: to whom, with which key, and nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.browser import in_thread
from support.live import until
from support.state_server import StateServer
from tokenflow_sgl.bench.servers import free_port
from tokenflow_sgl.dashboard.app import PAGE_FILES, Target, make_app
from tokenflow_sgl.dashboard.serve import parser

CHAT = "/v1/chat/completions"


@pytest.fixture
def behind() -> StateServer:
    return StateServer(3)


@pytest.fixture
def page(behind: StateServer) -> Iterator[httpx.Client]:
    with (
        in_thread(behind.app) as url,
        in_thread(make_app(Target(url, "sesame", "open-sesame"))) as dash,
        httpx.Client(base_url=dash, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("path", PAGE_FILES)
def test_every_file_of_the_page_is_in_the_package_and_may_load_only_from_its_own_server(
    page: httpx.Client, path: str
) -> None:
    reply = page.get(path)
    assert reply.status_code == 200 and len(reply.content) > 500
    assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_every_file_of_the_page_is_served() -> None:
    folder = Path(sys.modules["tokenflow_sgl.dashboard.app"].__file__ or "").parent / "page"
    assert {f"dashboard/page/{p.name}" for p in folder.iterdir()} == {n for n, _ in PAGE_FILES.values() if "page/" in n}


def test_the_state_is_asked_for_with_the_admin_key_and_the_chat_with_the_api_key(
    page: httpx.Client, behind: StateServer
) -> None:
    behind.texts = ["hello"]
    for reply in (
        page.get("/tokenflow/state?since=0"),
        page.get("/tokenflow/config"),
        page.get("/v1/models"),
        page.post("/tokenflow/ack", json={"acks": []}),
        page.post(CHAT, json={"messages": []}, headers={"authorization": "Bearer of the browser"}),
    ):
        assert reply.status_code == 200, reply.text
        assert "sesame" not in reply.text + str(reply.headers)
    keys = {path: key for path, key, _ in behind.seen}
    assert keys == {
        "/tokenflow/state": "Bearer open-sesame", "/tokenflow/config": "Bearer open-sesame",
        "/v1/models": "Bearer sesame", "/tokenflow/ack": "Bearer sesame", CHAT: "Bearer sesame",
    }  # fmt: skip


def test_the_page_learns_the_names_of_the_keys_and_not_the_keys(page: httpx.Client) -> None:
    info = page.get("/dash/info")
    assert info.json()["keys"] == ["api", "admin"] and "sesame" not in info.text


def test_a_server_with_one_key_is_asked_for_its_state_with_that_one() -> None:
    assert Target("http://x", "k").headers(admin=True) == {"authorization": "Bearer k"}
    assert Target("http://x").headers(admin=True) == {}


def test_what_the_page_does_not_need_is_not_forwarded(page: httpx.Client, behind: StateServer) -> None:
    assert page.post("/flush_cache").status_code == 404
    assert page.get("/tokenflow/ack").status_code == 405
    assert page.get("/v1/models/../../flush_cache").status_code in (404, 405)
    assert behind.seen == []


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"host": "evil.example"}, "Host"),
        ({"host": "evil.example:80"}, "Host"),
        ({"host": "127.0.0.1.evil.example"}, "Host"),
        ({"host": ""}, "Host"),
        ({"origin": "http://evil.example"}, "Origin"),
        ({"origin": "null"}, "Origin"),
        ({"origin": "http://127.0.0.1:1"}, "Origin"),
        ({"sec-fetch-site": "cross-site"}, "Sec-Fetch-Site"),
        ({"sec-fetch-site": "same-site"}, "Sec-Fetch-Site"),
    ],
)
def test_other_sites_are_refused_on_every_route(
    page: httpx.Client, behind: StateServer, headers: dict[str, str], why: str
) -> None:
    asked = [
        *[("GET", p) for p in PAGE_FILES],
        ("GET", "/dash/info"),
        ("GET", "/tokenflow/state?since=0"),
        ("POST", CHAT),
    ]
    for method, path in asked:
        reply = page.request(method, path, headers=headers)
        assert reply.status_code == 403 and reply.text.startswith(why), (path, reply.status_code, reply.text)
    assert behind.seen == []


def test_a_link_from_elsewhere_opens_the_page_and_a_forwarded_port_works(page: httpx.Client) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert page.get("/", headers=link).status_code == 200
    assert page.get("/tokenflow/state?since=0", headers=link).status_code == 403
    tunnel = {"host": "localhost:9999", "origin": "http://localhost:9999", "sec-fetch-site": "same-origin"}
    assert page.get("/tokenflow/state?since=0", headers=tunnel).status_code == 200


def test_a_chat_comes_piece_by_piece_with_its_headers(page: httpx.Client, behind: StateServer) -> None:
    behind.texts = ["one", "two"]
    behind.hold.clear()  # its end is held back: what came must be here before it
    with page.stream("POST", CHAT, json={"messages": []}) as reply:
        assert reply.headers["x-tokenflow-request-id"] == "mine" and reply.headers["x-tokenflow-ack-token"] == "secret"
        lines = (line for line in reply.iter_lines() if line)
        first = [json.loads(next(lines)[5:]) for _ in behind.texts]
        assert [c["choices"][0]["delta"]["content"] for c in first] == behind.texts
        behind.hold.set()
        assert next(lines) == "data: [DONE]"


def test_a_browser_that_leaves_ends_the_chat_at_the_server(page: httpx.Client, behind: StateServer) -> None:
    behind.texts = ["one"]
    behind.hold.clear()
    with page.stream("POST", CHAT, json={"messages": []}) as reply:
        next(reply.iter_lines())
    assert behind.left.wait(10), "the server's chat goes on without its client"


def test_the_socket_has_the_api_key_and_is_closed_to_other_sites(page: httpx.Client, behind: StateServer) -> None:
    client = pytest.importorskip("websockets.sync.client", reason="no websockets")
    at = str(page.base_url).replace("http", "ws") + "/tokenflow/stream"
    with pytest.raises(Exception, match="HTTP 403"):
        client.connect(at, origin="http://evil.example", proxy=None)
    assert behind.socket_keys == []
    behind.texts = ["one"]
    with client.connect(at, subprotocols=["tokenflow"], proxy=None) as socket:
        assert socket.subprotocol == "tokenflow"
        socket.send('{"messages": []}')
        told = [json.loads(text) for text in socket]
    assert [m.get("type", "chunk") for m in told] == ["started", "chunk", "done"]
    assert behind.socket_keys == ["Bearer sesame"]


def test_a_socket_of_a_server_that_has_none_is_refused() -> None:
    client = pytest.importorskip("websockets.sync.client", reason="no websockets")
    with (
        in_thread(make_app(Target(f"http://127.0.0.1:{free_port()}"))) as dash,
        pytest.raises(Exception, match="HTTP 403"),
    ):
        client.connect(f"{dash.replace('http', 'ws')}/tokenflow/stream", proxy=None)


def test_a_refusal_of_the_server_passes_as_it_is(page: httpx.Client, behind: StateServer) -> None:
    behind.state_status = 401
    reply = page.get("/tokenflow/state?since=0")
    assert (reply.status_code, reply.json()["error"]["message"]) == (401, "a key is missing")


def test_a_server_that_is_away_is_said_to_be() -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with in_thread(make_app(Target(away))) as dash:
        reply = httpx.get(f"{dash}/tokenflow/state?since=0", trust_env=False)
    assert reply.status_code == 502 and reply.json()["error"]["message"].startswith(f"{away} does not answer")


def test_a_body_beyond_all_measure_is_refused(page: httpx.Client, behind: StateServer) -> None:
    assert page.post(CHAT, content=b" " * (9 << 20)).status_code == 413
    assert behind.seen == []


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://", "http://x/path", "http://x?key=k"])
def test_a_server_that_is_no_url_is_refused_by_name(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--server", url])
    assert f"--server: {url!r} is not valid" in capsys.readouterr().err


def test_the_command_serves_the_page_on_this_machine_only(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tokenflow_sgl.cli", "dash", "--server", "http://127.0.0.1:1", "--port", str(port)]
    env = {**os.environ, "TOKENFLOW_ADMIN_KEY": "from the environment"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        until(lambda: _connects("127.0.0.1", port), "the page's port", deadline_s=60.0)
        assert httpx.get(f"http://127.0.0.1:{port}/dash/info", trust_env=False).json()["keys"] == ["admin"]
        assert not _connects("127.0.0.2", port), "it listens on more than 127.0.0.1"
    finally:
        process.terminate()
        process.wait(20)


def _connects(host: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0
