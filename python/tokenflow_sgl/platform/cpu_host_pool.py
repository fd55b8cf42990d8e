"""SGLang's hierarchical cache on a CPU: where host pages come from and how KV is copied.

Owns the three places where SGLang 0.5.23 calls CUDA for a multi-head KV pool: allocation, copy to the host, copy back.
Does not own when anything is copied, in which thread (cpu_streams.py), or the checksums (page_checks.py). Invariant:
where the device is not a CPU nothing of SGLang is changed; where it is, this is in force for stock servers too, because
stock with this cache is what we are compared with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tokenflow_sgl.platform import cpu_streams
from tokenflow_sgl.platform.page_checks import PageChecks, PageSum

logger = logging.getLogger(__name__)

# Whether every page is summed when stored and checked when loaded. What is stored while False is never checked.
verify_pages = True

_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
# SGLang keeps 10 GiB of the machine free beside a host pool; a small test machine would never get one.
HOST_RESERVE_BYTES = 1024**3
# Layouts whose per-layer host views are indexed by token; the others are indexed by page.
_TOKEN_LAYOUTS = ("layer_first", "page_first")


class HostPool(Protocol):
    """What the two copies read of MHATokenToKVPoolHost.

    Buffers are one tensor per layer: on the device [device_tokens, heads, head_dim], on the host
    [host_tokens, heads, head_dim].
    """

    layout: str
    page_size: int
    layer_num: int
    target_layer_num: int
    k_data_refs: Sequence[torch.Tensor]
    v_data_refs: Sequence[torch.Tensor]
    device_k_buffers: Sequence[torch.Tensor]
    device_v_buffers: Sequence[torch.Tensor]
    page_checks: PageChecks  # ours: not there before page_checks_of()


def register() -> None:
    """Make the host pool work in this process, if TorchCpuPlatform is in force.

    To be called by a general plugin, because hooks are applied when these have run.
    Raises AttributeError or ImportError when the installed SGLang has no such pool.
    """
    from sglang.srt.platforms import current_platform

    from tokenflow_sgl.platform.torch_cpu import TorchCpuPlatform

    if not isinstance(current_platform, TorchCpuPlatform):
        # Asking for device_type "cpu" would also catch SGLang's own CPU engine and its placeholder platform.
        return
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_host_pages
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(base.HICACHE_HOST_MEMORY_RESERVE_BYTES, HOST_RESERVE_BYTES)
    cpu_streams.install()
    HookRegistry.register(f"{_HOST_POOL}.load_to_device_per_layer", load_layer, HookType.REPLACE)
    HookRegistry.register(f"{_HOST_POOL}.backup_from_device_all_layer", back_up_layers, HookType.REPLACE)
    HookRegistry.register(f"{_HOST_POOL}.prepare_transfer_indices", own_indices, HookType.REPLACE)
    HookRegistry.register(f"{_HOST_POOL}.alloc", forget_allocated, HookType.AFTER)


def allocate_host_pages(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: object,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Plain memory of shape dims: stock would register it with a CUDA driver, and end the scheduler where none is."""
    if pin_memory:
        _warn_pageable()
    return torch.empty(dims, dtype=dtype, device=device)


@functools.cache
def _warn_pageable() -> None:
    # Cached: a server makes one pool for each kind of layer, and one line says it for all.
    logger.warning(
        "Host memory of the hierarchical cache is pageable: there is no CUDA driver here that could pin it. Copies run "
        "in threads of their own, at the speed of memory."
    )


