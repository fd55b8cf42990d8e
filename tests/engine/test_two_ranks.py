"""Two real scheduler ranks decide the same: their journals are identical. With a clock for each rank they are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import TESTS
from support.two_ranks import LOADS_WANTED, PAGE, PARKS_WANTED, STREAMS, TOKENS, copy_in_any_case
from tokenflow_sgl.core.cost import CostBelief
from tokenflow_sgl.core.journal import replay
from tokenflow_sgl.core.policies import policy_from_header

pytestmark = pytest.mark.engine


def run_ranks(folder: Path, clock: str, *, deadline_s: float) -> list[str]:
    """Exit status of each rank, as text; a rank that hangs is killed when the deadline ends."""
    processes = []
    for rank in (0, 1):
        command = [sys.executable, "-m", "support.two_ranks", str(rank), clock, str(folder), f"{folder}/out{rank}.json"]
        with (folder / f"log{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=TESTS,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            )
    ends = []
    for process in processes:
        try:
            ends.append(str(process.wait(timeout=deadline_s)))
        except subprocess.TimeoutExpired:
            ends.append("hang")
        deadline_s = 20.0  # when one rank is gone the other cannot go on
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return ends


def journals(folder: Path) -> list[bytes]:
    return [(folder / f"journal.rank{rank}").read_bytes() for rank in (0, 1)]


def test_two_ranks_plan_the_same_for_two_thousand_steps_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report B17: copies 1 ms late on one rank and 50 ms on the other, host pools that differ by a page."""
    ends = run_ranks(tmp_path, "tick", deadline_s=400)
    logs = "\n".join((tmp_path / f"log{r}").read_text(errors="replace")[-1500:] for r in (0, 1))
    assert ends == ["0", "0"], logs
    first, second = (json.loads((tmp_path / f"out{rank}.json").read_text()) for rank in (0, 1))
    print(f"steps {first['steps']}, under load {first['steps_under_load']}, counters {first['counters']}")
    print(f"longest step: {first['longest_step_s']:.2f} s and {second['longest_step_s']:.2f} s")
    a, b = journals(tmp_path)
    assert a == b, "the ranks' journals differ"
    assert first["steps_under_load"] >= 2000
    assert first["counters"] == second["counters"]
    assert first["counters"]["parks"] >= PARKS_WANTED
    # Copies ended at other times on the other rank, and each waited for both.
    assert first["counters"]["loads"] >= LOADS_WANTED
    assert first["counters"]["loads_failed"] == first["counters"]["stores_failed"] == 0
    # One rank has a page more memory, and both use what the smaller one has.
    (memory, *used), (other_memory, *other_used) = first["host_tokens"], second["host_tokens"]
    assert other_memory == memory + PAGE
    assert used == other_used == [memory, memory]
    # Token for token as in the undisturbed phase of the same run.
    assert first["same"] == [True] * STREAMS
    assert first["lengths"] == [TOKENS]
    monkeypatch.setattr(CostBelief, "load_spares_engine", CostBelief.load_spares_engine)  # undone after the test
    copy_in_any_case(CostBelief)
    agreed, difference = replay(tmp_path / "journal.rank0", policy_from_header)
    assert difference is None
    assert agreed > 2000


def test_a_clock_per_rank_makes_the_comparison_of_journals_fail(tmp_path: Path) -> None:
    """The negative control: what the test above compares would notice. Not the recorded times alone, which differ of
    course: plans differ too, or the ranks no longer go through the same batches, and hang or die."""
    ends = run_ranks(tmp_path, "local", deadline_s=60)
    a, b = journals(tmp_path)
    assert a != b, f"different clocks, same journals: the comparison proves nothing (ranks ended with {ends})"
    plans = [[json.loads(line).get("plan") for line in journal.splitlines()[1:-1]] for journal in (a, b)]
    steps = min(map(len, plans))
    assert steps > 0
    assert plans[0][:steps] != plans[1][:steps] or ends != ["0", "0"], "clocks of their own changed no decision"
