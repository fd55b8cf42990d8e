"""SGLang platform plugin: plain torch on an x86 CPU, where SGLang has neither an accelerator nor its own CPU kernels.

Owns the choice whether this platform is in force, and what SGLang asks of a platform. Does not own the host KV pool
(cpu_host_pool.py) and knows nothing of TokenFlow. Invariant: on a machine where SGLang serves without us, activate()
returns None and nothing changes.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import platform as host_platform
from typing import TYPE_CHECKING

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Packages that bring a device which torch itself may not know yet when plugins are discovered.
_VENDOR_PACKAGES = ("torch_npu", "torch_musa", "torchada", "habana_frameworks")


def activate() -> str | None:
    """Entry point of the group sglang.srt.platforms.

    Returns the path of the platform class where it is needed, else None, which leaves SGLang's own choice alone.
    """
    if has_accelerator() or sglang_serves_cpu() or host_platform.machine().lower() not in ("x86_64", "amd64"):
        # Not on ARM: there SGLang calls its own kernels whatever the platform says, and dies without them.
        return None
    if multiprocessing.current_process().name == "MainProcess":
        # A broken driver also looks like this, and a server that silently runs on the CPU would only seem slow.
        # Once: spawned children come by here as well, some before their parent_process() is known.
        logger.warning("No accelerator found: SGLang runs on the CPU with plain torch (tokenflow_torch_cpu).")
    return f"{__name__}:TorchCpuPlatform"


def has_accelerator() -> bool:
    """Whether torch sees a device of any kind, or a vendor's package for one is installed."""
    if torch.accelerator.is_available() or torch.cuda.is_available():
        return True
    return any(importlib.util.find_spec(name) is not None for name in _VENDOR_PACKAGES)


def sglang_serves_cpu() -> bool:
    """Whether SGLang's own CPU engine was asked for, or its AMX kernels work here (the test SGLang makes itself)."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return True
    if not torch.cpu._is_amx_tile_supported() or importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        import sgl_kernel  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        # The CUDA build of the package cannot be loaded without a driver: then there are no CPU kernels either.
        logger.info("sgl_kernel is installed and does not load (%s); using plain torch.", error)
        return False
    return hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Device facts of SGLang's CPU platform, with every kernel replaced by its torch reference.

    It calls itself out-of-tree: SGLang's in-tree "cpu" selects its own kernels and vllm's in several layers, none of
    which need be installed.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device(self, device_id: int = 0) -> str:
        # The value becomes ServerArgs.device, which SGLang compares with strings.
        return "cpu"

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Inductor would need a C++ compiler on the user's machine.
        return "eager"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
