"""The Python scripts beside the package: they start, and gpu_check judges what its servers did."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tokenflow_sgl.bench import run, servers
from tokenflow_sgl.bench.results import RunRecord
from tokenflow_sgl.core.qoe import StreamRecord

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("name", ["bench_copies", "bench_decide", "bench_fcfs", "fuzz", "gpu_check", "soak"])
def test_a_script_tells_how_it_is_used(name: str) -> None:
    answer = subprocess.run([sys.executable, SCRIPTS / name, "--help"], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "usage" in answer.stdout


def gpu_check() -> ModuleType:
    loader = SourceFileLoader("gpu_check", str(SCRIPTS / "gpu_check"))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def a_run(name: str, *, resumes: int, error: str | None) -> RunRecord:
    records = tuple(
        StreamRecord(group, group, 0.0, (0.1, 0.2), 10.0, 2, error) for group in ("background", "newcomers")
    )
    ours = name == "tokenflow"
    return RunRecord(name, 1, 1.0, records, 0.0, 0.0, 0.0, parks=4 if ours else None, resumes=resumes if ours else None)


@pytest.mark.parametrize(
    ("resumes", "error", "differ", "status", "failed"),
    [
        (4, None, False, 0, []),
        (3, None, False, 1, ["came back"]),
        (4, "cut", False, 1, ["complete"]),
        (4, None, True, 1, ["equals stock's"]),
    ],
)
def test_gpu_check_judges_what_the_servers_did(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resumes: int,
    error: str | None,
    differ: bool,
    status: int,
    failed: list[str],
) -> None:
    """The two servers are made up here: without a CUDA device nothing else of the script could run."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")

    class Server:
        def __init__(self, name: str, command: Any, *, url: str, log: Path) -> None:
            self.url = url + "/" + name

        def wait_ready(self, deadline_s: float) -> None: ...
        def stop(self) -> None: ...

    def run_all(scenario: Any, targets: Any, **_: Any) -> list[RunRecord]:
        return [a_run(targets[0].name, resumes=resumes, error=error)]

    monkeypatch.setattr(servers, "ServerProcess", Server)
    monkeypatch.setattr(run, "run_all", run_all)
    script = gpu_check()
    monkeypatch.setattr(script, "greedy", lambda url: [[1, 2 if differ and "tokenflow" in url else 3]])
    monkeypatch.setattr(script, "engine_checks", lambda *_: [(True, "the engine's part")])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "some-model"])
    assert script.main() == status
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert len(lines) == len(failed)
    assert all(any(text in line for line in lines) for text in failed)


FACTS = {
    "streams": 6, "same_undisturbed": 6, "same": 6, "parks": 12, "loads": 12, "failed": 0, "publishes": 60,
    "publish_ms": 0.5, "syncs": 0, "store_gb_s": 40.0, "load_gb_s": 45.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"same": 5}, "5 of 6 streams say the same"),
        ({"loads": 0}, "0 loads"),
        ({"failed": 1}, "copies that failed: 1"),
        ({"syncs": 3}, "3 device syncs"),
        ({"load_gb_s": None}, "not measured GB/s back"),
    ],
)
def test_gpu_check_judges_what_the_engine_did(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], says: str | None
) -> None:
    script = gpu_check()
    answer = subprocess.CompletedProcess([], 0, stdout="noise\n" + json.dumps({**FACTS, **changed}) + "\n")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: answer)
    failed = [text for ok, text in script.engine_checks("model", "cuda", 4096) if not ok]
    assert len(failed) == (says is not None)
    assert says is None or says in failed[0]


def test_gpu_check_says_so_when_its_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    script = gpu_check()
    answer = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: answer)
    ((ok, text),) = script.engine_checks("model", "cuda", 4096)
    assert not ok and "status 1" in text
