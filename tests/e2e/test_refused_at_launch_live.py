"""A server that was asked to be TokenFlow's and cannot be does not serve: one start for each way it can go wrong."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.live import OURS, asleep, command
from tokenflow_sgl.adapter.hooks import PINNED_RELEASE, installed_release
from tokenflow_sgl.bench.servers import free_port

pytestmark = pytest.mark.e2e
DEADLINE_S = 150.0

# Runs in every Python process of the server, before anything else. TARGET is a module, and once it was imported
# DOCTOR(module) changes it. With CHILD only in spawned children, where the parent cannot see it.
SITECUSTOMIZE = """
import importlib.abc, importlib.util, os, sys

def doctor(module):
{doctor}

class Doctor(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {target!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            doctor(module)
        spec.loader.exec_module = exec_module
        return spec

if not {child!r} or "--multiprocessing-fork" in sys.orig_argv:
    sys.meta_path.insert(0, Doctor())
"""


@dataclass(frozen=True)
class Case:
    """A way to be broken, and the words that the message must have."""

    name: str
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    target: str = ""
    doctor: str = ""
    child: bool = False


SCHEDULER = "sglang.srt.managers.scheduler"
FIX = f"pip install sglang=={PINNED_RELEASE}"
CASES = [
    Case(
        "our own module cannot be imported in the scheduler process",
        ("tokenflow:", installed_release(), "a broken wheel", FIX),
        target="tokenflow_sgl.adapter.penalties",
        doctor='raise ImportError("a broken wheel")',
        child=True,
    ),
    Case(
        "a method we override was renamed",
        ("tokenflow:", installed_release(), "Scheduler._should_defer_prefill", FIX),
        target=SCHEDULER,
        doctor="module.Scheduler._defer_prefill = module.Scheduler._should_defer_prefill\n"
        "del module.Scheduler._should_defer_prefill",
    ),
    Case(
        "a parameter we pass was renamed",
        ("tokenflow:", installed_release(), "release_kv_cache", "checkpoint", FIX),
        target="sglang.srt.mem_cache.common",
        doctor="old = module.release_kv_cache\n"
        "module.release_kv_cache = lambda req, tree_cache, keep=None: old(req, tree_cache, keep)",
    ),
    Case(
        "another plugin took the scheduler class",
        ("tokenflow:", installed_release(), f"{SCHEDULER}.Scheduler", "not in force"),
        target="sglang.srt.plugins.hook_registry",
        doctor="registry = module.HookRegistry\n"
        "old = registry.apply_hooks.__func__\n"
        "def apply_hooks(cls):\n"
        "    old(cls)\n"
        f"    scheduler = sys.modules['{SCHEDULER}']\n"
        "    scheduler.Scheduler = type('TheirScheduler', (scheduler.Scheduler,), {})\n"
        "registry.apply_hooks = classmethod(apply_hooks)",
    ),
    Case(
        "SGLANG_PLUGINS leaves us out",
        ("tokenflow:", installed_release(), "SGLANG_PLUGINS", "'some_other_plugin'"),
        env={"SGLANG_PLUGINS": "some_other_plugin"},
    ),
    Case(
        "a release that was never tested",
        ("tokenflow:", "9.9.9", FIX, "--tokenflow-allow-untested"),
        target="importlib.metadata",
        doctor="old = module.version\nmodule.version = lambda name: '9.9.9' if name == 'sglang' else old(name)",
    ),
    Case(
        "a flag that cannot work with parking",
        ("tokenflow:", "--disable-radix-cache", "(value True)", "--tokenflow-policy fcfs"),
        flags=("--disable-radix-cache",),
    ),
    Case(
        "several flags at once",
        ("--speculative-algorithm", "'NGRAM'", "--scheduler-recv-interval", "(value 4)"),
        flags=("--speculative-algorithm", "NGRAM", "--scheduler-recv-interval", "4"),
    ),
    Case(
        "a host pool that does not fit",  # field report B22 (c)
        ("tokenflow: --hicache-size (value 4000)", "4000.00 GB", "GB free"),
        flags=("--hicache-size", "4000"),
    ),
    Case(
        "a policy setting out of bounds",
        ("--tokenflow-mu", "101", "0 to 100"),
        flags=("--tokenflow-mu", "101"),
    ),
]


@dataclass(frozen=True)
class End:
    status: int | str
    output: str
    took_s: float


def start(case: Case, folder: Path) -> End:
    """Start the server of a case and wait for its end; a server that came up or hangs is killed at the deadline."""
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", **case.env}
    if case.target:
        lines = "".join(f"    {line}\n" for line in case.doctor.splitlines())
        (folder / "sitecustomize.py").write_text(
            SITECUSTOMIZE.format(target=case.target, doctor=lines, child=case.child)
        )
        env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])
    log = folder / "log"
    began_s = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(OURS, free_port(), "--page-size", "16", *case.flags),
            stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | str = process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = "still there at the deadline"
        took_s = time.monotonic() - began_s
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    return End(status, log.read_text(errors="replace"), took_s)


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[End]]]:
    """The starts of all cases that are to be judged, two at a time: they import for some seconds, and then they end."""
    wanted = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    folder = tmp_path_factory.mktemp("refused")
    asleep()
    with ThreadPoolExecutor(2) as pool:
        yield {case.name: pool.submit(start, case, folder / str(i)) for i, case in enumerate(wanted)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_server_ends_and_says_why(ends: dict[str, Future[End]], case: Case) -> None:
    end = ends[case.name].result()
    print(f"{case.name}: status {end.status} after {end.took_s:.1f} s")
    tail = end.output[-3000:]
    assert isinstance(end.status, int) and end.status != 0, f"{end.status}\n{tail}"
    missing = [word for word in case.says if word not in end.output]
    assert not missing, f"{missing} not said\n{tail}"
    assert "Uvicorn running" not in end.output and "fired up" not in end.output, tail
