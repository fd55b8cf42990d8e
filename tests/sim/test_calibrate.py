"""Step times from a journal: known times go in, the same come out, and hiccups do not."""

from __future__ import annotations

import pytest

from support.views import engine
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Finished, Plan, ReaderClass, Tick
from tokenflow_sgl.sim.calibrate import fit, gather
from tokenflow_sgl.sim.timing import StepWork


def journal_of(*, hiccup_s=0.0):
    """Decode steps of 2 to 6 streams at 5 ms + 1 ms a stream + 1 us a KV token, prefills at 4 ms + 50 us a token."""
    view, plan, now_s, steps = engine([]), Plan(), 0.0, []
    steps.append(
        ([Tick(now_s), *(Arrived(f"r{i}", 100 * (i + 1), 500, ReaderClass.READER, 6.0) for i in range(6))], view, plan)
    )
    for i, tokens in enumerate((50, 100, 200, 400, 700, 900)):
        now_s += 0.004 + 50e-6 * tokens
        steps.append(([Applied(prefill_tokens=tokens), Tick(now_s, 0.004 + 50e-6 * tokens)], view, plan))
        assert i < 6
    outputs = dict.fromkeys([f"r{i}" for i in range(6)], 1)
    for streams in (2, 3, 4, 6):
        rids = [f"r{i}" for i in range(streams)]
        steps.append(([Emitted(tuple(rids), tuple(outputs[r] for r in rids))], view, plan))
        for n in range(40):
            read = sum(100 * (i + 1) + outputs[f"r{i}"] for i in range(streams))
            step_s = 0.005 + 0.001 * streams + 1e-6 * read + (hiccup_s if n == 7 and streams == 3 else 0.0)
            now_s += step_s
            for rid in rids:
                outputs[rid] += 1
            emitted = Emitted(tuple(rids), tuple(outputs[r] for r in rids))
            tick = Tick(now_s, step_s, stores_s=((160, 0.002),), loads_s=((320, 0.002),))
            steps.append(([Applied(decoding=streams), tick, emitted], view, plan))
    steps.append(([Finished("r0")], view, plan))
    return steps


@pytest.mark.parametrize("hiccup_s", [0.0, 2.0])
def test_what_the_journal_says_is_what_the_table_says(hiccup_s):
    table = fit(gather(journal_of(hiccup_s=hiccup_s)), source="by hand")
    for streams, read in ((2, 400), (3, 900), (6, 2500)):
        wanted = 0.005 + 0.001 * streams + 1e-6 * read
        assert table.step_s(StepWork(decoding=streams, decode_context_tokens=read)) == pytest.approx(wanted, rel=0.02)
    assert table.step_s(StepWork(prefill=((300, 0),))) == pytest.approx(0.004 + 50e-6 * 300, rel=0.05)
    assert table.store_tok_s == pytest.approx(80_000) and table.load_tok_s == pytest.approx(160_000)


def test_publishing_is_not_counted_twice():
    steps = journal_of()
    events, view, plan = steps[20]
    tick = events[1]
    slower = Tick(tick.now_s, tick.last_step_s + 0.5, publishes_s=((700, 0.5),))
    steps[20] = ([events[0], slower, events[2]], view, plan)
    table = fit(gather(steps), source="by hand")
    assert table.step_s(StepWork(decoding=2, decode_context_tokens=400)) == pytest.approx(0.0074, rel=0.02)
    assert table.publish_s(700) == pytest.approx(0.5)


def test_a_journal_of_a_few_steps_is_refused():
    with pytest.raises(ValueError, match="journal: 0 decode and 6 prefill steps, valid: 50 and 5"):
        fit(gather(journal_of()[:7]), source="by hand")
