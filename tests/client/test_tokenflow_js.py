"""The page's reader under Node: tokenflow.test.mjs holds the cases."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tokenflow_sgl

MODULE = Path(tokenflow_sgl.__file__).parent / "client" / "tokenflow.js"
CASES = Path(__file__).with_name("tokenflow.test.mjs")


def node() -> str:
    path = shutil.which("node")
    if path is None:
        pytest.skip("no node on this machine (Debian: apt install nodejs)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.skip(f"node {version}: 20 or newer is needed for timers that a test can turn")
    return path


def test_the_readers_module_keeps_its_promises_under_node(tmp_path: Path) -> None:
    module = tmp_path / "tokenflow.mjs"  # for Node, .js alone is no module
    shutil.copy(MODULE, module)
    command = [node(), "--test", "--test-reporter=tap", str(CASES)]
    env = {**os.environ, "TOKENFLOW_JS": str(module)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed and int(passed[1]) == CASES.read_text().count('\ntest("'), done.stdout
