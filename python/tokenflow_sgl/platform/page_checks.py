"""Checksums of host pages: whether what was stored in one is what is about to be loaded.

Owns one sum and one state for each page of a host pool. Does not own the copies, nor what becomes of a bad page.
Invariant: a page whose store was begun and has not ended well is bad, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Filled by somebody else, such as a storage backend, or stored while nothing was verified: cannot be checked.
_UNKNOWN = 0
_UNFINISHED = 1
_STORED = 2
# The sum wraps, and so does the weight: odd, so that no bit of a layer's sum is lost.
_WEIGHT = 0x5851F42D4C957F2D


class PageChecks:
    """Of one pool. Pages are numbers; each is written by one thread at a time, as upstream locks what is copied."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.sums = torch.zeros(pages, dtype=torch.int64)
        self.states = torch.zeros(pages, dtype=torch.uint8)

    def pages_of(self, host_tokens: torch.Tensor) -> torch.Tensor:
        """Page numbers of tokens [pages * page_size]. A part of a page has no sum of its own: AssertionError."""
        rows = host_tokens.reshape(-1, self.page_size) if host_tokens.numel() % self.page_size == 0 else None
        offsets = torch.arange(self.page_size, device=host_tokens.device)
        whole = rows is not None and bool((rows == rows[:, :1] + offsets).all())
        assert whole and rows is not None and not bool((rows[:, 0] % self.page_size).any()), "not whole host pages"
        return rows[:, 0] // self.page_size

    def forget(self, pages: torch.Tensor) -> None:
        self.states[pages] = _UNKNOWN

    def begin_store(self, pages: torch.Tensor) -> None:
        self.states[pages] = _UNFINISHED

    def end_store(self, pages: torch.Tensor, sums: torch.Tensor | None) -> None:
        """`sums` are those of what was read from the device; None: not verified."""
        if sums is not None:
            self.sums[pages] = sums
        self.states[pages] = _UNKNOWN if sums is None else _STORED

    def bad(self, pages: torch.Tensor, buffers: Sequence[torch.Tensor], host_tokens: torch.Tensor) -> torch.Tensor:
        """For each page, whether it must not be loaded. `buffers` as for PageSum.add, indexed by host_tokens."""
        found = PageSum(len(pages))
        for buffer in buffers:
            found.add(rows_as_integers(buffer).index_select(0, host_tokens))
        states = self.states[pages]
        return (states == _UNFINISHED) | ((states == _STORED) & (self.sums[pages] != found.value))


class PageSum:
    """Of n pages, over one buffer after the other; the order of the buffers counts."""

    def __init__(self, pages: int) -> None:
        self.value = torch.zeros(pages, dtype=torch.int64)

    def add(self, rows: torch.Tensor) -> None:
        """Rows [pages * page_size, ...] of one layer's keys or values, whatever their type."""
        if len(self.value):
            rows = rows_as_integers(rows).reshape(len(self.value), -1)
            self.value = self.value * _WEIGHT + rows.sum(1, dtype=torch.int64)


def rows_as_integers(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes in the widest integers that a row divides into: summed four times as fast as half of that."""
    width = rows.shape[-1] * rows.element_size()
    wide = next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if width % t.itemsize == 0)
    return rows.view(wide)
