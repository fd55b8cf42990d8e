"""Who may know whom. Read from the source as it stands, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tokenflow_sgl

PACKAGE = Path(tokenflow_sgl.__file__).parent
ENGINE = {"sglang", "sgl_kernel"}
HEAVY = {*ENGINE, "torch", "triton", "transformers"}

# What decides and what arrives know nobody; the simulator and the adapter drive core; what people touch stands above
# them. The CPU platform knows nothing of TokenFlow, the client of it no more than how an experience is measured.
MAY_KNOW = {
    "core": set(),
    "workload": set(),
    "sim": {"core", "workload"},
    "platform": set(),
    "client": {"core"},
    "adapter": {"core", "platform"},
    "bench": {"core", "workload", "sim", "client", "adapter", "launch_server"},
    "dashboard": set(),
    "launch_server.py": {"adapter"},
    "cli.py": {"core", "workload", "adapter", "bench", "dashboard", "launch_server"},
    "__init__.py": set(),
}
MAY_IMPORT_SGLANG = {"adapter", "platform", "launch_server.py", "cli.py", "bench"}
NOT_IN_CORE = {"time", "random", "secrets", "threading", "asyncio", "multiprocessing", "concurrent", "datetime", "os"}
CLOCKS = {
    *("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns", "process_time"),
    *("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime"),
}


def files(part=""):
    root = PACKAGE / part
    found = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    assert found, f"nothing to check in {root}"
    return found


def part_of(path):
    return path.relative_to(PACKAGE).parts[0]


def imports(path):
    """Absolute dotted names that a file imports, wherever in it, those for type checkers only left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    here = ["tokenflow_sgl", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def clock_reads(path):
    """(function, expression) of every call or mention of a clock, through a module, an alias or a bare name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name in ("time", "datetime")}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names |= {a.asname or a.name for a in node.names if a.name in CLOCKS}
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            modules |= {a.asname or a.name for a in node.names}
    owner = {}
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            owner |= {id(node): function.name for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {*CLOCKS, "now", "utcnow", "today"}:
            if node.attr in CLOCKS and ast.unparse(node.value) not in modules:
                continue
            if node.attr not in CLOCKS and ast.unparse(node.value).split(".")[0] not in modules:
                continue
            yield owner.get(id(node)), ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in names:
            yield owner.get(id(node)), node.id


@pytest.mark.parametrize("part", ["core", "workload", "sim"])
def test_what_decides_what_arrives_and_what_simulates_import_no_engine_and_no_torch(part):
    for path in files(part):
        heavy = {name for name in imports(path) if name.split(".")[0] in HEAVY}
        assert not heavy, f"{path}: {heavy}"


def test_core_imports_no_clock_no_randomness_and_no_thread():
    for path in files("core"):
        banned = {name for name in imports(path) if name.split(".")[0] in NOT_IN_CORE}
        assert not banned, f"{path}: {banned}"


def test_only_the_journal_of_core_touches_a_file():
    for path in files("core"):
        if path.name == "journal.py":
            continue
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        opened = [ast.unparse(f) for f in calls if ast.unparse(f).split(".")[-1] in ("open", "print", "write_text")]
        assert not opened, f"{path}: {opened}"


def test_every_part_of_the_package_is_named_in_this_test():
    parts = {part_of(p) for p in files()}
    assert parts <= set(MAY_KNOW), f"say in MAY_KNOW whom {sorted(parts - set(MAY_KNOW))} may import"


@pytest.mark.parametrize("part", sorted(MAY_KNOW))
def test_the_arrows_between_the_parts_point_one_way(part):
    if not (PACKAGE / part).exists():
        pytest.skip(f"{part} is not there yet")
    for path in files(part):
        known = {name.split(".")[1] for name in imports(path) if name.startswith("tokenflow_sgl.")}
        # `from tokenflow_sgl import __version__` names an attribute and no part.
        known = {k for k in known if (PACKAGE / k).is_dir() or (PACKAGE / f"{k}.py").exists()}
        foreign = known - MAY_KNOW[part] - {part.removesuffix(".py")}
        assert not foreign, f"{path} imports {sorted(foreign)}"


def test_only_those_that_stand_next_to_the_engine_import_it():
    for path in files():
        engine = {name for name in imports(path) if name.split(".")[0] in ENGINE}
        assert not engine or part_of(path) in MAY_IMPORT_SGLANG, f"{path}: {engine}"


def test_the_client_knows_of_core_the_measures_only_and_nothing_but_httpx_and_websockets():
    for path in files("client"):
        names = set(imports(path))
        core = {name for name in names if name.startswith("tokenflow_sgl.core")}
        assert all(name.startswith("tokenflow_sgl.core.qoe.") and name.split(".")[-1].isupper() for name in core), core
        foreign = {name.split(".")[0] for name in names} - {"tokenflow_sgl", "httpx", "websockets"}
        assert foreign <= set(sys.stdlib_module_names), f"{path}: {foreign}"


BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked by test_layering")

sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        importlib.import_module(found.name)
print(sorted(m for m in sys.modules if m.split(".")[0] in {blocked!r}))
"""


@pytest.mark.parametrize(
    ("parts", "blocked"),
    [(("core", "workload", "sim"), HEAVY), (("client",), {*HEAVY, "numpy", "openai", "websockets"})],
)
def test_what_needs_no_engine_works_where_none_can_be_imported(parts, blocked):
    packages = [f"tokenflow_sgl.{p}" for p in parts if (PACKAGE / p).is_dir()]
    script = BLOCKED.format(blocked=blocked, packages=packages)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_decisions_know_one_clock_and_that_is_the_tick():
    """The stopwatch of a publish reaches the policy by the next tick too, rank 0's for all ranks."""
    reads = [
        (p.relative_to(PACKAGE).as_posix(), *read)
        for part in ("core", "adapter")
        for p in files(part)
        for read in clock_reads(p)
    ]
    assert sorted(reads) == [
        *[("adapter/executor.py", "_publish", "time.perf_counter")] * 2,
        ("adapter/routes.py", "__call__", "time.monotonic"),  # the HTTP process: how often it trims, no decision
        ("adapter/routes.py", "tokenflow_ack", "time.monotonic"),  # the HTTP process, for its rate limit: no decision
        ("adapter/scheduler.py", "_poll_timeout_aborts", "time.monotonic"),
        ("adapter/websocket.py", "_ack", "time.monotonic"),  # the same
    ]


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import time\ndef f(): return time.monotonic()", [("f", "time.monotonic")]),
        ("import time as t\nx = t.perf_counter_ns()", [(None, "t.perf_counter_ns")]),
        ("from time import time as now\ndef f(): return now()", [("f", "now")]),
        ("import datetime\ndef f(): return datetime.datetime.now()", [("f", "datetime.datetime.now")]),
        ("from datetime import datetime\nx = datetime.utcnow()", [(None, "datetime.utcnow")]),
        ("import time\ndef f(clock=time.monotonic): return clock()", [("f", "time.monotonic")]),
        ("import time\ntime.sleep(0.1)", []),
        ("class A:\n    def time(self): return self.clock.time()", []),
    ],
)
def test_the_search_for_clocks_finds_them_however_they_are_named(tmp_path, source, reads):
    path = tmp_path / "x.py"
    path.write_text(source)
    assert list(clock_reads(path)) == reads
