"""The small burst whose journal is kept in tests/golden: it pins every plan across refactors.

A change of policy that is meant changes the journal too. Look at the difference, then write it anew:

    PYTHONPATH=tests .venv/bin/python -m support.golden

Owns the scenario and the file. Invariant: the same code writes the same bytes.
"""

from __future__ import annotations

from pathlib import Path

from support.standin import Job, Record, StandIn
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.journal import Journal
from tokenflow_sgl.core.policies import header_of, make_policy
from tokenflow_sgl.core.types import ReaderClass

GOLDEN = Path(__file__).parents[1] / "golden" / "demo-like.jsonl"
POOL_TOKENS = 704

# Four background streams fill the pool with long answers, three newcomers with short ones come at once, and one
# request that nobody watches waits for its turn.
JOBS = (
    *(Job(f"background-{i}", 40, 140, at_s=0.1 * i, rate_tok_s=(4.0, 6.0, 8.0, 10.0)[i]) for i in range(4)),
    Job("batch", 80, 24, at_s=1.0, reader=ReaderClass.BATCH),
    *(Job(f"newcomer-{i}", 80, 12, at_s=3.5) for i in range(3)),
)


def write(path: Path) -> Record:
    """Run the burst and write its journal to `path`."""
    config = PolicyConfig()
    journal = Journal.open(path, header_of("tokenflow", config))
    try:
        return StandIn(make_policy("tokenflow", config), pool_tokens=POOL_TOKENS, journal=journal).run(JOBS)
    finally:
        journal.close()


if __name__ == "__main__":
    record = write(GOLDEN)
    parks = [rid for _, _, rid in record.parks]
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes, {len(record.plans)} plans, parks {parks}")