def back_up_layers(
    self: HostPool, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Copy every layer's tokens device_indices [n] to host_indices [n], whole pages, on the current stream."""
    _require_token_layout(self.layout)
    checks = page_checks_of(self)
    # At once and not by the copy: a load submitted before the store has ended must not pass for one of good pages.
    checks.begin_store(checks.pages_of(host_indices))
    cpu_streams.current_stream().submit(Store(self, host_indices, device_indices))


def load_layer(
    self: HostPool,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer's tokens host_indices [n] to device_indices [n], whole pages, on the current stream."""
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    _require_token_layout(self.layout)
    cpu_streams.current_stream().submit(Load(self, host_indices, device_indices, layer_id))


def own_indices(
    self: HostPool, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Called once for each submission: the copy reads its indices when the caller has long gone on."""
    return host_indices.clone(), device_indices.clone()


def forget_allocated(allocated: torch.Tensor | None, self: HostPool, need_size: int) -> None:
    """After an allocation: a sum of who had the page before would condemn what a storage backend puts there."""
    checks = getattr(self, "page_checks", None)
    if checks is not None and allocated is not None:
        checks.forget(checks.pages_of(allocated))


def page_checks_of(pool: HostPool) -> PageChecks:
    """The pool's own, made with its first copy."""
    checks: PageChecks | None = getattr(pool, "page_checks", None)
    if checks is None:
        checks = PageChecks(pool.k_data_refs[0].shape[0] // pool.page_size, pool.page_size)
        pool.page_checks = checks
    return checks


class CopyError(RuntimeError):
    """A copy between host and device did not happen for these host tokens [n], in any layer that one can rely on."""

    def __init__(self, message: str, host_tokens: torch.Tensor) -> None:
        super().__init__(message)
        self.host_tokens = host_tokens


@dataclass(frozen=True)
class Store:
    """All layers of the pages at device_indices to host_indices; what a copy thread runs."""

    pool: HostPool
    host_indices: torch.Tensor
    device_indices: torch.Tensor

    def __call__(self) -> None:
        _unless_all_failed(self.host_indices)
        try:
            checks = page_checks_of(self.pool)
            pages = checks.pages_of(self.host_indices)
            found = PageSum(len(pages)) if verify_pages else None
            for host, device in zip(_host_buffers(self.pool), _device_buffers(self.pool), strict=True):
                rows = device.index_select(0, self.device_indices)
                host.index_copy_(0, self.host_indices, rows)
                if found is not None:
                    # Of what was read, not of what arrived: a page written to the wrong place is found, too.
                    found.add(rows)
            checks.end_store(pages, None if found is None else found.value)
        except Exception as error:
            raise CopyError(f"a store to the host failed: {error!r}", self.host_indices) from error


@dataclass(frozen=True)
class Load:
    """One layer of the pages at host_indices to device_indices; what a copy thread runs."""

    pool: HostPool
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    layer_id: int

    def __call__(self) -> None:
        failed = _unless_all_failed(self.host_indices)
        try:
            # What failed in an earlier layer is left out: half a page on the device is as wrong as none.
            host, device = _without(failed, self.host_indices, self.device_indices)
            bad = self._bad_tokens(host)
            host, device = _without(bad, host, device)
            for source, target in (
                (self.pool.k_data_refs, self.pool.device_k_buffers),
                (self.pool.v_data_refs, self.pool.device_v_buffers),
            ):
                target[self.layer_id].index_copy_(0, device, source[self.layer_id].index_select(0, host))
        except Exception as error:
            tokens = torch.unique(torch.cat((failed, self.host_indices)))
            raise CopyError(f"a load of layer {self.layer_id} failed: {error!r}", tokens) from error
        if bad.numel():
            pages = page_checks_of(self.pool).pages_of(bad).tolist()
            raise CopyError(f"host pages {pages} are not what was stored", torch.cat((failed, bad)))

    def _bad_tokens(self, host_tokens: torch.Tensor) -> torch.Tensor:
        if self.layer_id or not verify_pages:
            return host_tokens[:0]
        checks = page_checks_of(self.pool)
        bad = checks.bad(checks.pages_of(host_tokens), _host_buffers(self.pool), host_tokens)
        return host_tokens.reshape(-1, checks.page_size)[bad].reshape(-1)


def _unless_all_failed(host_tokens: torch.Tensor) -> torch.Tensor:
    """Host tokens that have failed in this submission. Raises where it is not known which."""
    error = cpu_streams.current_stream().error
    if isinstance(error, CopyError):
        return error.host_tokens
    if error is not None:
        raise CopyError(f"what the copy waited for failed: {error!r}", host_tokens) from error
    return host_tokens[:0]


def _without(failed: torch.Tensor, host: torch.Tensor, device: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not failed.numel():
        return host, device
    good = ~torch.isin(host, failed)
    return host[good], device[good]


def _host_buffers(pool: HostPool) -> list[torch.Tensor]:
    return [*pool.k_data_refs[: pool.layer_num], *pool.v_data_refs[: pool.layer_num]]


def _device_buffers(pool: HostPool) -> list[torch.Tensor]:
    return [*pool.device_k_buffers[: pool.layer_num], *pool.device_v_buffers[: pool.layer_num]]


def _require_token_layout(layout: str) -> None:
    # Indexed by token, a page-indexed view would be written at the wrong place without any error.
    if layout not in _TOKEN_LAYOUTS:
        raise ValueError(f"--hicache-mem-layout {layout} does not work on a CPU; use {' or '.join(_TOKEN_LAYOUTS)}")
