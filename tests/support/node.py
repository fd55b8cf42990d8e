"""Runs the cases of a JavaScript module under Node.

Owns where the module lies for it. Invariant: every case of the file has passed, or it is told why none ran.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def run_cases(cases: Path, module: Path, folder: Path) -> None:
    """`cases` imports what $MODULE names: a copy of `module` in `folder`, since .js alone is no module for Node."""
    copy = folder / f"{module.stem}.mjs"
    shutil.copy(module, copy)
    command = [_node(), "--test", "--test-reporter=tap", str(cases)]
    env = {**os.environ, "MODULE": str(copy)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed and int(passed[1]) == cases.read_text().count('\ntest("'), done.stdout


def _node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("no node on this machine (Debian: apt install nodejs)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.skip(f"node {version}: 20 or newer is needed for timers that a test can turn")
    return path
