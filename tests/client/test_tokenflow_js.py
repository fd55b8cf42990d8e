"""The page's reader under Node: tokenflow.test.mjs holds the cases."""

from __future__ import annotations

from pathlib import Path

import tokenflow_sgl
from support.node import run_cases

MODULE = Path(tokenflow_sgl.__file__).parent / "client" / "tokenflow.js"


def test_the_readers_module_keeps_its_promises_under_node(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("tokenflow.test.mjs"), MODULE, tmp_path)
