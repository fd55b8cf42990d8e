"""Pages arrive on the other side whole, in threads of their own, and a page that is not what was stored never does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.copies import LOAD, STORE, FaultyCopies, InjectedFault, corrupt_page, numbers, touching
from tokenflow_sgl.platform import cpu_host_pool
from tokenflow_sgl.platform.cpu_host_pool import CopyError, back_up_layers, load_layer, own_indices
from tokenflow_sgl.platform.cpu_streams import Event, Stream, stream

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
DEVICE_PAGES, HOST_PAGES = 12, 16


def make_pool(dtype: torch.dtype = torch.float32, layout: str = "page_first", page: int = PAGE) -> Any:
    generator = torch.Generator().manual_seed(7)
    tokens = HOST_PAGES * page
    if layout == "page_first":
        host = torch.zeros(2, tokens, LAYERS, HEADS, DIM, dtype=dtype)
        k, v = ([side[:, i] for i in range(LAYERS)] for side in host)
    else:
        host = torch.zeros(2, LAYERS, tokens, HEADS, DIM, dtype=dtype)
        k, v = ([side[i] for i in range(LAYERS)] for side in host)
    device = [
        [torch.randn(DEVICE_PAGES * page, HEADS, DIM, generator=generator).to(dtype) for _ in range(LAYERS)]
        for _ in range(2)
    ]
    return SimpleNamespace(
        layout=layout, page_size=page, layer_num=LAYERS, target_layer_num=LAYERS,
        k_data_refs=k, v_data_refs=v, device_k_buffers=device[0], device_v_buffers=device[1],
    )  # fmt: skip


def tokens_of(*pages: int, page: int = PAGE) -> torch.Tensor:
    return (torch.tensor(pages, dtype=torch.int64)[:, None] * page + torch.arange(page)).reshape(-1)


def held(pool: Any, pages: tuple[int, ...]) -> torch.Tensor:
    """What the device holds in these pages, all layers, keys and values."""
    return torch.stack([b[tokens_of(*pages, page=pool.page_size)] for b in buffers(pool)])


def buffers(pool: Any) -> list[torch.Tensor]:
    return [*pool.device_k_buffers, *pool.device_v_buffers]


class Copies:
    """What upstream's engine does with a pool: one submission to a stream for each transfer."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.to_host, self.to_device = Stream(), Stream()

    def store(self, device: tuple[int, ...], host: tuple[int, ...]) -> Event:
        done = Event()
        size = self.pool.page_size
        with stream(self.to_host):
            back_up_layers(self.pool, None, tokens_of(*host, page=size), tokens_of(*device, page=size), "kernel")
            done.record()
        return done

    def load(self, host: tuple[int, ...], device: tuple[int, ...]) -> list[Event]:
        """Events of the layers, and that of the end."""
        events = [Event() for _ in range(LAYERS + 1)]
        size = self.pool.page_size
        with stream(self.to_device):
            indices = tokens_of(*host, page=size), tokens_of(*device, page=size)
            for layer in range(LAYERS):
                load_layer(self.pool, None, *indices, layer, "kernel")
                events[layer].record()
            events[-1].record()
        return events

    def wipe(self) -> None:
        for buffer in buffers(self.pool):
            buffer.fill_(-1.0)


@pytest.fixture
def copies() -> Copies:
    return Copies(make_pool())


@pytest.fixture
def faults() -> Iterator[FaultyCopies]:
    with FaultyCopies() as faults:
        yield faults


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("page", [1, PAGE])
def test_pages_come_back_as_they_were_wherever_they_land(dtype: torch.dtype, layout: str, page: int) -> None:
    copies = Copies(make_pool(dtype, layout, page))
    before = held(copies.pool, (1, 2, 5))
    copies.store((1, 2, 5), (9, 0, 3)).synchronize()
    for buffer in buffers(copies.pool):
        buffer.zero_()
    copies.load((9, 0, 3), (7, 8, 1))[-1].synchronize()
    assert torch.equal(held(copies.pool, (7, 8, 1)), before)


def test_outside_a_stream_the_copy_is_done_on_return(copies: Copies, faults: FaultyCopies) -> None:
    before = held(copies.pool, (1,))
    back_up_layers(copies.pool, None, tokens_of(4), tokens_of(1), "kernel")
    copies.wipe()
    for layer in range(LAYERS):
        load_layer(copies.pool, None, tokens_of(4), tokens_of(2), layer, "kernel")
    assert torch.equal(held(copies.pool, (2,)), before) and not faults.transfers


