"""The order in which a policy hears what happened."""

from __future__ import annotations

from types import SimpleNamespace

from tokenflow_sgl.adapter.ledger import Ledger
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, ReaderClass, Tick


def arrival(rid: str) -> Arrived:
    return Arrived(rid, 10, 20, ReaderClass.READER, 6.0)


def test_an_arrival_while_the_batch_was_formed_is_told_before_the_admission_in_it() -> None:
    ledger = Ledger()
    request = SimpleNamespace(
        rid="grammar", output_ids=[1], finished_reason=None, tokenflow=SimpleNamespace(parent=None)
    )
    ledger.arrived(arrival("grammar"), request)
    ledger.applied([("grammar", 10, 0)], [], prefill_tokens=10, decoding=0)
    ledger.emitted([request])
    ledger.tick(Tick(1.0))
    ledger.arrived(arrival("next"), request)
    events = ledger.drain()
    assert [type(e) for e in events] == [Arrived, Applied, Tick, Emitted, Arrived]
    assert [e.rid for e in events if isinstance(e, Arrived)] == ["grammar", "next"]
    assert ledger.drain() == []


def test_what_loads_came_to_is_told_once_with_the_step_in_which_it_was_seen() -> None:
    ledger = Ledger()
    ledger.loaded.append(("a", 64))
    ledger.unloaded.append("b")
    ledger.applied([], [], prefill_tokens=0, decoding=0)
    assert ledger.has_news
    assert ledger.drain() == [Applied(loaded=(("a", 64),), unloaded=("b",))]
    ledger.applied([], [], prefill_tokens=0, decoding=0)
    assert not ledger.has_news
