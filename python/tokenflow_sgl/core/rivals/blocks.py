"""Which running streams filled a block of KV since they were last published: for rivals that store each block as it
fills (vLLM's OffloadingConnector, SuperInfer's eager block rotation).

Owns that count, made of events alone, so that a steady step asks for no views. Invariant: what is due is more than what
is in the tree already, and no more than what is written.
"""

from __future__ import annotations

from ..types import Applied, Arrived, Emitted, EngineView, Event, Finished, Rid

BLOCK_TOKENS = 16  # vLLM's block, and SuperInfer's; both store block by block


class FullBlocks:
    """Streams by the output token whose coming fills their next block.

    The KV of the newest token is not written yet: with prompt + output tokens, prompt + output - 1 are.
    """

    def __init__(self) -> None:
        self.prompt_tokens: dict[Rid, int] = {}
        self.output_tokens: dict[Rid, int] = {}
        self.published: dict[Rid, int] = {}  # of those in memory
        self.next_at: dict[Rid, int] = {}  # output tokens at which the next block is full
        self.due: dict[Rid, int] = {}  # tokens written

    def observe(self, event: Event) -> None:
        if isinstance(event, Emitted):
            self._emitted(event)
        elif isinstance(event, Applied):
            self._applied(event)
        elif isinstance(event, Arrived):
            self._forget(event.rid)
            self.prompt_tokens[event.rid] = event.prompt_tokens
        elif isinstance(event, Finished):
            self._forget(event.rid)

    def _emitted(self, event: Emitted) -> None:
        find, outputs = self.next_at.get, self.output_tokens
        for rid, output in zip(event.rids, event.output_tokens, strict=True):
            at = find(rid)
            if at is None:
                continue
            outputs[rid] = output
            if output >= at:
                self.due[rid] = self.prompt_tokens[rid] + output - 1

    def _applied(self, event: Applied) -> None:
        for rid, up_to in event.published:
            self.due.pop(rid, None)  # refused: the next block is soon enough to try again
            if rid in self.published:
                self._reach(rid, max(up_to, self.published[rid]))
        for rid in event.parked:
            self._leave(rid)
        for rid, _, _ in event.admitted:
            if rid in self.prompt_tokens:
                self.due.pop(rid, None)
                self._reach(rid, self.prompt_tokens[rid] + self.output_tokens.get(rid, 0))  # its prefill publishes it

    def _reach(self, rid: Rid, published: int) -> None:
        self.published[rid] = published
        done = max(published, self.prompt_tokens[rid] + self.output_tokens.get(rid, 0) - 1)
        full = (done // BLOCK_TOKENS + 1) * BLOCK_TOKENS
        self.next_at[rid] = full - self.prompt_tokens[rid] + 1

    def _leave(self, rid: Rid) -> None:
        for book in (self.published, self.next_at, self.due):
            book.pop(rid, None)

    def _forget(self, rid: Rid) -> None:
        self._leave(rid)
        self.prompt_tokens.pop(rid, None)
        self.output_tokens.pop(rid, None)

    def publish(self, view: EngineView) -> tuple[tuple[Rid, int], ...]:
        """All that is due, in whole pages, in order of arrival at this state."""
        if not self.due or not view.host_ok:
            return ()
        page = view.page_tokens
        ends = ((rid, written - written % page) for rid, written in self.due.items())
        return tuple((rid, end) for rid, end in ends if end > self.published[rid])
