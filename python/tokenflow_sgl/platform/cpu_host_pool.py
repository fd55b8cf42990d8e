"""SGLang's hierarchical cache on a CPU: where host pages come from and how KV is copied, inline.

Owns the three places where SGLang 0.5.23 calls CUDA for a multi-head KV pool: allocation, copy to the host, copy back.
Does not own when anything is copied. Invariant: where the device is not a CPU nothing is imported or changed; where it
is, this is in force for stock servers too, because stock with this cache is what we are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

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
    layer_num: int
    target_layer_num: int
    k_data_refs: Sequence[torch.Tensor]
    v_data_refs: Sequence[torch.Tensor]
    device_k_buffers: Sequence[torch.Tensor]
    device_v_buffers: Sequence[torch.Tensor]


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
    HookRegistry.register(f"{_HOST_POOL}.load_to_device_per_layer", load_layer, HookType.REPLACE)
    HookRegistry.register(f"{_HOST_POOL}.backup_from_device_all_layer", back_up_layers, HookType.REPLACE)


def allocate_host_pages(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: object,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Plain memory of shape dims: stock would register it with a CUDA driver, and end the scheduler where none is."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


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
    """Copy one layer's tokens host_indices [n] to device_indices [n]."""
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    _require_token_layout(self.layout)
    self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
    self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]


def back_up_layers(
    self: HostPool, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Copy every layer's tokens device_indices [n] to host_indices [n]."""
    _require_token_layout(self.layout)
    for layer_id in range(self.layer_num):
        self.k_data_refs[layer_id][host_indices] = self.device_k_buffers[layer_id][device_indices]
        self.v_data_refs[layer_id][host_indices] = self.device_v_buffers[layer_id][device_indices]


def _require_token_layout(layout: str) -> None:
    # Indexed by token, a page-indexed view would be written at the wrong place without any error.
    if layout not in _TOKEN_LAYOUTS:
        raise ValueError(f"--hicache-mem-layout {layout} does not work on a CPU; use {' or '.join(_TOKEN_LAYOUTS)}")
