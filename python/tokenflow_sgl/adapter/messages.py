"""Messages between scheduler ranks, and the name of our question to the scheduler.

Owns the wire shapes; decides nothing. Invariant: TickReq rides the per-iteration request broadcast and never crosses
zmq, so no decoder of another process has to know it.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

# The `rid` of a GetInternalStateReq that asks for our state. Upstream's own `/server_info` sends the same request
# without it and needs no admin key: the scheduler answers with the streams of all clients only when it is ours.
_STATE_RID = "tokenflow:state:"


def state_rid(since: int) -> str:
    """The id of a question for our state, with the transitions after number `since`."""
    return f"{_STATE_RID}{since}"


def state_since(rid: object) -> int | None:
    """The `since` in such an id; None for any other."""
    if not isinstance(rid, str) or not rid.startswith(_STATE_RID):
        return None
    return int(rid.removeprefix(_STATE_RID))


class AckReq(BaseReq, kw_only=True):
    """What clients have consumed.

    acks: what they say: (id as the client knows it, index of the choice, tokens), in order. halts: what their
    connections show: (id, True) from when one takes nothing any more, (id, False) from when it does so again. Ids of
    streams that ended may be among both.

    From the HTTP process over upstream's own socket, behind the request it is about; then broadcast with the requests
    of an iteration, so that every rank hears it in the same step.
    """

    acks: tuple[tuple[str, int, int], ...] = ()
    halts: tuple[tuple[str, bool], ...] = ()


def register() -> None:
    """In every process that decodes messages: one that does not know a type cannot read it, and dies."""
    hook_custom_types(AckReq)


class TickReq(BaseReq, kw_only=True):
    """Rank 0's clock. Every rank decides by it; a clock per rank makes the ranks' batches differ and the server dies.

    now_s: rank 0's monotonic clock. last_step_s: seconds since the tick before, None after an idle spell.
    stores_s, loads_s, publishes_s: (tokens, seconds) of copies to the host, copies back and publish calls that finished
    since the tick before.
    """

    now_s: float = 0.0
    last_step_s: float | None = None
    stores_s: tuple[tuple[int, float], ...] = ()
    loads_s: tuple[tuple[int, float], ...] = ()
    publishes_s: tuple[tuple[int, float], ...] = ()
