"""Installed is not in force: without the switch a process is stock, with it a broken plugin is no server (B38)."""

from __future__ import annotations

import os
import subprocess
import sys

_ASK = """
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("scheduler:", Scheduler.__module__, "flags:", "--tokenflow-policy" in parser.format_help())
"""
_BROKEN = """
import sys
sys.modules["tokenflow_sgl.adapter.{module}"] = None
from tokenflow_sgl import launch_server
launch_server.main(["--model-path", "none"])
"""
_CHILD = """
import sys
from tokenflow_sgl.adapter import plugin
plugin.run_scheduler_process()
"""
_BYSTANDER = """
import sys, setproctitle
setproctitle.setproctitle("sglang::detokenizer")
from sglang.srt.plugins import load_plugins
load_plugins()
print("imported:", "sglang.srt.managers.scheduler" in sys.modules)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TOKENFLOW_ENABLE", "SGLANG_PLUGINS")}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_stock_process_in_the_same_environment_is_stock() -> None:
    done = run(_ASK)
    assert "scheduler: sglang.srt.managers.scheduler flags: False" in done.stdout, done.stderr


def test_switched_on_process_is_ours() -> None:
    done = run(_ASK, TOKENFLOW_ENABLE="1")
    assert "scheduler: tokenflow_sgl.adapter.scheduler flags: True" in done.stdout, done.stderr


def test_launcher_with_a_broken_import_ends_non_zero_and_names_it() -> None:
    done = run(_BROKEN.format(module="executor"))
    assert done.returncode != 0
    assert "tokenflow_sgl.adapter.executor" in done.stderr and "cannot be loaded into SGLang" in done.stderr


def test_launcher_whose_plugin_upstream_leaves_out_ends_non_zero_with_the_reason() -> None:
    done = run(_BROKEN.format(module="unused"), SGLANG_PLUGINS="other")
    assert done.returncode != 0 and "SGLANG_PLUGINS ('other')" in done.stderr


def test_scheduler_process_without_our_plugin_ends_before_it_becomes_a_scheduler() -> None:
    done = run(_CHILD, TOKENFLOW_ENABLE="1", SGLANG_PLUGINS="other")
    assert done.returncode != 0 and "did not load our plugin" in done.stderr


def test_detokenizer_does_not_pay_for_the_scheduler() -> None:
    done = run(_BYSTANDER, TOKENFLOW_ENABLE="1")
    assert "imported: False" in done.stdout, done.stderr
