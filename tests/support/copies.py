"""A faulty machine under the CPU platform's copies: late, out of order, failing, silent, or wrong.

Owns the faults and when each copy may go on. Does not own any of the product's threads: it stands in the one place that
they all pass, `cpu_streams.run_task`. Invariant: after the `with` block nothing is held back and every completion that
was lost has come, so that a test that failed leaves no thread waiting.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tokenflow_sgl.platform import cpu_host_pool, cpu_streams

STORE, LOAD = "store", "load"
POISON = 7777.0  # far from any key or value, and finite: a NaN would also spread through weights that are zero
_PATIENCE_S = 60.0


class InjectedFault(RuntimeError):
    """What a copy raises that was told to fail."""


@dataclass(frozen=True)
class Transfer:
    """One submission to a stream, as the rules see it. `number` counts those of its direction, from 0."""

    direction: str
    number: int
    host_pages: frozenset[int]


Which = Callable[[Transfer], bool]


def numbers(direction: str, *chosen: int) -> Which:
    """Transfers by direction and number; all of a direction if no number is given."""
    return lambda t: t.direction == direction and (not chosen or t.number in chosen)


def touching(pages: Iterable[int], direction: str | None = None) -> Which:
    """Transfers that move any of these host pages."""
    wanted = frozenset(pages)
    return lambda t: bool(wanted & t.host_pages) and direction in (None, t.direction)


@dataclass
class _Submission:
    """Of one stream, from one Begin to the next."""

    transfer: Transfer | None = None
    records_to_finish: int | None = None  # events after the last copy, until the one that ends the transfer


@dataclass
class FaultyCopies:
    """Context manager. Rules may be set before and while copies run; each holds until `heal`."""

    engine: Any = None
    seed: int = 0
    transfers: list[Transfer] = field(default_factory=list)  # in the order in which they began to be copied

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._changed = threading.Condition()
        self._open = {STORE: threading.Event(), LOAD: threading.Event()}
        self._released = threading.Event()
        self._submissions: dict[int, _Submission] = {}
        self._lost: list[Callable[[], None]] = []
        self._ended: set[Transfer] = set()
        self._unwrap: list[Callable[[], None]] = []
        self.heal()

    # ---- rules

    def heal(self) -> None:
        """No rule is in force any more; what is held back goes on."""
        self._delay: tuple[float | None, Which] | None = None
        self._reorder = False
        self._lose: Which = _none
        self._fail: Which = _none
        self._corrupt: list[tuple[Which, int, int]] = []
        for gate in (*self._open.values(), self._released):
            gate.set()

    def delay(self, seconds: float | None = None, which: Which = lambda t: True) -> None:
        """Each copy begins `seconds` late, or, with None, not before `release`."""
        self._released.clear()
        self._delay = (seconds, which)

    def release(self) -> None:
        self._delay = None
        self._released.set()

    def freeze(self, direction: str) -> None:
        """No copy of this direction begins before `thaw`; what is submitted queues up behind."""
        self._open[direction].clear()

    def thaw(self, direction: str) -> None:
        self._open[direction].set()

    def reorder(self) -> None:
        """The pages of each copy are moved in a random order."""
        self._reorder = True

    def lose(self, which: Which) -> None:
        """The copy is done and its finish event never is, before `find_lost`. A load's layers are done as ever."""
        self._lose = which

    def find_lost(self) -> int:
        """Every completion lost so far comes now; how many."""
        with self._changed:
            found, self._lost = self._lost, []
        for complete in found:
            complete()
        return len(found)

    def fail(self, which: Which) -> None:
        """The copy raises before it has moved anything."""
        self._fail = which

    def corrupt(self, which: Which, page: int = 0, layer: int = 0) -> None:
        """After a store has ended, one value of its `page`-th page (-1: the last) is another on the host."""
        self._corrupt.append((which, page, layer))

    # ---- what a test waits for

    def wait_begun(self, direction: str, count: int = 1) -> None:
        """Until `count` transfers of this direction have begun to be copied, or are held back from it."""
        self._wait(lambda: sum(t.direction == direction for t in self.transfers) >= count)

    def wait_ended(self, direction: str, count: int = 1) -> None:
        """Until `count` transfers of this direction were copied in full or failed; their events may still come."""
        self._wait(lambda: sum(t.direction == direction for t in self._ended) >= count)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout=_PATIENCE_S):
                raise TimeoutError(f"saw only {self.transfers}, ended {len(self._ended)}")

    # ---- in force

    def __enter__(self) -> FaultyCopies:
        self._real = cpu_streams.run_task
        cpu_streams.run_task = self._run
        return self

    def __exit__(self, *exc: object) -> None:
        cpu_streams.run_task = self._real
        self.heal()
        self.find_lost()
        while self._unwrap:
            self._unwrap.pop()()

    def _run(self, stream: cpu_streams.Stream, task: Any) -> None:
        submission = self._submissions.setdefault(id(stream), _Submission())
        if isinstance(task, cpu_streams.Begin):
            self._submissions[id(stream)] = _Submission()
        elif isinstance(task, (cpu_host_pool.Store, cpu_host_pool.Load)):
            self._copy(submission, task)
            return
        elif isinstance(task, cpu_streams.Record) and submission.records_to_finish is not None:
            submission.records_to_finish -= 1
            if submission.records_to_finish == 0 and submission.transfer and self._lose(submission.transfer):
                with self._changed:
                    self._lost.append(task)
                return
        self._real(stream, task)

    def _copy(self, submission: _Submission, task: Any) -> None:
        transfer = submission.transfer or self._begin(submission, task)
        if not self._open[transfer.direction].wait(_PATIENCE_S):
            raise TimeoutError(f"{transfer} was never thawed")
        if self._delay is not None and self._delay[1](transfer):
            seconds = self._delay[0]
            if not self._released.wait(_PATIENCE_S if seconds is None else seconds) and seconds is None:
                raise TimeoutError(f"{transfer} was never released")
        store = isinstance(task, cpu_host_pool.Store)
        last = store or task.layer_id == len(task.pool.k_data_refs) - 1
        if last:
            submission.records_to_finish = 1 if store else 2  # a load's last layer has an event of its own
        try:
            self._moved(transfer, task)()
            if store:
                for which, page, layer in self._corrupt:
                    if which(transfer):
                        corrupt_page(task.pool, int(_pages(task)[page]), layer)
        finally:
            if last:
                with self._changed:
                    self._ended.add(transfer)
                    self._changed.notify_all()

    def _begin(self, submission: _Submission, task: Any) -> Transfer:
        direction = STORE if isinstance(task, cpu_host_pool.Store) else LOAD
        with self._changed:
            number = sum(t.direction == direction for t in self.transfers)
            submission.transfer = Transfer(direction, number, frozenset(_pages(task).tolist()))
            self.transfers.append(submission.transfer)
            self._changed.notify_all()
        return submission.transfer

    def _moved(self, transfer: Transfer, task: Any) -> Any:
        """The copy that runs in place of the product's: its own, with other arguments."""
        if self._fail(transfer):
            return replace(task, pool=_Unreadable(task.pool))
        if not self._reorder:
            return task
        size = task.pool.page_size
        order = list(range(len(task.host_indices) // size))
        self._random.shuffle(order)
        host, device = (
            indices.reshape(-1, size)[order].reshape(-1) for indices in (task.host_indices, task.device_indices)
        )
        return replace(task, host_indices=host, device_indices=device)

    # ---- freed memory

    def poison_freed(self) -> None:
        """What the engine's allocator or host pool frees is overwritten at once: whoever still reads it is seen."""
        scheduler = self.engine.scheduler
        allocator = scheduler.token_to_kv_pool_allocator
        device = allocator.get_kvcache()
        host = host_pool_of(self.engine)
        page = torch.arange(allocator.page_size)

        def free_pages(*page_ids: torch.Tensor) -> None:
            for ids in page_ids:
                _poison((*device.k_buffer, *device.v_buffer), (ids[:, None] * allocator.page_size + page).reshape(-1))

        def free_tokens(tokens: torch.Tensor) -> None:
            if allocator.free_group is None:  # else it comes again when the group ends
                _poison((*device.k_buffer, *device.v_buffer), tokens)

        if hasattr(allocator, "_release_page_ids"):
            # Where free, free_segment and the end of a group meet, with whole pages.
            self._ahead_of(allocator, "_release_page_ids", free_pages)
        else:
            self._ahead_of(allocator, "free", free_tokens)
        self._ahead_of(host, "free", lambda tokens: _poison((*host.k_data_refs, *host.v_data_refs), tokens))

    def _ahead_of(self, owner: Any, name: str, first: Callable[..., None]) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return real(*args, **kwargs)

        setattr(owner, name, wrapped)
        self._unwrap.append(lambda: delattr(owner, name))


def host_pool_of(engine: Any) -> Any:
    """The host pool of keys and values behind an engine's tree."""
    pool = engine.scheduler.tree_cache.cache_controller.mem_pool_host
    return pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool


def corrupt_page(pool: Any, page: int, layer: int = 0) -> None:
    """One value of a host page becomes another; its checksum stays."""
    pool.v_data_refs[layer][page * pool.page_size + pool.page_size // 2].view(-1)[-1] += 1


class _Unreadable:
    """A pool whose keys and values cannot be had."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        if name == "k_data_refs":
            raise InjectedFault("told to fail")
        return getattr(self._pool, name)


def _pages(task: Any) -> torch.Tensor:
    return task.host_indices[:: task.pool.page_size] // task.pool.page_size


def _poison(buffers: Iterable[torch.Tensor], tokens: torch.Tensor) -> None:
    for buffer in buffers:
        buffer[tokens] = POISON


def _none(transfer: Transfer) -> bool:
    return False
