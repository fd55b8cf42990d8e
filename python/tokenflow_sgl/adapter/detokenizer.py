"""What a detokenizer has sent of an answer never becomes less.

Owns one number of upstream's record of an answer; decodes nothing. Invariant: no character of an answer is sent twice.

An answer may end in a piece of a character for some steps. Upstream then sends what can be printed before it and counts
that as sent. One step later its guess of what can be printed may be shorter: the count goes back, and what was sent is
sent again (field report B29: a doubled character).
"""

from __future__ import annotations

from sglang.srt.managers.detokenizer_manager import DecodeStatus


class SentOnce(DecodeStatus):
    """Upstream's record of one answer. `sent_offset` counts characters; what is smaller than before is not taken."""

    _sent = 0

    @property
    def sent_offset(self) -> int:
        return self._sent

    @sent_offset.setter
    def sent_offset(self, value: int) -> None:
        self._sent = max(self._sent, value)
