"""What the page makes of states, under Node: model.test.mjs holds the cases."""

from __future__ import annotations

from pathlib import Path

import tokenflow_sgl
from support.node import run_cases

MODULE = Path(tokenflow_sgl.__file__).parent / "dashboard" / "page" / "model.js"


def test_the_page_makes_of_states_what_happened(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("model.test.mjs"), MODULE, tmp_path)
