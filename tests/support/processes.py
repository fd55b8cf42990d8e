"""Runs a program of tests/support in a process of its own and gives back the JSON it wrote: one engine, one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def run_program(
    module: str, *args: str, out: Path, deadline_s: float = 420.0, env: dict[str, str] | None = None
) -> Any:
    """Raises AssertionError with the end of its output if it fails or takes longer than `deadline_s` seconds."""
    log = out.with_suffix(".log")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args, str(out)],
            cwd=TESTS, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            status = f"not done after {deadline_s:.0f} s"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    assert status == 0 and out.exists(), f"{module} {' '.join(args)}: {status}\n{tail}"
    return json.loads(out.read_text())
