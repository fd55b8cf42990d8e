"""Request ids: which ids a client may choose, and aborts that end the named request and no other.

Owns the rules at entry and the exact match; owns no request. Invariant: an abort of `u1` never touches `u10`.
Stock ends every request whose id BEGINS with the aborted id. Refusing such ids at entry would hit honest clients that
number their requests (`job-1`, `job-10`), and would let a client with the id `a` block every generated id that begins
with an `a`; so the match is made exact where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from .rates import BadField

MAX_CHARS = 256
VALID_RID = f"1 to {MAX_CHARS} characters without control characters, not in use by a live request"
# Upstream treats ids that begin so as health probes and may drop them while it is busy.
RESERVED_PREFIX = "HEALTH_CHECK"
# No client id begins with a control character, so a hidden id begins with nothing that could be aborted.
_HIDDEN = "\x00"
_VISIBLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))


def check_rid(rid: Any, live: Container[str], *, field: str = "rid") -> None:
    """Raises BadField for an id a client must not use now. Lists item by item; other types are upstream's to refuse."""
    if isinstance(rid, list):
        for item in rid:
            check_rid(item, live, field=field)
        return
    if not isinstance(rid, str):
        return
    bad = not rid or len(rid) > MAX_CHARS or any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in rid)
    if bad or rid.startswith(RESERVED_PREFIX):
        raise BadField(field, rid, VALID_RID)
    if rid in live:
        # Upstream refuses it too, but on a streaming /generate only inside a 200 response.
        raise BadField(field, rid, "an id that no live request has: this one is still running")


def header_value(rid: str) -> bytes:
    """An id as a response header: visible ASCII as it is, everything else percent-encoded UTF-8."""
    return quote(rid, safe=_VISIBLE_ASCII, errors="replace").encode("ascii")


def live_requests(scheduler: Any) -> Iterator[Any]:
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req
    yield from scheduler.collect_inflight_reqs()


@contextmanager
def only_exact(scheduler: Any, rid: str) -> Iterator[None]:
    """While open, no live request of the scheduler but `rid` itself has an id that begins with `rid`."""
    hidden = {id(r): r for r in live_requests(scheduler) if r.rid != rid and r.rid.startswith(rid)}
    for request in hidden.values():
        request.rid = _HIDDEN + request.rid
    try:
        yield
    finally:
        for request in hidden.values():
            request.rid = request.rid.removeprefix(_HIDDEN)


class _Ended:
    """What upstream's delayed abort reads of a request whose reply ended: the ids that are still that request's.

    Two seconds after a streamed reply, whatever became of it, upstream aborts the id. By then the id may be another's.
    """

    is_single = False

    def __init__(self, manager: Any, request: Any) -> None:
        self._manager = manager
        self._request = request
        self._owned: dict[str, Any] = {}

    async def remember(self) -> None:
        """At the end of the reply: who is live then, under these ids, was cut off."""
        ids = self._request.rid if isinstance(self._request.rid, list) else [self._request.rid]
        self._owned = {rid: state for rid in ids if (state := self._manager.rid_to_state.get(rid)) is not None}

    @property
    def rid(self) -> list[str]:
        live = self._manager.rid_to_state
        return [rid for rid, state in self._owned.items() if live.get(rid) is state]


def around_create_abort_task(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """AROUND hook of TokenizerManager.create_abort_task: it ends the request it was made for, never the next owner of
    its id. The tasks of a reply run in order, and upstream's reads the ids after its delay."""
    from starlette.background import BackgroundTask

    ended = _Ended(manager, obj)
    tasks = original(manager, ended)
    tasks.tasks.insert(0, BackgroundTask(ended.remember))
    return tasks
