"""Server processes: command lines, waiting, failing with the log, ending with the whole group."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tokenflow_sgl.bench import demo, servers
from tokenflow_sgl.bench.servers import ServerFailed, ServerProcess, server_command
from tokenflow_sgl.workload.scenario import load_scenario

SETTINGS = load_scenario("demo-burst").server
SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# The child prints its process id and waits; the parent waits for it.
FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
child.wait()
"""


def command(kind, settings=SETTINGS):
    return server_command(kind, model=Path("models/small"), settings=settings, port=1234)[1:]


def test_servers_share_every_flag_but_those_that_name_them():
    stock = command("stock")
    assert command("stock-eager") == [*stock, "--schedule-conservativeness", "0.2"]
    assert command("tokenflow") == ["-m", "tokenflow_sgl.launch_server", *stock[2:]]
    cache = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through"]
    assert command("stock-nocache") == [part for part in stock if part not in cache]
    assert "--max-total-tokens 12288" in " ".join(stock) and "--page-size 16" in " ".join(stock)
    assert "--disable-overlap-schedule" not in stock


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match="stock-eager"):
        command("stok")


def test_a_server_that_dies_says_how_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "s.log"
    dying = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = ServerProcess("stock", dying, url="http://127.0.0.1:9", log=log)
    with pytest.raises(ServerFailed, match=r"stock ended with status 1(.|\n)*no such model"):
        server.wait_ready()
    server.stop()


def test_a_server_that_never_answers_is_given_up_at_the_deadline(tmp_path):
    waiting = [sys.executable, "-c", "import signal; signal.pause()"]
    server = ServerProcess("stock", waiting, url="http://127.0.0.1:9", log=tmp_path / "s.log")
    try:
        with pytest.raises(ServerFailed, match="not ready after 0 s"):
            server.wait_ready(deadline_s=0.0)
    finally:
        server.stop()


def test_the_demo_starts_a_server_for_each_turn_and_stops_it_after(tmp_path, monkeypatch):
    started = []

    def serve(kind, *, model, settings, port):
        started.append((kind, port))
        return [sys.executable, "-c", SERVE, str(port)]

    monkeypatch.setattr(servers, "server_command", serve)
    scenario = load_scenario("demo-burst")
    fresh = demo.FreshServer("stock", model=Path("m"), scenario=scenario, logs=tmp_path, say=print)
    for turn in (1, 2):
        with fresh.awake() as url:
            assert [kind for kind, _ in started] == ["stock"] * turn
            assert url == f"http://127.0.0.1:{started[-1][1]}"
            assert urllib.request.urlopen(url, timeout=60).status == 200
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=60)


def test_the_whole_process_group_ends_with_the_server(tmp_path):
    log = tmp_path / "s.log"
    server = ServerProcess("stock", [sys.executable, "-c", FAMILY], url="http://127.0.0.1:9", log=log)
    # The child's id is in the log once both run; a pipe would be the server's to keep open.
    while not log.read_text().strip():
        os.sched_yield()
    child = int(log.read_text())
    server.stop()
    _becomes(child, "gone", "Z")  # a zombie until the system collects it
    assert _state(child) in ("gone", "Z")


def test_servers_know_their_kinds_and_the_demo_refuses_others(capsys):
    for arguments, names in (
        (["--servers", "stock,vllm"], "servers: 'stock,vllm'"),
        (["--servers", "stock,stock"], "servers: 'stock,stock'"),
        (["--max-tokens-factor", "0.5"], "max-tokens-factor: '0.5'"),
        (["--max-tokens-factor", "1,x"], "max-tokens-factor: '1,x'"),
        (["--scenario", "nope"], "nope"),
        (["--scenario", "guide-burst-4x"], "server: missing in scenario guide-burst-4x, valid: a scenario"),
        (["--seeds", "a"], "seeds: 'a'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            demo.main(arguments)
        assert stopped.value.code == 2
        assert names in capsys.readouterr().err
    assert {"stock", "stock-eager", "stock-nocache", "tokenflow"} <= set(servers.KINDS)


def _becomes(pid: int, *states: str) -> None:
    """Return once the process is in one of the states. Signals act a little later; the deadline only ends a hang."""
    give_up_s = time.monotonic() + 60
    while _state(pid) not in states:
        assert time.monotonic() < give_up_s, (pid, _state(pid), states)
        os.sched_yield()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "gone"