def test_a_store_that_stands_still_holds_up_neither_its_caller_nor_a_load(copies: Copies, faults: FaultyCopies) -> None:
    copies.store((1,), (1,)).synchronize()
    faults.freeze(STORE)
    frozen = copies.store((2,), (2,))
    faults.wait_begun(STORE, 2)
    copies.load((1,), (3,))[-1].synchronize()
    assert not frozen.query()
    faults.thaw(STORE)
    frozen.synchronize()


def test_a_layers_event_is_done_before_the_next_layer_is_loaded(copies: Copies, faults: FaultyCopies) -> None:
    copies.store((1,), (1,)).synchronize()
    faults.lose(numbers(LOAD))
    *layers, end = copies.load((1,), (2,))
    layers[-1].synchronize()
    copies.to_device.synchronize()
    assert not end.query() and faults.find_lost() == 1
    assert end.query() and end.error is None


@pytest.mark.parametrize("where", [0, 1, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_page_that_changed_on_the_host_is_not_loaded_and_the_others_are(
    copies: Copies, faults: FaultyCopies, where: int, layer: int
) -> None:
    device, host, landing = (1, 2, 3), (6, 4, 9), (7, 8, 10)
    before = held(copies.pool, device)
    faults.corrupt(numbers(STORE, 0), where, layer)
    copies.store(device, host).synchronize()
    copies.wipe()
    events = copies.load(host, landing)
    copies.to_device.synchronize()
    for event in events:
        assert isinstance(event.error, CopyError)
        assert event.error.host_tokens.tolist() == tokens_of(host[where]).tolist()
    with pytest.raises(CopyError):
        events[0].wait()
    good = [i for i in range(3) if i != where % 3]
    assert torch.equal(held(copies.pool, tuple(landing[i] for i in good)), held_pages(before, good))
    assert bool((held(copies.pool, (landing[where],)) == -1.0).all())


def held_pages(kept: torch.Tensor, pages: list[int]) -> torch.Tensor:
    return torch.cat([kept[:, i * PAGE : (i + 1) * PAGE] for i in pages], dim=1)


def test_every_single_bit_of_a_page_counts(copies: Copies) -> None:
    copies.store((1,), (5,)).synchronize()
    checks, pool = copies.pool.page_checks, copies.pool
    every = [*pool.k_data_refs, *pool.v_data_refs]
    for buffer in every:
        bits = buffer[5 * PAGE + 1, 1].view(torch.int32)
        for element in range(DIM):
            for bit in (0, 15, 31):
                flip = -(2**31) if bit == 31 else 1 << bit
                bits[element] ^= flip
                assert checks.bad(torch.tensor([5]), every, tokens_of(5)).all()
                bits[element] ^= flip
    assert not checks.bad(torch.tensor([5]), every, tokens_of(5)).any()


def test_two_pages_that_changed_places_are_both_bad(copies: Copies) -> None:
    copies.store((1, 2), (1, 2)).synchronize()
    for buffer in (*copies.pool.k_data_refs, *copies.pool.v_data_refs):
        buffer[tokens_of(1, 2)] = buffer[tokens_of(2, 1)]
    error = failed_load(copies, (1, 2), (3, 4))
    assert error.host_tokens.tolist() == tokens_of(1, 2).tolist()


def failed_load(copies: Copies, host: tuple[int, ...], device: tuple[int, ...]) -> CopyError:
    end = copies.load(host, device)[-1]
    copies.to_device.synchronize()
    assert isinstance(end.error, CopyError), end.error
    return end.error


def test_a_page_whose_store_failed_is_never_loaded(copies: Copies, faults: FaultyCopies) -> None:
    faults.fail(touching({3}, STORE))
    stored = copies.store((1, 2), (3, 4))
    copies.to_host.synchronize()
    assert isinstance(stored.error, CopyError) and isinstance(stored.error.__cause__, InjectedFault)
    assert stored.error.host_tokens.tolist() == tokens_of(3, 4).tolist()
    assert failed_load(copies, (3,), (5,)).host_tokens.tolist() == tokens_of(3).tolist()


def test_a_page_whose_store_has_not_ended_is_not_loaded(copies: Copies, faults: FaultyCopies) -> None:
    copies.store((1,), (3,)).synchronize()
    faults.freeze(STORE)
    stored = copies.store((2,), (3,))
    assert failed_load(copies, (3,), (5,)).host_tokens.tolist() == tokens_of(3).tolist()
    faults.thaw(STORE)
    stored.synchronize()
    copies.load((3,), (5,))[-1].synchronize()


def test_a_load_that_fails_fails_for_all_its_tokens_and_the_next_one_is_well(
    copies: Copies, faults: FaultyCopies
) -> None:
    copies.store((1, 2), (3, 4)).synchronize()
    faults.fail(numbers(LOAD, 0))
    error = failed_load(copies, (3, 4), (5, 6))
    assert sorted(error.host_tokens.tolist()) == tokens_of(3, 4).tolist()
    copies.load((3, 4), (5, 6))[-1].synchronize()
    assert torch.equal(held(copies.pool, (5, 6)), held(copies.pool, (1, 2)))


def test_what_was_waited_for_and_failed_fails_the_copy_before_it_moves_anything(copies: Copies) -> None:
    failed, done, other = Event(), Event(), Stream()
    with stream(other):
        other.submit(lambda: {}["producer"])
        failed.record()
    with stream(copies.to_host):
        failed.wait()
        back_up_layers(copies.pool, None, tokens_of(3), tokens_of(1), "kernel")
        done.record()
    copies.to_host.synchronize()
    assert isinstance(done.error, CopyError) and done.error.host_tokens.tolist() == tokens_of(3).tolist()
    assert not any(bool(b.any()) for b in copies.pool.k_data_refs)


def test_pages_moved_in_any_order_are_the_same_pages(copies: Copies, faults: FaultyCopies) -> None:
    faults.reorder()
    before = held(copies.pool, (1, 2, 3, 4, 5))
    copies.store((1, 2, 3, 4, 5), (8, 2, 5, 1, 0)).synchronize()
    copies.load((8, 2, 5, 1, 0), (7, 6, 9, 10, 11))[-1].synchronize()
    assert torch.equal(held(copies.pool, (7, 6, 9, 10, 11)), before)


def test_a_copy_held_back_begins_when_released(copies: Copies, faults: FaultyCopies) -> None:
    faults.delay()
    stored = copies.store((1,), (1,))
    faults.wait_begun(STORE)
    assert not stored.query() and not copies.pool.k_data_refs[0].any()
    faults.release()
    stored.synchronize()
    faults.wait_ended(STORE)


@pytest.mark.parametrize("tokens", [tokens_of(3)[:-1], tokens_of(3) + 1, tokens_of(3).flip(0)])
def test_a_part_of_a_page_is_not_stored(copies: Copies, tokens: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="not whole host pages"):
        back_up_layers(copies.pool, None, tokens, tokens, "kernel")


def test_a_page_filled_by_somebody_else_is_loaded_unchecked(copies: Copies) -> None:
    copies.store((1,), (3,)).synchronize()
    cpu_host_pool.forget_allocated(tokens_of(3), copies.pool, PAGE)
    corrupt_page(copies.pool, 3)
    copies.load((3,), (5,))[-1].synchronize()


def test_switched_off_nothing_is_summed_and_what_was_stored_so_is_never_bad(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_host_pool, "verify_pages", False)
    copies.store((1,), (3,)).synchronize()
    monkeypatch.setattr(cpu_host_pool, "verify_pages", True)
    corrupt_page(copies.pool, 3)
    copies.load((3,), (5,))[-1].synchronize()
    assert not copies.pool.page_checks.sums.any()


def test_a_copy_keeps_its_own_indices(copies: Copies) -> None:
    host, device = tokens_of(1), tokens_of(2)
    kept = own_indices(copies.pool, host, device, "kernel")
    host.zero_(), device.zero_()
    assert [i.tolist() for i in kept] == [tokens_of(1).tolist(), tokens_of(2).tolist()]


def test_one_line_says_that_host_memory_is_pageable_however_many_pools_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu_host_pool._warn_pageable.cache_clear()
    for _ in range(3):
        memory = cpu_host_pool.allocate_host_pages((2, 3), torch.float32, "cpu", True, None)
        assert memory.shape == (2, 3)
    assert len(caplog.records) == 1 and "pageable" in caplog.text
