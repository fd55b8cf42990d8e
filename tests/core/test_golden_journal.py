"""The kept journal of a burst: a refactor that changes one plan of it is found here (see tests/support/golden.py)."""

from __future__ import annotations

import json

import pytest

from support import golden
from tokenflow_sgl.core.journal import read, replay
from tokenflow_sgl.core.policies import policy_from_header
from tokenflow_sgl.core.types import Phase

ANEW = "if the change is meant, write it anew: PYTHONPATH=tests .venv/bin/python -m support.golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "again.jsonl"
    return path, golden.write(path)


def test_the_golden_journal_replays_to_the_same_plans():
    agreed, difference = replay(golden.GOLDEN, policy_from_header)
    assert difference is None, f"after {agreed} equal steps, {difference}; {ANEW}"
    assert agreed > 150


def test_the_golden_scenario_still_runs_to_the_golden_plans(run):
    # Replay feeds recorded views; this closes the loop. Settings may be added, so the headers are not compared.
    (_, kept), (_, again) = read(golden.GOLDEN), read(run[0])
    for step, (old, new) in enumerate(zip(kept, again, strict=True)):
        assert old[0] == new[0] and old[2] == new[2], f"step {step}: {old[2]} became {new[2]}; {ANEW}"


def test_the_golden_journal_shows_what_it_is_kept_for(run):
    _, record = run
    assert record.parks and any(record.returns_of(rid) for _, _, rid in record.parks)
    assert record.published_tokens and record.loaded_tokens
    assert set(record.finished.values()) == {"stop"}
    phases = {
        r["phase"] for line in golden.GOLDEN.read_text().splitlines()[1:] for r in json.loads(line)["requests"] or ()
    }
    assert phases == {phase.value for phase in Phase}
    kinds = {name for line in golden.GOLDEN.read_text().splitlines()[1:] for name, _ in json.loads(line)["events"]}
    assert kinds >= {"Applied", "Tick", "Arrived", "Emitted", "Finished"}


def test_the_golden_journal_is_small_enough_to_read():
    assert golden.GOLDEN.stat().st_size < 200_000


def test_the_same_code_writes_the_same_bytes(run, tmp_path):
    golden.write(tmp_path / "third.jsonl")
    assert (tmp_path / "third.jsonl").read_bytes() == run[0].read_bytes()
