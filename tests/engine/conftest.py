"""Runs the programs that the collected tests name, two at a time and ahead of the tests that read what they wrote.

A test names its program in its mark: `@pytest.mark.engine("support.cases", "overlap")`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from support.processes import run_program

Program = tuple[str, str]  # module and configuration
_AT_ONCE = 2
_started: dict[Program, Future[Any]] = {}
_pool = ThreadPoolExecutor(_AT_ONCE)
_out = Path(mkdtemp(prefix="tokenflow-engine-"))


def _start(program: Program) -> Future[Any]:
    if program not in _started:
        module, config = program
        out = _out / f"{module.rpartition('.')[2]}-{config}.json"
        _started[program] = _pool.submit(run_program, module, config, out=out)
    return _started[program]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    for item in session.items:
        for mark in item.iter_markers("engine"):
            if mark.args:
                _start(mark.args)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def program() -> Callable[[str, str], Any]:
    """What a program wrote: (module, configuration) -> its JSON. Waits for it; raises if it failed."""
    return lambda module, config: _start((module, config)).result()


@pytest.fixture
def results(program: Callable[[str, str], Any], config: str) -> Callable[[str], dict[str, Any]]:
    """Case by case, what `support.cases` saw in the engine `config`."""

    def of(case: str) -> dict[str, Any]:
        seen = program("support.cases", config)
        assert case in seen, f"{case} did not run: the engine was left busy by {seen.get('stopped_after')}"
        assert "error" not in seen[case], seen[case]["error"]
        return seen[case]

    return of
